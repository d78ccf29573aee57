/* The vector vocabulary (see vec_scalar_f32.h) on the compiler's vector extensions: 8 float64.
 * Any machine runs the code of 16 lanes with it. */
// clang-format off
#ifndef VEC_WIDE_F64_H
#define VEC_WIDE_F64_H

#include "simd/real_f64.h"
#include "vec_wide_words.h"

#include <math.h>
#include <string.h>

#define VR_WIDTH 8
#define V_ROWS 12
#define V_PAIRS 0
typedef double vr __attribute__((vector_size(64)));

#define EACH_LANE(type, width, expression)                                               \
    type r = {0};                                                                        \
    for (int i = 0; i < width; i++) { r[i] = (expression); }                             \
    return r

static inline vr vr_set1(double x) { EACH_LANE(vr, 8, x); }
static inline vr vr_load(const double *p) { vr r; memcpy(&r, p, sizeof r); return r; }
static inline void vr_store(double *p, vr a) { memcpy(p, &a, sizeof a); }
static inline vr vr_add(vr a, vr b) { return a + b; }
static inline vr vr_sub(vr a, vr b) { return a - b; }
static inline vr vr_mul(vr a, vr b) { return a * b; }
static inline vr vr_div(vr a, vr b) { return a / b; }
static inline vr vr_fma(vr a, vr b, vr c) { EACH_LANE(vr, 8, fma(a[i], b[i], c[i])); }
static inline vr vr_sqrt(vr a) { EACH_LANE(vr, 8, sqrt(a[i])); }
static inline vr vr_max(vr a, vr b) { EACH_LANE(vr, 8, a[i] > b[i] ? a[i] : b[i]); }
static inline vr vr_min(vr a, vr b) { EACH_LANE(vr, 8, a[i] < b[i] ? a[i] : b[i]); }
static inline vr vr_madd(vr a, vr b, vr c) { return a * b + c; }
static inline vr vr_if_less(vr a, vr b, vr x, vr y) { EACH_LANE(vr, 8, a[i] < b[i] ? x[i] : y[i]); }
static inline vr vr_pow2(vr a)
{
    uint64_t bits __attribute__((vector_size(64)));
    memcpy(&bits, &a, sizeof bits);
    bits <<= 52;
    memcpy(&a, &bits, sizeof a);
    return a;
}
static inline void vr_transpose(vr *rows)
{
    vr copy[8];
    memcpy(copy, rows, sizeof copy);
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) { rows[i][j] = copy[j][i]; }
    }
}
static inline vr vr_add_pairs(vr a, vr b)
{
    EACH_LANE(vr, 8, i < 4 ? a[2 * i] + a[2 * i + 1] : b[2 * i - 8] + b[2 * i - 7]);
}
static inline void vr_accumulate(double *sums, vr a)
{
    for (int i = 0; i < 8; i++) { sums[i] += a[i]; }
}
static inline double vr_sum(vr a)
{
    double sum = 0;
    for (int i = 0; i < 8; i++) { sum += a[i]; }
    return sum;
}
static inline uint32_t vr_mask_le(vr a, vr b)
{
    uint32_t mask = 0;
    for (int i = 0; i < 8; i++) { mask |= (uint32_t)(a[i] <= b[i]) << i; }
    return mask;
}
static inline void vr_compress(double *p, vr a, uint32_t mask)
{
    for (int i = 0, n = 0; i < 8; i++) { if (mask >> i & 1) { p[n++] = a[i]; } }
}
static inline void vr_compress_indices(int32_t *p, const int32_t *from, uint32_t mask)
{
    for (int i = 0, n = 0; i < 8; i++) { if (mask >> i & 1) { p[n++] = from[i]; } }
}
#undef EACH_LANE

#endif
