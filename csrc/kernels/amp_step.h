/* One pass over a list of gradients on the CPU, and the update of the loss scale. The
 * gradients' chunks, laid end to end, are cut into one contiguous range for each
 * thread. The sum of each chunk is stored; after the pass they are added in the order
 * of amp_sum.h. */
#ifndef AMP_STEP_H
#define AMP_STEP_H

#include "../amp_scale.h"
#include "../scratch.h"
#include "amp_job.h"
#include "parts.h"
#include "type_kernels.h"

/* The kernels for float64, or for float32 and the half types. Defined by the including
 * file. */
static const tfast_type_kernels *kernels_for(bool is_float64);

enum {
    TENSOR_COST = 256,     /* cost of starting a tensor, in elements */
    AMP_PART_COST = 131072 /* elements worth waking another thread */
};

static int64_t
amp_chunks(int64_t numel)
{
    return (numel + TFAST_AMP_CHUNK - 1) / TFAST_AMP_CHUNK;
}

/* The sum, or the extreme, over all chunks. */
static double
amp_total(const amp_job *job)
{
    double sums[TFAST_AMP_SUMS] = {0};

    if (job->kind == AMP_LARGEST || job->kind == AMP_SMALLEST) {
        sums[0] = job->sums[0];
        for (int64_t i = 1; i < job->chunks; i++) {
            sums[0] = amp_join(job->kind, sums[0], job->sums[i], 0);
        }
        return sums[0];
    }
    for (int64_t i = 0; i < job->chunks; i++) {
        sums[i % TFAST_AMP_SUMS] += job->sums[i];
    }
    for (int half = TFAST_AMP_SUMS / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) {
            sums[k] += sums[k + half];
        }
    }
    return sums[0];
}

/* ---- The pass -------------------------------------------------------------------- */

static void
amp_part(void *context, int part, int parts)
{
    amp_job *job = context;
    const tfast_amp_grads_args *args = job->args;
    const int64_t from = part_begin(job->cost, part, parts);
    const int64_t to = part_begin(job->cost, part + 1, parts);
    int64_t at = 0, chunk = 0;

    for (int64_t i = 0; i < args->n_tensors && at < to; i++) {
        const tfast_amp_tensor *tensor = &args->tensors[i];
        const int64_t first = part_cut(from - at, tensor->numel, TFAST_AMP_CHUNK);
        const int64_t end = part_cut(to - at, tensor->numel, TFAST_AMP_CHUNK);

        if (first < end) {
            kernels_for(tensor->dtype == TFAST_F64)
                ->amp_span(job, tensor, first, end, chunk + first / TFAST_AMP_CHUNK);
        }
        at += tensor->numel + TENSOR_COST;
        chunk += amp_chunks(tensor->numel);
    }
}

static amp_kind
amp_kind_of(const tfast_amp_grads_args *args)
{
    const double p = args->norm_type;

    if (args->total_norm == NULL && args->total_norm_f64 == NULL &&
        args->clip_coef == NULL) {
        return AMP_SQUARES;
    }
    if (isinf(p)) {
        return p > 0 ? AMP_LARGEST : AMP_SMALLEST;
    }
    return p == 2 ? AMP_SQUARES : p == 1 ? AMP_ABS : AMP_POWERS;
}

static amp_job
amp_job_of(const tfast_amp_grads_args *args, double factor, double scale)
{
    amp_job job = {.args = args, .kind = amp_kind_of(args)};

    job.rewrites = args->rewrite != TFAST_AMP_READ;
    /* as in torch, a NaN bound makes all elements NaN: they are multiplied by it */
    job.clamp = args->rewrite == TFAST_AMP_CLAMP && !isnan(args->clip_value);
    job.number = args->rewrite == TFAST_AMP_CLAMP ? args->clip_value
                                                  : tfast_amp_multiplier(factor, scale);
    for (int64_t i = 0; i < args->n_tensors; i++) {
        job.chunks += amp_chunks(args->tensors[i].numel);
        job.cost += args->tensors[i].numel + TENSOR_COST;
    }
    return job;
}

/* Without elements the norm is 0 for every norm_type. */
static void
amp_write_results(amp_job *job, double scale)
{
    const tfast_amp_grads_args *args = job->args;
    const double norm =
        job->chunks == 0 ? 0 : tfast_amp_norm(amp_total(job), args->norm_type, scale);

    if (args->found_inf != NULL) {
        *args->found_inf = atomic_load(&job->found) ? 1.0f : 0.0f;
    }
    if (args->total_norm != NULL) {
        *args->total_norm = (float)norm;
    }
    if (args->total_norm_f64 != NULL) {
        *args->total_norm_f64 = norm;
    }
    if (args->clip_coef != NULL) {
        *args->clip_coef =
            tfast_amp_clip_coef(norm, args->max_norm, args->total_norm_f64 != NULL);
    }
}

static tfast_status
amp_grads(const tfast_amp_grads_args *args)
{
    const double factor = args->factor != NULL ? *args->factor : 1.0;
    const double scale = args->grad_scale != NULL ? *args->grad_scale : 1.0;
    const bool wanted = args->found_inf != NULL || args->total_norm != NULL ||
                        args->total_norm_f64 != NULL || args->clip_coef != NULL;
    amp_job job = amp_job_of(args, factor, scale);

    if (wanted) {
        job.sums = tfast_scratch_take((size_t)(job.chunks + 1) * sizeof *job.sums);
        if (job.sums == NULL) {
            return tfast_fail(TFAST_ENOMEM, "no memory for the sums of %lld chunks",
                              (long long)job.chunks);
        }
    }
    if (wanted || job.rewrites) {
        tfast_parallel(parts_worth(job.cost, AMP_PART_COST), amp_part, &job);
    }
    if (wanted) {
        amp_write_results(&job, scale);
    }
    tfast_scratch_give(job.sums);
    return TFAST_OK;
}

static tfast_status
amp_update(const tfast_amp_update_args *args)
{
    tfast_amp_update_scale(args);
    return TFAST_OK;
}

#endif
