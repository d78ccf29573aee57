/* Elementary functions of vectors of `real`. */
#ifndef VECTOR_MATH_H
#define VECTOR_MATH_H

#include "../tfast.h"

#include <math.h>
#include <string.h>

#ifndef VR_WIDTH
#    error "include a vocabulary of csrc/simd/ first"
#endif

static const double LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;

/* 2^x with `in_log2`, else e^x. The result must be below 2^128 (2^1024). It is exactly
 * 0 if it would be below 2^-126.5 (2^-1022.5), also for -infinity; NaN for NaN; and
 * exactly 1 for 0, because each tile multiplies the running sums by it, which must not
 * give early keys more weight. Relative error 2e-7 (float32) or 1e-15 (float64); of
 * e^x, for which log2 e is rounded, up to 5e-8 times |x| more.
 *
 * With y = x * unit, where unit is 1 or log2 e, and n the integer nearest to y, the
 * result is 2^n * 2^(y - n): adding `magic` leaves n plus the exponent's bias in the
 * lowest bits. The polynomial is minimax in float32 and Taylor's series in float64. */
static inline __attribute__((always_inline)) vr
vector_power(const bool in_log2, vr x)
{
#if REAL_IS_F32
    static const real c[] = {1,
                             0.6931470037f,
                             0.2402224541f,
                             0.05550730973f,
                             0.009671502747f,
                             0.001326470054f};
    const vr magic = vr_set1(12582912.f + 127);
    const double least = -127;
#else
    static const real c[] = {
        1.0,
        0.6931471805599453,
        0.2402265069591007,
        0.05550410866482158,
        0.009618129107628477,
        0.0013333558146428443,
        0.00015403530393381606,
        1.5252733804059838e-05,
        1.3215486790144305e-06,
        1.0178086009239696e-07,
        7.054911620801121e-09,
        4.445538271870812e-10,
        2.5678435993488196e-11,
        1.3691488853904124e-12,
    };
    const vr magic = vr_set1(6755399441055744. + 1023);
    const double least = -1023;
#endif
    const int last = sizeof c / sizeof *c - 1;
    const vr unit = vr_set1((real)LOG2E);
    const vr clamped = vr_max(vr_set1((real)(in_log2 ? least : least * LN2)), x);
    const vr shifted = in_log2 ? vr_add(clamped, magic) : vr_madd(clamped, unit, magic);
    const vr f = in_log2 ? vr_sub(clamped, vr_sub(shifted, magic))
                         : vr_madd(clamped, unit, vr_sub(magic, shifted));
    vr p = vr_set1(c[last]);

    for (int i = last - 1; i >= 0; i--) {
        p = vr_madd(p, f, vr_set1(c[i]));
    }
    return vr_mul(p, vr_pow2(shifted));
}

static inline __attribute__((always_inline)) vr
vector_exp2(vr x)
{
    return vector_power(true, x);
}

static inline __attribute__((always_inline)) vr
vector_exp(vr x)
{
    return vector_power(false, x);
}

/* log2 of a normal number; NaN for NaN, undefined for 0. In float32 by the series of
 * atanh, exact to 1e-10 for |z| < 0.172, without a branch, so that the compiler can
 * vectorise it. */
static inline double
logarithm(double x)
{
#if REAL_IS_F32
    const uint64_t root_of_half = 0x3FE6A09E667F3BCD;
    uint64_t bits;
    int64_t exponent;
    double m, z, y;

    memcpy(&bits, &x, sizeof bits);
    exponent = (int64_t)(bits - root_of_half) >> 52;
    bits -= (uint64_t)exponent << 52;
    memcpy(&m, &bits, sizeof m);
    z = (m - 1) / (m + 1);
    y = z * z;
    y = 1 + y * (1. / 3 + y * (1. / 5 + y * (1. / 7 + y * (1. / 9 + y * (1. / 11)))));
    return (double)exponent + 2 * LOG2E * z * y + (x - x);
#else
    return log2(x);
#endif
}

static inline __attribute__((always_inline)) vr
vector_abs(vr x)
{
    return vr_max(x, vr_sub(vr_set1(0), x));
}

/* tanh(x): Taylor's series near 0, where 1 - 2 / (e^2x + 1) would cancel. */
static inline vr
vector_tanh(vr x)
{
#if REAL_IS_F32
    static const real c[] = {
        1,           -1.f / 3,         2.f / 15,          -17.f / 315,
        62.f / 2835, -1382.f / 155925, 21844.f / 6081075, -929569.f / 638512875};
    const vr far = vr_set1(0.5f), most = vr_set1(20);
#else
    static const real c[] = {
        1,          -1. / 3,         2. / 15,          -17. / 315,
        62. / 2835, -1382. / 155925, 21844. / 6081075, -929569. / 638512875};
    const vr far = vr_set1(0.1), most = vr_set1(40);
#endif
    const int last = sizeof c / sizeof *c - 1;
    const vr one = vr_set1(1), zero = vr_set1(0);
    const vr size = vector_abs(x), square = vr_mul(x, x);
    const vr e = vector_exp2(vr_mul(vr_min(most, size), vr_set1((real)(2 * LOG2E))));
    const vr large = vr_sub(one, vr_div(vr_set1(2), vr_add(e, one)));
    vr p = vr_set1(c[last]);

    for (int i = last - 1; i >= 0; i--) {
        p = vr_madd(p, square, vr_set1(c[i]));
    }
    return vr_if_less(size, far, vr_mul(p, x),
                      vr_if_less(x, zero, vr_sub(zero, large), large));
}

#endif
