/* The vector vocabulary on one lane: what every other instruction set must equal. vf is a
 * vector of float32, vd of float64; loads and stores need no alignment; vX_max(a, b) is
 * a > b ? a : b and vX_min(a, b) a < b ? a : b, so b where either is NaN; vX_madd is
 * a * b + c, fused where that is cheap; vX_if_less(a, b, x, y) is a < b ? x : y;
 * vX_pow2(a) shifts a's lowest bits to the exponent's place; vX_transpose() takes as
 * many rows as there are lanes; vX_sum adds up the lanes. V_ROWS by two vectors are the
 * accumulators that the registers hold beside two factors and a broadcast. v8 is eight
 * words of 64 bits: v8_count(x) is x, x + 1 .. x + 7, v8_mul(a, x) multiplies the low
 * halves, v8_high moves the high halves down, v8_store stores the low halves.
 * Where V_PAIRS is 1 a lane may hold a pair of bfloat16, the first in its low half:
 * vf_pair(a, b) rounds a and b, vf_store_pairs rounds and stores neighbours, vf_dot(a, b, c)
 * is c + the second product + the first. All may take subnormals for 0. v_has_pairs() is
 * whether the processor can. */
// clang-format off
#include "../half.h"

#include <math.h>

#define VF_WIDTH 1
#define VD_WIDTH 1
#define V_ROWS 6
#define V_PAIRS 0
typedef float vf;
typedef double vd;

static inline vf vf_set1(float x) { return x; }
static inline vf vf_load(const float *p) { return *p; }
static inline void vf_store(float *p, vf a) { *p = a; }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_fma(vf a, vf b, vf c) { return fmaf(a, b, c); }
static inline vf vf_sqrt(vf a) { return sqrtf(a); }
static inline vf vf_max(vf a, vf b) { return a > b ? a : b; }
static inline vf vf_min(vf a, vf b) { return a < b ? a : b; }
static inline vf vf_madd(vf a, vf b, vf c) { return a * b + c; }
static inline vf vf_if_less(vf a, vf b, vf x, vf y) { return a < b ? x : y; }
static inline vf vf_pow2(vf a)
{
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    bits <<= 23;
    memcpy(&a, &bits, sizeof a);
    return a;
}
static inline void vf_transpose(vf *rows) { (void)rows; }
static inline float vf_sum(vf a) { return a; }
static inline vf vf_load_f16(const uint16_t *p) { return tfast_from_f16(*p); }
static inline void vf_store_f16(uint16_t *p, vf a) { *p = tfast_to_f16(a); }
static inline vf vf_load_bf16(const uint16_t *p) { return tfast_from_bf16(*p); }
static inline void vf_store_bf16(uint16_t *p, vf a) { *p = tfast_to_bf16(a); }

static inline vd vd_set1(double x) { return x; }
static inline vd vd_load(const double *p) { return *p; }
static inline void vd_store(double *p, vd a) { *p = a; }
static inline vd vd_add(vd a, vd b) { return a + b; }
static inline vd vd_sub(vd a, vd b) { return a - b; }
static inline vd vd_mul(vd a, vd b) { return a * b; }
static inline vd vd_div(vd a, vd b) { return a / b; }
static inline vd vd_fma(vd a, vd b, vd c) { return fma(a, b, c); }
static inline vd vd_sqrt(vd a) { return sqrt(a); }
static inline vd vd_max(vd a, vd b) { return a > b ? a : b; }
static inline vd vd_min(vd a, vd b) { return a < b ? a : b; }
static inline vd vd_madd(vd a, vd b, vd c) { return a * b + c; }
static inline vd vd_if_less(vd a, vd b, vd x, vd y) { return a < b ? x : y; }
static inline vd vd_pow2(vd a)
{
    uint64_t bits;
    memcpy(&bits, &a, sizeof bits);
    bits <<= 52;
    memcpy(&a, &bits, sizeof a);
    return a;
}
static inline void vd_transpose(vd *rows) { (void)rows; }
static inline double vd_sum(vd a) { return a; }

typedef struct { uint64_t lane[8]; } v8;
#define EACH_OF_8(expression)                                                            \
    v8 r;                                                                                \
    for (int i = 0; i < 8; i++) { r.lane[i] = (expression); }                            \
    return r
static inline v8 v8_set1(uint32_t x) { EACH_OF_8(x); }
static inline v8 v8_count(uint32_t x) { EACH_OF_8(x + (uint32_t)i); }
static inline v8 v8_xor(v8 x, v8 y) { EACH_OF_8(x.lane[i] ^ y.lane[i]); }
static inline v8 v8_mul(v8 x, uint32_t y) { EACH_OF_8((uint64_t)(uint32_t)x.lane[i] * y); }
static inline v8 v8_high(v8 x) { EACH_OF_8(x.lane[i] >> 32); }
static inline void v8_store(uint32_t *p, v8 x)
{
    for (int i = 0; i < 8; i++) { p[i] = (uint32_t)x.lane[i]; }
}
#undef EACH_OF_8
