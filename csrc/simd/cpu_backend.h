/* The backend of one instruction set, from its kernel tables for float32 and float64.
 * The including file (SET.c) must define kernels_for() and unusable(). */
#ifndef CPU_BACKEND_H
#define CPU_BACKEND_H

#include "../kernels/type_kernels.h"
#include "../neighbour_search.h"

/* The kernels with float64 arithmetic, or those with float32 arithmetic, which also
 * serve float16 and bfloat16. */
static const tfast_type_kernels *kernels_for(bool is_float64);
/* NULL if this CPU has the instruction set, else the reason why it cannot be used. */
static const char *unusable(void);

#include "../kernels/adamw_step.h"
#include "../kernels/amp_step.h"
#include "../kernels/trajectory_step.h"

static tfast_status
attention(const tfast_attention_args *args)
{
    return kernels_for(args->dtype == TFAST_F64)->attention(args);
}

static tfast_status
attention_backward(const tfast_attention_args *args)
{
    return kernels_for(args->dtype == TFAST_F64)->attention_backward(args);
}

static tfast_status
attention_scratch(int64_t *bytes, const tfast_attention_args *args, bool backward)
{
    return kernels_for(args->dtype == TFAST_F64)
        ->attention_scratch(bytes, args, backward);
}

/* The kernels of the search for neighbours. */
static const tfast_neighbour_kernels *neighbour_kernels(void);

static tfast_status
neighbours_count(tfast_neighbours_plan **plan, tfast_neighbours_args *args)
{
    return tfast_neighbours_plan_cpu(plan, args, neighbour_kernels());
}

#define CPU_BACKEND(NAME)                                                              \
    {                                                                                  \
        .abi = TFAST_ABI, .name = NAME, .device = TFAST_CPU, .unusable = unusable,     \
        .adamw = adamw_step, .amp_grads = amp_grads, .amp_update = amp_update,         \
        .attention = attention, .attention_backward = attention_backward,              \
        .attention_scratch = attention_scratch, .neighbours_count = neighbours_count,  \
        .trajectory = trajectory,                                                      \
    }

#endif
