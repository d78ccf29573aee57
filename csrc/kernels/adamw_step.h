/* One step over a list of slots on the CPU: the slots' elements, laid end to end, are
 * cut into one contiguous range for each thread. */
#ifndef ADAMW_STEP_H
#define ADAMW_STEP_H

#include "../adamw_codes.h"
#include "../adamw_coef.h"
#include "parts.h"
#include "type_kernels.h"

#include <string.h>

/* The kernels for float64, or for float32 and the half types. Defined by the including
 * file. */
static const tfast_type_kernels *kernels_for(bool is_float64);

enum {
    SLOT_COST = 64,    /* cost of starting a slot, in elements */
    PART_COST = 32768, /* elements worth waking a sleeping thread, which takes 50 us */
    /* ranges are cut at multiples of this many elements of a slot: whole cache lines,
     * and whole blocks of 8-bit state */
    CUT = TFAST_CODE_BLOCK
};

typedef struct {
    const tfast_adamw_args *args;
    int64_t cost; /* of all slots, in elements, see parts.h */
    bool skip;    /* found_inf is set: only zero the gradients */
} adamw_job;

static const tfast_adamw_extra no_extra;

/* Steps elements first .. first + n - 1 of slot i. */
static void
adamw_slot_span(const tfast_adamw_args *args, int64_t i, int64_t first, int64_t n,
                const tfast_adamw_coef *coef)
{
    const tfast_adamw_slot *slot = &args->slots[i];
    const tfast_adamw_extra *extra =
        args->extras != NULL ? &args->extras[i] : &no_extra;

    kernels_for(slot->param_dtype == TFAST_F64 || slot->state_dtype == TFAST_F64)
        ->adamw_span(slot, extra, first, n, coef, args);
}

static void
adamw_zero(const tfast_adamw_slot *slot, int64_t first, int64_t n)
{
    const size_t size = tfast_dtype_size(slot->grad_dtype);

    memset((char *)slot->grad + (size_t)first * size, 0, (size_t)n * size);
}

static void
adamw_part(void *context, int part, int parts)
{
    const adamw_job *job = context;
    const tfast_adamw_args *args = job->args;
    const double lr = args->lr_device != NULL ? *args->lr_device : args->lr;
    const double scale = args->grad_scale != NULL ? *args->grad_scale : 1.0;
    const double clip = args->clip_coef != NULL ? *args->clip_coef : 1.0;
    const int64_t from = part_begin(job->cost, part, parts);
    const int64_t to = part_begin(job->cost, part + 1, parts);
    tfast_adamw_coef coef = {0};
    int64_t coef_step = 0, at = 0;

    for (int64_t i = 0; i < args->n_slots && at < to; i++) {
        const tfast_adamw_slot *slot = &args->slots[i];
        const int64_t first = part_cut(from - at, slot->numel, CUT);
        const int64_t end = part_cut(to - at, slot->numel, CUT);
        const int64_t step = slot->step != NULL ? (int64_t)*slot->step : args->step;

        at += slot->numel + SLOT_COST;
        if (first >= end) {
            continue;
        }
        if (job->skip) {
            adamw_zero(slot, first, end - first);
            continue;
        }
        if (step != coef_step) {
            coef = tfast_adamw_coef_at(args, step, lr, scale, clip);
            coef_step = step;
        }
        adamw_slot_span(args, i, first, end - first, &coef);
    }
}

static tfast_status
adamw_step(const tfast_adamw_args *args)
{
    adamw_job job = {.args = args};

    job.skip = args->found_inf != NULL && *args->found_inf != 0;
    if (job.skip && !args->zero_grad) {
        return TFAST_OK;
    }
    for (int64_t i = 0; i < args->n_slots; i++) {
        job.cost += args->slots[i].numel + SLOT_COST;
        if (args->slots[i].step != NULL && !job.skip) {
            *args->slots[i].step += 1;
        }
    }
    tfast_parallel(parts_worth(job.cost, PART_COST), adamw_part, &job);
    return TFAST_OK;
}

#endif
