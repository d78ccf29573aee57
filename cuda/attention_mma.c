/* Which calls of attention tensor cores take, what their launches pass, and how a
 * call's scratch is divided. */
#include "attention.h"

/* ---- Which kernels --------------------------------------------------------------- */

tfast_status
tfast_mma_path(int *path, const tfast_attention_args *args)
{
    const int64_t rows = (args->n_q > args->n_k ? args->n_q : args->n_k) / 16 + 1;

    *path = 0;
    if ((args->dtype != TFAST_F16 && args->dtype != TFAST_BF16) || args->batch == 0 ||
        args->heads == 0 || args->dim > MMA_MAX_DIM || args->dim_v > MMA_MAX_DIM ||
        args->n_q > MMA_MAX_ROWS || args->n_k > MMA_MAX_ROWS ||
        rows > MMA_MAX_BLOCKS / args->heads / args->batch) {
        return TFAST_OK;
    }
    return tfast_kernel_path(path);
}

int
tfast_mma_kernel(const tfast_attention_args *args, int path, int f16_75, int bf16_75,
                 int f16_80, int bf16_80)
{
    if (args->dtype == TFAST_F16) {
        return path == 75 ? f16_75 : f16_80;
    }
    return path == 75 ? bf16_75 : bf16_80;
}

bool
tfast_mma_has_options(const tfast_attention_args *args)
{
    return args->mask.data != NULL || args->bias.data != NULL ||
           args->alibi_slopes != NULL || args->softcap != 0 || args->dropout_p > 0 ||
           !(args->scale > 0);
}

/* ---- Scratch --------------------------------------------------------------------- */

/* Puts a part of so many bytes behind the others. */
static int64_t
place(attention_scratch *scratch, int64_t bytes)
{
    const int64_t at = scratch->bytes, unit = TFAST_SCRATCH_ALIGNMENT;

    scratch->bytes += divided_up(bytes, unit) * unit;
    return at;
}

attention_scratch
tfast_attention_scratch_of(const tfast_attention_args *args, int path, bool backward)
{
    const int64_t heads = args->batch * args->heads;
    const int64_t queries =
        args->cu_seqlens_q == NULL ? args->batch * args->n_q : args->total_q;
    const int64_t rows = queries * args->heads;
    const bool scaled = is_scaled(args, path);
    const int64_t real = args->dtype == TFAST_F64 ? 8 : 4;
    attention_scratch scratch = {0};

    scratch.exponents =
        place(&scratch, scaled ? EXPONENTS * heads * EXPONENT_PARTS * 4 : 0);
    scratch.results = place(&scratch, backward ? 0 : tfast_decode_results(args, path));
    scratch.delta = place(&scratch, backward && path != 0 ? rows * 4 : 0);
    scratch.shares = place(&scratch, backward && may_be_far(args) ? rows * real : 0);
    scratch.bounds = place(&scratch, backward && scaled ? rows * 4 : 0);
    scratch.powers = place(
        &scratch, backward && scaled ? heads * (int64_t)sizeof(mma_head_powers) : 0);
    scratch.parts =
        place(&scratch, backward && path != 0 ? tfast_mma_term_parts(args) : 0);
    return scratch;
}

/* ---- Calls ----------------------------------------------------------------------- */

/* Whether rows begin at multiples of so many elements, a power of two. */
static bool
is_aligned(const tfast_attention_rows *rows, int64_t elements)
{
    return (uintptr_t)rows->data % (2 * (size_t)elements) == 0 &&
           rows->batch % elements == 0 && rows->head % elements == 0 &&
           rows->row % elements == 0;
}

/* Whether rows that are aligned can be copied 16 bytes at a time to their end. */
static bool
has_whole_chunks(const tfast_attention_args *args)
{
    return args->dim % 8 == 0 && args->dim_v % 8 == 0;
}

mma_call
tfast_mma_forward_call(const tfast_attention_args *args, int path)
{
    const attention_scratch scratch = tfast_attention_scratch_of(args, path, false);
    char *at = args->scratch;
    mma_call call = {.args = *args};

    if (is_scaled(args, path)) {
        call.exponents = (int32_t *)(at + scratch.exponents);
    }
    call.chunks =
        is_aligned(&args->q, 8) && is_aligned(&args->k, 8) && is_aligned(&args->v, 8);
    call.whole = call.chunks && has_whole_chunks(args);
    call.pairs = is_aligned(&args->out, 2);
    return call;
}

mma_call
tfast_mma_backward_call(const tfast_attention_args *args, int path)
{
    const attention_scratch scratch = tfast_attention_scratch_of(args, path, true);
    char *at = args->scratch;
    mma_call call = {.args = *args, .delta = (float *)(at + scratch.delta)};

    if (may_be_far(args)) {
        call.shares = (float *)(at + scratch.shares);
    }
    if (is_scaled(args, path)) {
        call.exponents = (int32_t *)(at + scratch.exponents);
        call.bounds = (int32_t *)(at + scratch.bounds);
        call.powers = (mma_head_powers *)(at + scratch.powers);
    }
    call.chunks = is_aligned(&args->q, 8) && is_aligned(&args->k, 8) &&
                  is_aligned(&args->v, 8) && is_aligned(&args->out, 8) &&
                  is_aligned(&args->dout, 8);
    call.whole = call.chunks && has_whole_chunks(args);
    call.pairs = is_aligned(&args->dq, 2) && is_aligned(&args->dk, 2) &&
                 is_aligned(&args->dv, 2);
    return call;
}

tfast_status
tfast_mma_find_exponents(const mma_call *call, int tensors)
{
    const tfast_attention_args *args = &call->args;
    const int64_t warps = tensors * args->batch * args->heads * EXPONENT_PARTS;
    const exponents_call of = {*call, tensors};

    if (call->exponents == NULL) {
        return TFAST_OK;
    }
    return LAUNCH(KERNEL_exponents, blocks_of(warps / (EXPONENT_THREADS / 32), 1 << 20),
                  args->stream, of);
}
