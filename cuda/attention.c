/* Attention's host side: by tensor cores where there are kernels for the case,
 * otherwise by the plain ones, which do everything. */
#include "attention.h"

/* Of a plain kernel for float; that for double is the next one. */
static tfast_status
launch_plain(int kernel, const tfast_attention_args *args, int64_t works)
{
    const plain_call call = {.args = *args, .n_works = works};

    return works == 0 ? TFAST_OK
                      : LAUNCH(kernel + (args->dtype == TFAST_F64),
                               blocks_of(works, MOST_BLOCKS), args->stream, call);
}

static int64_t
tiles_of(int64_t n)
{
    return divided_up(n, PLAIN_TILE);
}

tfast_status
tfast_cuda_attention_scratch(int64_t *bytes, const tfast_attention_args *args,
                             bool backward)
{
    tfast_device_scope scope;
    tfast_status status = tfast_enter_device(&scope, args->device.index);
    int path = 0;

    if (status == TFAST_OK) {
        status = tfast_mma_path(&path, args);
    }
    *bytes =
        status == TFAST_OK ? tfast_attention_scratch_of(args, path, backward).bytes : 0;
    tfast_leave_device(&scope);
    return status;
}

/* ---- Forward --------------------------------------------------------------------- */

static tfast_status
forward(const tfast_attention_args *args)
{
    bool taken = false;
    tfast_status status = tfast_decode_attention(&taken, args);

    if (status == TFAST_OK && !taken) {
        status = tfast_mma_attention(&taken, args);
    }
    if (status != TFAST_OK || taken) {
        return status;
    }
    return launch_plain(KERNEL_plain_forward_float, args,
                        tiles_of(args->n_q) * args->heads * args->batch);
}

tfast_status
tfast_cuda_attention(const tfast_attention_args *args)
{
    tfast_device_scope scope;
    tfast_status status = tfast_enter_device(&scope, args->device.index);

    if (status == TFAST_OK) {
        status = forward(args);
    }
    tfast_leave_device(&scope);
    return status;
}

/* ---- Backward -------------------------------------------------------------------- */

static tfast_status
launch_term(const tfast_attention_args *args, attention_term term)
{
    const int64_t *stride = term.stride;
    const int64_t tiles[4] = {
        stride[0] == 0 ? 1 : args->batch,
        stride[1] == 0 ? 1 : args->heads,
        stride[2] == 0 ? 1 : tiles_of(args->n_q),
        stride[3] == 0 ? 1 : tiles_of(args->n_k),
    };
    const plain_call call = {*args,
                             tiles[0] * tiles[1] * tiles[2] * tiles[3],
                             term,
                             {tiles[0], tiles[1], tiles[2], tiles[3]}};

    if (term.data == NULL || call.n_works == 0) {
        return TFAST_OK;
    }
    return LAUNCH(KERNEL_plain_term_float + (args->dtype == TFAST_F64),
                  blocks_of(call.n_works, MOST_BLOCKS), args->stream, call);
}

static tfast_status
plain_backward(const tfast_attention_args *args)
{
    const int64_t queries = tiles_of(args->n_q) * args->heads * args->batch;
    const int64_t keys = tiles_of(args->n_k) * args->kv_heads * args->batch;
    const bool dkv = args->dk.data != NULL || args->dv.data != NULL;
    tfast_status status = launch_plain(KERNEL_plain_shares_float, args,
                                       args->scratch != NULL ? queries : 0);

    if (status == TFAST_OK) {
        status = launch_plain(KERNEL_plain_dq_float, args,
                              args->dq.data != NULL ? queries : 0);
    }
    if (status == TFAST_OK) {
        status = launch_plain(KERNEL_plain_dkv_float, args, dkv ? keys : 0);
    }
    if (status == TFAST_OK) {
        status = launch_term(args, tfast_bias_term(args));
    }
    if (status == TFAST_OK) {
        status = launch_term(args, tfast_alibi_term(args));
    }
    if (status == TFAST_OK) {
        status = launch_plain(KERNEL_plain_dsinks_float, args,
                              args->dsinks != NULL ? args->heads : 0);
    }
    return status;
}

static tfast_status
backward(const tfast_attention_args *args)
{
    tfast_attention_args own = *args;
    bool taken = false;
    const tfast_status status = tfast_mma_attention_backward(&taken, args);

    if (status != TFAST_OK || taken) {
        return status;
    }
    own.scratch = may_be_far(args) ? args->scratch : NULL;
    return plain_backward(&own);
}

tfast_status
tfast_cuda_attention_backward(const tfast_attention_args *args)
{
    tfast_device_scope scope;
    tfast_status status = tfast_enter_device(&scope, args->device.index);

    if (status == TFAST_OK) {
        status = backward(args);
    }
    tfast_leave_device(&scope);
    return status;
}
