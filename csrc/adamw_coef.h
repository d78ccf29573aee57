/* The coefficients of one AdamW step, computed in double. The CPU kernels and
 * cuda/device/ share this file and get the same bits; both are compiled without
 * contraction of a * b + c (-ffp-contract=off, -fmad=false). */
#ifndef TFAST_ADAMW_COEF_H
#define TFAST_ADAMW_COEF_H

#include "tfast.h"

/* A kernel rounds each coefficient once to its arithmetic type. */
typedef struct {
    double unscale; /* gradient *= unscale; clip_coef / grad_scale */
    double sign;    /* gradient *= sign; -1 with maximize, else 1 */
    double l2;      /* gradient += l2 * param; 0 with decoupled weight decay */
    double decay;   /* param *= decay */
    double beta1;   /* if <= 0.5, exp_avg = g - beta1 * (g - exp_avg) */
    double rest1;   /* 1 - beta1 */
    double beta2;
    double rest2;         /* 1 - beta2 */
    double step_size;     /* lr / (1 - beta1^t) */
    double inv_root_bias; /* 1 / sqrt(1 - beta2^t) */
    double eps;
    double ema_rest; /* 1 - ema_decay */
    int64_t step;
} tfast_adamw_coef;

/* base^exponent by squaring, because pow() does not give the same bits on every
 * machine. The relative error is at most exponent * 2^-53; for base < 1 the result
 * underflows before the error matters. */
TFAST_HOST_DEVICE static inline double
tfast_power(double base, int64_t exponent)
{
    double result = 1.0;

    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) {
            result = result * base;
        }
        base = base * base;
    }
    return result;
}

/* `step` starts at 1. `lr`, `grad_scale` and `clip_coef` are passed by value, because
 * `args` may hold only their device addresses. */
TFAST_HOST_DEVICE static inline tfast_adamw_coef
tfast_adamw_coef_at(const tfast_adamw_args *args, int64_t step, double lr,
                    double grad_scale, double clip_coef)
{
    const double weight_decay = args->weight_decay;
    tfast_adamw_coef coef;

    coef.unscale = clip_coef / grad_scale;
    coef.sign = args->maximize ? -1.0 : 1.0;
    coef.l2 = args->decoupled_weight_decay ? 0.0 : weight_decay;
    coef.decay = args->decoupled_weight_decay ? 1.0 - lr * weight_decay : 1.0;
    coef.beta1 = args->beta1;
    coef.rest1 = 1.0 - args->beta1;
    coef.beta2 = args->beta2;
    coef.rest2 = 1.0 - args->beta2;
    coef.step_size = lr / (1.0 - tfast_power(args->beta1, step));
    coef.inv_root_bias = 1.0 / sqrt(1.0 - tfast_power(args->beta2, step));
    coef.eps = args->eps;
    coef.ema_rest = 1.0 - args->ema_decay;
    coef.step = step;
    return coef;
}

#endif
