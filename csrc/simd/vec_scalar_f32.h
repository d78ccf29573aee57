/* The vector vocabulary on one lane, float32: what every other instruction set must
 * equal. vec_SET_f32.h and vec_SET_f64.h define the same names for the two arithmetic
 * types, vec_SET_words.h those for the words of dropout.
 *
 * vr is a vector of VR_WIDTH `real`; loads and stores need no alignment. vr_max(a, b) is
 * a > b ? a : b and vr_min(a, b) a < b ? a : b, so b where either is NaN. vr_madd is
 * a * b + c, fused where that is cheap. vr_if_less(a, b, x, y) is a < b ? x : y.
 * vr_pow2(a) shifts the lowest bits of a to the exponent's place. vr_transpose() takes as
 * many rows as there are lanes. vr_sum adds up the lanes. V_ROWS by two vectors are the
 * accumulators that the registers hold beside two factors and a broadcast.
 *
 * Where V_PAIRS is 1, a lane may hold a pair of bfloat16, the first in its low half:
 * vr_pair(a, b) rounds a and b, vr_store_pairs rounds and stores neighbours, and
 * vr_dot(a, b, c) is c + the second product + the first. All may take subnormals for 0.
 * v_has_pairs() is whether the processor has these instructions. */
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
static inline float vr_sum(vr a) { return a; }
static inline vr vr_load_f16(const uint16_t *p) { return tfast_from_f16(*p); }
static inline void vr_store_f16(uint16_t *p, vr a) { *p = tfast_to_f16(a); }
static inline vr vr_load_bf16(const uint16_t *p) { return tfast_from_bf16(*p); }
static inline void vr_store_bf16(uint16_t *p, vr a) { *p = tfast_to_bf16(a); }

#endif
