/* Attention backward by plain multiply-adds: the shares of far rows, see share_of(). A
 * block owns TILE queries, and walks over their keys if any of these rows is far. */
#ifndef TFAST_ATTENTION_PLAIN_FAR_CUH
#define TFAST_ATTENTION_PLAIN_FAR_CUH

#include "attention_plain_backward.cuh"
#include "attention_plain_forward.cuh"

/* Sums of the weights of a thread's 4 rows, of all their keys. */
template <typename REAL>
DEVICE void
sum_weights(REAL sum[4], const REAL lse[4], const tfast_attention_args &args,
            const attention_head &h, const plain_rows &q, int64_t first,
            const plain_shared<REAL> &shared)
{
    const int64_t begin = first_key(args, h, first) / TILE * TILE;
    const int64_t end = end_key(args, h, first + q.n - 1);

    for (int64_t key = begin; key < end; key += TILE) {
        const plain_rows k = plain_keys(args, h, args.k, args.dim, key);
        REAL s[4][4], slope[4][4];
        products(s, shared.weights, shared.chunk, q, k);
        finish_scores<false>(s, slope, args, h, {first, key});
#pragma unroll
        for (int i = 0; i < 16; i++) {
            sum[i / 4] += exponential(s[i / 4][i % 4] - lse[i / 4]);
        }
    }
    combine_rows<false>(sum, shared.numbers);
}

template <typename REAL>
DEVICE void
plain_shares_tile(const tfast_attention_args &args, const attention_head &h,
                  int64_t first, const plain_shared<REAL> &shared)
{
    const plain_rows q = plain_queries(args, h, args.q, args.dim, first);
    const REAL *all = (const REAL *)args.lse + lse_row(args, h) + first;
    const REAL *sinks = (const REAL *)args.sinks;
    REAL *shares = (REAL *)args.scratch + number_row(args, h) + first;
    REAL lse[4], sum[4] = {0, 0, 0, 0};
    bool far = false;

#pragma unroll
    for (int a = 0; a < 4; a++) {
        lse[a] = tile_row(a) < q.n ? all[tile_row(a)] : 0;
        far = far || is_far(lse[a]);
    }
    if (__syncthreads_or(far)) { /* and nobody reads the last tile's numbers any more */
        sum_weights(sum, lse, args, h, q, first, shared);
    }
#pragma unroll
    for (int a = 0; a < 4; a++) {
        const REAL sink = sinks == nullptr ? 0 : exponential(sinks[h.head] - lse[a]);
        if (threadIdx.x / 32 % ACROSS == 0 && threadIdx.x % 4 == 0 &&
            tile_row(a) < q.n) {
            shares[tile_row(a)] = is_far(lse[a]) ? share_of(sum[a] + sink, lse[a]) : 1;
        }
    }
}

template <typename REAL>
TFAST_KERNEL(PLAIN_THREADS, 1)
attention_plain_shares(const __grid_constant__ plain_call call)
{
    const tfast_attention_args &args = call.args;
    SHARED(REAL, weights, TILE * PITCH);
    SHARED(REAL, chunk, TILE * plain_sizes<REAL>::CHUNK_PITCH);
    SHARED(REAL, numbers, ACROSS * TILE);
    const int64_t tiles = (args.n_q + TILE - 1) / TILE;

    for (int64_t i = blockIdx.x; i < call.n_works; i += gridDim.x) {
        const plain_work work = work_of(i, tiles, args.heads);
        const attention_head h = attention_head_of(args, work.batch, work.head);
        if (work.first < h.n_q) {
            plain_shares_tile<REAL>(args, h, work.first, {weights, chunk, numbers});
        }
    }
}

#endif
