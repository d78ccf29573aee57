/* Attention backward by plain multiply-adds, without atomics: whoever owns a gradient
 * adds it up alone, in a fixed order. Blocks that own queries make dq, blocks that own
 * keys make dk and dv (of all heads that share them), blocks that own a tile of a term
 * make its gradient, summed over the dimensions in which it is broadcast. Weights are
 * made anew by each from lse, and from the shares of far rows: in args.scratch, where
 * NULL says that all are 1. */
#ifndef TFAST_ATTENTION_PLAIN_BACKWARD_CUH
#define TFAST_ATTENTION_PLAIN_BACKWARD_CUH

#include "attention_plain.cuh"
#include "attention_term.cuh"

/* ---- Rows' numbers --------------------------------------------------------------- */

/* dout . out - dlse of one query, by `parts` threads: a power of two. */
template <typename REAL>
DEVICE REAL
delta_of(const tfast_attention_args &args, const attention_head &h, int64_t query,
         int part, int parts)
{
    const int64_t dout = query_row(args, h, args.dout, query);
    const int64_t out = query_row(args, h, args.out, query);
    const REAL *dlse = (const REAL *)args.dlse;
    REAL sum = 0;

    for (int d = part; d < args.dim_v; d += parts) {
        sum = fused(read_element<REAL>(args.dout.data, args.dtype, dout + d),
                    read_element<REAL>(args.out.data, args.dtype, out + d), sum);
    }
    for (int by = 1; by < parts; by *= 2) {
        sum += __shfl_xor_sync(~0u, sum, by);
    }
    return dlse == nullptr ? sum : sum - dlse[lse_row(args, h) + query];
}

/* Of TILE queries from `first` on: lse into numbers[0 ..], delta and shares behind. */
template <typename REAL>
DEVICE void
load_numbers(REAL *numbers, const tfast_attention_args &args, const attention_head &h,
             int64_t first)
{
    constexpr int PARTS = PLAIN_THREADS / TILE;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const int64_t query = first + row < h.n_q ? first + row : h.n_q - 1;
    const REAL delta = delta_of<REAL>(args, h, query, part, PARTS);
    const REAL *shares = (const REAL *)args.scratch;

    __syncthreads(); /* nobody reads the last tile's any more */
    if (part == 0) {
        numbers[row] = ((const REAL *)args.lse)[lse_row(args, h) + query];
        numbers[TILE + row] = delta;
        numbers[2 * TILE + row] =
            shares == nullptr ? 1 : shares[number_row(args, h) + query];
    }
}

/* ---- A tile ---------------------------------------------------------------------- */

/* What a block has in shared memory. */
template <typename REAL>
struct plain_shared {
    REAL *weights, *chunk, *numbers;
};

/* A thread's part of a tile: what v is weighted with, and the gradients of scores. */
template <typename REAL>
struct plain_gradients {
    REAL weight[4][4], score[4][4], slope[4][4];
};

/* From scores and products of dout and v, both in place in `g`. */
template <bool KEYS, typename REAL>
DEVICE void
finish_gradients(plain_gradients<REAL> *g, const REAL keep[4][4], const REAL *numbers)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int a = i / 4, b = i % 4, query = KEYS ? tile_column(b) : tile_row(a);
        const REAL s = g->weight[a][b];
        const bool none = s == -(REAL)INFINITY;
        const REAL weight =
            none ? 0 : exponential(s - numbers[query]) * numbers[2 * TILE + query];
        const REAL gradient = fused(g->score[a][b], keep[a][b], -numbers[TILE + query]);
        g->weight[a][b] = weight * keep[a][b];
        g->score[a][b] = weight == 0 ? 0 : weight * gradient;
    }
}

/* The gradients of one tile; `numbers` are those of its queries. */
template <bool KEYS, typename REAL>
DEVICE void
tile_gradients(plain_gradients<REAL> *g, const tfast_attention_args &args,
               const attention_head &h, const plain_tile &tile,
               const plain_shared<REAL> &shared)
{
    const plain_rows q = plain_queries(args, h, args.q, args.dim, tile.query);
    const plain_rows dout = plain_queries(args, h, args.dout, args.dim_v, tile.query);
    const plain_rows k = plain_keys(args, h, args.k, args.dim, tile.key);
    const plain_rows v = plain_keys(args, h, args.v, args.dim_v, tile.key);
    REAL keep[4][4];

    products(g->weight, shared.weights, shared.chunk, KEYS ? k : q, KEYS ? q : k);
    finish_scores<KEYS>(g->weight, g->slope, args, h, tile);
    products(g->score, shared.weights, shared.chunk, KEYS ? v : dout, KEYS ? dout : v);
    if (args.dropout_p > 0) {
        dropout_factors<KEYS>(keep, args, h, tile);
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            keep[i / 4][i % 4] = 1;
        }
    }
    finish_gradients<KEYS>(g, keep, shared.numbers);
}

/* Gradients of scores become those of the products of query and key, but for scale. A
 * slope may be NaN where the gradient is 0. */
template <typename REAL>
DEVICE void
bend_gradients(plain_gradients<REAL> *g)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        REAL *x = &g->score[i / 4][i % 4];
        *x = *x == 0 ? 0 : *x * g->slope[i / 4][i % 4];
    }
}

/* sums += weights . streamed, of this thread's weights and all others'. */
template <typename REAL>
DEVICE void
add_own_tile(plain_sums<REAL> *sums, const REAL weights[4][4],
             const plain_shared<REAL> &shared, const plain_rows &streamed)
{
    const REAL one[4] = {1, 1, 1, 1};

    __syncthreads(); /* add_products reads what lies there */
    put_weights(shared.weights, weights);
    add_tile(sums, one, shared.weights, shared.chunk, streamed);
}

/* ---- dq -------------------------------------------------------------------------- */

template <typename REAL>
DEVICE void
plain_dq_tile(const tfast_attention_args &args, const attention_head &h, int64_t first,
              const plain_shared<REAL> &shared)
{
    const plain_rows dq = plain_queries(args, h, args.dq, args.dim, first);
    const int64_t begin = first_key(args, h, first) / TILE * TILE;
    const int64_t end = end_key(args, h, first + dq.n - 1);
    const REAL scale = (REAL)args.scale, scales[4] = {scale, scale, scale, scale};
    plain_sums<REAL> sums;

    clear_sums(&sums);
    load_numbers(shared.numbers, args, h, first);
    for (int64_t key = begin; key < end; key += TILE) {
        const plain_rows k = plain_keys(args, h, args.k, args.dim, key);
        plain_gradients<REAL> g;
        tile_gradients<false>(&g, args, h, {first, key}, shared);
        bend_gradients(&g);
        add_own_tile(&sums, g.score, shared, k);
    }
    store_sums(dq, sums, scales);
}

template <typename REAL>
TFAST_KERNEL(PLAIN_THREADS, 1)
attention_plain_dq(const __grid_constant__ plain_call call)
{
    const tfast_attention_args &args = call.args;
    SHARED(REAL, weights, TILE * PITCH);
    SHARED(REAL, chunk, TILE * plain_sizes<REAL>::CHUNK_PITCH);
    SHARED(REAL, numbers, 3 * TILE);
    const int64_t tiles = (args.n_q + TILE - 1) / TILE;

    for (int64_t i = blockIdx.x; i < call.n_works; i += gridDim.x) {
        const plain_work work = work_of(i, tiles, args.heads);
        const attention_head h = attention_head_of(args, work.batch, work.head);
        if (work.first < h.n_q) {
            plain_dq_tile<REAL>(args, h, work.first, {weights, chunk, numbers});
        }
    }
}

/* ---- dk, dv ---------------------------------------------------------------------- */

template <typename REAL>
struct plain_key_sums {
    plain_sums<REAL> dk, dv;
};

/* Adds what the queries of one head say about TILE keys. */
template <typename REAL>
DEVICE void
add_head(plain_key_sums<REAL> *sums, const tfast_attention_args &args,
         const attention_head &h, int64_t first, const plain_shared<REAL> &shared)
{
    const int64_t last = first + rows_left(h.n_k, first) - 1;
    const int64_t begin = first_query(args, h, first) / TILE * TILE;
    const int64_t end = last < first ? 0 : end_query(args, h, last);

    for (int64_t query = begin; query < end; query += TILE) {
        const plain_rows q = plain_queries(args, h, args.q, args.dim, query);
        const plain_rows dout = plain_queries(args, h, args.dout, args.dim_v, query);
        plain_gradients<REAL> g;
        load_numbers(shared.numbers, args, h, query);
        tile_gradients<true>(&g, args, h, {query, first}, shared);
        bend_gradients(&g);
        add_own_tile(&sums->dv, g.weight, shared, dout);
        add_own_tile(&sums->dk, g.score, shared, q);
    }
}

template <typename REAL>
DEVICE void
plain_dkv_tile(const tfast_attention_args &args, int64_t batch, int64_t kv_head,
               int64_t first, const plain_shared<REAL> &shared)
{
    const int64_t group = args.heads / args.kv_heads;
    const attention_head shape = attention_head_of(args, batch, kv_head * group);
    const REAL one[4] = {1, 1, 1, 1}, scale = (REAL)args.scale;
    const REAL scales[4] = {scale, scale, scale, scale};
    plain_key_sums<REAL> sums;

    if (first >= shape.rows_k) {
        return;
    }
    clear_sums(&sums.dk);
    clear_sums(&sums.dv);
    for (int64_t i = 0; i < group; i++) {
        const attention_head h = attention_head_of(args, batch, kv_head * group + i);
        add_head(&sums, args, h, first, shared);
    }
    if (args.dk.data != nullptr) {
        store_sums(plain_keys(args, shape, args.dk, args.dim, first), sums.dk, scales);
    }
    if (args.dv.data != nullptr) {
        store_sums(plain_keys(args, shape, args.dv, args.dim_v, first), sums.dv, one);
    }
}

template <typename REAL>
TFAST_KERNEL(PLAIN_THREADS, 1)
attention_plain_dkv(const __grid_constant__ plain_call call)
{
    const tfast_attention_args &args = call.args;
    SHARED(REAL, weights, TILE * PITCH);
    SHARED(REAL, chunk, TILE * plain_sizes<REAL>::CHUNK_PITCH);
    SHARED(REAL, numbers, 3 * TILE);
    const int64_t tiles = (args.n_k + TILE - 1) / TILE;

    for (int64_t i = blockIdx.x; i < call.n_works; i += gridDim.x) {
        const plain_work work = work_of(i, tiles, args.kv_heads);
        plain_dkv_tile<REAL>(args, work.batch, work.head, work.first,
                             {weights, chunk, numbers});
    }
}

/* ---- Terms ----------------------------------------------------------------------- */

/* From `begin` to `end` - 1 of a dimension. */
struct plain_range {
    int64_t begin, end;
};

/* All of a dimension where the term is broadcast, otherwise `n` from `first` on. */
DEVICE plain_range
range_of(int64_t stride, int64_t first, int64_t n, int64_t size)
{
    if (stride == 0) {
        return {0, size};
    }
    return {first, first + n < size ? first + n : size};
}

/* Adds one head's gradients in these queries and keys. */
template <typename REAL>
DEVICE void
add_term_head(REAL sums[4][4], const tfast_attention_args &args,
              const attention_head &h, const attention_term &term, plain_range queries,
              plain_range keys, const plain_shared<REAL> &shared)
{
    const int64_t end_q = queries.end < h.n_q ? queries.end : h.n_q;

    for (int64_t query = queries.begin; query < end_q; query += TILE) {
        const int64_t last = query + rows_left(h.n_q, query) - 1;
        const int64_t begin = first_key(args, h, query) / TILE * TILE;
        const int64_t end = end_key(args, h, last);
        load_numbers(shared.numbers, args, h, query);
        for (int64_t key = keys.begin > begin ? keys.begin : begin;
             key < keys.end && key < end; key += TILE) {
            plain_gradients<REAL> g;
            tile_gradients<false>(&g, args, h, {query, key}, shared);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int64_t at = query + tile_row(i / 4);
                const int64_t to = key + tile_column(i % 4);
                const REAL x = g.score[i / 4][i % 4];
                sums[i / 4][i % 4] += term.alibi ? -x * distance<REAL>(h, at, to) : x;
            }
        }
    }
}

template <typename REAL>
DEVICE void
plain_term_tile(const tfast_attention_args &args, const attention_term &term,
                const int64_t first[4], const plain_shared<REAL> &shared)
{
    const int64_t *stride = term.stride;
    const plain_range batches = range_of(stride[0], first[0], 1, args.batch);
    const plain_range heads = range_of(stride[1], first[1], 1, args.heads);
    const plain_range queries = range_of(stride[2], first[2], TILE, args.n_q);
    const plain_range keys = range_of(stride[3], first[3], TILE, args.n_k);
    const int64_t rows = stride[2] == 0 ? 1 : queries.end - queries.begin;
    const int64_t columns = stride[3] == 0 ? 1 : keys.end - keys.begin;
    REAL sums[4][4] = {};

    for (int64_t b = batches.begin; b < batches.end; b++) {
        for (int64_t i = heads.begin; i < heads.end; i++) {
            const attention_head h = attention_head_of(args, b, i);
            add_term_head(sums, args, h, term, queries, keys, shared);
        }
    }
    __syncthreads(); /* the products are done with what lies there */
    put_weights(shared.weights, sums);
    reduce_tile<TILE>(shared.weights, stride[2] == 0, stride[3] == 0);
    for (int i = threadIdx.x; i < rows * columns; i += PLAIN_THREADS) {
        const int64_t row = i / columns, column = i % columns;
        const int64_t at = first[0] * stride[0] + first[1] * stride[1] +
                           (first[2] + row) * stride[2] +
                           (first[3] + column) * stride[3];
        ((REAL *)term.data)[at] = shared.weights[row * PITCH + column];
    }
}

template <typename REAL>
TFAST_KERNEL(PLAIN_THREADS, 1)
attention_plain_term(const __grid_constant__ plain_call call)
{
    const tfast_attention_args &args = call.args;
    const int64_t *tiles = call.term_tiles;
    SHARED(REAL, weights, TILE * PITCH);
    SHARED(REAL, chunk, TILE * plain_sizes<REAL>::CHUNK_PITCH);
    SHARED(REAL, numbers, 3 * TILE);

    for (int64_t i = blockIdx.x; i < call.n_works; i += gridDim.x) {
        const int64_t key = i % tiles[3], above = i / tiles[3];
        const int64_t query = above % tiles[2], head = above / tiles[2];
        const int64_t first[4] = {head / tiles[1], head % tiles[1], query * TILE,
                                  key * TILE};
        plain_term_tile<REAL>(args, call.term, first, {weights, chunk, numbers});
    }
}

/* ---- Sinks ----------------------------------------------------------------------- */

/* One head, whose rows the block's warps share out, item by item. */
template <typename REAL>
DEVICE void
plain_dsinks_head(const tfast_attention_args &args, int64_t head, double *parts)
{
    enum { WARPS = PLAIN_THREADS / 32 };
    const REAL sink = ((const REAL *)args.sinks)[head];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sum = 0;

    for (int64_t b = 0; b < args.batch; b++) {
        const attention_head h = attention_head_of(args, b, head);
        const REAL *lse = (const REAL *)args.lse + lse_row(args, h);
        const REAL *shares = (const REAL *)args.scratch;
        for (int64_t query = warp; query < h.n_q; query += WARPS) {
            const REAL delta = delta_of<REAL>(args, h, query, lane, 32);
            const REAL share =
                shares == nullptr ? 1 : shares[number_row(args, h) + query];
            if (lse[query] != -(REAL)INFINITY) {
                sum -= (double)(exponential(sink - lse[query]) * share * delta);
            }
        }
    }
    if (lane == 0) {
        parts[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; w++) {
            sum += parts[w];
        }
        ((REAL *)args.dsinks)[head] = (REAL)sum;
    }
}

template <typename REAL>
TFAST_KERNEL(PLAIN_THREADS, 1)
attention_plain_dsinks(const __grid_constant__ plain_call call)
{
    const tfast_attention_args &args = call.args;
    SHARED(double, parts, PLAIN_THREADS / 32);

    for (int64_t head = blockIdx.x; head < args.heads; head += gridDim.x) {
        plain_dsinks_head<REAL>(args, head, parts);
        __syncthreads(); /* before the numbers in `parts` change */
    }
}

#endif
