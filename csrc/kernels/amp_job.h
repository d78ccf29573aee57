/* One pass over a list of gradients: what it computes, and its results. */
#ifndef AMP_JOB_H
#define AMP_JOB_H

#include "../amp_sum.h"
#include "../tfast.h"

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef enum {
    AMP_SQUARES,  /* 2-norm; also used if only found_inf is wanted */
    AMP_ABS,      /* 1-norm */
    AMP_LARGEST,  /* infinity-norm */
    AMP_SMALLEST, /* norm_type -infinity */
    AMP_POWERS    /* any other norm_type */
} amp_kind;

typedef struct {
    const tfast_amp_grads_args *args;
    amp_kind kind;
    bool rewrites, clamp;
    double number; /* the multiplier of elements, or with `clamp` their bound */
    double *sums;  /* one for each chunk; NULL if only rewriting is wanted */
    int64_t chunks;
    int64_t cost;      /* of all tensors, in elements, see parts.h */
    atomic_bool found; /* whether an element is not finite */
} amp_job;

/* Adds x, which is >= 0 or NaN, to a sum, or updates an extreme with it. NaN
 * propagates. */
static inline double
amp_join(amp_kind kind, double sum, double x, double norm_type)
{
    switch (kind) {
    case AMP_SQUARES:
        return fma(x, x, sum);
    case AMP_ABS:
        return sum + x;
    case AMP_LARGEST:
        return x > sum || x != x ? x : sum;
    case AMP_SMALLEST:
        return x < sum || x != x ? x : sum;
    default:
        return sum + pow(x, norm_type);
    }
}

#endif
