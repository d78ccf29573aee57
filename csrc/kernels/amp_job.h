/* What a pass over a list of gradients is to do, and what it finds. */
#ifndef AMP_JOB_H
#define AMP_JOB_H

#include "../amp_sum.h"
#include "../tfast.h"

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef enum {
    AMP_SQUARES, /* also where only infinities and NaNs are looked for */
    AMP_ABS,
    AMP_LARGEST,
    AMP_SMALLEST,
    AMP_POWERS
} amp_kind;

typedef struct {
    const tfast_amp_grads_args *args;
    amp_kind kind;
    bool rewrites, clamp;
    double number; /* what elements are multiplied by or held to */
    double *sums;  /* one a chunk; NULL where no result is wanted */
    int64_t chunks;
    int64_t cost;      /* of all tensors */
    atomic_bool found; /* an element that is not finite */
} amp_job;

/* x, which is >= 0 or NaN, joins a sum or an extreme, which stays NaN. */
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
