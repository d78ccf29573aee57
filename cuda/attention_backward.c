/* Launches of attention's backward by tensor cores. */
#include "attention.h"

static tfast_status
launch_delta(const mma_call *call, int path)
{
    const tfast_attention_args *args = &call->args;
    const int64_t works = divided_up(args->n_q, DELTA_ROWS) * args->heads * args->batch;
    const int kernel =
        tfast_mma_kernel(args, path, KERNEL_delta_mma_f16, KERNEL_delta_mma_bf16_as_f16,
                         KERNEL_delta_mma_f16, KERNEL_delta_mma_bf16);

    return works == 0 ? TFAST_OK
                      : LAUNCH(kernel, blocks_of(works, 1 << 20), args->stream, *call);
}

static tfast_status
launch_shares(const mma_call *call, int path)
{
    const tfast_attention_args *args = &call->args;
    const int64_t works = divided_up(args->n_q, FAR_ROWS) * args->heads * args->batch;
    const int kernel = tfast_mma_kernel(
        args, path, KERNEL_shares_75_mma_f16, KERNEL_shares_75_mma_bf16_as_f16,
        KERNEL_shares_80_mma_f16, KERNEL_shares_80_mma_bf16);

    return call->shares == NULL || works == 0
               ? TFAST_OK
               : LAUNCH(kernel, blocks_of(works, 1 << 20), args->stream, *call);
}

static tfast_status
launch_powers(const mma_call *call)
{
    const tfast_attention_args *args = &call->args;
    const int64_t works = args->batch * args->kv_heads;

    return call->powers == NULL
               ? TFAST_OK
               : LAUNCH(KERNEL_powers, blocks_of(works, 1 << 20), args->stream, *call);
}

/* What the kernels of gradients need to know. */
static tfast_status
prepare(const mma_call *call, int path)
{
    tfast_status status = tfast_mma_find_exponents(call, EXPONENTS);

    if (status == TFAST_OK) {
        status = launch_delta(call, path);
    }
    if (status == TFAST_OK) {
        status = launch_shares(call, path);
    }
    return status == TFAST_OK ? launch_powers(call) : status;
}

/* The kernel of dk and dv; that of dq is the next one. */
static int
kernel_of_gradients(const mma_call *call, int path)
{
    /* from the first of its list, by tile of dims and options: see kernels.h */
    static const int of_list[6][2] = {{0, 2}, {4, 6}, {0, 4}, {2, 4}, {0, 2}, {4, 6}};
    const tfast_attention_args *args = &call->args;
    const int tile = tile_of_dims(args);
    const int first =
        tile < 2   ? tfast_mma_kernel(args, path, KERNEL_backward_75_mma_f16_32_1_0,
                                      KERNEL_backward_75_mma_bf16_as_f16_32_1_0,
                                      KERNEL_backward_80_mma_f16_32_1_0,
                                      KERNEL_backward_80_mma_bf16_32_1_0)
        : tile < 4 ? tfast_mma_kernel(args, path, KERNEL_backward_75_mma_f16_96_1_0,
                                      KERNEL_backward_75_mma_bf16_as_f16_96_1_0,
                                      KERNEL_backward_80_mma_f16_96_1_0,
                                      KERNEL_backward_80_mma_bf16_96_1_0)
                   : tfast_mma_kernel(args, path, KERNEL_backward_75_mma_f16_192_1_0,
                                      KERNEL_backward_75_mma_bf16_as_f16_192_1_0,
                                      KERNEL_backward_80_mma_f16_192_1_0,
                                      KERNEL_backward_80_mma_bf16_192_1_0);

    return first + of_list[tile][tfast_mma_has_options(args)];
}

/* Those of q, k and v. */
static tfast_status
launch_gradients(const mma_call *call, int path)
{
    const tfast_attention_args *args = &call->args;
    const int kernel = kernel_of_gradients(call, path);
    const int64_t keys =
        divided_up(args->n_k, tfast_kernel_rows(kernel)) * args->kv_heads * args->batch;
    const int64_t queries = divided_up(args->n_q, tfast_kernel_rows(kernel + 1)) *
                            args->heads * args->batch;
    tfast_status status = TFAST_OK;

    if (keys != 0 && (args->dk.data != NULL || args->dv.data != NULL)) {
        status = LAUNCH(kernel, keys, args->stream, *call);
    }
    if (status == TFAST_OK && queries != 0 && args->dq.data != NULL) {
        status = LAUNCH(kernel + 1, queries, args->stream, *call);
    }
    return status;
}

static bool
is_any_wanted(const tfast_attention_args *args)
{
    return args->dq.data != NULL || args->dk.data != NULL || args->dv.data != NULL ||
           args->dbias != NULL || args->dalibi != NULL || args->dsinks != NULL;
}

tfast_status
tfast_mma_attention_backward(bool *taken, const tfast_attention_args *args)
{
    int path;
    tfast_status status = tfast_mma_path(&path, args);

    *taken = path != 0;
    if (status != TFAST_OK || !*taken || !is_any_wanted(args)) {
        return status;
    }
    const mma_call call = tfast_mma_backward_call(args, path);
    status = prepare(&call, path);
    if (status == TFAST_OK) {
        status = launch_gradients(&call, path);
    }
    return status == TFAST_OK ? tfast_mma_option_gradients(&call, path) : status;
}
