/* Table of the kernels that are compiled for one instruction set and one arithmetic
 * type: float64 for float64 tensors, float32 for all others. Each csrc/simd/SET_TYPE.c
 * exports one such table. */
#ifndef TYPE_KERNELS_H
#define TYPE_KERNELS_H

#include "../adamw_coef.h"
#include "../tfast.h"
#include "amp_job.h"

typedef struct {
    /* Steps n elements of a slot from `first` on. */
    void (*adamw_span)(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
                       int64_t first, int64_t n, const tfast_adamw_coef *coef,
                       const tfast_adamw_args *args);
    /* Sums and rewrites elements first .. end - 1; `chunk` is the index of the first
     * chunk in job->sums. */
    void (*amp_span)(amp_job *job, const tfast_amp_tensor *tensor, int64_t first,
                     int64_t end, int64_t chunk);
    tfast_status (*attention)(const tfast_attention_args *args);
    tfast_status (*attention_backward)(const tfast_attention_args *args);
    tfast_status (*attention_scratch)(int64_t *bytes, const tfast_attention_args *args,
                                      bool backward);
    /* Writes the metrics of agents first .. end - 1 to rows of `values`, and for each
     * agent a bit for each metric that it has to `found`. False: a probability of
     * theirs is outside of [0, 1]. */
    bool (*trajectory_agents)(const tfast_trajectory_args *args, int64_t first,
                              int64_t end, double *values, uint8_t *found);
} tfast_type_kernels;

#endif
