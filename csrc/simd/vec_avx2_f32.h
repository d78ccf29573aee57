/* The vector vocabulary (see vec_scalar_f32.h) on AVX2, FMA and F16C: 8 float32. */
// clang-format off
#ifndef VEC_AVX2_F32_H
#define VEC_AVX2_F32_H

#include "../half.h"
#include "real_f32.h"
#include "vec_avx2_words.h"

#include <immintrin.h>

#define VR_WIDTH 8
#define V_ROWS 6
#define V_PAIRS 0
typedef __m256 vr;

static inline vr vr_set1(float x) { return _mm256_set1_ps(x); }
static inline vr vr_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vr_store(float *p, vr a) { _mm256_storeu_ps(p, a); }
static inline vr vr_add(vr a, vr b) { return _mm256_add_ps(a, b); }
static inline vr vr_sub(vr a, vr b) { return _mm256_sub_ps(a, b); }
static inline vr vr_mul(vr a, vr b) { return _mm256_mul_ps(a, b); }
static inline vr vr_div(vr a, vr b) { return _mm256_div_ps(a, b); }
static inline vr vr_fma(vr a, vr b, vr c) { return _mm256_fmadd_ps(a, b, c); }
static inline vr vr_sqrt(vr a) { return _mm256_sqrt_ps(a); }
static inline vr vr_max(vr a, vr b) { return _mm256_max_ps(a, b); }
static inline vr vr_min(vr a, vr b) { return _mm256_min_ps(a, b); }
static inline vr vr_madd(vr a, vr b, vr c) { return _mm256_fmadd_ps(a, b, c); }
static inline vr vr_if_less(vr a, vr b, vr x, vr y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline vr vr_pow2(vr a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
}
static inline void vr_transpose(vr *r)
{
    vr pair[8], quad[8];
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            quad[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + 2 + j], 0x44);
            quad[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + 2 + j], 0xEE);
        }
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
    }
}
static inline vr vr_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void vr_store_f16(uint16_t *p, vr a)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vr vr_load_bf16(const uint16_t *p)
{
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
static inline void vr_store_bf16(uint16_t *p, vr a)
{
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_or_si256(_mm256_add_epi32(bits, bias), nan);
    const __m256i half = _mm256_srli_epi32(rounded, 16);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(half),
                                                    _mm256_extracti128_si256(half, 1)));
}
#define V_TWO_BF16
static inline void vr_load_two_bf16(const uint16_t *p, vr *a, vr *b)
{
    const __m256i both = _mm256_loadu_si256((const __m256i *)p);
    *a = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    *b = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xFFFF0000)));
}
static inline void vr_store_two_bf16(uint16_t *p, vr a, vr b)
{
    const __m256i i = _mm256_castps_si256(a), j = _mm256_castps_si256(b);
    const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(i, 16), j, 0xAA);
    const __m256i low = _mm256_blend_epi16(i, _mm256_slli_epi32(j, 16), 0xAA);
    /* Up if the low half is above 0x8000, or equal and the high half odd. */
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi16(1));
    const __m256i above = _mm256_subs_epu16(_mm256_or_si256(low, odd), _mm256_set1_epi16(-0x8000));
    __m256i rounded = _mm256_add_epi16(high, _mm256_min_epu16(above, _mm256_set1_epi16(1)));
    if (_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0) {
        const __m256i nan_a = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
        const __m256i nan_b = _mm256_castps_si256(_mm256_cmp_ps(b, b, _CMP_UNORD_Q));
        rounded = _mm256_or_si256(rounded, _mm256_blend_epi16(nan_a, nan_b, 0xAA));
    }
    _mm256_storeu_si256((__m256i *)p, rounded);
}
static inline vr vr_abs(vr a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vr vr_copysign(vr a, vr b)
{
    return _mm256_or_ps(a, _mm256_and_ps(b, _mm256_set1_ps(-0.0f)));
}
static inline vr vr_bits_down(vr a, int n, uint32_t k)
{
    const __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(a), n);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32((int)k)));
}
static inline vr vr_bits_up(vr a, int n, uint32_t k)
{
    const __m256i bits = _mm256_sub_epi32(_mm256_castps_si256(a), _mm256_set1_epi32((int)k));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, n));
}
static inline vr vr_load_u8(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline void vr_store_u8(uint8_t *p, vr a)
{
    const __m256i word = _mm256_cvtps_epi32(a);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(word),
                                         _mm256_extracti128_si256(word, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(half, half));
}
static inline vr vr_add_pairs(vr a, vr b)
{
    const __m256d halves = _mm256_castps_pd(_mm256_hadd_ps(a, b));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(halves, 0xD8));
}
static inline void vr_accumulate(double *sums, vr a)
{
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), low));
    _mm256_storeu_pd(sums + 4, _mm256_add_pd(_mm256_loadu_pd(sums + 4), high));
}
static inline float vr_sum(vr a)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline float vr_largest(vr a)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

#endif
