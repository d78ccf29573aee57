/* Launches of attention's forward by tensor cores. */
#include "attention.h"

tfast_status
tfast_mma_attention(bool *taken, const tfast_attention_args *args)
{
    int path, kernel;
    tfast_status status = tfast_mma_path(&path, args);

    *taken = path != 0;
    if (status != TFAST_OK || !*taken) {
        return status;
    }
    const mma_call call = tfast_mma_forward_call(args, path);
    status = tfast_mma_find_exponents(&call, EXPONENT_V + 1);
    if (status != TFAST_OK || args->n_q == 0) {
        return status;
    }
    kernel = tfast_mma_kernel(args, path, KERNEL_forward_75_mma_f16_32_0,
                              KERNEL_forward_75_mma_bf16_as_f16_32_0,
                              KERNEL_forward_80_mma_f16_32_0,
                              KERNEL_forward_80_mma_bf16_32_0);
    kernel += tile_of_dims(args) * 2 + tfast_mma_has_options(args);
    return LAUNCH(kernel,
                  divided_up(args->n_q, tfast_kernel_rows(kernel)) * args->heads *
                      args->batch,
                  args->stream, call);
}
