/* Attention forward by plain multiply-adds: a block owns TILE queries and walks over
 * their keys with an online softmax. */
#ifndef TFAST_ATTENTION_PLAIN_FORWARD_CUH
#define TFAST_ATTENTION_PLAIN_FORWARD_CUH

#include "attention_plain.cuh"

/* A thread's 4 rows: the output so far is sums / sum, and weights are relative to top.
 * `sum` is of this thread's keys alone. */
template <typename REAL>
struct plain_softmax {
    plain_sums<REAL> sums;
    REAL top[4], sum[4];
};

/* Combines numbers of rows across all threads that share them: their maximum or sum.
 * `exchange` is [ACROSS][TILE]. */
template <bool MAXIMUM, typename REAL>
DEVICE void
combine_rows(REAL x[4], REAL *exchange)
{
    const int warp = threadIdx.x / 32 % ACROSS;

#pragma unroll
    for (int a = 0; a < 4; a++) {
#pragma unroll
        for (int by = 1; by < 4; by *= 2) {
            const REAL other = __shfl_xor_sync(~0u, x[a], by);
            x[a] = MAXIMUM ? fmax(x[a], other) : x[a] + other;
        }
        if (threadIdx.x % 4 == 0) {
            exchange[warp * TILE + tile_row(a)] = x[a];
        }
    }
    __syncthreads();
#pragma unroll
    for (int a = 0; a < 4; a++) {
        x[a] = exchange[tile_row(a)];
#pragma unroll
        for (int w = 1; w < ACROSS; w++) {
            const REAL other = exchange[w * TILE + tile_row(a)];
            x[a] = MAXIMUM ? fmax(x[a], other) : x[a] + other;
        }
    }
}

/* Scores become weights; `fade` is what older ones are multiplied by. */
template <typename REAL>
DEVICE void
soften(REAL s[4][4], REAL fade[4], plain_softmax<REAL> *state, REAL *exchange)
{
    REAL top[4];

#pragma unroll
    for (int a = 0; a < 4; a++) {
        top[a] = fmax(fmax(s[a][0], s[a][1]), fmax(s[a][2], s[a][3]));
    }
    combine_rows<true>(top, exchange);
#pragma unroll
    for (int a = 0; a < 4; a++) {
        const REAL high = fmax(top[a], state->top[a]);
        const REAL base = high == -(REAL)INFINITY ? 0 : high;
        REAL sum = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) {
            s[a][b] = exponential(s[a][b] - base);
            sum += s[a][b];
        }
        fade[a] = exponential(state->top[a] - base);
        state->sum[a] = fused(state->sum[a], fade[a], sum);
        state->top[a] = high;
    }
}

/* Writes the rows of a tile and their lse, sinks included. */
template <typename REAL>
DEVICE void
finish_rows(plain_softmax<REAL> *state, const tfast_attention_args &args,
            const attention_head &h, int64_t first, REAL *exchange)
{
    const plain_rows out = plain_queries(args, h, args.out, args.dim_v, first);
    const REAL *sinks = (const REAL *)args.sinks;
    const REAL sink = sinks == nullptr ? -(REAL)INFINITY : sinks[h.head];
    REAL *lse = (REAL *)args.lse;
    REAL factor[4];

    combine_rows<false>(state->sum, exchange);
#pragma unroll
    for (int a = 0; a < 4; a++) {
        const REAL high = fmax(state->top[a], sink);
        const REAL fade = exponential(state->top[a] - high);
        const REAL sum = state->sum[a] * fade + exponential(sink - high);
        const bool empty = state->sum[a] == 0;
        factor[a] = empty ? 0 : fade / sum;
        if (lse != nullptr && threadIdx.x / 32 % ACROSS == 0 && threadIdx.x % 4 == 0 &&
            tile_row(a) < out.n) {
            lse[lse_row(args, h) + first + tile_row(a)] =
                empty ? -(REAL)INFINITY : high + logarithm(sum);
        }
    }
    store_sums(out, state->sums, factor);
}

template <typename REAL>
DEVICE void
plain_forward_tile(const tfast_attention_args &args, const attention_head &h,
                   int64_t first, REAL *weights, REAL *chunk, REAL *exchange)
{
    const plain_rows q = plain_queries(args, h, args.q, args.dim, first);
    const int64_t begin = first_key(args, h, first) / TILE * TILE;
    const int64_t end = end_key(args, h, first + q.n - 1);
    plain_softmax<REAL> state;

    clear_sums(&state.sums);
#pragma unroll
    for (int a = 0; a < 4; a++) {
        state.top[a] = -(REAL)INFINITY;
        state.sum[a] = 0;
    }
    for (int64_t key = begin; key < end; key += TILE) {
        const plain_rows k = plain_keys(args, h, args.k, args.dim, key);
        const plain_rows v = plain_keys(args, h, args.v, args.dim_v, key);
        const plain_tile tile = {first, key};
        REAL s[4][4], slope[4][4], fade[4];
        products(s, weights, chunk, q, k);
        finish_scores<false>(s, slope, args, h, tile);
        soften(s, fade, &state, exchange);
        if (args.dropout_p > 0) {
            dropout_factors<false>(slope, args, h, tile);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                s[i / 4][i % 4] *= slope[i / 4][i % 4];
            }
        }
        put_weights(weights, s);
        add_tile(&state.sums, fade, weights, chunk, v);
    }
    finish_rows(&state, args, h, first, exchange);
}

template <typename REAL>
TFAST_KERNEL(PLAIN_THREADS, 1)
attention_plain_forward(const __grid_constant__ plain_call call)
{
    const tfast_attention_args &args = call.args;
    SHARED(REAL, weights, TILE * PITCH);
    SHARED(REAL, chunk, TILE * plain_sizes<REAL>::CHUNK_PITCH);
    SHARED(REAL, exchange, ACROSS * TILE);
    const int64_t tiles = (args.n_q + TILE - 1) / TILE;

    for (int64_t i = blockIdx.x; i < call.n_works; i += gridDim.x) {
        const plain_work work = work_of(i, tiles, args.heads);
        const attention_head h = attention_head_of(args, work.batch, work.head);
        if (work.first < h.n_q) {
            plain_forward_tile(args, h, work.first, weights, chunk, exchange);
        }
        __syncthreads(); /* before the numbers in `exchange` change */
    }
}

#endif
