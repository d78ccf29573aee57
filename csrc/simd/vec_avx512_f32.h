/* The vector vocabulary (see vec_scalar_f32.h) on AVX-512 F, BW, DQ and VL: 16 float32.
 * AVX512_BF16 is used only for products of pairs, because its conversion flushes
 * subnormals to zero. Its instructions are inline assembly, so that this unit needs no
 * compiler flag for an instruction set that not every AVX-512 processor has. */
// clang-format off
#ifndef VEC_AVX512_F32_H
#define VEC_AVX512_F32_H

#include "../cpuid.h"
#include "../half.h"
#include "real_f32.h"
#include "vec_avx512_words.h"

#include <immintrin.h>
#include <stdatomic.h>
#include <stdbool.h>

#define VR_WIDTH 16
#define V_ROWS 12
#if __GNUC__ >= 10 || defined(__clang__) /* assemblers of older gcc lack AVX512_BF16 */
#define V_PAIRS 1
#define FPCLASS_SUBNORMAL 0x20
#else
#define V_PAIRS 0
#endif
typedef __m512 vr;

static inline vr vr_set1(float x) { return _mm512_set1_ps(x); }
static inline vr vr_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vr_store(float *p, vr a) { _mm512_storeu_ps(p, a); }
static inline vr vr_add(vr a, vr b) { return _mm512_add_ps(a, b); }
static inline vr vr_sub(vr a, vr b) { return _mm512_sub_ps(a, b); }
static inline vr vr_mul(vr a, vr b) { return _mm512_mul_ps(a, b); }
static inline vr vr_div(vr a, vr b) { return _mm512_div_ps(a, b); }
static inline vr vr_fma(vr a, vr b, vr c) { return _mm512_fmadd_ps(a, b, c); }
static inline vr vr_sqrt(vr a) { return _mm512_sqrt_ps(a); }
static inline vr vr_max(vr a, vr b) { return _mm512_max_ps(a, b); }
static inline vr vr_min(vr a, vr b) { return _mm512_min_ps(a, b); }
static inline vr vr_madd(vr a, vr b, vr c) { return _mm512_fmadd_ps(a, b, c); }
static inline vr vr_if_less(vr a, vr b, vr x, vr y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline vr vr_pow2(vr a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
}
/* Transposes 4 x 4 blocks inside the 128-bit quarters, then permutes the quarters. */
static inline void vr_transpose(vr *r)
{
    vr pair[16], quad[16], half[16];
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
static inline vr vr_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void vr_store_f16(uint16_t *p, vr a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vr vr_load_bf16(const uint16_t *p)
{
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
/* Caches the answer, because CPUID is slow, most of all in a virtual machine. */
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
/* The instruction flushes subnormals to 0; those of a vector that has any are rounded as
 * on other processors. */
static inline void vr_store_bf16(uint16_t *p, vr a)
{
    if (v_has_pairs() && _mm512_fpclass_ps_mask(a, FPCLASS_SUBNORMAL) == 0) {
        __m256i rounded;
        __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(a));
        _mm256_storeu_si256((__m256i *)p, rounded);
        return;
    }
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i half = _mm512_mask_set1_epi32(rounded, nan, 0x7FC0);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(half));
}
static inline vr vr_abs(vr a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
static inline vr vr_copysign(vr a, vr b)
{
    return _mm512_or_ps(a, _mm512_and_ps(b, _mm512_set1_ps(-0.0f)));
}
static inline vr vr_bits_down(vr a, int n, uint32_t k)
{
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(a), n);
    return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32((int)k)));
}
static inline vr vr_bits_up(vr a, int n, uint32_t k)
{
    const __m512i bits = _mm512_sub_epi32(_mm512_castps_si512(a), _mm512_set1_epi32((int)k));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, n));
}
static inline vr vr_load_u8(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline void vr_store_u8(uint8_t *p, vr a)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
static inline vr vr_pair(vr first, vr second)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both;
    __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
}
static inline void vr_store_pairs(float *p, vr a)
{
    __m256i half;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(a));
    _mm256_storeu_si256((__m256i *)p, half);
}
static inline vr vr_dot(vr a, vr b, vr c)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
static inline vr vr_add_pairs(vr a, vr b)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14,
                                           16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b),
                         _mm512_permutex2var_ps(a, odd, b));
}
static inline void vr_accumulate(double *sums, vr a)
{
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), low));
    _mm512_storeu_pd(sums + 8, _mm512_add_pd(_mm512_loadu_pd(sums + 8), high));
}
static inline float vr_sum(vr a) { return _mm512_reduce_add_ps(a); }
static inline float vr_largest(vr a) { return _mm512_reduce_max_ps(a); }

#endif
