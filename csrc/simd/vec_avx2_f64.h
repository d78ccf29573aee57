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

#endif
