/* The vector vocabulary (see vec_scalar.h) on AVX-512 F, BW, DQ, VL: 16 float32, 8 float64.
 * AVX512-BF16 only for products of pairs: its conversion flushes subnormals to zero. As
 * assembly, so that no function needs another instruction set than the rest. */
// clang-format off
#include "../cpuid.h"
#include "../half.h"

#include <immintrin.h>
#include <stdatomic.h>
#include <stdbool.h>

#define VF_WIDTH 16
#define VD_WIDTH 8
#define V_ROWS 12
#if __GNUC__ >= 10 || defined(__clang__) /* older ones come with older assemblers */
#define V_PAIRS 1
#else
#define V_PAIRS 0
#endif
typedef __m512 vf;
typedef __m512d vd;

static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_madd(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_if_less(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline vf vf_pow2(vf a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
}
/* By 4 x 4 inside the 128-bit quarters, then the quarters among themselves. */
static inline void vf_transpose(vf *r)
{
    vf pair[16], quad[16], half[16];
    for (int i = 0; i < 16; i += 2) {
        pair[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        pair[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; j++) {
            quad[i + 2 * j] = _mm512_shuffle_ps(pair[i + j], pair[i + 2 + j], 0x44);
            quad[i + 2 * j + 1] = _mm512_shuffle_ps(pair[i + j], pair[i + 2 + j], 0xEE);
        }
    }
    for (int i = 0; i < 4; i++) {
        half[i] = _mm512_shuffle_f32x4(quad[i], quad[i + 4], 0x88);
        half[i + 4] = _mm512_shuffle_f32x4(quad[i], quad[i + 4], 0xDD);
        half[i + 8] = _mm512_shuffle_f32x4(quad[i + 8], quad[i + 12], 0x88);
        half[i + 12] = _mm512_shuffle_f32x4(quad[i + 8], quad[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(half[i], half[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(half[i], half[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_f32x4(half[i + 4], half[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(half[i + 4], half[i + 12], 0xDD);
    }
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void vf_store_f16(uint16_t *p, vf a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
static inline void vf_store_bf16(uint16_t *p, vf a)
{
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i half = _mm512_mask_set1_epi32(rounded, nan, 0x7FC0);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(half));
}
/* CPUID is slow, most of all in a virtual machine: it is asked once. */
static inline bool v_has_pairs(void)
{
    static _Atomic(int) known;
    int has = atomic_load_explicit(&known, memory_order_relaxed);
    if (has == 0) {
        has = tfast_cpu_features() & TFAST_CPU_BF16 ? 1 : -1;
        atomic_store_explicit(&known, has, memory_order_relaxed);
    }
    return has > 0;
}
static inline vf vf_pair(vf first, vf second)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both;
    __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
}
static inline void vf_store_pairs(float *p, vf a)
{
    __m256i half;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(a));
    _mm256_storeu_si256((__m256i *)p, half);
}
static inline vf vf_dot(vf a, vf b, vf c)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
static inline float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }

static inline vd vd_set1(double x) { return _mm512_set1_pd(x); }
static inline vd vd_load(const double *p) { return _mm512_loadu_pd(p); }
static inline void vd_store(double *p, vd a) { _mm512_storeu_pd(p, a); }
static inline vd vd_add(vd a, vd b) { return _mm512_add_pd(a, b); }
static inline vd vd_sub(vd a, vd b) { return _mm512_sub_pd(a, b); }
static inline vd vd_mul(vd a, vd b) { return _mm512_mul_pd(a, b); }
static inline vd vd_div(vd a, vd b) { return _mm512_div_pd(a, b); }
static inline vd vd_fma(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
static inline vd vd_sqrt(vd a) { return _mm512_sqrt_pd(a); }
static inline vd vd_max(vd a, vd b) { return _mm512_max_pd(a, b); }
static inline vd vd_min(vd a, vd b) { return _mm512_min_pd(a, b); }
static inline vd vd_madd(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
static inline vd vd_if_less(vd a, vd b, vd x, vd y)
{
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline vd vd_pow2(vd a)
{
    return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(a), 52));
}
static inline void vd_transpose(vd *r)
{
    vd pair[8], quad[8];
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
static inline double vd_sum(vd a) { return _mm512_reduce_add_pd(a); }

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
