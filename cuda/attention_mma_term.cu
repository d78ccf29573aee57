/* Launches of the gradients of attention's options by tensor cores. */
#include "attention_mma_term.cuh"
#include "attention_scratch.cuh"

/* Blocks that a term's gradient has if each of them has so many tiles of scores: with
 * fewer the sums' way through scratch would count. */
static const int64_t TERM_BLOCKS = 512, LEAST_TILES = 4;

/* A grid's x has 31 bits; what is past it the blocks do after their first. */
static unsigned
blocks_of(int64_t works)
{
    return (unsigned)(works < 1 << 30 ? works : 1 << 30);
}

static int64_t
divided_up(int64_t x, int64_t by)
{
    return (x + by - 1) / by;
}

/* Fills in how the call's term is divided. */
static void
divide_term(mma_term_call *call)
{
    const tfast_attention_args &args = call->args;
    const int64_t *stride = call->term.stride, *n = call->walks;
    const int64_t size[4] = {args.batch, args.heads, divided_up(args.n_q, TERM_TILE),
                             divided_up(args.n_k, TERM_TILE)};

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

static mma_term_call
term_call_of(const mma_backward_call &call, const attention_term &term, float *parts)
{
    mma_term_call of = {};

    static_cast<mma_backward_call &>(of) = call;
    of.term = term;
    of.parts = parts;
    divide_term(&of);
    return of;
}

/* Elements of a term's parts. */
static int64_t
parts_of(const tfast_attention_args *args, const attention_term &term)
{
    mma_backward_call call = {};

    call.args = *args;
    const mma_term_call of = term_call_of(call, term, nullptr);
    return term.data == nullptr || of.splits == 1
               ? 0
               : of.splits * of.n_tiles * of.rows * of.columns;
}

int64_t
tfast_mma_term_parts(const tfast_attention_args *args)
{
    const int64_t bias = parts_of(args, bias_term(*args));
    const int64_t alibi = parts_of(args, alibi_term(*args));

    return (bias > alibi ? bias : alibi) * 4;
}

template <typename PATH, typename T>
static tfast_status
launch_term(const mma_term_call &call)
{
    typedef mma_term_shape<PATH> S;
    const cudaStream_t stream = (cudaStream_t)call.args.stream;
    constexpr auto kernel = attention_mma_term<PATH, T>;
    const int64_t sums = call.n_tiles * call.rows * call.columns;

    if (call.n_tiles == 0) {
        return TFAST_OK;
    }
    LAUNCH(kernel, blocks_of(call.n_tiles * call.splits), S::THREADS, S::BYTES, stream,
           call);
    if (call.splits > 1) {
        LAUNCH(attention_mma_term_sum, blocks_of(divided_up(sums, SUM_THREADS)),
               SUM_THREADS, 0, stream, call);
    }
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_term");
}

static tfast_status
launch_term_of(const mma_backward_call &call, const attention_term &term, int version)
{
    const attention_scratch scratch = attention_scratch_of(&call.args, version, true);
    float *parts = (float *)((char *)call.args.scratch + scratch.parts);
    const mma_term_call of = term_call_of(call, term, parts);

    if (term.data == nullptr) {
        return TFAST_OK;
    }
    if (version < 80) {
        return call.powers != nullptr ? launch_term<path_75, mma_bf16_as_f16>(of)
                                      : launch_term<path_75, mma_f16>(of);
    }
    return call.args.dtype == TFAST_F16 ? launch_term<path_80, mma_f16>(of)
                                        : launch_term<path_80, mma_bf16>(of);
}

static tfast_status
launch_dsinks(const mma_backward_call &call)
{
    if (call.args.dsinks == nullptr) {
        return TFAST_OK;
    }
    LAUNCH(attention_mma_dsinks, blocks_of(call.args.heads), SINKS_THREADS, 0,
           (cudaStream_t)call.args.stream, call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_dsinks");
}

tfast_status
tfast_mma_option_gradients(const mma_backward_call &call, int version)
{
    tfast_status status = launch_term_of(call, bias_term(call.args), version);

    if (status == TFAST_OK) {
        status = launch_term_of(call, alibi_term(call.args), version);
    }
    return status == TFAST_OK ? launch_dsinks(call) : status;
}
