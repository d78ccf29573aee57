/* CRC-32C of long messages by folding: a block of 64 bytes is multiplied by the power
 * of x that moves it some blocks ahead, and xored into the block there (Gopal and
 * others, "Fast CRC computation for generic polynomials using PCLMULQDQ", 2009).
 * VPCLMULQDQ multiplies four pairs at once: 256 bytes take about ten cycles. */
#ifndef CRC_AVX512_H
#define CRC_AVX512_H

#include "../cpuid.h"

#include <immintrin.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CRC_TARGET __attribute__((target("vpclmulqdq,pclmul")))

enum { CRC_LEAST_FOLDED = 256 }; /* bytes */

/* CRC_n: x^(n + 63) and x^(n - 1), the factors for the earlier and the later 64 bits of
 * 128 bits that are moved n bits ahead. */
#define CRC_2048 0xe9a5d8be00000000, 0x1426a81500000000
#define CRC_1536 0x7ccbbbf200000000, 0x31c9460800000000
#define CRC_1024 0x6577b24500000000, 0x7417153f00000000
#define CRC_512 0x1c19243b00000000, 0x75bba45b00000000
#define CRC_384 0xa46ef4aa00000000, 0x6051243f00000000
#define CRC_256 0x33ccbbbc00000000, 0xa2158b3400000000
#define CRC_128 0x3743f7bd00000000, 0x3171d43000000000

CRC_TARGET static inline __m512i
crc_powers(uint64_t early, uint64_t late)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)late, (long long)early));
}

/* Moves each 128-bit quarter of x ahead to the position of `next`, and xors it in. */
CRC_TARGET static inline __m512i
crc_move(__m512i x, __m512i powers, __m512i next)
{
    const __m512i early = _mm512_clmulepi64_epi128(x, powers, 0x00);
    const __m512i late = _mm512_clmulepi64_epi128(x, powers, 0x11);

    return _mm512_ternarylogic_epi64(early, late, next, 0x96); /* exclusive or */
}

/* The CRC register after the block x: folds its quarters into the last one. */
CRC_TARGET static inline uint64_t
crc_reduce(__m512i x)
{
    static const uint64_t powers[8] = {CRC_384, CRC_256, CRC_128, 0, 0};
    const __m512i last = _mm512_maskz_mov_epi64(0xc0, x);
    const __m512i sum = crc_move(x, _mm512_loadu_si512(powers), last);
    const __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(sum),
                                          _mm512_extracti64x4_epi64(sum, 1));
    const __m128i quarter =
        _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(quarter));

    return _mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(quarter, 1));
}

/* Processes all whole blocks of 64 bytes; *bytes must be at least CRC_LEAST_FOLDED.
 * Advances *data, and sets *bytes to the rest. */
CRC_TARGET static uint64_t
crc_fold_blocks(uint64_t crc, const uint8_t **data, size_t *bytes)
{
    const __m512i far = crc_powers(CRC_2048), near = crc_powers(CRC_512);
    const uint8_t *p = *data;
    size_t left = *bytes - 256;
    __m512i x0 = _mm512_loadu_si512(p), x1 = _mm512_loadu_si512(p + 64);
    __m512i x2 = _mm512_loadu_si512(p + 128), x3 = _mm512_loadu_si512(p + 192);

    x0 = _mm512_xor_si512(
        x0, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)(uint32_t)crc)));
    for (p += 256; left >= 256; left -= 256, p += 256) {
        x0 = crc_move(x0, far, _mm512_loadu_si512(p));
        x1 = crc_move(x1, far, _mm512_loadu_si512(p + 64));
        x2 = crc_move(x2, far, _mm512_loadu_si512(p + 128));
        x3 = crc_move(x3, far, _mm512_loadu_si512(p + 192));
    }
    x3 = crc_move(x0, crc_powers(CRC_1536), x3);
    x3 = crc_move(x1, crc_powers(CRC_1024), x3);
    x3 = crc_move(x2, near, x3);
    for (; left >= 64; left -= 64, p += 64) {
        x3 = crc_move(x3, near, _mm512_loadu_si512(p));
    }
    *data = p;
    *bytes = left;
    return crc_reduce(x3);
}

/* Caches the answer, because CPUID is slow, most of all in a virtual machine. */
static inline bool
crc_can_fold(void)
{
    static _Atomic(int) known;
    int can = atomic_load_explicit(&known, memory_order_relaxed);

    if (can == 0) {
        can = tfast_cpu_features() & TFAST_CPU_VPCLMUL ? 1 : -1;
        atomic_store_explicit(&known, can, memory_order_relaxed);
    }
    return can > 0;
}

static inline uint64_t
crc_fold(uint64_t crc, const uint8_t **data, size_t *bytes)
{
    return *bytes >= CRC_LEAST_FOLDED && crc_can_fold()
               ? crc_fold_blocks(crc, data, bytes)
               : crc;
}

#endif
