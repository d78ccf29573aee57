/* The vector vocabulary (see vec_scalar_f32.h) on one lane of float64. */
// clang-format off
#ifndef VEC_SCALAR_F64_H
#define VEC_SCALAR_F64_H

#include "real_f64.h"
#include "vec_scalar_words.h"

#include <math.h>
#include <string.h>

#define VR_WIDTH 1
#define V_ROWS 6
#define V_PAIRS 0
typedef double vr;

static inline vr vr_set1(double x) { return x; }
static inline vr vr_load(const double *p) { return *p; }
static inline void vr_store(double *p, vr a) { *p = a; }
static inline vr vr_add(vr a, vr b) { return a + b; }
static inline vr vr_sub(vr a, vr b) { return a - b; }
static inline vr vr_mul(vr a, vr b) { return a * b; }
static inline vr vr_div(vr a, vr b) { return a / b; }
static inline vr vr_fma(vr a, vr b, vr c) { return fma(a, b, c); }
static inline vr vr_sqrt(vr a) { return sqrt(a); }
static inline vr vr_max(vr a, vr b) { return a > b ? a : b; }
static inline vr vr_min(vr a, vr b) { return a < b ? a : b; }
static inline vr vr_madd(vr a, vr b, vr c) { return a * b + c; }
static inline vr vr_if_less(vr a, vr b, vr x, vr y) { return a < b ? x : y; }
static inline vr vr_pow2(vr a)
{
    uint64_t bits;
    memcpy(&bits, &a, sizeof bits);
    bits <<= 52;
    memcpy(&a, &bits, sizeof a);
    return a;
}
static inline void vr_transpose(vr *rows) { (void)rows; }
static inline vr vr_add_pairs(vr a, vr b) { return a + b; }
static inline void vr_accumulate(double *sums, vr a) { *sums += a; }
static inline double vr_sum(vr a) { return a; }

static inline uint32_t vr_mask_le(vr a, vr b) { return a <= b; }
static inline void vr_compress(double *p, vr a, uint32_t mask) { (void)mask; *p = a; }
static inline void vr_compress_indices(int32_t *p, const int32_t *from, uint32_t mask)
{
    (void)mask;
    *p = *from;
}

#endif
