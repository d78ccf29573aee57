/* CPU features by CPUID. __builtin_cpu_supports() does not know f16c before GCC 11.
 * Leaves and bits are documented in Intel's manual, volume 2A, CPUID, and volume 1,
 * 13.3. */
#include "cpuid.h"

#if defined(__x86_64__)

#    include <stdint.h>

struct registers {
    uint32_t eax, ebx, ecx, edx;
};

static struct registers
cpuid(uint32_t leaf, uint32_t part)
{
    struct registers r = {leaf, 0, part, 0};
    __asm__ volatile("cpuid" : "+a"(r.eax), "=b"(r.ebx), "+c"(r.ecx), "=d"(r.edx));
    return r;
}

/* XCR0: the register state that the operating system saves for a thread. */
static uint32_t
saved_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int
has_all(uint32_t word, uint32_t bits)
{
    return (word & bits) == bits;
}

unsigned
tfast_cpu_features(void)
{
    const uint32_t pclmul = 1u << 1, vpclmul = 1u << 10;
    const uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    const uint32_t bmi = 1u << 3, avx2 = 1u << 5;
    const uint32_t bf16 = 1u << 5; /* in eax of leaf 7, subleaf 1 */
    const uint32_t avx512f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
    const uint32_t ymm = 0x06; /* xmm, upper halves of ymm */
    const uint32_t zmm = 0xe6; /* the same, masks, upper halves of zmm, zmm16 to 31 */

    if (cpuid(0, 0).eax < 7 ||
        !has_all(cpuid(1, 0).ecx, pclmul | fma | osxsave | avx | f16c))
        return 0;
    uint32_t saved = saved_state();
    struct registers extended = cpuid(7, 0);
    if (!has_all(saved, ymm) || !has_all(extended.ebx, bmi | avx2))
        return 0;
    if (!has_all(saved, zmm) || !has_all(extended.ebx, avx512f | dq | bw | vl))
        return TFAST_CPU_AVX2;
    unsigned features = TFAST_CPU_AVX2 | TFAST_CPU_AVX512;
    if (has_all(extended.ecx, vpclmul))
        features |= TFAST_CPU_VPCLMUL;
    if (extended.eax >= 1 && has_all(cpuid(7, 1).eax, bf16))
        features |= TFAST_CPU_BF16;
    return features;
}

#else

unsigned
tfast_cpu_features(void)
{
    return 0;
}

#endif
