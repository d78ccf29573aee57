/* The vector vocabulary on one lane of float32: the reference for every other
 * instruction set. vec_SET_f32.h and vec_SET_f64.h define the same names for the two
 * arithmetic types, vec_SET_words.h the 64-bit integers for the random numbers of
 * dropout.
 *
 * vr is a vector of VR_WIDTH `real`; loads and stores need no alignment. vr_max(a, b)
 * is a > b ? a : b and vr_min(a, b) is a < b ? a : b, so b if either is NaN. vr_fma is
 * a fused multiply-add. vr_madd is a * b + c, fused only if the set has FMA.
 * vr_if_less(a, b, x, y) is a < b ? x : y. vr_pow2(a) shifts the lowest bits of a into
 * the exponent field. vr_transpose() transposes VR_WIDTH vectors in place. vr_sum adds
 * the lanes. vr_add_pairs(a, b) is the sums of neighbouring lanes of a followed by b, and
 * vr_accumulate(sums, a) adds the lanes to as many float64.
 *
 * Of float32 only: vr_load_u8 and vr_store_u8 convert from and to bytes; the store
 * rounds to nearest even, and its lanes must be in 0 .. 255. vr_copysign(a, b) is a, which
 * must be >= 0, with the sign of b. vr_bits_down(a, n, k) has the bits (a >> n) + k, and
 * vr_bits_up(a, n, k) the bits (a - k) << n.
 *
 * Of float64 only: vr_mask_le(a, b) has bit i set where a <= b in lane i; vr_compress()
 * and vr_compress_indices() store the lanes that a mask selects one after another, and
 * may write anything to the rest of VR_WIDTH places.
 *
 * V_ROWS: registers suffice for V_ROWS x 2 vectors of accumulators of a
 * matrix product, beside two factors and a broadcast.
 *
 * V_PAIRS is 1 where a lane may hold a pair of bfloat16, the first in its low half:
 * vr_pair(a, b) rounds lanes of a and b to pairs, vr_store_pairs rounds neighbouring
 * lanes to pairs and stores them, and vr_dot(a, b, c) is c + the product of the second
 * elements + that of the first. All three may flush subnormals to 0. v_has_pairs() is
 * whether the processor has these instructions. */
// clang-format off
#ifndef VEC_SCALAR_F32_H
#define VEC_SCALAR_F32_H

#include "../half.h"
#include "real_f32.h"
#include "vec_scalar_words.h"

#include <math.h>
#include <string.h>

#define VR_WIDTH 1
#define V_ROWS 6
#define V_PAIRS 0
typedef float vr;

static inline vr vr_set1(float x) { return x; }
static inline vr vr_load(const float *p) { return *p; }
static inline void vr_store(float *p, vr a) { *p = a; }
static inline vr vr_add(vr a, vr b) { return a + b; }
static inline vr vr_sub(vr a, vr b) { return a - b; }
static inline vr vr_mul(vr a, vr b) { return a * b; }
static inline vr vr_div(vr a, vr b) { return a / b; }
static inline vr vr_fma(vr a, vr b, vr c) { return fmaf(a, b, c); }
static inline vr vr_sqrt(vr a) { return sqrtf(a); }
static inline vr vr_max(vr a, vr b) { return a > b ? a : b; }
static inline vr vr_min(vr a, vr b) { return a < b ? a : b; }
static inline vr vr_madd(vr a, vr b, vr c) { return a * b + c; }
static inline vr vr_if_less(vr a, vr b, vr x, vr y) { return a < b ? x : y; }
static inline vr vr_pow2(vr a)
{
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    bits <<= 23;
    memcpy(&a, &bits, sizeof a);
    return a;
}
static inline void vr_transpose(vr *rows) { (void)rows; }
static inline vr vr_add_pairs(vr a, vr b) { return a + b; }
static inline void vr_accumulate(double *sums, vr a) { *sums += (double)a; }
static inline float vr_sum(vr a) { return a; }
static inline float vr_largest(vr a) { return a; }
static inline vr vr_load_f16(const uint16_t *p) { return tfast_from_f16(*p); }
static inline void vr_store_f16(uint16_t *p, vr a) { *p = tfast_to_f16(a); }
static inline vr vr_load_bf16(const uint16_t *p) { return tfast_from_bf16(*p); }
static inline void vr_store_bf16(uint16_t *p, vr a) { *p = tfast_to_bf16(a); }
static inline vr vr_abs(vr a) { return fabsf(a); }
static inline vr vr_copysign(vr a, vr b) { return copysignf(a, b); }
static inline vr vr_bits_down(vr a, int n, uint32_t k)
{
    return tfast_float_from_bits((tfast_bits_from_float(a) >> n) + k);
}
static inline vr vr_bits_up(vr a, int n, uint32_t k)
{
    return tfast_float_from_bits((tfast_bits_from_float(a) - k) << n);
}
static inline vr vr_load_u8(const uint8_t *p) { return *p; }
static inline void vr_store_u8(uint8_t *p, vr a) { *p = (uint8_t)lrintf(a); }

#endif
