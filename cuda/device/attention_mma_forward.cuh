/* Attention forward by tensor cores: a warp owns 16 PIECES queries, a block WARPS
 * warps, and walks over their keys from the last tile to the first with an online
 * softmax. The weights go from one product to the next in registers.
 *
 * Two kernels a tile of dims: a fast one that knows bounds alone (causal, window,
 * lengths), and one with OPTIONS (mask, bias, ALiBi, softcap, dropout, any scale),
 * which takes registers that the first needs for its larger tiles. */
#ifndef TFAST_ATTENTION_MMA_FORWARD_CUH
#define TFAST_ATTENTION_MMA_FORWARD_CUH

#include "attention_mma.cuh"

/* ---- Tiles ----------------------------------------------------------------------- */

/* A kernel's sizes; HELD: the pieces of q in registers, see mma_own. Blocks of fewer
 * than 8 warps are asked for twice a multiprocessor, which bounds them to 255 registers
 * a thread either way. */
template <typename PATH, int DIM, bool HAS_OPTIONS>
struct mma_forward_shape {
    static constexpr bool OPTIONS = HAS_OPTIONS;
    static constexpr int D = DIM;
    static constexpr bool ASYNC = PATH::ASYNC, FAST = !OPTIONS;
    static constexpr int WARPS = FAST && D > 64 && !(ASYNC && D == 128) ? 8 : 4;
    static constexpr int PIECES = OPTIONS || WARPS == 8 ? 1 : 2;
    static constexpr int STREAMED = D == 256 ? (ASYNC && FAST ? 32 : 16)
                                    : D == 192 && ASYNC != FAST ? 32
                                    : D == 192 && !ASYNC        ? 16
                                    : D == 128 && ASYNC == FAST ? 32
                                    : D == 64 && FAST           ? 48
                                                                : 64;
    static constexpr int HELD = D == 256 && !ASYNC && OPTIONS             ? 0
                                : D == 256 || (D == 192 && ASYNC && FAST) ? 8
                                : ASYNC && FAST && (D == 96 || D == 128)  ? 0
                                                                          : D / 16;
    static constexpr int BLOCKS = WARPS == 8 ? 1 : 2;

    static constexpr int THREADS = WARPS * 32, ROWS = WARPS * PIECES * 16;
    static constexpr int STAGES = ASYNC ? 2 : 1; /* tiles of keys */
    static constexpr int OWN_BYTES = ROWS * (D - HELD * 16) * 2;
    static constexpr int TILE_BYTES = STREAMED * D * 2;
    static constexpr int BYTES = OWN_BYTES + (STAGES + 1) * TILE_BYTES;
    static_assert(BYTES + (int)sizeof(mma_block) <= (ASYNC ? 101376 : 65536),
                  "what sm_86, or sm_75, has for a block");
};

/* What a warp keeps. Rows: g, g + 8 of each piece. With OPTIONS scores are in natural
 * units, otherwise in those of log2. */
template <typename S>
struct mma_softmax {
    float out[S::PIECES][S::D / 8][4];
    float top[S::PIECES][2], sum[S::PIECES][2]; /* sum: of this thread's keys */
};

/* Where a thread's piece of a tile of scores is. */
struct mma_place {
    int64_t query; /* of fragment rows g; the other is 8 further */
    int64_t key;   /* the tile's first */
};

/* ---- Scores ---------------------------------------------------------------------- */

/* Forbids what is out of bounds, for tiles where anything is. */
template <typename S>
DEVICE void
bound_scores(mma_scores<S> *s, const tfast_attention_args &args,
             const attention_head &h, const mma_place &place)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const attention_reach reach =
            reach_of(args, h, place.query + r * 8, place.key, S::STREAMED);
#pragma unroll
        for (int i = 0; i < S::STREAMED / 4; i++) {
            const int key = fragment_column(i / 2, i % 2);
            if (key < reach.first || key >= reach.end) {
                s->at[i / 2][r * 2 + i % 2] = -INFINITY;
            }
        }
    }
}

/* The same for row r of a fragment, and everything else that makes a score from a
 * product. */
template <typename S>
DEVICE void
finish_row(mma_scores<S> *s, int r, const tfast_attention_args &args,
           const attention_head &h, const attention_rule<float> &rule,
           const mma_place &place)
{
    [[maybe_unused]] constexpr int AT_ONCE = mma_scores<S>::AT_ONCE;
    const attention_reach reach =
        reach_of(args, h, place.query, place.key, S::STREAMED);

#pragma unroll(AT_ONCE)
    for (int n = 0; n < S::STREAMED / 8; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int key = fragment_column(n, i);
            float *score = &s->at[0][r * 2 + i], slope;
            if (reach.first <= key && key < reach.end) {
                *score = score_of(&slope, *score, args, h, rule, place.query,
                                  place.key + key);
            } else {
                *score = -INFINITY;
            }
        }
        turn_fragments(s, r * 2);
    }
}

template <typename S>
DEVICE void
finish_mma_scores(mma_scores<S> *s, const tfast_attention_args &args,
                  const attention_head &h, const attention_rule<float> &rule,
                  const mma_place &place)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        finish_row(s, r, args, h, rule, {place.query + r * 8, place.key});
    }
}

/* Scores become weights; the output and sum so far are made relative to the new top. */
template <typename S>
DEVICE void
soften_piece(mma_scores<S> *s, mma_softmax<S> *state, int piece, float unit)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY, sum = 0;
#pragma unroll
        for (int i = 0; i < S::STREAMED / 4; i++) {
            top = fmaxf(top, s->at[i / 2][r * 2 + i % 2]);
        }
        top = fmaxf(state->top[piece][r], quad_max(top) * (S::OPTIONS ? 1 : unit));
        const float base = top == -INFINITY ? 0 : top;
        const float back = state->top[piece][r] - base;
        const float fade = S::OPTIONS ? exponential(back) : ex2_approx(back);
        state->top[piece][r] = top;
#pragma unroll
        for (int i = 0; i < S::STREAMED / 4; i++) {
            float *x = &s->at[i / 2][r * 2 + i % 2];
            *x = S::OPTIONS ? exponential(*x - base)
                            : ex2_approx(fused(*x, unit, -base));
            sum += *x;
        }
        state->sum[piece][r] = fused(state->sum[piece][r], fade, sum);
#pragma unroll
        for (int i = 0; i < S::D / 4; i++) {
            state->out[piece][i / 2][r * 2 + i % 2] *= fade;
        }
    }
}

/* Weights of dropped elements become 0; the others' factor is the output's, at last. */
template <typename S>
DEVICE void
drop_weights(mma_scores<S> *s, const attention_dropout &dropout, const mma_place &place)
{
#pragma unroll
    for (int block = 0; block < S::STREAMED / 16; block++) {
        uint32_t word[4];
        const int first = fragment_column(block * 2, 0);
        dropout_words(word, dropout, place.query, place.key + first);
#pragma unroll
        for (int i = 0; i < 8; i++) { /* of two fragments: each word has a row's pair */
            const uint32_t both = word[i / 2 % 2 * 2 + i / 4];
            const uint32_t number = i % 2 == 1 ? both >> 16 : both & 0xFFFF;
            if (number < dropout.threshold) {
                s->at[block * 2 + i / 4][i % 4] = 0;
            }
        }
    }
}

/* ---- Values ---------------------------------------------------------------------- */

/* out += weights . values */
template <typename PATH, typename T, typename S>
DEVICE void
add_values(mma_softmax<S> *state, const mma_scores<S> s[S::PIECES],
           const mma_reader<S::D> &reader, smem values)
{
    uint32_t w[S::PIECES][S::STREAMED / 16][4];

#pragma unroll
    for (int p = 0; p < S::PIECES; p++) {
        pack_weights<T>(w[p], s[p]);
    }
#pragma unroll
    for (int k = 0; k < S::STREAMED / 16; k++) {
#pragma unroll
        for (int n = 0; n < S::D / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4_trans(right,
                              reader.template left<S::STREAMED>(values, k * 16, 2 * n));
#pragma unroll
            for (int p = 0; p < S::PIECES; p++) {
                PATH::template mma<T>(state->out[p][2 * n], w[p][k], right);
                PATH::template mma<T>(state->out[p][2 * n + 1], w[p][k], right + 2);
            }
        }
    }
}

/* ---- A block --------------------------------------------------------------------- */

/* What a thread keeps for all tiles of keys. */
template <typename S>
struct mma_forward_thread {
    mma_own<S::D, S::HELD> own[S::PIECES];
    mma_reader<S::D> reader;
    smem q;
};

/* Tile number `tile` of an array's rows. */
template <typename S>
DEVICE mma_rows
keys_of(const tfast_attention_args &args, const attention_head &h,
        const tfast_attention_rows &rows, int64_t dims, int tile)
{
    return mma_keys(args, h, rows, dims, (int64_t)tile * S::STREAMED, S::STREAMED);
}

/* Whether any of the block's queries may not look at all of a tile's keys. */
template <typename S>
DEVICE bool
is_bounded(const tfast_attention_args &args, const mma_block &block, int tile)
{
    const int64_t key = (int64_t)tile * S::STREAMED;

    return key < first_key(args, block.h, block.last) ||
           key + S::STREAMED > end_key(args, block.h, block.first);
}

/* The first row of a warp's piece, from the block's first. */
template <typename S>
DEVICE int
piece_row(int piece)
{
    return (int)(threadIdx.x / 32 * S::PIECES + piece) * 16;
}

/* Products of queries and keys. */
template <typename PATH, typename T, typename S>
DEVICE void
multiply_keys(mma_scores<S> s[S::PIECES], const mma_forward_thread<S> &own, smem keys)
{
#pragma unroll
    for (int k = 0; k < S::D / 16; k++) {
        uint32_t left[S::PIECES][4];
#pragma unroll
        for (int p = 0; p < S::PIECES; p++) {
            own.own[p].template get<S::ROWS>(left[p], own.reader, own.q,
                                             piece_row<S>(p), k);
        }
#pragma unroll
        for (int n = 0; n < S::STREAMED / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4(right,
                        own.reader.template right<S::STREAMED>(keys, n * 16, 2 * k));
#pragma unroll
            for (int p = 0; p < S::PIECES; p++) {
                PATH::template mma<T>(s[p].at[2 * n], left[p], right);
                PATH::template mma<T>(s[p].at[2 * n + 1], left[p], right + 2);
            }
        }
    }
}

/* From products to weights, for all pieces. */
template <typename S>
DEVICE void
weigh_keys(mma_scores<S> s[S::PIECES], mma_softmax<S> *state,
           const tfast_attention_args &args, const mma_block &block, int64_t key,
           bool bounded)
{
#pragma unroll
    for (int p = 0; p < S::PIECES; p++) {
        const int row = piece_row<S>(p) + (int)(threadIdx.x % 32 / 4);
        const mma_place place = {block.first + row, key};
        if constexpr (S::OPTIONS) {
            attention_rule<float> rule = rule_of<float>(args, block.h);
            rule.scale = block.unit;
            finish_mma_scores(&s[p], args, block.h, rule, place);
        } else if (bounded) {
            bound_scores(&s[p], args, block.h, place);
        }
        soften_piece(&s[p], state, p, block.unit);
        if constexpr (S::OPTIONS) {
            if (args.dropout_p > 0) {
                drop_weights(&s[p], dropout_of(args, block.h), place);
            }
        }
    }
}

/* Writes the outputs and lse, sinks included. */
template <typename T, typename S>
DEVICE void
finish_mma_rows(mma_softmax<S> *state, const mma_call &call, const mma_block &block)
{
    const tfast_attention_args &args = call.args;
    const attention_head &h = block.h;
    const mma_rows out =
        columns_from(mma_queries(args, h, args.out, args.dim_v, block.first, S::ROWS),
                     fragment_column(0, 0));
    const float *sinks = (const float *)args.sinks;
    const float unit = S::OPTIONS ? 1 : 1.44269504f;
    const float sink = sinks == nullptr ? -INFINITY : sinks[h.head];
    const float kept =
        S::OPTIONS && args.dropout_p > 0 ? (float)dropout_of(args, h).scale : 1;
    const float back = power_out<T>(block, EXPONENT_V);
    const int lane = threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < S::PIECES * 2; i++) {
        const int p = i / 2, r = i % 2, row = piece_row<S>(p) + lane / 4 + r * 8;
        const float own = quad_sum(state->sum[p][r]), top = state->top[p][r] / unit;
        const float high = fmaxf(top, sink), fade = exponential(top - high);
        const float sum = own * fade + exponential(sink - high);
        const bool empty = own == 0;
        const float factor = empty ? 0 : kept * fade / sum;
        if (args.lse != nullptr && lane % 4 == 0 && row < out.n) {
            ((float *)args.lse)[lse_row(args, h) + block.first + row] =
                empty ? -INFINITY : high + logf(sum);
        }
#pragma unroll
        for (int n = 0; n < S::D / 8; n++) {
            const float *o = &state->out[p][n][2 * r];
            const uint32_t pair =
                empty ? 0 : T::store(o[0] * factor * back, o[1] * factor * back);
            write_pair(out, row, n * 8, pair, call.pairs);
        }
    }
}

template <typename PATH, typename T, typename S>
DEVICE void
walk_keys(const mma_call &call, const mma_block &block,
          const mma_forward_thread<S> &own, char *base)
{
    const tfast_attention_args &args = call.args;
    const attention_head &h = block.h;
    const smem k_at = own.q + S::OWN_BYTES, v_at = k_at + S::STAGES * S::TILE_BYTES;
    const int begin = (int)(first_key(args, h, block.first) / S::STREAMED);
    int tile =
        (int)((end_key(args, h, block.last) + S::STREAMED - 1) / S::STREAMED) - 1;
    mma_tile<PATH, S::STREAMED, S::D, S::THREADS> k_tile, v_tile;
    mma_softmax<S> state = {};
    int stage = 0;

#pragma unroll
    for (int i = 0; i < S::PIECES * 2; i++) {
        state.top[i / 2][i % 2] = -INFINITY;
    }
    if (tile >= begin) {
        k_tile.fetch(k_at, keys_of<S>(args, h, args.k, args.dim, tile), call.chunks);
    }
    for (; tile >= begin; tile--) {
        const bool bounded = S::OPTIONS || is_bounded<S>(args, block, tile);
        const smem keys = k_at + stage * S::TILE_BYTES;
        mma_scores<S> s[S::PIECES] = {};
        k_tile.template land<0, T>(keys, power_in<T>(block, EXPONENT_K));
        __syncthreads(); /* keys are there, and nobody reads the old values any more */
        v_tile.fetch(v_at, keys_of<S>(args, h, args.v, args.dim_v, tile), call.chunks);
        stage ^= PATH::ASYNC;
        if (tile > begin) {
            k_tile.fetch(k_at + stage * S::TILE_BYTES,
                         keys_of<S>(args, h, args.k, args.dim, tile - 1), call.chunks);
        } else if constexpr (PATH::ASYNC) {
            cp_async_commit(); /* an empty group: as many as ever are later */
        }
        multiply_keys<PATH, T>(s, own, keys);
        weigh_keys(s, &state, args, block, (int64_t)tile * S::STREAMED, bounded);
        v_tile.template land<1, T>(v_at, power_in<T>(block, EXPONENT_V));
        const char *landed = base + S::OWN_BYTES + S::STAGES * S::TILE_BYTES;
        /* values are there, and nobody reads these keys any more */
        if (__syncthreads_or(bounded && !is_finite<T>(v_tile, landed)) != 0) {
#pragma unroll
            for (int p = 0; p < S::PIECES; p++) {
                add_carefully<T, S::D>(state.out[p], s[p], landed, 0);
            }
        } else {
            add_values<PATH, T>(&state, s, own.reader, v_at);
        }
    }
    finish_mma_rows<T>(&state, call, block);
}

/* Which head and rows are the block's; by its first warp. */
template <typename T, typename S>
DEVICE void
begin_block(mma_block *block, const mma_call &call)
{
    const tfast_attention_args &args = call.args;
    const int64_t tiles = (args.n_q + S::ROWS - 1) / S::ROWS;
    const int64_t item = blockIdx.x / tiles, head = item % args.heads;

    if constexpr (T::SCALED) {
        for (int tensor = 0; tensor <= EXPONENT_V; tensor++) {
            const int exponent =
                read_exponent(call.exponents, args, tensor, item / args.heads, head);
            if (threadIdx.x == 0) {
                block->exponent[tensor] = exponent;
            }
        }
    }
    if (threadIdx.x == 0) {
        block->h = attention_head_of(args, item / args.heads, head);
        block->first = (tiles - 1 - blockIdx.x % tiles) * S::ROWS; /* long first */
        block->last = block->first + mma_left(block->h.n_q, block->first, S::ROWS) - 1;
        block->unit = unit_of<T, S>(args, block->exponent[EXPONENT_Q],
                                    block->exponent[EXPONENT_K]);
    }
}

template <typename PATH, typename T, typename S>
TFAST_KERNEL(S::THREADS, S::BLOCKS)
attention_mma_forward(const __grid_constant__ mma_call call)
{
    SHARED_DYNAMIC(base);
    SHARED(mma_block, block, 1);
    const tfast_attention_args &args = call.args;
    mma_forward_thread<S> own;

    if (threadIdx.x < 32) {
        begin_block<T, S>(block, call);
    }
    __syncthreads();
    if (block->last < block->first) {
        return;
    }
    const mma_rows q =
        mma_queries(args, block->h, args.q, args.dim, block->first, S::ROWS);
    const float power = power_in<T>(*block, EXPONENT_Q);
    own.q = smem_address(base);
#pragma unroll
    for (int p = 0; p < S::PIECES; p++) {
        own.own[p].template read<T>(q, piece_row<S>(p), call.chunks, power);
    }
    if constexpr (S::OWN_BYTES > 0) { /* a barrier follows before it is read */
        typedef mma_own<S::D, S::HELD> held;
        mma_tile<PATH, S::ROWS, held::REST, S::THREADS> q_tile;
        q_tile.fetch(own.q, held::rest(q), call.chunks);
        q_tile.template land<0, T>(own.q, power);
    }
    walk_keys<PATH, T>(call, *block, own, base);
}

#endif
