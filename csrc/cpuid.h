/* Instruction sets that both the processor and the operating system support. */
#ifndef TFAST_CPUID_H
#define TFAST_CPUID_H

enum {
    TFAST_CPU_AVX2 =
        1, /* avx2, fma, f16c, bmi and pclmulqdq; the system saves ymm registers */
    TFAST_CPU_AVX512 =
        2, /* the above, avx512f, bw, dq and vl; the system saves zmm and masks */
    TFAST_CPU_VPCLMUL = 4, /* vpclmulqdq, and everything of TFAST_CPU_AVX512 */
    TFAST_CPU_BF16 = 8     /* avx512_bf16, and everything of TFAST_CPU_AVX512 */
};

/* The features above as a bit set; 0 except on x86-64. Executes CPUID. */
unsigned tfast_cpu_features(void);

#endif
