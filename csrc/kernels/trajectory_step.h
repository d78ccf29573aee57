/* Trajectory metrics on the CPU: agents in blocks of a fixed size, one contiguous range
 * of blocks for each thread. The sums of each block are stored and added in order after
 * the pass, so that they do not depend on the number of threads. */
#ifndef TRAJECTORY_STEP_H
#define TRAJECTORY_STEP_H

#include "../scratch.h"
#include "parts.h"
#include "trajectory_probability.h"
#include "type_kernels.h"

#include <math.h>
#include <stdatomic.h>

/* Defined by the including file. */
static const tfast_type_kernels *kernels_for(bool is_float64);

enum {
    TRAJECTORY_BLOCK = TFAST_TRAJECTORY_BLOCK,
    TRAJECTORY_PART_COST = 65536 /* coordinates worth waking another thread */
};

typedef struct {
    double sum[TFAST_TRAJECTORY_METRICS], count[TFAST_TRAJECTORY_METRICS];
} trajectory_sums;

typedef struct {
    const tfast_trajectory_args *args;
    trajectory_sums *blocks;
    int64_t n_blocks;
    _Atomic bool outside; /* a probability is outside of [0, 1] */
} trajectory_job;

static void
trajectory_block(trajectory_job *job, int64_t block)
{
    const tfast_trajectory_args *args = job->args;
    const int64_t first = block * TRAJECTORY_BLOCK;
    const int64_t left = args->n - first;
    const int n = left < TRAJECTORY_BLOCK ? (int)left : TRAJECTORY_BLOCK;
    double own[TRAJECTORY_BLOCK * TFAST_TRAJECTORY_METRICS];
    double *values =
        args->agents != NULL ? args->agents + first * TFAST_TRAJECTORY_METRICS : own;
    uint8_t found[TRAJECTORY_BLOCK];
    trajectory_sums *sums = &job->blocks[block];

    if (!kernels_for(args->pred_dtype == TFAST_F64 || args->target_dtype == TFAST_F64)
             ->trajectory_agents(args, first, first + n, values, found)) {
        job->outside = true;
    }
    *sums = (trajectory_sums){{0}, {0}};
    for (int i = 0; i < n; i++, values += TFAST_TRAJECTORY_METRICS) {
        for (int m = 0; m < TFAST_TRAJECTORY_METRICS; m++) {
            if ((found[i] >> m & 1) != 0) {
                sums->sum[m] += values[m];
                sums->count[m] += 1;
            }
        }
    }
}

static void
trajectory_part(void *context, int part, int parts)
{
    trajectory_job *job = context;
    const int64_t end = part_begin(job->n_blocks, part + 1, parts);

    for (int64_t i = part_begin(job->n_blocks, part, parts); i < end; i++) {
        trajectory_block(job, i);
    }
}

/* Of agents of modes * steps * dim coordinates; 64 bits suffice, for they are in
 * memory, but a broadcast dimension is not. */
static int64_t
trajectory_cost(const tfast_trajectory_args *args)
{
    const double cost =
        (double)args->n * (double)args->modes * (double)args->steps * (double)args->dim;

    return cost < 1e15 ? (int64_t)cost : (int64_t)1e15;
}

/* Fails at the first probability that is outside of [0, 1]. */
static tfast_status
trajectory_check_probabilities(const tfast_trajectory_args *args)
{
    for (int64_t agent = 0; agent < args->n; agent++) {
        for (int64_t mode = 0; mode < args->modes; mode++) {
            const double p = trajectory_probability(args, agent, mode);

            if (trajectory_is_outside(p)) {
                return tfast_fail(TFAST_EINVAL,
                                  "probabilities must be in [0, 1], got %g for agent "
                                  "%lld, mode %lld; apply softmax to logits",
                                  p, (long long)agent, (long long)mode);
            }
        }
    }
    return TFAST_OK;
}

static tfast_status
trajectory(const tfast_trajectory_args *args)
{
    trajectory_job job = {.args = args};
    double *totals = args->totals;

    job.n_blocks = args->n / TRAJECTORY_BLOCK + (args->n % TRAJECTORY_BLOCK != 0);
    job.blocks = tfast_scratch_take((size_t)(job.n_blocks + 1) * sizeof *job.blocks);
    if (job.blocks == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the sums of %lld agents",
                          (long long)args->n);
    }
    tfast_parallel(parts_worth(trajectory_cost(args), TRAJECTORY_PART_COST),
                   trajectory_part, &job);
    for (int m = 0; m < TFAST_TRAJECTORY_METRICS; m++) {
        double sum = 0, count = 0;

        for (int64_t i = 0; i < job.n_blocks; i++) {
            sum += job.blocks[i].sum[m];
            count += job.blocks[i].count[m];
        }
        totals[m] = sum;
        totals[TFAST_TRAJECTORY_METRICS + m] = count;
    }
    tfast_scratch_give(job.blocks);
    return job.outside ? trajectory_check_probabilities(args) : TFAST_OK;
}

#endif
