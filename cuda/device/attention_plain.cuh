/* Attention by plain multiply-adds: any dtype, any dims, every option. What the kernels
 * share: a block works on a tile of TILE x TILE scores, of which every thread has 4 x 4
 * in registers. Rows of the tile are owned by the block (queries, or keys where KEYS),
 * columns are streamed.
 *
 * Shared memory, of 48 KB: a tile of weights (first the owned rows' chunk of dims), a
 * chunk of the streamed rows, and a few numbers a row. Results stay in registers: 64
 * rows x 256 dims are 64 floats a thread. */
#ifndef TFAST_ATTENTION_PLAIN_CUH
#define TFAST_ATTENTION_PLAIN_CUH

#include "attention_head.cuh"

enum {
    TILE = PLAIN_TILE,
    ACROSS = 4, /* warps that share rows */
    PITCH = TILE + 1
};

/* Dims that are multiplied from shared memory at a time, and how that divides. */
template <typename REAL>
struct plain_sizes {
    static constexpr int CHUNK = sizeof(REAL) == 4 ? 64 : 16;
    static constexpr int CHUNKS = TFAST_ATTENTION_MAX_DIM / CHUNK;
    static constexpr int COLUMNS = CHUNK / 16; /* of a thread, of a chunk of results */
    static constexpr int CHUNK_PITCH = CHUNK + 1;
};

/* Sums of weights times streamed rows: 4 rows of a thread, all dims. */
template <typename REAL>
struct plain_sums {
    REAL at[plain_sizes<REAL>::CHUNKS][4][plain_sizes<REAL>::COLUMNS];
};

/* ---- A thread's place in the tile ------------------------------------------------ */

/* Lanes lie as in a tensor core's accumulator, which is how dropout is laid out. */
DEVICE int
tile_row(int a)
{
    return (int)threadIdx.x / 32 / ACROSS * 32 + (int)threadIdx.x % 32 / 4 + 8 * a;
}

DEVICE int
tile_column(int b)
{
    return (int)threadIdx.x / 32 % ACROSS * 16 + (int)threadIdx.x % 4 * 2 + b % 2 +
           b / 2 * 8;
}

/* The same for a chunk of results. */
DEVICE int
chunk_column(int c)
{
    return (int)threadIdx.x / 32 % ACROSS * 4 + (int)threadIdx.x % 4 + 16 * c;
}

template <bool KEYS>
DEVICE int
tile_query(int x)
{
    return KEYS ? tile_column(x) : tile_row(x);
}

template <bool KEYS>
DEVICE int
tile_key(int y)
{
    return KEYS ? tile_row(y) : tile_column(y);
}

/* ---- Rows in memory -------------------------------------------------------------- */

/* Up to TILE rows of an array. */
struct plain_rows {
    void *data;
    int64_t at, stride; /* in elements: the first row, from one to the next */
    int n, dims, dtype;
};

/* How many of a tile's rows there are. */
DEVICE int
rows_left(int64_t n, int64_t first)
{
    return (int)clamped(n - first, 0, TILE);
}

DEVICE plain_rows
plain_queries(const tfast_attention_args &args, const attention_head &h,
              const tfast_attention_rows &rows, int64_t dims, int64_t first)
{
    return {rows.data, query_row(args, h, rows, first),
            rows.row,  rows_left(h.n_q, first),
            (int)dims, args.dtype};
}

/* Also the keys past kv_lens: they are there, and no query looks at them. */
DEVICE plain_rows
plain_keys(const tfast_attention_args &args, const attention_head &h,
           const tfast_attention_rows &rows, int64_t dims, int64_t first)
{
    return {rows.data, key_row(args, h, rows, first),
            rows.row,  rows_left(h.rows_k, first),
            (int)dims, args.dtype};
}

/* Dims from `dim` on, zeros where there is nothing. Whether all are finite. */
template <typename REAL>
DEVICE bool
load_chunk(REAL *chunk, const plain_rows &rows, int dim)
{
    constexpr int CHUNK = plain_sizes<REAL>::CHUNK;
    bool finite = true;

    for (int i = threadIdx.x; i < TILE * CHUNK; i += PLAIN_THREADS) {
        const int row = i / CHUNK, column = i % CHUNK;
        REAL x = 0;
        if (row < rows.n && dim + column < rows.dims) {
            x = read_element<REAL>(rows.data, rows.dtype,
                                   rows.at + row * rows.stride + dim + column);
        }
        chunk[row * plain_sizes<REAL>::CHUNK_PITCH + column] = x;
        finite = finite && x * 0 == 0;
    }
    return finite;
}

/* ---- Products -------------------------------------------------------------------- */

template <typename REAL>
DEVICE void
add_products(REAL s[4][4], const REAL *left, const REAL *right, int dims)
{
    constexpr int CHUNK_PITCH = plain_sizes<REAL>::CHUNK_PITCH;

#pragma unroll 4
    for (int d = 0; d < dims; d++) {
        REAL x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = left[tile_row(i) * CHUNK_PITCH + d];
            y[i] = right[tile_column(i) * CHUNK_PITCH + d];
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            s[i / 4][i % 4] = fused(x[i / 4], y[i % 4], s[i / 4][i % 4]);
        }
    }
}

/* s = own . streamed for all pairs of rows. `left` and `right` hold a chunk each. */
template <typename REAL>
DEVICE void
products(REAL s[4][4], REAL *left, REAL *right, const plain_rows &own,
         const plain_rows &streamed)
{
    constexpr int CHUNK = plain_sizes<REAL>::CHUNK;

#pragma unroll
    for (int i = 0; i < 16; i++) {
        s[i / 4][i % 4] = 0;
    }
    for (int d = 0; d < own.dims; d += CHUNK) {
        __syncthreads(); /* nobody reads any more what was there */
        load_chunk(left, own, d);
        load_chunk(right, streamed, d);
        __syncthreads();
        add_products(s, left, right, own.dims - d < CHUNK ? own.dims - d : CHUNK);
    }
}

/* One chunk of the sums. A careful one leaves out rows of weight 0: theirs may be NaN,
 * and are none of this row's business. */
template <typename REAL>
DEVICE void
add_weighted(REAL sum[4][plain_sizes<REAL>::COLUMNS], const REAL *weights,
             const REAL *chunk, int n, bool careful)
{
    constexpr int COLUMNS = plain_sizes<REAL>::COLUMNS;

#pragma unroll 4
    for (int j = 0; j < n; j++) {
#pragma unroll
        for (int a = 0; a < 4; a++) {
            const REAL weight = weights[tile_row(a) * PITCH + j];
            if (careful && weight == 0) {
                continue;
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const REAL x =
                    chunk[j * plain_sizes<REAL>::CHUNK_PITCH + chunk_column(c)];
                sum[a][c] = fused(weight, x, sum[a][c]);
            }
        }
    }
}

/* Writes this thread's weights where all threads find them. */
template <typename REAL>
DEVICE void
put_weights(REAL *weights, const REAL w[4][4])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        weights[tile_row(i / 4) * PITCH + tile_column(i % 4)] = w[i / 4][i % 4];
    }
}

/* Chunk `k` of the sums. Registers have no index that is not constant, so it is looked
 * for; as in add_part(). */
template <typename REAL>
DEVICE void
get_part(REAL part[4][plain_sizes<REAL>::COLUMNS], const plain_sums<REAL> &sums, int k)
{
    constexpr int COLUMNS = plain_sizes<REAL>::COLUMNS;

#pragma unroll
    for (int own = 0; own < plain_sizes<REAL>::CHUNKS; own++) {
        if (own == k) {
#pragma unroll
            for (int i = 0; i < 4 * COLUMNS; i++) {
                part[i / COLUMNS][i % COLUMNS] = sums.at[own][i / COLUMNS][i % COLUMNS];
            }
        }
    }
}

/* The same chunk = fade * chunk + part */
template <typename REAL>
DEVICE void
add_part(plain_sums<REAL> *sums, const REAL fade[4],
         const REAL part[4][plain_sizes<REAL>::COLUMNS], int k)
{
    constexpr int COLUMNS = plain_sizes<REAL>::COLUMNS;

#pragma unroll
    for (int own = 0; own < plain_sizes<REAL>::CHUNKS; own++) {
        if (own == k) {
#pragma unroll
            for (int i = 0; i < 4 * COLUMNS; i++) {
                REAL *sum = &sums->at[own][i / COLUMNS][i % COLUMNS];
                *sum = fused(*sum, fade[i / COLUMNS], part[i / COLUMNS][i % COLUMNS]);
            }
        }
    }
}

/* sums = fade * sums + weights . streamed, where each tile has sums of its own first:
 * long sums keep their digits. `chunk` holds a chunk of the streamed rows; `weights`
 * need no barrier before. */
template <typename REAL>
DEVICE void
add_tile(plain_sums<REAL> *sums, const REAL fade[4], const REAL *weights, REAL *chunk,
         const plain_rows &streamed)
{
    constexpr int CHUNK = plain_sizes<REAL>::CHUNK;

#pragma unroll 1
    for (int k = 0; k * CHUNK < streamed.dims; k++) {
        REAL part[4][plain_sizes<REAL>::COLUMNS] = {};
        __syncthreads(); /* the weights are there, and the chunk is free */
        const bool finite = load_chunk(chunk, streamed, k * CHUNK);
        const bool careful = __syncthreads_or(!finite) != 0;
        if (careful) {
            add_weighted(part, weights, chunk, streamed.n, true);
        } else {
            add_weighted(part, weights, chunk, streamed.n, false);
        }
        add_part(sums, fade, part, k);
    }
}

template <typename REAL>
DEVICE void
clear_sums(plain_sums<REAL> *sums)
{
#pragma unroll
    for (int k = 0; k < plain_sizes<REAL>::CHUNKS; k++) {
#pragma unroll
        for (int i = 0; i < 4 * plain_sizes<REAL>::COLUMNS; i++) {
            sums->at[k][i % 4][i / 4] = 0;
        }
    }
}

/* rows = factor * sums */
template <typename REAL>
DEVICE void
store_sums(const plain_rows &rows, const plain_sums<REAL> &sums, const REAL factor[4])
{
    constexpr int CHUNK = plain_sizes<REAL>::CHUNK;
    constexpr int COLUMNS = plain_sizes<REAL>::COLUMNS;

#pragma unroll 1
    for (int k = 0; k * CHUNK < rows.dims; k++) {
        REAL part[4][COLUMNS];
        get_part(part, sums, k);
#pragma unroll
        for (int i = 0; i < 4 * COLUMNS; i++) {
            const int a = i / COLUMNS, c = i % COLUMNS;
            const int dim = k * CHUNK + chunk_column(c);
            if (tile_row(a) < rows.n && dim < rows.dims) {
                const int64_t at = rows.at + tile_row(a) * rows.stride + dim;
                write_element(rows.data, rows.dtype, at,
                              factor[a] == 0 ? 0 : part[a][c] * factor[a]);
            }
        }
    }
}

/* ---- Scores ---------------------------------------------------------------------- */

/* Where a tile of scores is. */
struct plain_tile {
    int64_t query, key;
};

/* Turns all a query's numbers into the next one's, and the last into the first. */
template <bool KEYS, typename REAL>
DEVICE void
turn_queries(REAL s[4][4])
{
#pragma unroll
    for (int y = 0; y < 4; y++) {
        const REAL first = s[KEYS ? y : 0][KEYS ? 0 : y];
#pragma unroll
        for (int x = 0; x < 3; x++) {
            s[KEYS ? y : x][KEYS ? x : y] = s[KEYS ? y : x + 1][KEYS ? x + 1 : y];
        }
        s[KEYS ? y : 3][KEYS ? 3 : y] = first;
    }
}

/* Turns products into scores, -infinity where a query may not look. With softcap
 * `slope` becomes the derivative. Queries take turns to be the first, so that the loop
 * need not be unrolled: a score with all options is long. */
template <bool KEYS, typename REAL>
DEVICE void
finish_scores(REAL s[4][4], REAL slope[4][4], const tfast_attention_args &args,
              const attention_head &h, const plain_tile &tile)
{
    const attention_rule<REAL> rule = rule_of<REAL>(args, h);

#pragma unroll
    for (int i = 0; i < 16; i++) {
        slope[i / 4][i % 4] = 1;
    }
#pragma unroll 1
    for (int x = 0; x < 4; x++) {
        const int64_t query = tile.query + tile_query<KEYS>(x);
        const attention_reach reach = reach_of(args, h, query, tile.key, TILE);
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const int key = tile_key<KEYS>(y), a = KEYS ? y : 0, b = KEYS ? 0 : y;
            if (reach.first <= key && key < reach.end) {
                s[a][b] = score_of(&slope[a][b], s[a][b], args, h, rule, query,
                                   tile.key + key);
            } else {
                s[a][b] = -(REAL)INFINITY;
            }
        }
        turn_queries<KEYS>(s);
        turn_queries<KEYS>(slope);
    }
}

/* What each weight is multiplied by: 0, or the scale. */
template <bool KEYS, typename REAL>
DEVICE void
dropout_factors(REAL keep[4][4], const tfast_attention_args &args,
                const attention_head &h, const plain_tile &tile)
{
    const attention_dropout dropout = dropout_of(args, h);

#pragma unroll
    for (int block = 0; block < 4; block++) { /* whose words 2 x 2 of a thread share */
        const int a0 = block / 2 * 2, b0 = block % 2;
        const int i0 = KEYS ? tile_column(b0) : tile_row(a0);
        const int j0 = KEYS ? tile_row(a0) : tile_column(b0);
        uint32_t word[4];
        dropout_words(word, dropout, tile.query + i0, tile.key + j0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int a = a0 + i / 2, b = b0 + i % 2 * 2;
            const int query = KEYS ? tile_column(b) : tile_row(a);
            const int key = KEYS ? tile_row(a) : tile_column(b);
            keep[a][b] = is_kept(word, dropout, query, key) ? (REAL)dropout.scale : 0;
        }
    }
}

/* ---- Work ------------------------------------------------------------------------ */

/* Number `work` of all tiles of all heads of all items. */
struct plain_work {
    int64_t batch, head, first; /* the tile's first row */
};

DEVICE plain_work
work_of(int64_t work, int64_t tiles, int64_t heads)
{
    return {work / tiles / heads, work / tiles % heads, work % tiles * TILE};
}

#endif
