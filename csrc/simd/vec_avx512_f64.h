/* The vector vocabulary (see vec_scalar_f32.h) on AVX-512 F, BW, DQ and VL: 8 float64. */
// clang-format off
#ifndef VEC_AVX512_F64_H
#define VEC_AVX512_F64_H

#include "real_f64.h"
#include "vec_avx512_words.h"

#include <immintrin.h>

#define VR_WIDTH 8
#define V_ROWS 12
#define V_PAIRS 0
typedef __m512d vr;

static inline vr vr_set1(double x) { return _mm512_set1_pd(x); }
static inline vr vr_load(const double *p) { return _mm512_loadu_pd(p); }
static inline void vr_store(double *p, vr a) { _mm512_storeu_pd(p, a); }
static inline vr vr_add(vr a, vr b) { return _mm512_add_pd(a, b); }
static inline vr vr_sub(vr a, vr b) { return _mm512_sub_pd(a, b); }
static inline vr vr_mul(vr a, vr b) { return _mm512_mul_pd(a, b); }
static inline vr vr_div(vr a, vr b) { return _mm512_div_pd(a, b); }
static inline vr vr_fma(vr a, vr b, vr c) { return _mm512_fmadd_pd(a, b, c); }
static inline vr vr_sqrt(vr a) { return _mm512_sqrt_pd(a); }
static inline vr vr_max(vr a, vr b) { return _mm512_max_pd(a, b); }
static inline vr vr_min(vr a, vr b) { return _mm512_min_pd(a, b); }
static inline vr vr_madd(vr a, vr b, vr c) { return _mm512_fmadd_pd(a, b, c); }
static inline vr vr_if_less(vr a, vr b, vr x, vr y)
{
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline vr vr_pow2(vr a)
{
    return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(a), 52));
}
static inline void vr_transpose(vr *r)
{
    vr pair[8], quad[8];
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
        pair[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 4; j += 2) {
            quad[i + 2 * j] = _mm512_shuffle_f64x2(pair[2 * j + i], pair[2 * j + 2 + i], 0x88);
            quad[i + 2 * j + 2] = _mm512_shuffle_f64x2(pair[2 * j + i], pair[2 * j + 2 + i], 0xDD);
        }
    }
    for (int i = 0; i < 2; i++) {
        r[i] = _mm512_shuffle_f64x2(quad[i], quad[i + 4], 0x88);
        r[i + 4] = _mm512_shuffle_f64x2(quad[i], quad[i + 4], 0xDD);
        r[i + 2] = _mm512_shuffle_f64x2(quad[i + 2], quad[i + 6], 0x88);
        r[i + 6] = _mm512_shuffle_f64x2(quad[i + 2], quad[i + 6], 0xDD);
    }
}
static inline vr vr_add_pairs(vr a, vr b)
{
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    return _mm512_add_pd(_mm512_permutex2var_pd(a, even, b),
                         _mm512_permutex2var_pd(a, odd, b));
}
static inline void vr_accumulate(double *sums, vr a)
{
    _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), a));
}
static inline double vr_sum(vr a) { return _mm512_reduce_add_pd(a); }

static inline uint32_t vr_mask_le(vr a, vr b) { return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ); }
static inline void vr_compress(double *p, vr a, uint32_t mask)
{
    _mm512_storeu_pd(p, _mm512_maskz_compress_pd((__mmask8)mask, a));
}
static inline void vr_compress_indices(int32_t *p, const int32_t *from, uint32_t mask)
{
    const __m256i a = _mm256_loadu_si256((const __m256i *)from);
    _mm256_storeu_si256((__m256i *)p, _mm256_maskz_compress_epi32((__mmask8)mask, a));
}

#endif
