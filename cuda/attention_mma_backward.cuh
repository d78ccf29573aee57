/* Attention backward by tensor cores, deterministic: one kernel owns queries and makes
 * dq, one owns keys and makes dk and dv of all heads that share them. Both make the
 * weights anew from lse. A warp owns 16 rows and walks over tiles of the other side's,
 * two stages deep.
 *
 *            own rows    streamed   made
 *   dq       q, dout     k, v       dq  += ds k
 *   dk, dv   k, v        q, dout    dk  += ds' q, dv += p' dout
 *
 * dout . out - dlse of each query is needed by both. Before dq is written, the first 4
 * bytes of its rows hold that number: nobody has to allocate anything. */
#ifndef TFAST_ATTENTION_MMA_BACKWARD_CUH
#define TFAST_ATTENTION_MMA_BACKWARD_CUH

#include "attention_mma.cuh"

/* ---- Tiles ----------------------------------------------------------------------- */

/* A kernel's sizes; X and Y say whether the own rows are in registers. */
template <typename PATH, int DIM, bool OWNS_KEYS, bool HAS_OPTIONS>
struct mma_backward_shape {
    static constexpr bool KEYS = OWNS_KEYS, OPTIONS = HAS_OPTIONS;
    static constexpr int D = DIM;
    static constexpr int WARPS = 4;
    static constexpr int STREAMED = D == 128 && (OPTIONS || !PATH::ASYNC) ? 16 : 32;
    static constexpr bool X = D <= 64, Y = D <= 64;
    static constexpr int BLOCKS = D <= 64 ? 2 : 1;

    static constexpr int THREADS = WARPS * 32, ROWS = WARPS * 16;
    static constexpr int OWN_BYTES = ROWS * D * 2, TILE_BYTES = STREAMED * D * 2;
    static constexpr int Y_AT = X ? 0 : OWN_BYTES;
    static constexpr int TILES_AT = Y_AT + (Y ? 0 : OWN_BYTES);
    static constexpr int NUMBERS_AT = TILES_AT + 4 * TILE_BYTES;
    static constexpr int BYTES = NUMBERS_AT + (KEYS ? 4 * STREAMED * 4 : 0);
    static_assert(BYTES + (int)sizeof(mma_block) <= (PATH::ASYNC ? 101376 : 65536),
                  "what sm_86, or sm_75, has for a block");
    static_assert(2 * STREAMED <= THREADS, "a thread brings one of a tile's numbers");
};

/* What a thread keeps for all steps. */
template <typename PATH, typename S>
struct mma_backward_thread {
    mma_own<S::D, S::X ? S::D / 16 : 0> x;
    mma_own<S::D, S::Y ? S::D / 16 : 0> y;
    mma_reader<S::D> reader;
    smem base;
    float lse[2], delta[2]; /* of its own queries */
    mma_tile<PATH, S::STREAMED, S::D, S::THREADS> u, v;
    float number; /* of a streamed query, on its way */
    float dx[S::D / 8][4], dy[S::KEYS ? S::D / 8 : 1][4];
};

/* ---- Rows' numbers --------------------------------------------------------------- */

/* Where the number of a query of this head lies: in dq's row. */
DEVICE uint32_t *
delta_at(const tfast_attention_args &args, const attention_head &h, int64_t query)
{
    return (uint32_t *)((uint16_t *)args.dq.data + query_row(args, h, args.dq, query));
}

/* lse so that whatever has none gets weight 0. */
DEVICE float
lse_of(const tfast_attention_args &args, const attention_head &h, int64_t query)
{
    const float lse = ((const float *)args.lse)[lse_row(args, h) + query];

    return lse == -INFINITY ? INFINITY : lse;
}

enum { DELTA_THREADS = 128 };

/* A warp a query; blocks go on until all rows of all heads are done. */
TFAST_KERNEL(DELTA_THREADS, 4)
attention_mma_delta(const tfast_attention_args args)
{
    const int64_t heads = args.heads * args.batch, warps = DELTA_THREADS / 32;
    const int64_t rows = (args.n_q + warps - 1) / warps;

    for (int64_t i = blockIdx.x; i < heads * rows; i += gridDim.x) {
        const int64_t query = i % rows * warps + threadIdx.x / 32, head = i / rows;
        const attention_head h =
            attention_head_of(args, head / args.heads, head % args.heads);
        if (query < h.n_q) {
            const float delta =
                delta_of<float>(args, h, query, (int)threadIdx.x % 32, 32);
            if (threadIdx.x % 32 == 0) {
                *delta_at(args, h, query) = __float_as_uint(delta);
            }
        }
    }
}

/* ---- A step: one tile of the other side's rows ----------------------------------- */

/* Which tile, of which of the heads that share keys. */
struct mma_step {
    int head, tile;
};

template <typename S>
DEVICE attention_head
head_of_step(const mma_block &block, const mma_step &step)
{
    attention_head h = block.h;

    h.head += S::KEYS ? step.head : 0;
    return h;
}

template <typename S>
DEVICE mma_rows
streamed_u(const tfast_attention_args &args, const attention_head &h, int tile)
{
    const int64_t first = (int64_t)tile * S::STREAMED;

    return S::KEYS ? mma_queries(args, h, args.q, args.dim, first, S::STREAMED)
                   : mma_keys(args, h, args.k, args.dim, first, S::STREAMED);
}

template <typename S>
DEVICE mma_rows
streamed_v(const tfast_attention_args &args, const attention_head &h, int tile)
{
    const int64_t first = (int64_t)tile * S::STREAMED;

    return S::KEYS ? mma_queries(args, h, args.dout, args.dim_v, first, S::STREAMED)
                   : mma_keys(args, h, args.v, args.dim_v, first, S::STREAMED);
}

/* Begins to bring a step's tiles into a stage. */
template <typename PATH, typename S>
DEVICE void
fetch_step(mma_backward_thread<PATH, S> *own, const mma_call &call,
           const mma_block &block, const mma_step &step, int stage)
{
    const tfast_attention_args &args = call.args;
    const attention_head h = head_of_step<S>(block, step);
    const smem u_at = own->base + S::TILES_AT + stage * 2 * S::TILE_BYTES;

    own->u.fetch(u_at, streamed_u<S>(args, h, step.tile), call.chunks);
    own->v.fetch(u_at + S::TILE_BYTES, streamed_v<S>(args, h, step.tile), call.chunks);
    if constexpr (S::KEYS) {
        const int i = threadIdx.x % S::STREAMED;
        const int64_t query = (int64_t)step.tile * S::STREAMED + i;
        const bool is_lse = (int)threadIdx.x < S::STREAMED;
        own->number = is_lse ? INFINITY : 0;
        if ((int)threadIdx.x < 2 * S::STREAMED && query < h.n_q) {
            own->number = is_lse ? lse_of(args, h, query)
                                 : __uint_as_float(*delta_at(args, h, query));
        }
    }
}

/* Ends to; a barrier must follow before anyone reads. */
template <typename PATH, typename S>
DEVICE void
land_step(mma_backward_thread<PATH, S> *own, int stage)
{
    const smem u_at = own->base + S::TILES_AT + stage * 2 * S::TILE_BYTES;

    own->u.template land<0>(u_at);
    own->v.template land<0>(u_at + S::TILE_BYTES);
    if constexpr (S::KEYS) {
        if ((int)threadIdx.x < 2 * S::STREAMED) {
            st_shared_f32(own->base + S::NUMBERS_AT +
                              (stage * 2 * S::STREAMED + (int)threadIdx.x) * 4,
                          own->number);
        }
    }
}

/* lse (or delta, with `second`) of the queries of fragment n's columns. */
template <typename S>
DEVICE float2
numbers_of(smem base, int stage, int n, int second)
{
    const int at = (stage * 2 + second) * S::STREAMED + fragment_column(n, 0);

    return ld_shared_2f32(base + S::NUMBERS_AT + at * 4);
}

/* Whether some query of a tile may not look at some key of it. */
template <typename S>
DEVICE bool
is_step_bounded(const tfast_attention_args &args, const mma_block &block, int tile)
{
    const attention_head &h = block.h;
    const int64_t other = (int64_t)tile * S::STREAMED, end = other + S::STREAMED;
    const int64_t query = S::KEYS ? other : block.first;
    const int64_t last = S::KEYS ? (end < h.n_q ? end : h.n_q) - 1 : block.last;
    const int64_t key = S::KEYS ? block.first : other;

    return key < first_key(args, h, last) ||
           key + (S::KEYS ? S::ROWS : S::STREAMED) > end_key(args, h, query);
}

/* ---- Products -------------------------------------------------------------------- */

/* s = own . tile' */
template <typename PATH, typename T, typename S, int HELD>
DEVICE void
multiply_own(mma_scores<S> *s, const mma_own<S::D, HELD> &own, smem own_at,
             const mma_reader<S::D> &reader, smem tile)
{
#pragma unroll
    for (int k = 0; k < S::D / 16; k++) {
        uint32_t left[4];
        own.template get<S::ROWS>(left, reader, own_at, (int)threadIdx.x / 32 * 16, k);
#pragma unroll
        for (int n = 0; n < S::STREAMED / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4(right, reader.template right<S::STREAMED>(tile, n * 16, 2 * k));
            PATH::template mma<T>(s->at[2 * n], left, right);
            PATH::template mma<T>(s->at[2 * n + 1], left, right + 2);
        }
    }
}

/* out += weights . tile */
template <typename PATH, typename T, typename S>
DEVICE void
add_step(float out[S::D / 8][4], const mma_scores<S> &s, const mma_reader<S::D> &reader,
         smem tile)
{
    uint32_t w[S::STREAMED / 16][4];

    pack_weights<T>(w, s);
#pragma unroll
    for (int k = 0; k < S::STREAMED / 16; k++) {
#pragma unroll
        for (int n = 0; n < S::D / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4_trans(right,
                              reader.template left<S::STREAMED>(tile, k * 16, 2 * n));
            PATH::template mma<T>(out[2 * n], w[k], right);
            PATH::template mma<T>(out[2 * n + 1], w[k], right + 2);
        }
    }
}

/* ---- Weights and gradients of scores --------------------------------------------- */

/* Products become weights: 0 where a query may not look. With softcap `slope` becomes
 * the derivative. */
template <typename PATH, typename S>
DEVICE void
weigh_step(mma_scores<S> *s, mma_scores<S> *slope, const tfast_attention_args &args,
           const mma_block &block, const attention_head &h,
           const mma_backward_thread<PATH, S> &own, int tile, int stage, bool bounded)
{
    constexpr int QUERIES = S::KEYS ? S::STREAMED / 4 : 2; /* of a thread */
    constexpr int KEYS = S::KEYS ? 2 : S::STREAMED / 4;
    const int64_t row = block.first + (int)threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t column = (int64_t)tile * S::STREAMED;
    const float unit = (float)(args.scale * 1.4426950408889634);

#pragma unroll
    for (int x = 0; x < QUERIES; x++) {
        const int64_t query =
            S::KEYS ? column + fragment_column(x / 2, x % 2) : row + x * 8;
        const int64_t first = S::KEYS ? row : column;
        float lse = own.lse[S::KEYS ? 0 : x];
        attention_reach reach = {0, S::KEYS ? 16 : S::STREAMED};
        if constexpr (S::KEYS) {
            const float2 two = numbers_of<S>(own.base, stage, x / 2, 0);
            lse = x % 2 == 0 ? two.x : two.y;
        }
        if (bounded) {
            reach = reach_of(args, h, query, first, S::KEYS ? 16 : S::STREAMED);
        }
#pragma unroll
        for (int y = 0; y < KEYS; y++) {
            const int c = S::KEYS ? x : y, r = S::KEYS ? y : x;
            const int key = S::KEYS ? y * 8 : fragment_column(y / 2, y % 2);
            const bool allowed = reach.first <= key && key < reach.end;
            float *p = &s->at[c / 2][r * 2 + c % 2];
            if constexpr (S::OPTIONS) {
                float *bent = &slope->at[c / 2][r * 2 + c % 2];
                const attention_rule<float> rule = rule_of<float>(args, h);
                const float score =
                    allowed ? score_of(bent, *p, args, h, rule, query, first + key)
                            : -INFINITY;
                *p = score == -INFINITY ? 0 : exponential(score - lse);
            } else {
                *p = allowed ? ex2_approx(fused(*p, unit, lse * -1.44269504f)) : 0;
            }
        }
    }
}

/* Which of a thread's elements dropout keeps: bit 4 n + i for element i of fragment n.
 */
template <typename S>
DEVICE uint32_t
kept_elements(const tfast_attention_args &args, const mma_block &block,
              const attention_head &h, int tile)
{
    const attention_dropout dropout = dropout_of(args, h);
    const int64_t row = block.first + (int)threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    uint32_t kept = 0;

#pragma unroll
    for (int i = 0; i < S::STREAMED / 8; i++) { /* a block of 16 x 16's columns by 2 */
        const int64_t column =
            (int64_t)tile * S::STREAMED + fragment_column(i / 2 * 2, i % 2);
        uint32_t word[4];
        dropout_words(word, dropout, S::KEYS ? column : row, S::KEYS ? row : column);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int r = e / 2 * 8, c = (int)threadIdx.x % 4 * 2 + i % 2 + e % 2 * 8;
            const int g = (int)threadIdx.x % 32 / 4 + r;
            const bool is = is_kept(word, dropout, S::KEYS ? c : g, S::KEYS ? g : c);
            const int fragment = i / 2 * 2 + e % 2, element = e / 2 * 2 + i % 2;
            kept |= (uint32_t)is << (fragment * 4 + element);
        }
    }
    return kept;
}

/* Products of dout and v become gradients of scores, but for scale. */
template <typename PATH, typename S>
DEVICE void
finish_step(mma_scores<S> *e, const mma_scores<S> &p, const mma_scores<S> &slope,
            const tfast_attention_args &args, const mma_backward_thread<PATH, S> &own,
            int stage, uint32_t kept, float scale)
{
#pragma unroll
    for (int n = 0; n < S::STREAMED / 8; n++) {
        float2 two = make_float2(0, 0);
        if constexpr (S::KEYS) {
            two = numbers_of<S>(own.base, stage, n, 1);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float delta =
                S::KEYS ? (i % 2 == 0 ? two.x : two.y) : own.delta[i / 2];
            float x = e->at[n][i];
            if constexpr (S::OPTIONS) {
                x = (kept >> (n * 4 + i) & 1) != 0 ? x * scale : 0;
            }
            x = p.at[n][i] == 0 ? 0 : p.at[n][i] * (x - delta);
            if constexpr (S::OPTIONS) { /* a slope may be NaN where the gradient is 0 */
                x = args.softcap != 0 && x != 0 ? x * slope.at[n][i] : x;
            }
            e->at[n][i] = x;
        }
    }
}

/* ---- A block --------------------------------------------------------------------- */

/* All of one step, once its tiles are there. `careful`: some of their elements are not
 * finite, and some query may not look at some key. */
template <typename PATH, typename T, typename S>
DEVICE void
take_step(mma_backward_thread<PATH, S> *own, const mma_call &call,
          const mma_block &block, const mma_step &step, int stage, bool bounded,
          bool careful)
{
    const tfast_attention_args &args = call.args;
    const attention_head h = head_of_step<S>(block, step);
    const smem u_at = own->base + S::TILES_AT + stage * 2 * S::TILE_BYTES;
    const smem v_at = u_at + S::TILE_BYTES;
    mma_scores<S> s = {}, e = {}, slope;
    uint32_t kept = ~0u;
    float scale = 1;

    multiply_own<PATH, T>(&s, own->x, own->base, own->reader, u_at);
    weigh_step(&s, &slope, args, block, h, *own, step.tile, stage, bounded);
    if (S::OPTIONS && args.dropout_p > 0) {
        kept = kept_elements<S>(args, block, h, step.tile);
        scale = (float)dropout_of(args, h).scale;
    }
    if constexpr (S::KEYS) {
        mma_scores<S> w = s;
        if constexpr (S::OPTIONS) {
#pragma unroll
            for (int i = 0; i < S::STREAMED / 2; i++) {
                float *x = &w.at[i / 4][i % 4];
                *x = (kept >> i & 1) != 0 ? *x * scale : 0;
            }
        }
        if (careful) {
            add_carefully<T>(own->dy, w, streamed_v<S>(args, h, step.tile));
        } else {
            add_step<PATH, T>(own->dy, w, own->reader, v_at);
        }
    }
    multiply_own<PATH, T>(&e, own->y, own->base + S::Y_AT, own->reader, v_at);
    finish_step(&e, s, slope, args, *own, stage, kept, scale);
    if (careful) {
        add_carefully<T>(own->dx, e, streamed_u<S>(args, h, step.tile));
    } else {
        add_step<PATH, T>(own->dx, e, own->reader, u_at);
    }
}

template <typename PATH, typename T, typename S>
DEVICE void
walk_steps(mma_backward_thread<PATH, S> *own, const mma_call &call,
           const mma_block &block, const char *base)
{
    const tfast_attention_args &args = call.args;
    const attention_head &h = block.h;
    const int64_t begin_row =
        S::KEYS ? first_query(args, h, block.first) : first_key(args, h, block.first);
    const int64_t end_row =
        S::KEYS ? end_query(args, h, block.last) : end_key(args, h, block.last);
    const int heads = S::KEYS ? (int)(args.heads / args.kv_heads) : 1;
    const int begin = (int)(begin_row / S::STREAMED);
    const int end =
        begin_row < end_row ? (int)((end_row + S::STREAMED - 1) / S::STREAMED) : begin;
    mma_step step = {0, begin};
    int stage = 0;

    if (begin == end || heads == 0) {
        return;
    }
    fetch_step(own, call, block, step, stage);
    while (step.head < heads) {
        const bool bounded = S::OPTIONS || is_step_bounded<S>(args, block, step.tile);
        const char *u_at = base + S::TILES_AT + stage * 2 * S::TILE_BYTES;
        const bool last = step.tile + 1 == end;
        const mma_step next = {step.head + last, last ? begin : step.tile + 1};
        land_step(own, stage);
        bool finite = !bounded || is_finite<T>(own->u, u_at);
        if (S::KEYS && bounded) {
            finite = finite && is_finite<T>(own->v, u_at + S::TILE_BYTES);
        }
        /* these tiles are there, and nobody reads the other stage any more */
        const bool careful = __syncthreads_or(!finite) != 0;
        if (next.head < heads) {
            fetch_step(own, call, block, next, stage ^ 1);
        }
        take_step<PATH, T>(own, call, block, step, stage, bounded, careful);
        step = next;
        stage ^= 1;
    }
}

/* Rows of a gradient from the warp's fragments. */
template <typename T, typename S>
DEVICE void
store_rows(const mma_rows &rows, const float x[S::D / 8][4], float scale, bool pairs)
{
    const int row = (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4;

#pragma unroll
    for (int i = 0; i < S::D / 4; i++) {
        const float *two = &x[i / 2][i % 2 * 2];
        write_pair(rows, row + i % 2 * 8, fragment_column(i / 2, 0),
                   T::pack(two[0] * scale, two[1] * scale), pairs);
    }
}

/* The own rows of an array, and their place. */
template <typename S>
DEVICE mma_rows
own_rows(const tfast_attention_args &args, const mma_block &block,
         const tfast_attention_rows &rows, int64_t dims)
{
    return S::KEYS ? mma_keys(args, block.h, rows, dims, block.first, S::ROWS)
                   : mma_queries(args, block.h, rows, dims, block.first, S::ROWS);
}

template <typename PATH, typename S>
DEVICE void
read_own(mma_backward_thread<PATH, S> *own, const mma_call &call,
         const mma_block &block)
{
    const tfast_attention_args &args = call.args;
    const mma_rows x = own_rows<S>(args, block, S::KEYS ? args.k : args.q, args.dim);
    const mma_rows y =
        own_rows<S>(args, block, S::KEYS ? args.v : args.dout, args.dim_v);
    const int row = (int)threadIdx.x / 32 * 16;

    own->x.read(x, row, call.chunks);
    own->y.read(y, row, call.chunks);
    if constexpr (!S::X) {
        mma_tile<PATH, S::ROWS, S::D, S::THREADS> tile;
        tile.fetch(own->base, x, call.chunks);
        tile.template land<0>(own->base);
    }
    if constexpr (!S::Y) {
        mma_tile<PATH, S::ROWS, S::D, S::THREADS> tile;
        tile.fetch(own->base + S::Y_AT, y, call.chunks);
        tile.template land<0>(own->base + S::Y_AT);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t query = block.first + row + (int)threadIdx.x % 32 / 4 + r * 8;
        const bool is = !S::KEYS && query <= block.last;
        own->lse[r] = is ? lse_of(args, block.h, query) : INFINITY;
        own->delta[r] = is ? __uint_as_float(*delta_at(args, block.h, query)) : 0;
    }
}

template <typename T, typename S, typename PATH>
DEVICE void
store_own(const mma_backward_thread<PATH, S> &own, const mma_call &call,
          const mma_block &block)
{
    const tfast_attention_args &args = call.args;
    const float scale = (float)args.scale;

    if constexpr (S::KEYS) { /* also of keys past kv_lens: zeros */
        mma_rows dk = own_rows<S>(args, block, args.dk, args.dim);
        mma_rows dv = own_rows<S>(args, block, args.dv, args.dim_v);
        dk.n = dv.n = mma_left(block.h.rows_k, block.first, S::ROWS);
        if (args.dk.data != nullptr) {
            store_rows<T, S>(dk, own.dx, scale, call.pairs);
        }
        if (args.dv.data != nullptr) {
            store_rows<T, S>(dv, own.dy, 1, call.pairs);
        }
    } else {
        __syncthreads(); /* nobody reads the numbers in these rows any more */
        store_rows<T, S>(own_rows<S>(args, block, args.dq, args.dim), own.dx, scale,
                         call.pairs);
    }
}

template <typename PATH, typename T, typename S>
TFAST_KERNEL(S::THREADS, S::BLOCKS)
attention_mma_backward(const __grid_constant__ mma_call call)
{
    if constexpr (PATH::HERE) {
        SHARED_DYNAMIC(base);
        SHARED(mma_block, block, 1);
        const tfast_attention_args &args = call.args;
        const int64_t size = S::KEYS ? args.n_k : args.n_q;
        const int64_t heads = S::KEYS ? args.kv_heads : args.heads;
        const int64_t tiles = (size + S::ROWS - 1) / S::ROWS;
        const int64_t tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
        mma_backward_thread<PATH, S> own;

        if (threadIdx.x == 0) { /* the tile with most to do comes first */
            const int64_t group = S::KEYS ? args.heads / args.kv_heads : 1;
            block->h = attention_head_of(args, head / heads, head % heads * group);
            block->first = (S::KEYS ? tile : tiles - 1 - tile) * S::ROWS;
            const int64_t rows = S::KEYS ? block->h.n_k : block->h.n_q;
            block->last = block->first + mma_left(rows, block->first, S::ROWS) - 1;
        }
        __syncthreads();
        if (block->first >= (S::KEYS ? block->h.rows_k : block->h.n_q)) {
            return;
        }
        own.base = smem_address(base);
#pragma unroll
        for (int i = 0; i < S::D / 2; i++) {
            own.dx[i / 4][i % 4] = 0;
            if constexpr (S::KEYS) {
                own.dy[i / 4][i % 4] = 0;
            }
        }
        read_own(&own, call, *block);
        if (block->last >= block->first) {
            walk_steps<PATH, T>(&own, call, *block, base);
        }
        store_own<T>(own, call, *block);
    }
}

#endif
