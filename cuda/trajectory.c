/* The host side of trajectory metrics: two launches, the second adds up what blocks of
 * agents have given. */
#include "host.h"

static int64_t
count_blocks(const tfast_trajectory_args *args)
{
    return args->n / TFAST_TRAJECTORY_BLOCK + (args->n % TFAST_TRAJECTORY_BLOCK != 0);
}

tfast_status
tfast_cuda_trajectory_scratch(int64_t *bytes, const tfast_trajectory_args *args)
{
    *bytes = count_blocks(args) * (int64_t)sizeof(trajectory_sums);
    return TFAST_OK;
}

static tfast_status
run(const trajectory_call *call)
{
    const tfast_trajectory_args *args = &call->args;
    const bool wide = args->pred_dtype == TFAST_F64 || args->target_dtype == TFAST_F64;
    const int kernel = wide ? KERNEL_trajectory_agents_wide : KERNEL_trajectory_agents;
    tfast_status status = TFAST_OK;
    int full;

    if (call->n_blocks > 0) {
        status = tfast_full_grid(&full, kernel);
        if (status == TFAST_OK) {
            status = LAUNCH(kernel, call->n_blocks < full ? call->n_blocks : full,
                            args->stream, *call);
        }
    }
    return status == TFAST_OK ? LAUNCH(KERNEL_trajectory_total, 1, args->stream, *call)
                              : status;
}

tfast_status
tfast_cuda_trajectory(const tfast_trajectory_args *args)
{
    const trajectory_call call = {*args, args->scratch, count_blocks(args)};
    tfast_device_scope scope;
    tfast_status status = tfast_enter_device(&scope, args->device.index);

    if (status == TFAST_OK) {
        status = run(&call);
    }
    tfast_leave_device(&scope);
    return status;
}
