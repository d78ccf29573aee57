/* The vector vocabulary (see vec_scalar_f32.h) on AVX2, FMA and F16C: 4 float64. */
// clang-format off
#ifndef VEC_AVX2_F64_H
#define VEC_AVX2_F64_H

#include "real_f64.h"
#include "vec_avx2_words.h"

#include <immintrin.h>

#define VR_WIDTH 4
#define V_ROWS 6
#define V_PAIRS 0
typedef __m256d vr;

static inline vr vr_set1(double x) { return _mm256_set1_pd(x); }
static inline vr vr_load(const double *p) { return _mm256_loadu_pd(p); }
static inline void vr_store(double *p, vr a) { _mm256_storeu_pd(p, a); }
static inline vr vr_add(vr a, vr b) { return _mm256_add_pd(a, b); }
static inline vr vr_sub(vr a, vr b) { return _mm256_sub_pd(a, b); }
static inline vr vr_mul(vr a, vr b) { return _mm256_mul_pd(a, b); }
static inline vr vr_div(vr a, vr b) { return _mm256_div_pd(a, b); }
static inline vr vr_fma(vr a, vr b, vr c) { return _mm256_fmadd_pd(a, b, c); }
static inline vr vr_sqrt(vr a) { return _mm256_sqrt_pd(a); }
static inline vr vr_max(vr a, vr b) { return _mm256_max_pd(a, b); }
static inline vr vr_min(vr a, vr b) { return _mm256_min_pd(a, b); }
static inline vr vr_madd(vr a, vr b, vr c) { return _mm256_fmadd_pd(a, b, c); }
static inline vr vr_if_less(vr a, vr b, vr x, vr y)
{
    return _mm256_blendv_pd(y, x, _mm256_cmp_pd(a, b, _CMP_LT_OQ));
}
static inline vr vr_pow2(vr a)
{
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(a), 52));
}
static inline void vr_transpose(vr *r)
{
    const vr a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
    const vr c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}
static inline vr vr_add_pairs(vr a, vr b)
{
    return _mm256_permute4x64_pd(_mm256_hadd_pd(a, b), 0xD8);
}
static inline void vr_accumulate(double *sums, vr a)
{
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), a));
}
static inline double vr_sum(vr a)
{
    const __m128d x = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)));
}

static inline uint32_t vr_mask_le(vr a, vr b)
{
    return (uint32_t)_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_LE_OQ));
}
/* For each mask, the lanes that it selects, in order. */
static const int32_t v_selected[16][4] = {
    {0, 0, 0, 0}, {0, 0, 0, 0}, {1, 0, 0, 0}, {0, 1, 0, 0},
    {2, 0, 0, 0}, {0, 2, 0, 0}, {1, 2, 0, 0}, {0, 1, 2, 0},
    {3, 0, 0, 0}, {0, 3, 0, 0}, {1, 3, 0, 0}, {0, 1, 3, 0},
    {2, 3, 0, 0}, {0, 2, 3, 0}, {1, 2, 3, 0}, {0, 1, 2, 3},
};
static inline void vr_compress_indices(int32_t *p, const int32_t *from, uint32_t mask)
{
    const __m128i lanes = _mm_loadu_si128((const __m128i *)v_selected[mask]);
    const __m128 a = _mm_loadu_ps((const float *)(const void *)from);
    _mm_storeu_ps((float *)(void *)p, _mm_permutevar_ps(a, lanes));
}
static inline void vr_compress(double *p, vr a, uint32_t mask)
{
    /* Lane i of float64 is the lanes 2 i and 2 i + 1 of 32 bits. */
    const __m256i lanes = _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)v_selected[mask]));
    const __m256i low = _mm256_slli_epi64(lanes, 1);
    const __m256i high = _mm256_slli_epi64(_mm256_add_epi64(low, _mm256_set1_epi64x(1)), 32);
    const __m256i halves = _mm256_or_si256(low, high);
    _mm256_storeu_pd(p, _mm256_castps_pd(_mm256_permutevar8x32_ps(_mm256_castpd_ps(a), halves)));
}

#endif
