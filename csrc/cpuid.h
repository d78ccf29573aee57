/* What the processor and the operating system together can run. */
#ifndef TFAST_CPUID_H
#define TFAST_CPUID_H

enum {
    TFAST_CPU_AVX2 =
        1, /* avx2, fma, f16c, bmi and pclmulqdq; ymm registers are saved */
    TFAST_CPU_AVX512 =
        2, /* the above, avx512f, bw, dq and vl; zmm and masks are saved */
    TFAST_CPU_VPCLMUL = 4, /* the above, and vpclmulqdq */
    TFAST_CPU_BF16 = 8     /* avx512_bf16, and all that TFAST_CPU_AVX512 needs */
};

/* The set of features above; empty on anything but x86-64. */
unsigned tfast_cpu_features(void);

#endif
