/* Attention forward of few queries against many keys, as in decoding. The queries of
 * all heads that share a head of keys are the rows of tiles of 16, so that one read of
 * the keys serves them all; the keys are split over blocks, and in a block over warps,
 * which walk tiles of their own with an online softmax and without a barrier. A block
 * adds up what its warps found, a second kernel what the blocks did, each in order.
 *
 * What bounds it is memory: keys and values are read once for each tile of rows, two
 * bytes an element (bfloat16 on sm_75 once more before, for its exponents); results of
 * splits are about 1 / 8 of that at most, written and read once. One kernel has all
 * options: its arithmetic waits for memory anyway.
 *
 *                        registers          KB of shared   KB on their way
 *                        64      128        memory         to a block
 *   sm_75                222     250        33             16
 *         as bfloat16    234     249        33             16
 *   sm_80                146     166        65             48
 *
 * Of these blocks of 4 warps a T4 (40 multiprocessors) holds 40, a 4090 (128) 128, an
 * A100 (108) 216 and an H200 (132) 396, by shared memory. To keep memory busy for a
 * microsecond takes 0.3, 1, 2 and 4.8 MB on their way: they have room for 0.6, 6, 10
 * and 19. 32768 keys of 8 heads and 128 dims, 134 MB, then take at least 420, 133, 67
 * and 28 microseconds. The table is ptxas 13.0's; nothing has been measured yet. */
#ifndef TFAST_ATTENTION_DECODE_CUH
#define TFAST_ATTENTION_DECODE_CUH

#include "attention_mma_forward.cuh"

/* ---- Sizes ----------------------------------------------------------------------- */

/* Enough blocks for two on each of 132 multiprocessors. With fewer keys a split than
 * the least, results would be a larger part of what is read and written. */
enum { DECODE_ROWS = 16, DECODE_MAX_TILES = 4, DECODE_MAX_DIM = 128 };
enum { DECODE_BLOCKS = 264, DECODE_LEAST_KEYS = 128 };

/* How a call is divided: by its sizes alone, so that its results have the same bits
 * however many multiprocessors there are. */
struct decode_plan {
    int64_t rows;   /* of one head of keys: queries of all heads that share it */
    int64_t tiles;  /* of DECODE_ROWS of them */
    int64_t splits; /* of the keys */
    int64_t pitch;  /* from one row of sums to the next: dim_v, up to a multiple of 4 */
};

/* sums: [batch, kv_heads, rows, splits, pitch], relative to the row's largest score in
 * the split. numbers: [batch, kv_heads, rows, splits], that score and the weights' sum,
 * with 0 of which the sums are not written. */
struct decode_call {
    mma_call mma;
    decode_plan plan;
    float *sums;
    float2 *numbers;
};

/* A kernel's sizes. */
template <typename PATH, int DIM>
struct decode_shape {
    static constexpr bool OPTIONS = true;
    static constexpr int D = DIM, PIECES = 1, ROWS = DECODE_ROWS;
    static constexpr int HELD = D / 16; /* all of q is in registers */
    static constexpr int WARPS = 4, THREADS = WARPS * 32;
    static constexpr int BLOCKS = 2;
    static constexpr int STREAMED = D == 64 ? 32 : 16; /* keys of a warp's tile */
    static constexpr int UNIT = WARPS * STREAMED;
    static constexpr int STAGES = PATH::ASYNC ? 2 : 1;   /* tiles of keys, of values */
    static constexpr int AHEAD = PATH::ASYNC ? UNIT : 0; /* values are fetched */
    static constexpr int TILE_BYTES = STREAMED * D * 2;
    static constexpr int WARP_BYTES = 2 * STAGES * TILE_BYTES;
    static constexpr int BYTES = WARPS * WARP_BYTES;
    static_assert(WARP_BYTES >= ROWS * D * 4, "a warp's sums take its tiles' place");
};

/* ---- A block --------------------------------------------------------------------- */

/* Kept in shared memory, where it takes no registers. */
struct decode_block {
    attention_head h; /* the first of those that share their keys */
    int64_t row;      /* the tile's first */
    int n_rows;
    int64_t key, end;        /* the split's keys */
    int64_t result;          /* of its first row: the next row's is `splits` further */
    int exponent[EXPONENTS]; /* of keys and values, where they are scaled */
    struct {
        int query, head;   /* the head from the first one */
        float power, unit; /* the query's, and what its products are multiplied by */
    } rows[DECODE_ROWS];
};

/* The split's share of `unit` keys at a time of all that the rows may look at. */
DEVICE void
find_keys(decode_block *block, const decode_call &call, int64_t split, int unit)
{
    const tfast_attention_args &args = call.mma.args;
    const int64_t group = args.heads / args.kv_heads;
    const int64_t last = (block->row + block->n_rows - 1) / group;
    const int64_t begin = first_key(args, block->h, block->row / group) / unit;
    const int64_t end = end_key(args, block->h, last);
    const int64_t units = (end + unit - 1) / unit - begin, splits = call.plan.splits;

    block->key = (begin + units * split / splits) * unit;
    block->end = (begin + units * (split + 1) / splits) * unit;
    block->end = block->end < end ? block->end : end;
}

/* Number blockIdx.x: tiles of the same keys are neighbours. */
DEVICE void
find_block(decode_block *block, const decode_call &call, int unit)
{
    const tfast_attention_args &args = call.mma.args;
    const decode_plan &plan = call.plan;
    const int64_t group = args.heads / args.kv_heads;
    const int64_t split = blockIdx.x / plan.tiles % plan.splits;
    const int64_t head = blockIdx.x / plan.tiles / plan.splits; /* of all items' keys */

    block->h =
        attention_head_of(args, head / args.kv_heads, head % args.kv_heads * group);
    block->row = blockIdx.x % plan.tiles * DECODE_ROWS;
    block->n_rows = mma_left(block->h.n_q * group, block->row, DECODE_ROWS);
    block->result = (head * plan.rows + block->row) * plan.splits + split;
    block->key = block->end = 0;
    if (block->n_rows > 0) {
        find_keys(block, call, split, unit);
    }
}

/* Number `i` of the tile's rows, which there need not be; by a whole warp. */
template <typename T, typename S>
DEVICE void
find_row(decode_block *block, const decode_call &call, int i)
{
    const tfast_attention_args &args = call.mma.args;
    const int group = (int)(args.heads / args.kv_heads);
    const int row = (int)(blockIdx.x % call.plan.tiles) * DECODE_ROWS + i;
    int exponent[EXPONENTS] = {};

    if constexpr (T::SCALED) {
        const int64_t keys = blockIdx.x / call.plan.tiles / call.plan.splits;
        const int64_t head = keys % args.kv_heads * group + row % group;
        for (int tensor = 0; tensor <= EXPONENT_V; tensor++) {
            exponent[tensor] = read_exponent(call.mma.exponents, args, tensor,
                                             keys / args.kv_heads, head);
        }
    }
    if (threadIdx.x % 32 == 0) {
        block->rows[i] = {
            row / group, row % group, T::SCALED ? power_of(exponent[EXPONENT_Q]) : 1,
            unit_of<T, S>(args, exponent[EXPONENT_Q], exponent[EXPONENT_K])};
        if (i == 0) {
            block->exponent[EXPONENT_K] = exponent[EXPONENT_K];
            block->exponent[EXPONENT_V] = exponent[EXPONENT_V];
        }
    }
}

/* The tile's row that is row r of a thread's fragments: g, or g + 8. */
DEVICE int
fragment_row(int r)
{
    return (int)threadIdx.x % 32 / 4 + r * 8;
}

/* Its head. */
DEVICE attention_head
head_of_row(const decode_block &block, int r)
{
    attention_head h = block.h;

    h.head += block.rows[fragment_row(r)].head;
    return h;
}

/* And where its scores are. */
DEVICE mma_place
place_of_row(const decode_block &block, int r, int64_t key)
{
    return {block.rows[fragment_row(r)].query, key};
}

template <typename T, typename S>
DEVICE void
read_queries(mma_forward_thread<S> *own, const mma_call &call,
             const decode_block &block)
{
    const tfast_attention_args &args = call.args;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const mma_rows q =
            columns_from(mma_queries(args, head_of_row(block, r), args.q, args.dim,
                                     place_of_row(block, r, 0).query, 1),
                         fragment_column(0, 0));
        const float power = block.rows[fragment_row(r)].power;
#pragma unroll
        for (int n = 0; n < S::D / 8; n++) {
            own->own[0].piece[n / 2][n % 2 * 2 + r] =
                T::load(read_pair(q, 0, n * 8, call.chunks), power);
        }
    }
}

/* ---- Weights --------------------------------------------------------------------- */

/* As drop_weights(), for one row. */
template <typename S>
DEVICE void
drop_row(mma_scores<S> *s, int r, const attention_dropout &dropout,
         const mma_place &place)
{
#pragma unroll
    for (int block = 0; block < S::STREAMED / 16; block++) {
        uint32_t word[4];
        dropout_words(word, dropout, place.query,
                      place.key + fragment_column(block * 2, 0));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = fragment_column(block * 2 + i / 2, i % 2);
            if (!is_kept(word, dropout, (int)(place.query % 16), key)) {
                s->at[block * 2 + i / 2][r * 2 + i % 2] = 0;
            }
        }
    }
}

/* From products to weights, for the keys from `key` on. */
template <typename S>
DEVICE void
weigh_split_keys(mma_scores<S> *s, mma_softmax<S> *state,
                 const tfast_attention_args &args, const decode_block &block,
                 int64_t key)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const attention_head h = head_of_row(block, r);
        attention_rule<float> rule = rule_of<float>(args, h);
        rule.scale = block.rows[fragment_row(r)].unit;
        finish_row(s, r, args, h, rule, place_of_row(block, r, key));
    }
    soften_piece(s, state, 0, 1);
    if (args.dropout_p > 0) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            drop_row(s, r, dropout_of(args, head_of_row(block, r)),
                     place_of_row(block, r, key));
        }
    }
}

/* ---- A warp's keys --------------------------------------------------------------- */

/* Begins to bring the keys or values from `key` on, if there are any. */
template <typename PATH, int N, int D>
DEVICE void
fetch_keys(mma_tile<PATH, N, D, 32> *tile, smem to, const mma_call &call,
           const decode_block &block, const tfast_attention_rows &rows, int64_t dims,
           int64_t key)
{
    if (key < block.end) {
        tile->fetch(to, mma_keys(call.args, block.h, rows, dims, key, N), call.chunks);
    } else if constexpr (PATH::ASYNC) {
        cp_async_commit(); /* an empty group: as many as ever are later */
    }
}

/* `base` is where this warp's tiles are. Copies that are asynchronous have two steps of
 * the walk to arrive, as of four tiles three are under way; others, which take
 * registers until then, have one product. */
template <typename PATH, typename T, typename S>
DEVICE void
walk_split_keys(mma_softmax<S> *state, const mma_call &call, const decode_block &block,
                char *base)
{
    const tfast_attention_args &args = call.args;
    const smem k_at = smem_address(base), v_at = k_at + S::STAGES * S::TILE_BYTES;
    int64_t key = block.key + (int)threadIdx.x / 32 * S::STREAMED;
    mma_tile<PATH, S::STREAMED, S::D, 32> k_tile, v_tile;
    mma_forward_thread<S> own;
    int now = 0;

    fetch_keys(&k_tile, k_at, call, block, args.k, args.dim, key);
    if constexpr (PATH::ASYNC) {
        fetch_keys(&v_tile, v_at, call, block, args.v, args.dim_v, key);
        fetch_keys(&k_tile, k_at + S::TILE_BYTES, call, block, args.k, args.dim,
                   key + S::UNIT);
    }
    read_queries<T>(&own, call, block);
    for (; key < block.end; key += S::UNIT) {
        const int other = S::STAGES == 1 ? 0 : S::TILE_BYTES - now;
        mma_scores<S> s = {};
        k_tile.template land<2, T>(k_at + now, power_in<T>(block, EXPONENT_K));
        __syncwarp(); /* keys are there, and nobody reads the last values any more */
        fetch_keys(&v_tile, v_at + other, call, block, args.v, args.dim_v,
                   key + S::AHEAD);
        multiply_keys<PATH, T>(&s, own, k_at + now);
        weigh_split_keys(&s, state, args, block, key);
        v_tile.template land<2, T>(v_at + now, power_in<T>(block, EXPONENT_V));
        __syncwarp(); /* values are there, and nobody reads these keys any more */
        const char *landed = base + S::STAGES * S::TILE_BYTES + now;
        const bool finite = is_finite<T>(v_tile, landed);
        fetch_keys(&k_tile, k_at + now, call, block, args.k, args.dim,
                   key + S::AHEAD + S::UNIT);
        if (__any_sync(~0u, !finite)) {
            add_carefully<T>(
                state->out[0], s,
                mma_keys(args, block.h, args.v, args.dim_v, key, S::STREAMED),
                power_in<T>(block, EXPONENT_V));
        } else {
            add_values<PATH, T>(state, &s, own.reader, v_at + now);
        }
        now = other;
    }
}

/* ---- A block's result ------------------------------------------------------------ */

/* What the warps found, each in the place of its tiles: element i of a lane's sums is
 * sums[i * 32 + lane]. */
template <typename S>
DEVICE void
leave_sums(float *sums, float2 *numbers, const mma_softmax<S> &state)
{
    const int lane = threadIdx.x % 32, first = (int)threadIdx.x / 32 * S::ROWS;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = quad_sum(state.sum[0][r]);
        if (lane % 4 == 0) {
            numbers[first + lane / 4 + r * 8] = make_float2(state.top[0][r], sum);
        }
    }
#pragma unroll
    for (int i = 0; i < S::D / 2; i++) {
        sums[i * 32 + lane] = state.out[0][i / 4][i % 4];
    }
}

/* The scores' largest of `n` parts. */
DEVICE float
highest(const float2 *numbers, int n, int step)
{
    float top = -INFINITY;

#pragma unroll
    for (int i = 0; i < n; i++) {
        top = fmaxf(top, numbers[i * step].x);
    }
    return top;
}

/* Adds up row r of the fragments over the warps; each does every WARPS-th fragment. */
template <typename T, typename S>
DEVICE void
add_warps(const decode_call &call, const decode_block &block, const char *base,
          const float2 *numbers, int r)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4 + r * 8;
    const int64_t result = block.result + row * call.plan.splits;
    const float top = highest(numbers + row, S::WARPS, S::ROWS);
    const float back = power_out<T>(block, EXPONENT_V);
    float fade[S::WARPS], sum = 0;

    if (row >= block.n_rows) {
        return;
    }
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) {
        const float2 number = numbers[w * S::ROWS + row];
        fade[w] = exponential(number.x - (top == -INFINITY ? 0 : top));
        sum = fused(number.y, fade[w], sum);
    }
    if (warp == 0 && lane % 4 == 0) {
        call.numbers[result] = make_float2(top, sum);
    }
#pragma unroll 1
    for (int n = warp; n < S::D / 8; n += S::WARPS) {
        const int column = n * 8 + lane % 4 * 2;
        float2 both = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < S::WARPS; w++) {
            const float *own =
                (const float *)(base + w * S::WARP_BYTES) + (n * 4 + r * 2) * 32 + lane;
            both.x = fused(own[0], fade[w], both.x);
            both.y = fused(own[32], fade[w], both.y);
        }
        if (column < call.plan.pitch && sum != 0) {
            *(float2 *)(call.sums + result * call.plan.pitch + column) =
                make_float2(both.x * back, both.y * back);
        }
    }
}

template <typename PATH, typename T, typename S>
TFAST_KERNEL(S::THREADS, S::BLOCKS)
attention_decode(const __grid_constant__ decode_call call)
{
    if constexpr (PATH::HERE) {
        SHARED_DYNAMIC(base);
        SHARED(decode_block, block, 1);
        SHARED(float2, numbers, S::WARPS * S::ROWS);
        char *own = base + (int)threadIdx.x / 32 * S::WARP_BYTES;
        mma_softmax<S> state = {};

        if (threadIdx.x == 0) {
            find_block(block, call, S::UNIT);
        }
#pragma unroll
        for (int i = 0; i < S::ROWS / S::WARPS; i++) {
            find_row<T, S>(block, call, i * S::WARPS + (int)threadIdx.x / 32);
        }
        __syncthreads();
        if (block->key >= block->end) {
            if ((int)threadIdx.x < block->n_rows) {
                call.numbers[block->result + threadIdx.x * call.plan.splits] =
                    make_float2(-INFINITY, 0);
            }
            return;
        }
        state.top[0][0] = state.top[0][1] = -INFINITY;
        walk_split_keys<PATH, T>(&state, call.mma, *block, own);
        __syncwarp(); /* nobody reads the last values any more */
        leave_sums((float *)own, numbers, state);
        __syncthreads();
        add_warps<T, S>(call, *block, base, numbers, 0);
        add_warps<T, S>(call, *block, base, numbers, 1);
    }
}

/* ---- All blocks' results --------------------------------------------------------- */

enum { COMBINE_WARPS = 8, COMBINE_THREADS = COMBINE_WARPS * 32 };

/* A row of one head, and what all splits have for it. */
struct combined_row {
    attention_head h;
    int64_t query;
    const float2 *numbers;
    const float *sums;
    float top, sum; /* with the sink */
    bool empty;
};

DEVICE combined_row
row_to_combine(const decode_call &call)
{
    const tfast_attention_args &args = call.mma.args;
    const decode_plan &plan = call.plan;
    const int64_t group = args.heads / args.kv_heads, head = blockIdx.x / plan.rows;
    const int64_t row = blockIdx.x % plan.rows, first = blockIdx.x * plan.splits;

    return {attention_head_of(args, head / args.kv_heads,
                              head % args.kv_heads * group + row % group),
            row / group,
            call.numbers + first,
            call.sums + first * plan.pitch,
            -INFINITY,
            0,
            true};
}

/* By a whole warp, a lane every 32nd split. */
DEVICE void
sum_numbers(combined_row *row, const decode_call &call)
{
    const tfast_attention_args &args = call.mma.args;
    const float *sinks = (const float *)args.sinks;
    const float sink = sinks == nullptr ? -INFINITY : sinks[row->h.head];
    const int lane = threadIdx.x % 32;
    float top = sink, sum = 0;

    for (int64_t split = lane; split < call.plan.splits; split += 32) {
        top = fmaxf(top, row->numbers[split].x);
    }
    for (int by = 1; by < 32; by *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, by));
    }
    row->top = top == -INFINITY ? 0 : top;
    for (int64_t split = lane; split < call.plan.splits; split += 32) {
        const float2 number = row->numbers[split];
        sum = fused(number.y, exponential(number.x - row->top), sum);
        row->empty = row->empty && number.y == 0;
    }
    for (int by = 1; by < 32; by *= 2) {
        sum += __shfl_xor_sync(~0u, sum, by);
    }
    row->empty = __all_sync(~0u, row->empty);
    row->sum = sum + exponential(sink - row->top);
}

/* Dims `dim` to dim + 3 of the splits that are this warp's. */
DEVICE float4
add_splits(const combined_row &row, const decode_plan &plan, int64_t dim)
{
    float4 sum = {0, 0, 0, 0};

#pragma unroll 4
    for (int64_t split = threadIdx.x / 32; split < plan.splits;
         split += COMBINE_WARPS) {
        const float2 number = row.numbers[split];
        const float fade = exponential(number.x - row.top);
        if (number.y != 0) {
            const float4 x = *(const float4 *)(row.sums + split * plan.pitch + dim);
            sum = {fused(x.x, fade, sum.x), fused(x.y, fade, sum.y),
                   fused(x.z, fade, sum.z), fused(x.w, fade, sum.w)};
        }
    }
    return sum;
}

TFAST_KERNEL(COMBINE_THREADS, 4)
attention_decode_combine(const __grid_constant__ decode_call call)
{
    SHARED(float4, sums, COMBINE_WARPS * TFAST_ATTENTION_MAX_DIM / 4);
    const tfast_attention_args &args = call.mma.args;
    const int64_t dim_v = args.dim_v;
    combined_row row = row_to_combine(call);

    if (row.query >= row.h.n_q) {
        return;
    }
    sum_numbers(&row, call);
    for (int part = threadIdx.x % 32; part * 4 < dim_v; part += 32) {
        sums[(int)threadIdx.x / 32 * (TFAST_ATTENTION_MAX_DIM / 4) + part] =
            add_splits(row, call.plan, part * 4);
    }
    __syncthreads();
    if (threadIdx.x == 0 && args.lse != nullptr) {
        ((float *)args.lse)[lse_row(args, row.h) + row.query] =
            row.empty ? -INFINITY : row.top + logf(row.sum);
    }
    if (threadIdx.x < dim_v) {
        const double kept = args.dropout_p > 0 ? dropout_of(args, row.h).scale : 1;
        const float *own = (const float *)sums + threadIdx.x;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < COMBINE_WARPS; w++) {
            sum += own[w * TFAST_ATTENTION_MAX_DIM];
        }
        write_element(args.out.data, args.dtype,
                      query_row(args, row.h, args.out, row.query) + threadIdx.x,
                      row.empty ? 0 : sum * ((float)kept / row.sum));
    }
}

#endif
