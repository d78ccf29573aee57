/* Launches of the gradients of attention's options by tensor cores. */
#include "attention.h"

/* Blocks that a term's gradient has if each of them has so many tiles of scores: with
 * fewer the sums' way through scratch would count. */
static const int64_t TERM_BLOCKS = 512, LEAST_TILES = 4;

attention_term
tfast_bias_term(const tfast_attention_args *args)
{
    const int64_t *stride = args->dbias_stride;

    return (attention_term){
        args->dbias, {stride[0], stride[1], stride[2], stride[3]}, false};
}

attention_term
tfast_alibi_term(const tfast_attention_args *args)
{
    return (attention_term){args->dalibi, {args->alibi_batch, 1, 0, 0}, true};
}

/* Fills in how the call's term is divided. */
static void
divide_term(mma_term_call *call)
{
    const tfast_attention_args *args = &call->mma.args;
    const int64_t *stride = call->term.stride, *n = call->walks;
    const int64_t size[4] = {args->batch, args->heads, divided_up(args->n_q, TERM_TILE),
                             divided_up(args->n_k, TERM_TILE)};

    call->n_tiles = 1;
    for (int d = 0; d < 4; d++) {
        call->tiles[d] = stride[d] == 0 ? 1 : size[d];
        call->walks[d] = stride[d] == 0 ? size[d] : 1;
        call->n_tiles *= call->tiles[d];
    }
    call->n_walks = n[0] * n[1] * n[2];
    call->rows = stride[2] == 0 ? 1 : TERM_TILE;
    call->columns = stride[3] == 0 ? 1 : TERM_TILE;

    const int64_t wanted =
        divided_up(TERM_BLOCKS, call->n_tiles + (call->n_tiles == 0));
    const int64_t worth = call->n_walks * n[3] / LEAST_TILES;
    const int64_t most = call->n_walks < worth ? call->n_walks : worth;
    call->splits = wanted < most ? wanted : most < 1 ? 1 : most;
}

/* Elements of a term's parts. */
static int64_t
parts_of(const tfast_attention_args *args, attention_term term)
{
    mma_term_call call = {.mma.args = *args, .term = term};

    divide_term(&call);
    return term.data == NULL || call.splits == 1
               ? 0
               : call.splits * call.n_tiles * call.rows * call.columns;
}

int64_t
tfast_mma_term_parts(const tfast_attention_args *args)
{
    const int64_t bias = parts_of(args, tfast_bias_term(args));
    const int64_t alibi = parts_of(args, tfast_alibi_term(args));

    return (bias > alibi ? bias : alibi) * 4;
}

static tfast_status
launch_term(const mma_call *mma, attention_term term, int path)
{
    const tfast_attention_args *args = &mma->args;
    const attention_scratch scratch = tfast_attention_scratch_of(args, path, true);
    const int kernel = tfast_mma_kernel(
        args, path, KERNEL_term_75_mma_f16, KERNEL_term_75_mma_bf16_as_f16,
        KERNEL_term_80_mma_f16, KERNEL_term_80_mma_bf16);
    mma_term_call call = {*mma, term,
                          .parts = (float *)((char *)args->scratch + scratch.parts)};
    tfast_status status;

    divide_term(&call);
    if (term.data == NULL || call.n_tiles == 0) {
        return TFAST_OK;
    }
    status = LAUNCH(kernel, blocks_of(call.n_tiles * call.splits, MOST_BLOCKS),
                    args->stream, call);
    if (status == TFAST_OK && call.splits > 1) {
        const int64_t sums = call.n_tiles * call.rows * call.columns;
        status = LAUNCH(KERNEL_term_sum,
                        blocks_of(divided_up(sums, SUM_THREADS), MOST_BLOCKS),
                        args->stream, call);
    }
    return status;
}

tfast_status
tfast_mma_option_gradients(const mma_call *call, int path)
{
    const tfast_attention_args *args = &call->args;
    tfast_status status = launch_term(call, tfast_bias_term(args), path);

    if (status == TFAST_OK) {
        status = launch_term(call, tfast_alibi_term(args), path);
    }
    if (status == TFAST_OK && args->dsinks != NULL) {
        status = LAUNCH(KERNEL_dsinks, blocks_of(args->heads, MOST_BLOCKS),
                        args->stream, *call);
    }
    return status;
}
