/* Eight 64-bit words (see vec_scalar_words.h) on AVX-512 F, BW, DQ and VL. */
// clang-format off
#ifndef VEC_AVX512_WORDS_H
#define VEC_AVX512_WORDS_H

#include "../kernels/philox_row.h"

#include <immintrin.h>
#include <stdint.h>

typedef __m512i v8;
static inline v8 v8_set1(uint32_t x) { return _mm512_set1_epi64(x); }
static inline v8 v8_count(uint32_t x)
{
    return _mm512_setr_epi64(x, x + 1, x + 2, x + 3, x + 4, x + 5, x + 6, x + 7);
}
static inline v8 v8_xor(v8 x, v8 y) { return _mm512_xor_si512(x, y); }
static inline v8 v8_mul(v8 x, uint32_t y) { return _mm512_mul_epu32(x, _mm512_set1_epi64(y)); }
static inline v8 v8_high(v8 x) { return _mm512_srli_epi64(x, 32); }
static inline void v8_store(uint32_t *p, v8 x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi64_epi32(x));
}

extern philox_function tfast_avx512_philox; /* of avx512_words.c */
static inline void philox_words(uint32_t to[][4][PHILOX_PAIRS], philox_row row)
{
    tfast_avx512_philox(to, row);
}

#endif
