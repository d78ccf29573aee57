/* The vector vocabulary (see vec_scalar.h) on the compiler's vector extensions: 16 float32,
 * 8 float64, on any machine. Runs the code paths that 16 lanes take where AVX-512 is missing. */
// clang-format off
#include "../half.h"

#include <math.h>
#include <stdbool.h>

/* These functions are all inlined; how they would pass vectors does not matter. */
#pragma GCC diagnostic ignored "-Wpsabi"

#define VF_WIDTH 16
#define VD_WIDTH 8
#define V_ROWS 12
#define V_PAIRS 1
typedef float vf __attribute__((vector_size(64)));
typedef double vd __attribute__((vector_size(64)));

#define EACH_LANE(type, width, expression)                                               \
    type r = {0};                                                                        \
    for (int i = 0; i < width; i++) { r[i] = (expression); }                             \
    return r

static inline vf vf_set1(float x) { EACH_LANE(vf, 16, x); }
static inline vf vf_load(const float *p) { vf r; memcpy(&r, p, sizeof r); return r; }
static inline void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_fma(vf a, vf b, vf c) { EACH_LANE(vf, 16, fmaf(a[i], b[i], c[i])); }
static inline vf vf_sqrt(vf a) { EACH_LANE(vf, 16, sqrtf(a[i])); }
static inline vf vf_max(vf a, vf b) { EACH_LANE(vf, 16, a[i] > b[i] ? a[i] : b[i]); }
static inline vf vf_min(vf a, vf b) { EACH_LANE(vf, 16, a[i] < b[i] ? a[i] : b[i]); }
static inline vf vf_madd(vf a, vf b, vf c) { return a * b + c; }
static inline vf vf_if_less(vf a, vf b, vf x, vf y) { EACH_LANE(vf, 16, a[i] < b[i] ? x[i] : y[i]); }
static inline vf vf_pow2(vf a)
{
    uint32_t bits __attribute__((vector_size(64)));
    memcpy(&bits, &a, sizeof bits);
    bits <<= 23;
    memcpy(&a, &bits, sizeof a);
    return a;
}
static inline void vf_transpose(vf *rows)
{
    vf copy[16];
    memcpy(copy, rows, sizeof copy);
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 16; j++) { rows[i][j] = copy[j][i]; }
    }
}
static inline vf vf_load_f16(const uint16_t *p) { EACH_LANE(vf, 16, tfast_from_f16(p[i])); }
static inline vf vf_load_bf16(const uint16_t *p) { EACH_LANE(vf, 16, tfast_from_bf16(p[i])); }
static inline void vf_store_f16(uint16_t *p, vf a)
{
    for (int i = 0; i < 16; i++) { p[i] = tfast_to_f16(a[i]); }
}
static inline void vf_store_bf16(uint16_t *p, vf a)
{
    for (int i = 0; i < 16; i++) { p[i] = tfast_to_bf16(a[i]); }
}

static inline bool v_has_pairs(void) { return true; }
static inline vf vf_pair(vf first, vf second)
{
    uint32_t bits[16];
    for (int i = 0; i < 16; i++) {
        bits[i] = (uint32_t)tfast_to_bf16(second[i]) << 16 | tfast_to_bf16(first[i]);
    }
    memcpy(&first, bits, sizeof bits);
    return first;
}
static inline void vf_store_pairs(float *p, vf a)
{
    uint16_t half[16];
    vf_store_bf16(half, a);
    memcpy(p, half, sizeof half);
}
static inline vf vf_dot(vf a, vf b, vf c)
{
    typedef uint32_t words __attribute__((vector_size(64)));
    const words high = 0xFFFF0000 - (words){0}, x = (words)a, y = (words)b;
    c += (vf)(x & high) * (vf)(y & high);
    return c + (vf)(x << 16) * (vf)(y << 16);
}

static inline float vf_sum(vf a)
{
    float sum = 0;
    for (int i = 0; i < 16; i++) { sum += a[i]; }
    return sum;
}

static inline vd vd_set1(double x) { EACH_LANE(vd, 8, x); }
static inline vd vd_load(const double *p) { vd r; memcpy(&r, p, sizeof r); return r; }
static inline void vd_store(double *p, vd a) { memcpy(p, &a, sizeof a); }
static inline vd vd_add(vd a, vd b) { return a + b; }
static inline vd vd_sub(vd a, vd b) { return a - b; }
static inline vd vd_mul(vd a, vd b) { return a * b; }
static inline vd vd_div(vd a, vd b) { return a / b; }
static inline vd vd_fma(vd a, vd b, vd c) { EACH_LANE(vd, 8, fma(a[i], b[i], c[i])); }
static inline vd vd_sqrt(vd a) { EACH_LANE(vd, 8, sqrt(a[i])); }
static inline vd vd_max(vd a, vd b) { EACH_LANE(vd, 8, a[i] > b[i] ? a[i] : b[i]); }
static inline vd vd_min(vd a, vd b) { EACH_LANE(vd, 8, a[i] < b[i] ? a[i] : b[i]); }
static inline vd vd_madd(vd a, vd b, vd c) { return a * b + c; }
static inline vd vd_if_less(vd a, vd b, vd x, vd y) { EACH_LANE(vd, 8, a[i] < b[i] ? x[i] : y[i]); }
static inline vd vd_pow2(vd a)
{
    uint64_t bits __attribute__((vector_size(64)));
    memcpy(&bits, &a, sizeof bits);
    bits <<= 52;
    memcpy(&a, &bits, sizeof a);
    return a;
}
static inline void vd_transpose(vd *rows)
{
    vd copy[8];
    memcpy(copy, rows, sizeof copy);
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) { rows[i][j] = copy[j][i]; }
    }
}
static inline double vd_sum(vd a)
{
    double sum = 0;
    for (int i = 0; i < 8; i++) { sum += a[i]; }
    return sum;
}

typedef uint64_t v8 __attribute__((vector_size(64)));
static inline v8 v8_set1(uint32_t x) { EACH_LANE(v8, 8, x); }
static inline v8 v8_count(uint32_t x) { EACH_LANE(v8, 8, x + (uint32_t)i); }
static inline v8 v8_xor(v8 x, v8 y) { return x ^ y; }
static inline v8 v8_mul(v8 x, uint32_t y) { EACH_LANE(v8, 8, (uint64_t)(uint32_t)x[i] * y); }
static inline v8 v8_high(v8 x) { return x >> 32; }
static inline void v8_store(uint32_t *p, v8 x)
{
    for (int i = 0; i < 8; i++) { p[i] = (uint32_t)x[i]; }
}
#undef EACH_LANE
