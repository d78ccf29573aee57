/* Attention backward by tensor cores, deterministic: one kernel owns queries and makes
 * dq, one owns keys and makes dk and dv of all heads that share them. Both make the
 * weights anew from lse. A warp owns 16 rows and walks over tiles of the other side's,
 * two stages deep, from the last one on: the tiles before it have all rows, so that
 * their addresses are the last one's minus constants.
 *
 *            own rows    streamed   made
 *   dq       q, dout     k, v       dq  += ds k
 *   dk, dv   k, v        q, dout    dk  += ds' q, dv += p' dout
 *
 * dout . out - dlse of each query is needed by both: a kernel before them writes these
 * numbers to the call's scratch. */
#ifndef TFAST_ATTENTION_MMA_BACKWARD_CUH
#define TFAST_ATTENTION_MMA_BACKWARD_CUH

#include "attention_mma_backward_scores.cuh"

/* ---- A step: one tile of the other side's rows ----------------------------------- */

/* Which tile, of which of the heads that share keys. */
struct mma_step {
    int head, tile;
};

template <typename S>
DEVICE attention_head
head_of_step(const mma_backward_block &block, const mma_step &step)
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

/* Finds the thread's parts of a step's tiles. */
template <typename PATH, typename S>
DEVICE void
find_parts(mma_backward_thread<PATH, S> *own, const mma_call &call,
           const mma_backward_block &block, const mma_step &step)
{
    typedef mma_tile<PATH, S::STREAMED, S::D, S::THREADS> tile_type;
    const tfast_attention_args &args = call.args;
    const attention_head h = head_of_step<S>(block, step);

    own->u_part = tile_type::part_of(streamed_u<S>(args, h, step.tile));
    own->v_part = tile_type::part_of(streamed_v<S>(args, h, step.tile));
    if constexpr (S::KEYS) {
        const int64_t query =
            (int64_t)step.tile * S::STREAMED + threadIdx.x % S::STREAMED;
        own->number_at = (int)threadIdx.x < S::STREAMED
                             ? (const float *)args.lse + lse_row(args, h) + query
                             : call.delta + number_row(args, h) + query;
        own->has_number = (int)threadIdx.x < 2 * S::STREAMED && query < h.n_q;
    }
}

/* Moves them to the tiles before, of the same head. */
template <typename PATH, typename S>
DEVICE void
step_parts_back(mma_backward_thread<PATH, S> *own, const tfast_attention_args &args)
{
    typedef mma_tile<PATH, S::STREAMED, S::D, S::THREADS> tile_type;
    const int64_t u = S::KEYS ? args.q.row : args.k.row;
    const int64_t v = S::KEYS ? args.dout.row : args.v.row;

    tile_type::step_back(&own->u_part, -2 * S::STREAMED * u);
    tile_type::step_back(&own->v_part, -2 * S::STREAMED * v);
    if constexpr (S::KEYS) {
        own->number_at -= S::STREAMED;
        own->has_number = (int)threadIdx.x < 2 * S::STREAMED;
    }
}

/* Begins to copy them into a stage. */
template <typename PATH, typename S>
DEVICE void
fetch_parts(mma_backward_thread<PATH, S> *own, bool whole, int stage)
{
    const smem u_at = own->base + S::TILES_AT + stage * 2 * S::TILE_BYTES;

    own->u.fetch_part(u_at, own->u_part, whole);
    own->v.fetch_part(u_at + S::TILE_BYTES, own->v_part, whole);
    if constexpr (S::KEYS) {
        own->number = (int)threadIdx.x < S::STREAMED ? INFINITY : 0;
        if (own->has_number) {
            own->number = *own->number_at;
        }
    }
}

/* Ends to; a barrier must follow before anyone reads. */
template <typename T, typename PATH, typename S>
DEVICE void
land_step(mma_backward_thread<PATH, S> *own, const mma_backward_block &block, int stage)
{
    const smem u_at = own->base + S::TILES_AT + stage * 2 * S::TILE_BYTES;

    own->u.template land<0, T>(u_at,
                               power_in<T>(block, S::KEYS ? EXPONENT_Q : EXPONENT_K));
    own->v.template land<0, T>(
        u_at + S::TILE_BYTES, power_in<T>(block, S::KEYS ? EXPONENT_DOUT : EXPONENT_V));
    if constexpr (S::KEYS) {
        const float delta = T::SCALED ? own->number * block.delta : own->number;
        if ((int)threadIdx.x < 2 * S::STREAMED) {
            st_shared_f32(own->base + S::NUMBERS_AT +
                              (stage * 2 * S::STREAMED + (int)threadIdx.x) * 4,
                          (int)threadIdx.x < S::STREAMED ? usable_lse(own->number)
                                                         : delta);
        }
    }
}

/* ---- A block --------------------------------------------------------------------- */

/* All of one step, once its tiles are there. `careful`: some of their elements are not
 * finite, and some query may not look at some key. */
template <typename PATH, typename T, typename S>
DEVICE void
take_step(mma_backward_thread<PATH, S> *own, const mma_call &call,
          const mma_backward_block &block, char *base, const mma_step &step, int stage,
          bool bounded, bool careful)
{
    const tfast_attention_args &args = call.args;
    const attention_head h = head_of_step<S>(block, step);
    const smem u_at = own->base + S::TILES_AT + stage * 2 * S::TILE_BYTES;
    const smem v_at = u_at + S::TILE_BYTES;
    const char *landed = base + S::TILES_AT + stage * 2 * S::TILE_BYTES;
    mma_scores<S> s = {}, e = {}, slope;
    uint32_t kept = ~0u;

    if (S::OPTIONS && args.dropout_p > 0) {
        kept = kept_elements<S>(args, block, h, step.tile);
    }
    if constexpr (S::PAIRS) {
        multiply_pair<PATH, T>(*own, base, u_at);
        read_product(&s, base, 0);
    } else {
        multiply_own<PATH, T>(&s, own->x, own->base, own->reader, u_at);
    }
    if constexpr (S::OPTIONS) {
        weigh_step_with_options(&s, &slope, args, block, h, *own, step.tile, stage);
    } else {
        weigh_step(&s, block, *own, stage);
        if (bounded) {
            bound_weights(&s, args, block, step.tile);
        }
    }
    if constexpr (S::KEYS) {
        if constexpr (S::OPTIONS) {
            share_step(&s, call, h, *own, step.tile, stage);
        }
        mma_scores<S> w = s;
        if constexpr (S::OPTIONS || T::SCALED) {
#pragma unroll
            for (int i = 0; i < S::STREAMED / 2; i++) {
                float *x = &w.at[i / 4][i % 4];
                *x = (kept >> i & 1) != 0 ? *x * block.weight : 0;
            }
        }
        if (careful) {
            add_step_carefully<T>(own->dy, w, landed + S::TILE_BYTES);
        } else {
            add_step<PATH, T>(own->dy, w, own->reader, v_at);
        }
    }
    if constexpr (S::PAIRS) {
        read_product(&e, base, 1);
    } else {
        multiply_own<PATH, T>(&e, own->y, own->base + S::Y_AT, own->reader, v_at);
    }
    finish_step<T>(&e, s, *own, block, stage, kept);
    if constexpr (S::OPTIONS) {
        bend_step(&e, slope, args);
    }
    if (careful) {
        add_step_carefully<T>(own->dx, e, landed);
    } else {
        add_step<PATH, T>(own->dx, e, own->reader, u_at);
    }
}

template <typename PATH, typename T, typename S>
DEVICE void
walk_steps(mma_backward_thread<PATH, S> *own, const mma_call &call,
           mma_backward_block *shared, char *base)
{
    const mma_backward_block &block = *shared;
    mma_step step = {0, block.end - 1};
    int stage = 0;

    find_parts(own, call, block, step);
    fetch_parts(own, call.whole, stage);
    while (step.head < block.heads) {
        const bool bounded =
            S::OPTIONS || step.tile < block.free_begin || step.tile >= block.free_end;
        const char *u_at = base + S::TILES_AT + stage * 2 * S::TILE_BYTES;
        const bool last = step.tile == block.begin; /* of a head */
        const mma_step next = {step.head + last, last ? block.end - 1 : step.tile - 1};
        if (T::SCALED && S::KEYS && step.head > 0 && step.tile == block.end - 1) {
            __syncthreads(); /* nobody reads the last head's numbers any more */
            if (threadIdx.x < 32) {
                begin_head<T, S>(shared, call, block.h.batch, block.h.head + step.head);
            }
            __syncthreads();
        }
        land_step<T>(own, block, stage);
        bool finite = !bounded || is_finite<T>(own->u, u_at);
        if (S::KEYS && bounded) {
            finite = finite && is_finite<T>(own->v, u_at + S::TILE_BYTES);
        }
        /* these tiles are there, and nobody reads another stage any more */
        const bool careful = __syncthreads_or(!finite) != 0;
        if (next.head < block.heads) {
            if (S::KEPT && (!S::KEYS || !last)) {
                step_parts_back(own, call.args);
            } else {
                find_parts(own, call, block, next);
            }
            fetch_parts(own, call.whole, stage ^ (S::STAGES - 1));
        }
        take_step<PATH, T>(own, call, block, base, step, stage, bounded, careful);
        step = next;
        if constexpr (S::STAGES == 1) {
            __syncthreads(); /* nobody reads these tiles any more */
        } else {
            stage ^= 1;
        }
    }
}

/* Rows of a gradient from the warp's fragments. */
template <typename T, typename S>
DEVICE void
store_rows(const mma_rows &whole, const float x[S::MADE / 8][4],
           const float2 factors[2], bool pairs)
{
    const mma_rows rows = share_of<S>(whole);
    const int row = warp_row<S>() + (int)threadIdx.x % 32 / 4;

#pragma unroll
    for (int i = 0; i < S::MADE / 4; i++) {
        const float *two = &x[i / 2][i % 2 * 2];
        const float2 by = factors[i % 2];
        write_pair(rows, row + i % 2 * 8, fragment_column(i / 2, 0),
                   T::store(two[0] * by.x * by.y, two[1] * by.x * by.y), pairs);
    }
}

/* The own rows of an array, and their place. */
template <typename S>
DEVICE mma_rows
own_rows(const tfast_attention_args &args, const mma_backward_block &block,
         const tfast_attention_rows &rows, int64_t dims)
{
    return S::KEYS ? mma_keys(args, block.h, rows, dims, block.first, S::ROWS)
                   : mma_queries(args, block.h, rows, dims, block.first, S::ROWS);
}

/* Of the thread's own queries, if the block owns queries. */
template <typename T, typename PATH, typename S>
DEVICE void
read_numbers(mma_backward_thread<PATH, S> *own, const mma_call &call,
             const mma_backward_block &block)
{
    const tfast_attention_args &args = call.args;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t query =
            block.first + warp_row<S>() + (int)threadIdx.x % 32 / 4 + r * 8;
        const bool is = !S::KEYS && query <= block.last;
        own->lse[r] = is ? lse_of(args, block.h, query) : INFINITY;
        own->delta[r] = is ? call.delta[number_row(args, block.h) + query] : 0;
        if constexpr (T::SCALED && !S::KEYS) {
            const int bound = is ? call.bounds[number_row(args, block.h) + query] : 0;
            own->delta[r] *= two_to(15 - bound);
            own->product[r] = block.kept * product_power(block, bound);
        }
    }
}

template <typename T, typename PATH, typename S>
DEVICE void
read_own(mma_backward_thread<PATH, S> *own, const mma_call &call,
         const mma_backward_block &block)
{
    const tfast_attention_args &args = call.args;
    const mma_rows x = own_rows<S>(args, block, S::KEYS ? args.k : args.q, args.dim);
    const mma_rows y =
        own_rows<S>(args, block, S::KEYS ? args.v : args.dout, args.dim_v);
    const float x_power = power_in<T>(block, S::KEYS ? EXPONENT_K : EXPONENT_Q);
    const float y_power = power_in<T>(block, S::KEYS ? EXPONENT_V : EXPONENT_DOUT);
    const int row = warp_row<S>();

    if constexpr (S::PAIRS) {
        const bool second = warp_share<S>() != 0;
        own->x.template read<T>({second ? y.data : x.data, second ? y.stride : x.stride,
                                 x.n, second ? y.dims : x.dims},
                                row, call.chunks, second ? y_power : x_power);
    } else {
        own->x.template read<T>(x, row, call.chunks, x_power);
        own->y.template read<T>(y, row, call.chunks, y_power);
    }
    if constexpr (!S::X) {
        mma_tile<PATH, S::ROWS, S::D, S::THREADS> tile;
        tile.fetch(own->base, x, call.whole);
        tile.template land<0, T>(own->base, x_power);
    }
    if constexpr (!S::Y) {
        mma_tile<PATH, S::ROWS, S::D, S::THREADS> tile;
        tile.fetch(own->base + S::Y_AT, y, call.whole);
        tile.template land<0, T>(own->base + S::Y_AT, y_power);
    }
    read_numbers<T>(own, call, block);
}

template <typename T, typename S, typename PATH>
DEVICE void
store_own(const mma_backward_thread<PATH, S> &own, const mma_call &call,
          const mma_backward_block &block)
{
    const tfast_attention_args &args = call.args;
    const float scale = (float)args.scale;
    float2 x[2] = {{scale, 1}, {scale, 1}}, y[2] = {{1, 1}, {1, 1}};

    if constexpr (S::KEYS) { /* also of keys past kv_lens: zeros */
        mma_rows dk = own_rows<S>(args, block, args.dk, args.dim);
        mma_rows dv = own_rows<S>(args, block, args.dv, args.dim_v);
        dk.n = dv.n = mma_left(block.h.rows_k, block.first, S::ROWS);
        if constexpr (T::SCALED) {
            const int64_t head = block.h.batch * args.heads + block.h.head;
            const mma_head_powers powers = call.powers[head];
            x[0] = x[1] = scaled_by(scale, powers.dk - 157);
            y[0] = y[1] = scaled_by(1, powers.dv - 142);
        }
        if (args.dk.data != nullptr) {
            store_rows<T, S>(dk, own.dx, x, call.pairs);
        }
        if (args.dv.data != nullptr) {
            store_rows<T, S>(dv, own.dy, y, call.pairs);
        }
    } else {
        const int64_t row = block.first + warp_row<S>() + (int)threadIdx.x % 32 / 4;
        for (int r = 0; r < 2; r++) {
            const int64_t query = row + r * 8;
            if constexpr (S::OPTIONS) {
                x[r].x *= share_at(call, block.h, query);
            }
            if constexpr (T::SCALED) {
                const int bound = query <= block.last
                                      ? call.bounds[number_row(args, block.h) + query]
                                      : 0;
                x[r] = scaled_by(x[r].x, bound + block.exponent[EXPONENT_K] - 157);
            }
        }
        store_rows<T, S>(own_rows<S>(args, block, args.dq, args.dim), own.dx, x,
                         call.pairs);
    }
}

/* In which of the tiles every query may look at every key. */
template <typename S>
DEVICE void
find_free_tiles(mma_backward_block *block, const tfast_attention_args &args)
{
    const attention_head &h = block->h;
    const int64_t past = block->first + S::ROWS; /* the block's rows */
    int64_t begin = first_key(args, h, block->last),
            end = end_key(args, h, block->first);

    if constexpr (S::KEYS) {
        begin = first_query(args, h, past - 1);
        end = past <= h.n_k ? end_query(args, h, block->first) : 0;
    }
    block->free_begin = (int)((begin + S::STREAMED - 1) / S::STREAMED);
    block->free_end = (int)(end / S::STREAMED);
}

/* Which rows are the block's, and what it walks over; by its first warp. The tile of
 * rows with most to do comes first. */
template <typename T, typename S>
DEVICE void
begin_backward(mma_backward_block *block, const mma_call &call)
{
    const tfast_attention_args &args = call.args;
    const int64_t size = S::KEYS ? args.n_k : args.n_q;
    const int64_t heads = S::KEYS ? args.kv_heads : args.heads;
    const int64_t group = S::KEYS ? args.heads / args.kv_heads : 1;
    const int64_t tiles = (size + S::ROWS - 1) / S::ROWS;
    const int64_t tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
    const attention_head h =
        attention_head_of(args, head / heads, head % heads * group);
    const int64_t first = (S::KEYS ? tile : tiles - 1 - tile) * S::ROWS;
    const int64_t last = first + mma_left(S::KEYS ? h.n_k : h.n_q, first, S::ROWS) - 1;
    const int64_t begin =
        S::KEYS ? first_query(args, h, first) : first_key(args, h, first);
    const int64_t end = S::KEYS ? end_query(args, h, last) : end_key(args, h, last);

    if (threadIdx.x == 0) {
        block->h = h;
        block->first = first;
        block->last = last;
        find_free_tiles<S>(block, args);
        block->heads = last >= first && begin < end ? (int)group : 0;
        block->begin = (int)(begin / S::STREAMED);
        block->end = (int)((end + S::STREAMED - 1) / S::STREAMED);
        block->kept = S::OPTIONS ? (float)dropout_of(args, h).scale : 1;
    }
    begin_head<T, S>(block, call, h.batch, h.head);
}

template <typename PATH, typename T, typename S>
TFAST_KERNEL(S::THREADS, S::BLOCKS)
attention_mma_backward(const __grid_constant__ mma_call call)
{
    SHARED_DYNAMIC(base);
    SHARED(mma_backward_block, block, 1);
    mma_backward_thread<PATH, S> own;

    if (threadIdx.x < 32) {
        begin_backward<T, S>(block, call);
    }
    __syncthreads();
    if (block->first >= (S::KEYS ? block->h.rows_k : block->h.n_q)) {
        return;
    }
    own.base = smem_address(base);
#pragma unroll
    for (int i = 0; i < S::MADE / 2; i++) {
        own.dx[i / 4][i % 4] = 0;
        if constexpr (S::KEYS) {
            own.dy[i / 4][i % 4] = 0;
        }
    }
    read_own<T>(&own, call, *block);
    if (block->heads > 0) {
        walk_steps<PATH, T>(&own, call, block, base);
    }
    store_own<T>(own, call, *block);
}

/* For the lists BACKWARD_SHAPES_ of kernels.h. */
#define CHECK_BACKWARD(K, path, type, dims, keys, options, rows, threads, shared)      \
    CHECK_SHAPE(rows, threads, shared,                                                 \
                mma_backward_shape<path_##path, dims, keys, options>)

#endif
