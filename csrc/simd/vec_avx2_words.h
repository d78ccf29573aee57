/* Eight 64-bit words (see vec_scalar_words.h) on AVX2, FMA and F16C. */
// clang-format off
#ifndef VEC_AVX2_WORDS_H
#define VEC_AVX2_WORDS_H

#include "../kernels/philox_row.h"

#include <immintrin.h>
#include <stdint.h>

/* a holds words 0 1 4 5 and b words 2 3 6 7, so that v8_store() needs one shuffle. */
typedef struct { __m256i a, b; } v8;
static inline v8 v8_set1(uint32_t x) { return (v8){_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)}; }
static inline v8 v8_count(uint32_t x)
{
    return (v8){_mm256_setr_epi64x(x, x + 1, x + 4, x + 5),
                _mm256_setr_epi64x(x + 2, x + 3, x + 6, x + 7)};
}
static inline v8 v8_xor(v8 x, v8 y)
{
    return (v8){_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
static inline v8 v8_mul(v8 x, uint32_t y)
{
    const __m256i factor = _mm256_set1_epi64x(y);
    return (v8){_mm256_mul_epu32(x.a, factor), _mm256_mul_epu32(x.b, factor)};
}
static inline v8 v8_high(v8 x)
{
    return (v8){_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)};
}
static inline void v8_store(uint32_t *p, v8 x)
{
    const __m256 a = _mm256_castsi256_ps(x.a), b = _mm256_castsi256_ps(x.b);
    _mm256_storeu_ps((float *)p, _mm256_shuffle_ps(a, b, 0x88));
}

extern philox_function tfast_avx2_philox; /* of avx2_words.c */
static inline void philox_words(uint32_t to[][4][PHILOX_PAIRS], philox_row row)
{
    tfast_avx2_philox(to, row);
}

#endif
