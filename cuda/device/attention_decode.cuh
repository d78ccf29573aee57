/* Attention forward of few queries against many keys, as in decoding. The queries of
 * all heads that share a head of keys are the rows of tiles of 16, so that one read of
 * the keys serves them all; the keys are split over blocks, and in a block over warps,
 * which walk tiles of their own with an online softmax and without a barrier. A block
 * adds up what its warps found, a second kernel what the blocks did, each in order.
 *
 * A warp's registers do not hold queries and sums of more than 128 dims. There the 3 or
 * 4 warps of a block walk the same tiles, and each makes 64 of the dims: of products,
 * which all add up by way of shared memory, and of results. That takes three barriers a
 * tile, and each warp makes the weights of all its 512 scores.
 *
 * What bounds it is memory: keys and values are read once for each tile of rows, two
 * bytes an element (bfloat16 on sm_75 once more before, for its exponents); results of
 * splits are about 1 / 8 of that at most, written and read once. One kernel has all
 * options: its arithmetic waits for memory anyway. On its way to a block are 16 KB on
 * sm_75 (12 with 192 dims), 48 from sm_80 on (36).
 *
 * Of these blocks a T4 (40 multiprocessors) holds 40, a 4090 (128) 128, an A100 (108)
 * 216 and an H200 (132) 396, by shared memory; of those with 192 dims a T4 80 and an
 * H200 528. To keep memory busy for a microsecond takes 0.3, 1, 2 and 4.8 MB on their
 * way: they have room for 0.6, 6, 10 and 19, with 192 dims for 1, 4.7, 8 and 19. 32768
 * keys of 8 heads and 128 dims, 134 MB, then take at least 420, 133, 67 and 28
 * microseconds. Nothing has been measured yet. */
#ifndef TFAST_ATTENTION_DECODE_CUH
#define TFAST_ATTENTION_DECODE_CUH

#include "attention_mma_forward.cuh"

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

/* A kernel's sizes. With up to 128 dims each warp has tiles of its own; with more, all
 * warps of a block share them, and each makes D of the products' and results' dims, one
 * panel of a tile. */
template <typename PATH, int DIM>
struct decode_shape {
    static constexpr bool OPTIONS = true;
    static constexpr int SHARING = DIM > 128 ? DIM / 64 : 1; /* warps of one tile */
    static constexpr int WARPS = SHARING > 1 ? SHARING : 4, THREADS = WARPS * 32;
    static constexpr int TILES = WARPS / SHARING; /* side by side */
    static constexpr int BLOCKS = 2;
    static constexpr int COLUMNS = DIM, D = DIM / SHARING; /* of a tile, of a warp */
    static constexpr int PIECES = 1, ROWS = DECODE_ROWS;
    static constexpr int HELD = D / 16; /* its part of q is all in registers */
    static constexpr int STREAMED = DIM == 128 ? 16 : 32; /* keys of a tile */
    static constexpr int UNIT = TILES * STREAMED;
    static constexpr int STAGES = PATH::ASYNC ? 2 : 1;   /* tiles of keys, of values */
    static constexpr int AHEAD = PATH::ASYNC ? UNIT : 0; /* values are fetched */
    static constexpr int TILE_BYTES = STREAMED * COLUMNS * 2;
    static constexpr int PANEL_BYTES = STREAMED * D * 2;
    static constexpr int SET_BYTES = 2 * STAGES * TILE_BYTES; /* with the values' */
    static constexpr int PRODUCT_BYTES = SHARING > 1 ? 4 * ROWS *STREAMED : 0;
    static constexpr int BYTES = TILES * SET_BYTES + WARPS * PRODUCT_BYTES;
    static_assert(SET_BYTES >= ROWS * COLUMNS * 4, "sums take their tiles' place");
    static_assert(BYTES + (int)sizeof(decode_block) +
                          TILES * ROWS * (int)sizeof(float2) <=
                      (PATH::ASYNC ? 101376 : 65536),
                  "what sm_86, or sm_75, has for a block");
};

/* Which of the warps that share a tile this is, and which of the tiles is its own. */
template <typename S>
DEVICE int
warp_share()
{
    return S::SHARING > 1 ? (int)threadIdx.x / 32 : 0;
}

template <typename S>
DEVICE int
warp_tile()
{
    return S::SHARING > 1 ? 0 : (int)threadIdx.x / 32;
}

/* A barrier of the warps that share a tile. */
template <typename S>
DEVICE void
tile_barrier()
{
    if constexpr (S::SHARING > 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

/* The same; whether any of their threads says so. */
template <typename S>
DEVICE bool
tile_vote(bool mine)
{
    if constexpr (S::SHARING > 1) {
        return __syncthreads_or(mine) != 0;
    } else {
        __syncwarp();
        return __any_sync(~0u, mine) != 0;
    }
}

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
                         warp_share<S>() * S::D + fragment_column(0, 0));
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
template <typename PATH, int N, int D, int THREADS>
DEVICE void
fetch_keys(mma_tile<PATH, N, D, THREADS> *tile, smem to, const mma_call &call,
           const decode_block &block, const tfast_attention_rows &rows, int64_t dims,
           int64_t key)
{
    if (key < block.end) {
        tile->fetch(to, mma_keys(call.args, block.h, rows, dims, key, N), call.whole);
    } else if constexpr (PATH::ASYNC) {
        cp_async_commit(); /* an empty group: as many as ever are later */
    }
}

/* Each warp of a tile has the products of its dims: these become the whole products, by
 * way of shared memory and summed in the same order by all. */
template <typename S>
DEVICE void
add_products(mma_scores<S> *s, char *products)
{
    constexpr int N = S::STREAMED / 8;
    float4 *at = (float4 *)products + threadIdx.x % 32;

#pragma unroll
    for (int n = 0; n < N; n++) {
        const float *x = s->at[n];
        at[(warp_share<S>() * N + n) * 32] = {x[0], x[1], x[2], x[3]};
    }
    __syncthreads(); /* the values' one is between these reads and the next writes */
    *s = {};
#pragma unroll
    for (int i = 0; i < S::SHARING * N; i++) {
        const float4 x = at[i * 32];
        s->at[i % N][0] += x.x;
        s->at[i % N][1] += x.y;
        s->at[i % N][2] += x.z;
        s->at[i % N][3] += x.w;
    }
}

/* `base` is where the warp's tiles are and, where it shares them, products behind them.
 * Copies that are asynchronous have two steps of the walk to arrive, as of four tiles
 * three are under way; others, which take registers until then, have one product. */
template <typename PATH, typename T, typename S>
DEVICE void
walk_split_keys(mma_softmax<S> *state, const mma_call &call, const decode_block &block,
                char *base)
{
    const tfast_attention_args &args = call.args;
    const smem k_at = smem_address(base), v_at = k_at + S::STAGES * S::TILE_BYTES;
    const int panel = warp_share<S>() * S::PANEL_BYTES;
    int64_t key = block.key + warp_tile<S>() * S::STREAMED;
    mma_tile<PATH, S::STREAMED, S::COLUMNS, S::SHARING * 32> k_tile, v_tile;
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
        tile_barrier<S>(); /* keys are there, nobody reads the last values any more */
        fetch_keys(&v_tile, v_at + other, call, block, args.v, args.dim_v,
                   key + S::AHEAD);
        multiply_keys<PATH, T>(&s, own, k_at + now + panel);
        if constexpr (S::SHARING > 1) {
            add_products(&s, base + S::SET_BYTES);
        }
        weigh_split_keys(&s, state, args, block, key);
        v_tile.template land<2, T>(v_at + now, power_in<T>(block, EXPONENT_V));
        const char *landed = base + S::STAGES * S::TILE_BYTES + now;
        /* values are there, and nobody reads these keys any more */
        const bool careful = tile_vote<S>(!is_finite<T>(v_tile, landed));
        fetch_keys(&k_tile, k_at + now, call, block, args.k, args.dim,
                   key + S::AHEAD + S::UNIT);
        if (careful) {
            add_carefully<T, S::D>(state->out[0], s, landed + panel, 0);
        } else {
            add_values<PATH, T>(state, &s, own.reader, v_at + now + panel);
        }
        now = other;
    }
}

/* ---- A block's result ------------------------------------------------------------ */

/* What the warps found, in the place of their tiles: element i of a lane's sums, those
 * of all warps of a tile, is sums[i * 32 + lane]. */
template <typename S>
DEVICE void
leave_sums(float *sums, float2 *numbers, const mma_softmax<S> &state)
{
    const int lane = threadIdx.x % 32, first = warp_tile<S>() * S::ROWS;
    float *own = sums + warp_share<S>() * (S::D / 2) * 32;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = quad_sum(state.sum[0][r]);
        if (warp_share<S>() == 0 && lane % 4 == 0) {
            numbers[first + lane / 4 + r * 8] = make_float2(state.top[0][r], sum);
        }
    }
#pragma unroll
    for (int i = 0; i < S::D / 2; i++) {
        own[i * 32 + lane] = state.out[0][i / 4][i % 4];
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

/* Adds up row r of the fragments over the tiles; each warp does every WARPS-th one. */
template <typename T, typename S>
DEVICE void
add_tiles(const decode_call &call, const decode_block &block, const char *base,
          const float2 *numbers, int r)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4 + r * 8;
    const int64_t result = block.result + row * call.plan.splits;
    const float top = highest(numbers + row, S::TILES, S::ROWS);
    const float back = power_out<T>(block, EXPONENT_V);
    float fade[S::TILES], sum = 0;

    if (row >= block.n_rows) {
        return;
    }
#pragma unroll
    for (int t = 0; t < S::TILES; t++) {
        const float2 number = numbers[t * S::ROWS + row];
        fade[t] = exponential(number.x - (top == -INFINITY ? 0 : top));
        sum = fused(number.y, fade[t], sum);
    }
    if (warp == 0 && lane % 4 == 0) {
        call.numbers[result] = make_float2(top, sum);
    }
#pragma unroll 1
    for (int n = warp; n < S::COLUMNS / 8; n += S::WARPS) {
        const int column = n * 8 + lane % 4 * 2;
        float2 both = make_float2(0, 0);
#pragma unroll
        for (int t = 0; t < S::TILES; t++) {
            const float *own =
                (const float *)(base + t * S::SET_BYTES) + (n * 4 + r * 2) * 32 + lane;
            both.x = fused(own[0], fade[t], both.x);
            both.y = fused(own[32], fade[t], both.y);
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
    SHARED_DYNAMIC(base);
    SHARED(decode_block, block, 1);
    SHARED(float2, numbers, S::TILES * S::ROWS);
    char *own = base + warp_tile<S>() * S::SET_BYTES;
    mma_softmax<S> state = {};

    if (threadIdx.x == 0) {
        find_block(block, call, S::UNIT);
    }
#pragma unroll
    for (int i = 0; i < S::ROWS; i += S::WARPS) {
        const int row = i + (int)threadIdx.x / 32;
        if (row < S::ROWS) {
            find_row<T, S>(block, call, row);
        }
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
    tile_barrier<S>(); /* nobody reads the last values any more */
    leave_sums((float *)own, numbers, state);
    __syncthreads();
    add_tiles<T, S>(call, *block, base, numbers, 0);
    add_tiles<T, S>(call, *block, base, numbers, 1);
}

#endif
