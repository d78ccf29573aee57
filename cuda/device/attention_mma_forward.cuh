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
    /* Whether registers hold the addresses of the next tiles of keys and values. */
    static constexpr bool KEPT = D <= 128;

    static constexpr int THREADS = WARPS * 32, ROWS = WARPS * PIECES * 16;
    /* Tiles of keys in shared memory. With 128 dims one, for two blocks on sm_86. */
    static constexpr int STAGES = ASYNC && !(FAST && D == 128) ? 2 : 1;
    static constexpr int OWN_BYTES = ROWS * (D - HELD * 16) * 2;
    static constexpr int TILE_BYTES = STREAMED * D * 2;
    static constexpr int BYTES = OWN_BYTES + (STAGES + 1) * TILE_BYTES;
    static_assert(BYTES + (int)sizeof(mma_block) <= (ASYNC ? 101376 : 65536),
                  "what sm_86, or sm_75, has for a block");
    static_assert(!FAST || D > 128 || !ASYNC || D == 96 ||
                      2 * (BYTES + 1024 + (int)sizeof(mma_block)) <= 102400,
                  "two blocks on sm_86");
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

/* Scores become weights; the output and sum so far are made relative to the new top.
 * The later a tile, the more rarely it has a new top in any row. */
template <typename S>
DEVICE void
soften_piece(mma_scores<S> *s, mma_softmax<S> *state, int piece, float unit)
{
    float fade[2];

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
        fade[r] = S::OPTIONS ? exponential(back) : ex2_approx(back);
        state->top[piece][r] = top;
#pragma unroll
        for (int i = 0; i < S::STREAMED / 4; i++) {
            float *x = &s->at[i / 2][r * 2 + i % 2];
            *x = S::OPTIONS ? exponential(*x - base)
                            : ex2_approx(fused(*x, unit, -base));
            sum += *x;
        }
        state->sum[piece][r] = fused(state->sum[piece][r], fade[r], sum);
    }
    if (__any_sync(~0u, fade[0] != 1 || fade[1] != 1)) {
#pragma unroll
        for (int i = 0; i < S::D / 2; i++) {
            state->out[piece][i / 4][i % 4] *= fade[i % 4 / 2];
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

/* A thread's part of a tile of keys or values, whose first row is `head` elements
 * behind rows.data. */
template <typename S, typename TILE>
DEVICE mma_rows
part_of_keys(const attention_head &h, const tfast_attention_rows &rows, int64_t head,
             int64_t dims, int tile)
{
    const int64_t first = (int64_t)tile * S::STREAMED;
    const uint16_t *data = (const uint16_t *)rows.data + head + first * rows.row;

    return TILE::part_of(
        {(uint16_t *)data, rows.row, mma_left(h.n_k, first, S::STREAMED), (int)dims});
}

/* Begins to fetch the keys before those of `tile`, of which `k` is a thread's part. */
template <typename S, typename TILE>
DEVICE void
fetch_next(TILE *k_tile, mma_rows *k, smem to, const mma_call &call,
           const mma_block &block, int tile)
{
    const tfast_attention_args &args = call.args;

    if (tile > block.begin) {
        if constexpr (S::KEPT) {
            TILE::step_back(k, -2 * S::STREAMED * args.k.row);
        } else {
            *k = part_of_keys<S, TILE>(block.h, args.k, block.k, args.dim, tile - 1);
        }
        k_tile->fetch_part(to, *k, call.whole);
    } else if constexpr (S::ASYNC) {
        cp_async_commit(); /* empty, so that land() counts the same groups */
    }
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
    typedef mma_tile<PATH, S::STREAMED, S::D, S::THREADS> tile_type;
    tile_type k_tile, v_tile;
    int tile = block.end - 1;
    mma_rows k = part_of_keys<S, tile_type>(h, args.k, block.k, args.dim, tile);
    mma_rows v = part_of_keys<S, tile_type>(h, args.v, block.v, args.dim_v, tile);
    mma_softmax<S> state = {};
    int stage = 0;

#pragma unroll
    for (int i = 0; i < S::PIECES * 2; i++) {
        state.top[i / 2][i % 2] = -INFINITY;
    }
    if (tile >= block.begin) {
        k_tile.fetch_part(k_at, k, call.whole);
    }
    for (; tile >= block.begin; tile--) {
        const bool bounded =
            S::OPTIONS || tile < block.free_begin || tile >= block.free_end;
        const smem keys = k_at + stage * S::TILE_BYTES;
        mma_scores<S> s[S::PIECES] = {};
        k_tile.template land<0, T>(keys, power_in<T>(block, EXPONENT_K));
        __syncthreads(); /* keys are there, and nobody reads the old values any more */
        if constexpr (!S::KEPT) {
            v = part_of_keys<S, tile_type>(h, args.v, block.v, args.dim_v, tile);
        }
        v_tile.fetch_part(v_at, v, call.whole);
        if constexpr (S::KEPT) {
            tile_type::step_back(&v, -2 * S::STREAMED * args.v.row);
        }
        multiply_keys<PATH, T>(s, own, keys);
        if constexpr (S::STAGES == 2 || !PATH::ASYNC) {
            stage ^= S::STAGES == 2;
            fetch_next<S>(&k_tile, &k, k_at + stage * S::TILE_BYTES, call, block, tile);
        }
        weigh_keys(s, &state, args, block, (int64_t)tile * S::STREAMED, bounded);
        v_tile.template land<S::STAGES - 1, T>(v_at, power_in<T>(block, EXPONENT_V));
        const char *landed = base + S::OWN_BYTES + S::STAGES * S::TILE_BYTES;
        /* values are there, and nobody reads these keys any more */
        const bool careful =
            __syncthreads_or(bounded && !is_finite<T>(v_tile, landed)) != 0;
        if constexpr (S::STAGES == 1 && PATH::ASYNC) {
            fetch_next<S>(&k_tile, &k, k_at, call, block, tile);
        }
        if (careful) {
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

/* Which tiles of keys the block walks, and where bounds cut none of their scores. */
template <typename S>
DEVICE void
find_tiles(mma_block *block, const tfast_attention_args &args)
{
    const attention_head &h = block->h;
    const int64_t first = first_key(args, h, block->last);

    block->k = key_row(args, h, args.k, 0);
    block->v = key_row(args, h, args.v, 0);
    block->begin = (int)(first_key(args, h, block->first) / S::STREAMED);
    block->end = (int)((end_key(args, h, block->last) + S::STREAMED - 1) / S::STREAMED);
    block->free_begin = (int)((first + S::STREAMED - 1) / S::STREAMED);
    block->free_end = (int)(end_key(args, h, block->first) / S::STREAMED);
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
        find_tiles<S>(block, args);
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
        q_tile.fetch(own.q, held::rest(q), call.whole);
        q_tile.template land<0, T>(own.q, power);
    }
    walk_keys<PATH, T>(call, *block, own, base);
}

#endif
