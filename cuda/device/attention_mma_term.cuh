/* Gradients of attention's options by tensor cores: of a bias, of ALiBi's slopes and of
 * sinks. Deterministic, as the others.
 *
 * A block owns 64 queries x 64 keys of a term and walks, in a fixed order, over the
 * batch items, heads and tiles of queries in which the term is broadcast, and where it
 * is broadcast over keys over all their tiles. For each tile it makes the weights and
 * the gradients of scores anew, as the kernel of dq does, and adds these up in float32
 * registers; rows and columns are summed up in double at the end. q k' and dout v' are
 * made from 64 dims at a time, one product after the other in the same registers, so
 * that one kernel serves all dims.
 *
 * A term of few tiles ([1, H, N, N] with short N, [B, 1, 1, N], the slopes) would give
 * few blocks: the walks of a tile are dealt out to several, until there are 512 blocks
 * or 4 tiles of scores a block. Their sums go to scratch (16 KB a block and less where
 * the term is broadcast over queries or keys, 16 MB at most), and a last kernel adds
 * them up in double, in order. Only walks over keys are never divided: a term
 * [1, 1, N, 1] of one item and head has N / 64 blocks, however many keys there are.
 *
 * A tile of 64 x 64 scores takes 2 * 64 * 64 flops and 256 bytes, most of them from L2,
 * for each of dim and dim_v: 2 products beside the 7 of the whole backward. B 16, H 12,
 * N 1024, 64 dims with a bias [1, H, N, N] are 52 GFLOP: by multiply-adds at least 0.79
 * ms of a T4 and 0.052 of an H200 (0.087 at the 60 % that mma.sync reaches). 100 MB of
 * q, k, v and dout, 50 of bias and 50 of its gradient are at least 0.63 ms of a T4's
 * memory and 0.042 of an H200's; to make it whole and sum it up after would write 805
 * MB. Slopes take the same products, sinks lse and delta, 8 bytes a query. None of it
 * has been measured yet.
 *
 * By registers and shared memory 2 blocks of 4 warps fit on a multiprocessor. Tiles
 * have one stage on sm_75 and two from sm_80 on. */
#ifndef TFAST_ATTENTION_MMA_TERM_CUH
#define TFAST_ATTENTION_MMA_TERM_CUH

#include "attention_mma_backward.cuh"
#include "attention_term.cuh"

enum { TERM_DIMS = 64, TERM_PITCH = TERM_TILE + 1 };

/* A kernel that owns queries, as the others' shapes; its results are no rows. */
template <typename PATH>
struct mma_term_shape {
    static constexpr bool KEYS = false, OPTIONS = true, PAIRS = false;
    static constexpr bool X = false, Y = false;
    static constexpr int D = TERM_DIMS, MADE = 8;
    static constexpr int WARPS = 4, SHARING = 1, THREADS = 128;
    static constexpr int ROWS = TERM_TILE, STREAMED = TERM_TILE;
    static constexpr int STAGES = PATH::ASYNC ? 2 : 1;
    static constexpr int TILE_BYTES = TERM_TILE * D * 2;
    static constexpr int TILES_BYTES = STAGES * 2 * TILE_BYTES;
    static constexpr int SUMS_BYTES = TERM_TILE * TERM_PITCH * 4;
    static constexpr int BYTES = TILES_BYTES > SUMS_BYTES ? TILES_BYTES : SUMS_BYTES;
};

/* ---- The walk -------------------------------------------------------------------- */

/* The rows and keys of one tile of queries, of all that a block walks over; by its
 * first warp. Those with most to do, the last ones, come first. */
template <typename T, typename S>
DEVICE void
begin_walk(mma_backward_block *block, const mma_term_call &call, const int64_t tile[4],
           int64_t walk)
{
    const tfast_attention_args &args = call.mma.args;
    const int64_t *walks = call.walks, heads = walks[0] * walks[1];
    const int64_t batch = tile[0] + walk % heads / walks[1];
    const int64_t head = tile[1] + walk % heads % walks[1];
    const attention_head h = attention_head_of(args, batch, head);
    const int64_t first = (tile[2] + walks[2] - 1 - walk / heads) * S::ROWS;
    const int64_t last = first + mma_left(h.n_q, first, S::ROWS) - 1;
    const bool all = call.term.stride[3] == 0;
    const int64_t key = all ? 0 : tile[3] * S::STREAMED;
    const int64_t key_end = all ? args.n_k : key + S::STREAMED;
    const int64_t begin = clamped(first_key(args, h, first), key, key_end);
    const int64_t end = clamped(end_key(args, h, last), key, key_end);

    if (threadIdx.x == 0) {
        block->h = h;
        block->first = first;
        block->last = last;
        block->heads = last >= first && begin < end;
        block->begin = (int)(begin / S::STREAMED);
        block->end = (int)((end + S::STREAMED - 1) / S::STREAMED);
        block->kept = (float)dropout_of(args, h).scale;
    }
    begin_head<T, S>(block, call.mma, h.batch, h.head);
}

/* 64 dims, of q and k or behind these of dout and v, of one tile of keys. */
struct mma_piece {
    int tile, number;
};

DEVICE int
pieces_of(int64_t dims)
{
    return (int)((dims + TERM_DIMS - 1) / TERM_DIMS);
}

/* Begins to bring a piece into a stage. */
template <typename PATH, typename S>
DEVICE void
fetch_piece(mma_backward_thread<PATH, S> *own, const mma_term_call &call,
            const mma_backward_block &block, const mma_piece &piece, int stage)
{
    const tfast_attention_args &args = call.mma.args;
    const int before = pieces_of(args.dim);
    const bool second = piece.number >= before;
    const int column = (piece.number - (second ? before : 0)) * TERM_DIMS;
    const int64_t dims = second ? args.dim_v : args.dim;
    const smem at = own->base + stage * 2 * S::TILE_BYTES;
    const mma_rows rows = mma_queries(args, block.h, second ? args.dout : args.q, dims,
                                      block.first, S::ROWS);
    const mma_rows keys = mma_keys(args, block.h, second ? args.v : args.k, dims,
                                   (int64_t)piece.tile * S::STREAMED, S::STREAMED);

    own->u.fetch(at, columns_from(rows, column), call.mma.whole);
    own->v.fetch(at + S::TILE_BYTES, columns_from(keys, column), call.mma.whole);
}

/* Ends to; a barrier must follow before anyone reads. */
template <typename T, typename PATH, typename S>
DEVICE void
land_piece(mma_backward_thread<PATH, S> *own, const mma_term_call &call,
           const mma_backward_block &block, const mma_piece &piece, int stage)
{
    const bool second = piece.number >= pieces_of(call.mma.args.dim);
    const smem at = own->base + stage * 2 * S::TILE_BYTES;

    own->u.template land<0, T>(at,
                               power_in<T>(block, second ? EXPONENT_DOUT : EXPONENT_Q));
    own->v.template land<0, T>(at + S::TILE_BYTES,
                               power_in<T>(block, second ? EXPONENT_V : EXPONENT_K));
}

/* Adds a tile's gradients, without the shares of far rows so far, and with a power of
 * two where the type is scaled: see attention_mma_backward_scale.cuh. */
template <typename T, typename S>
DEVICE void
add_gradients(mma_scores<S> *sums, const mma_scores<S> &x, const mma_term_call &call,
              const mma_backward_block &block, int tile)
{
    const int64_t row = block.first + warp_row<S>() + (int)threadIdx.x % 32 / 4;
    const int64_t column = (int64_t)tile * S::STREAMED;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t query = row + r * 8;
        float back = share_at(call.mma, block.h, query);
        if (T::SCALED && query <= block.last) {
            const int64_t first = number_row(call.mma.args, block.h);
            back *= two_to(call.mma.bounds[first + query] - 15);
        }
#pragma unroll
        for (int c = 0; c < S::STREAMED / 4; c++) {
            const int64_t key = column + fragment_column(c / 2, c % 2);
            float y = x.at[c / 2][r * 2 + c % 2] * back;
            if (call.term.alibi) {
                y *= -distance<float>(block.h, query, key);
            }
            sums->at[c / 2][r * 2 + c % 2] += y;
        }
    }
}

/* All tiles of keys of a tile of queries. */
template <typename T, typename PATH, typename S>
DEVICE void
walk_keys(mma_scores<S> *sums, mma_backward_thread<PATH, S> *own,
          const mma_term_call &call, const mma_backward_block &block)
{
    const tfast_attention_args &args = call.mma.args;
    const int before = pieces_of(args.dim), pieces = before + pieces_of(args.dim_v);
    mma_piece piece = {block.begin, 0};
    mma_scores<S> weights, x = {}, slope;
    int stage = 0;

    fetch_piece(own, call, block, piece, stage);
    while (piece.tile < block.end) {
        const bool last = piece.number + 1 == pieces;
        const mma_piece next = {piece.tile + last, last ? 0 : piece.number + 1};
        const smem at = own->base + stage * 2 * S::TILE_BYTES;
        land_piece<T>(own, call, block, piece, stage);
        __syncthreads(); /* it is there, and nobody reads another stage any more */
        if (next.tile < block.end) {
            fetch_piece(own, call, block, next, stage ^ (S::STAGES - 1));
        }
        multiply_own<PATH, T>(&x, own->x, at, own->reader, at + S::TILE_BYTES);
        if (piece.number + 1 == before) {
            weigh_step_with_options(&x, &slope, args, block, block.h, *own, piece.tile,
                                    0);
            weights = x;
            x = {};
        }
        if (last) {
            const uint32_t kept =
                args.dropout_p > 0 ? kept_elements<S>(args, block, block.h, piece.tile)
                                   : ~0u;
            finish_step<T>(&x, weights, *own, block, 0, kept);
            add_gradients<T>(sums, x, call, block, piece.tile);
            x = {};
        }
        piece = next;
        if constexpr (S::STAGES == 1) {
            __syncthreads(); /* nobody reads this piece any more */
        } else {
            stage ^= 1;
        }
    }
}

/* ---- A block --------------------------------------------------------------------- */

/* The tile's place in each dimension. */
DEVICE void
find_tile(int64_t tile[4], const mma_term_call &call, int64_t number)
{
#pragma unroll
    for (int d = 3; d >= 0; d--) {
        tile[d] = number % call.tiles[d];
        number /= call.tiles[d];
    }
}

/* Writes element `i` of what is left of a tile, if the term has it. */
DEVICE void
write_term(const mma_term_call &call, const int64_t tile[4], int64_t i, double x)
{
    const attention_term &term = call.term;
    const int64_t *stride = term.stride;
    const int64_t query = tile[2] * TERM_TILE + i / call.columns;
    const int64_t key = tile[3] * TERM_TILE + i % call.columns;

    if ((stride[2] == 0 || query < call.mma.args.n_q) &&
        (stride[3] == 0 || key < call.mma.args.n_k)) {
        ((float *)term.data)[tile[0] * stride[0] + tile[1] * stride[1] +
                             query * stride[2] + key * stride[3]] = (float)x;
    }
}

/* Writes a block's sums, to the term or as a part of them. */
template <typename S>
DEVICE void
store_sums(const mma_scores<S> &sums, const mma_term_call &call, const int64_t tile[4],
           int64_t work, float *shared)
{
    const int64_t *stride = call.term.stride;
    const int row = warp_row<S>() + (int)threadIdx.x % 32 / 4;
    const int columns = call.columns, left = call.rows * columns;

    __syncthreads(); /* nobody reads what lies there any more */
#pragma unroll
    for (int i = 0; i < S::STREAMED / 2; i++) {
        shared[(row + i % 4 / 2 * 8) * TERM_PITCH + fragment_column(i / 4, i)] =
            sums.at[i / 4][i % 4];
    }
    reduce_tile<TERM_TILE>(shared, stride[2] == 0, stride[3] == 0);
    for (int i = threadIdx.x; i < left; i += S::THREADS) {
        const float x = shared[i / columns * TERM_PITCH + i % columns];
        if (call.splits > 1) {
            call.parts[work * left + i] = x;
        } else {
            write_term(call, tile, i, x);
        }
    }
}

template <typename PATH, typename T>
TFAST_KERNEL(mma_term_shape<PATH>::THREADS, 2)
attention_mma_term(const __grid_constant__ mma_term_call call)
{
    typedef mma_term_shape<PATH> S;
    SHARED_DYNAMIC(base);
    SHARED(mma_backward_block, block, 1);
    const int64_t tiles = call.n_tiles;
    mma_backward_thread<PATH, S> own;
    own.base = smem_address(base);

    for (int64_t i = blockIdx.x; i < tiles * call.splits; i += gridDim.x) {
        mma_scores<S> sums = {};
        int64_t tile[4];
        find_tile(tile, call, i % tiles);
        for (int64_t walk = i / tiles; walk < call.n_walks; walk += call.splits) {
            __syncthreads(); /* nobody reads the last one's numbers any more */
            if (threadIdx.x < 32) {
                begin_walk<T, S>(block, call, tile, walk);
            }
            __syncthreads();
            if (block->heads > 0) {
                read_numbers<T>(&own, call.mma, *block);
                walk_keys<T>(&sums, &own, call, *block);
            }
        }
        store_sums(sums, call, tile, i, (float *)base);
    }
}

/* Adds up the parts: a thread an element. */
TFAST_KERNEL(SUM_THREADS, 4)
attention_mma_term_sum(const __grid_constant__ mma_term_call call)
{
    const int64_t left = call.rows * call.columns, n = call.n_tiles * left;
    const int64_t step = (int64_t)gridDim.x * SUM_THREADS;

    for (int64_t i = blockIdx.x * (int64_t)SUM_THREADS + threadIdx.x; i < n;
         i += step) {
        double sum = 0;
        int64_t tile[4];
        for (int64_t split = 0; split < call.splits; split++) {
            sum += (double)call.parts[split * n + i];
        }
        find_tile(tile, call, i / left);
        write_term(call, tile, i % left, sum);
    }
}

/* ---- Sinks ----------------------------------------------------------------------- */

/* The sum of x over the block, for its first thread; in a fixed order. */
DEVICE double
sum_of_block(double x)
{
    SHARED(double, of_warp, SINKS_THREADS / 32);
    double sum = 0;

    for (int by = 1; by < 32; by *= 2) {
        x += __shfl_xor_sync(~0u, x, by);
    }
    __syncthreads(); /* nobody reads the last head's any more */
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = x;
    }
    __syncthreads();
    for (int i = 0; threadIdx.x == 0 && i < SINKS_THREADS / 32; i++) {
        sum += of_warp[i];
    }
    return sum;
}

/* A block a head: from lse and delta, 8 bytes a query, which is all that it reads. */
TFAST_KERNEL(SINKS_THREADS, 4)
attention_mma_dsinks(const __grid_constant__ mma_call call)
{
    const tfast_attention_args &args = call.args;

    for (int64_t head = blockIdx.x; head < args.heads; head += gridDim.x) {
        const float sink = ((const float *)args.sinks)[head];
        double sum = 0;
        for (int64_t b = 0; b < args.batch; b++) {
            const attention_head h = attention_head_of(args, b, head);
            const float *lse = (const float *)args.lse + lse_row(args, h);
            const int64_t first = number_row(args, h);
            for (int64_t i = threadIdx.x; i < h.n_q; i += SINKS_THREADS) {
                if (lse[i] != -INFINITY) {
                    sum -= (double)(exponential(sink - lse[i]) * share_at(call, h, i) *
                                    call.delta[first + i]);
                }
            }
        }
        sum = sum_of_block(sum);
        if (threadIdx.x == 0) {
            ((float *)args.dsinks)[head] = (float)sum;
        }
    }
}

#endif
