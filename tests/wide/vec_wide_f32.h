/* The vector vocabulary (see vec_scalar_f32.h) on the compiler's vector extensions: 16 float32.
 * Any machine runs the code of 16 lanes with it. */
// clang-format off
#ifndef VEC_WIDE_F32_H
#define VEC_WIDE_F32_H

#include "half.h"
#include "simd/real_f32.h"
#include "vec_wide_words.h"

#include <math.h>
#include <string.h>
#include <stdbool.h>

#define VR_WIDTH 16
#define V_ROWS 12
#define V_PAIRS 1
typedef float vr __attribute__((vector_size(64)));

#define EACH_LANE(type, width, expression)                                               \
    type r = {0};                                                                        \
    for (int i = 0; i < width; i++) { r[i] = (expression); }                             \
    return r

static inline vr vr_set1(float x) { EACH_LANE(vr, 16, x); }
static inline vr vr_load(const float *p) { vr r; memcpy(&r, p, sizeof r); return r; }
static inline void vr_store(float *p, vr a) { memcpy(p, &a, sizeof a); }
static inline vr vr_add(vr a, vr b) { return a + b; }
static inline vr vr_sub(vr a, vr b) { return a - b; }
static inline vr vr_mul(vr a, vr b) { return a * b; }
static inline vr vr_div(vr a, vr b) { return a / b; }
static inline vr vr_fma(vr a, vr b, vr c) { EACH_LANE(vr, 16, fmaf(a[i], b[i], c[i])); }
static inline vr vr_sqrt(vr a) { EACH_LANE(vr, 16, sqrtf(a[i])); }
static inline vr vr_max(vr a, vr b) { EACH_LANE(vr, 16, a[i] > b[i] ? a[i] : b[i]); }
static inline vr vr_min(vr a, vr b) { EACH_LANE(vr, 16, a[i] < b[i] ? a[i] : b[i]); }
static inline vr vr_madd(vr a, vr b, vr c) { return a * b + c; }
static inline vr vr_if_less(vr a, vr b, vr x, vr y) { EACH_LANE(vr, 16, a[i] < b[i] ? x[i] : y[i]); }
static inline vr vr_pow2(vr a)
{
    uint32_t bits __attribute__((vector_size(64)));
    memcpy(&bits, &a, sizeof bits);
    bits <<= 23;
    memcpy(&a, &bits, sizeof a);
    return a;
}
static inline void vr_transpose(vr *rows)
{
    vr copy[16];
    memcpy(copy, rows, sizeof copy);
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 16; j++) { rows[i][j] = copy[j][i]; }
    }
}
static inline vr vr_load_f16(const uint16_t *p) { EACH_LANE(vr, 16, tfast_from_f16(p[i])); }
static inline vr vr_load_bf16(const uint16_t *p) { EACH_LANE(vr, 16, tfast_from_bf16(p[i])); }
static inline vr vr_abs(vr a) { EACH_LANE(vr, 16, fabsf(a[i])); }
static inline vr vr_copysign(vr a, vr b) { EACH_LANE(vr, 16, copysignf(a[i], b[i])); }
static inline vr vr_bits_down(vr a, int n, uint32_t k)
{
    EACH_LANE(vr, 16, tfast_float_from_bits((tfast_bits_from_float(a[i]) >> n) + k));
}
static inline vr vr_bits_up(vr a, int n, uint32_t k)
{
    EACH_LANE(vr, 16, tfast_float_from_bits((tfast_bits_from_float(a[i]) - k) << n));
}
static inline vr vr_load_u8(const uint8_t *p) { EACH_LANE(vr, 16, p[i]); }
static inline void vr_store_u8(uint8_t *p, vr a)
{
    for (int i = 0; i < 16; i++) { p[i] = (uint8_t)lrintf(a[i]); }
}
static inline void vr_store_f16(uint16_t *p, vr a)
{
    for (int i = 0; i < 16; i++) { p[i] = tfast_to_f16(a[i]); }
}
static inline void vr_store_bf16(uint16_t *p, vr a)
{
    for (int i = 0; i < 16; i++) { p[i] = tfast_to_bf16(a[i]); }
}

static inline bool v_has_pairs(void) { return true; }
static inline vr vr_pair(vr first, vr second)
{
    uint32_t bits[16];
    for (int i = 0; i < 16; i++) {
        bits[i] = (uint32_t)tfast_to_bf16(second[i]) << 16 | tfast_to_bf16(first[i]);
    }
    memcpy(&first, bits, sizeof bits);
    return first;
}
static inline void vr_store_pairs(float *p, vr a)
{
    uint16_t half[16];
    vr_store_bf16(half, a);
    memcpy(p, half, sizeof half);
}
static inline vr vr_dot(vr a, vr b, vr c)
{
    typedef uint32_t words __attribute__((vector_size(64)));
    const words high = 0xFFFF0000 - (words){0}, x = (words)a, y = (words)b;
    c += (vr)(x & high) * (vr)(y & high);
    return c + (vr)(x << 16) * (vr)(y << 16);
}

static inline vr vr_add_pairs(vr a, vr b)
{
    EACH_LANE(vr, 16, i < 8 ? a[2 * i] + a[2 * i + 1] : b[2 * i - 16] + b[2 * i - 15]);
}
static inline void vr_accumulate(double *sums, vr a)
{
    for (int i = 0; i < 16; i++) { sums[i] += a[i]; }
}
static inline float vr_sum(vr a)
{
    float sum = 0;
    for (int i = 0; i < 16; i++) { sum += a[i]; }
    return sum;
}
static inline float vr_largest(vr a)
{
    float most = a[0];
    for (int i = 1; i < 16; i++) { most = a[i] > most ? a[i] : most; }
    return most;
}
#undef EACH_LANE

#endif
