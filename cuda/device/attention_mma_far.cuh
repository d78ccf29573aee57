/* Attention backward by tensor cores: the shares of far rows, see share_of(). A warp a
 * tile of 16 queries, which walks over their keys if any of the rows is far, and makes
 * their weights anew as the kernels of gradients do. It reads its fragments straight
 * from global memory: most calls have no such row, and then lse is all that is read. */
#ifndef TFAST_ATTENTION_MMA_FAR_CUH
#define TFAST_ATTENTION_MMA_FAR_CUH

#include "attention_mma_backward_scores.cuh"

/* A kernel that owns queries, as the others' shapes, of 16 dims at a time. */
struct mma_far_shape {
    static constexpr bool KEYS = false, OPTIONS = true, PAIRS = false;
    static constexpr bool X = true, Y = true;
    static constexpr int D = 16, MADE = 8, STREAMED = 32;
    static constexpr int WARPS = 4, SHARING = 1, BLOCK = WARPS * 32, ROWS = WARPS * 16;
    static constexpr int THREADS = 32; /* that share a tile */
    static_assert(ROWS == FAR_ROWS && BLOCK == FAR_THREADS, "as launches know it");
};

/* Products of the warp's queries and a tile's keys. */
template <typename PATH, typename T>
DEVICE void
multiply_far(mma_scores<mma_far_shape> *s, const mma_call &call,
             const mma_backward_block &block, int tile)
{
    typedef mma_far_shape S;
    const tfast_attention_args &args = call.args;
    const int64_t key = (int64_t)tile * S::STREAMED;
    const mma_rows rows =
        mma_queries(args, block.h, args.q, args.dim, block.first, S::ROWS);
    const mma_rows keys = mma_keys(args, block.h, args.k, args.dim, key, S::STREAMED);

#pragma unroll 1
    for (int d = 0; d < args.dim; d += S::D) {
        mma_own<S::D, 1> q, k;
        q.template read<T>(columns_from(rows, d), warp_row<S>(), call.chunks,
                           power_in<T>(block, EXPONENT_Q));
#pragma unroll
        for (int n = 0; n < S::STREAMED / 16; n++) {
            k.template read<T>(columns_from(keys, d), n * 16, call.chunks,
                               power_in<T>(block, EXPONENT_K));
            const uint32_t *x = k.piece[0];
            const uint32_t right[4] = {x[0], x[2], x[1], x[3]};
            PATH::template mma<T>(s->at[2 * n], q.piece[0], right);
            PATH::template mma<T>(s->at[2 * n + 1], q.piece[0], right + 2);
        }
    }
}

/* The sums of the weights of a thread's two rows. */
template <typename PATH, typename T>
DEVICE void
sum_far(float sum[2], const mma_call &call, const mma_backward_block &block,
        const mma_backward_thread<PATH, mma_far_shape> &own)
{
    typedef mma_far_shape S;
    const tfast_attention_args &args = call.args;
    const int64_t row = block.first + warp_row<S>();
    const int64_t end =
        end_key(args, block.h, row + mma_left(block.h.n_q, row, 16) - 1);
    int tile = (int)(first_key(args, block.h, row) / S::STREAMED);

#pragma unroll 1
    for (; (int64_t)tile * S::STREAMED < end; tile++) {
        mma_scores<S> s = {}, slope;
        multiply_far<PATH, T>(&s, call, block, tile);
        weigh_step_with_options(&s, &slope, args, block, block.h, own, tile, 0);
#pragma unroll
        for (int i = 0; i < S::STREAMED / 2; i++) {
            sum[i % 4 / 2] += s.at[i / 4][i % 4];
        }
    }
}

/* Finds the shares of a warp's rows. */
template <typename PATH, typename T>
DEVICE void
find_shares(const mma_call &call, const attention_head &h, int64_t first)
{
    typedef mma_far_shape S;
    const tfast_attention_args &args = call.args;
    const float *sinks = (const float *)args.sinks;
    const int64_t row = first + warp_row<S>() + threadIdx.x % 32 / 4;
    mma_backward_block block = {};
    mma_backward_thread<PATH, S> own;
    float sum[2] = {0, 0};

    block.h = h;
    block.first = first;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        own.lse[r] = lse_of(args, h, row + r * 8);
    }
    if (__any_sync(~0u, is_far(own.lse[0]) || is_far(own.lse[1]))) {
        if constexpr (T::SCALED) {
            for (int i = EXPONENT_Q; i <= EXPONENT_K; i++) {
                block.exponent[i] =
                    read_exponent(call.exponents, args, i, h.batch, h.head);
            }
        }
        block.unit =
            unit_of<T, S>(args, block.exponent[EXPONENT_Q], block.exponent[EXPONENT_K]);
        sum_far<PATH, T>(sum, call, block, own);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sink =
            sinks == nullptr ? 0 : exponential(sinks[h.head] - own.lse[r]);
        const float all = quad_sum(sum[r]) + sink;
        if (threadIdx.x % 4 == 0 && row + r * 8 < h.n_q) {
            call.shares[number_row(args, h) + row + r * 8] =
                is_far(own.lse[r]) ? share_of(all, own.lse[r]) : 1;
        }
    }
}

/* Blocks go on until all rows of all heads are done. */
template <typename PATH, typename T>
TFAST_KERNEL(mma_far_shape::BLOCK, 4)
attention_mma_shares(const __grid_constant__ mma_call call)
{
    const tfast_attention_args &args = call.args;
    const int64_t tiles = (args.n_q + mma_far_shape::ROWS - 1) / mma_far_shape::ROWS;
    const int64_t works = tiles * args.heads * args.batch;

    for (int64_t i = blockIdx.x; i < works; i += gridDim.x) {
        const int64_t head = i / tiles;
        const attention_head h =
            attention_head_of(args, head / args.heads, head % args.heads);
        find_shares<PATH, T>(call, h, i % tiles * mma_far_shape::ROWS);
    }
}

#endif
