/* How the CPU's backends read the probabilities of trajectories. */
#ifndef TRAJECTORY_PROBABILITY_H
#define TRAJECTORY_PROBABILITY_H

#include "../half.h"
#include "../tfast.h"

static inline double
trajectory_probability(const tfast_trajectory_args *args, int64_t agent, int64_t mode)
{
    const int64_t i =
        agent * args->probability_stride[0] + mode * args->probability_stride[1];

    switch ((tfast_dtype)args->probability_dtype) {
    case TFAST_F64:
        return ((const double *)args->probabilities)[i];
    case TFAST_F32:
        return ((const float *)args->probabilities)[i];
    case TFAST_F16:
        return tfast_from_f16(((const uint16_t *)args->probabilities)[i]);
    default:
        return tfast_from_bf16(((const uint16_t *)args->probabilities)[i]);
    }
}

/* Whether it is no probability. NaN passes: padding agents often have it. */
static inline bool
trajectory_is_outside(double p)
{
    return p < 0 || p > 1;
}

#endif
