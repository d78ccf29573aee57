/* Attention backward by tensor cores: the sizes of its kernels' tiles, the numbers of
 * rows, and the products of a step.
 *
 * Results of 16 rows x 128 dims, two of them, are all that a warp's registers hold.
 * With more dims two warps share their 16 rows: each makes one of the two products of a
 * step that are summed over the dims, for both by way of shared memory, and adds to its
 * half of the results' dims. That is 7 products for the whole backward, as with fewer
 * dims; dk and dv by kernels of their own would be 8. What it costs is 16 x 16 floats
 * of shared memory a warp and one more barrier a step. */
#ifndef TFAST_ATTENTION_MMA_BACKWARD_TILES_CUH
#define TFAST_ATTENTION_MMA_BACKWARD_TILES_CUH

#include "attention_mma_backward_scale.cuh"

/* ---- Tiles ----------------------------------------------------------------------- */

/* What a block keeps in shared memory. */
struct mma_backward_block : mma_block {
    int heads;  /* that share its rows: it walks over the tiles of each */
    float kept; /* what dropout multiplies the others by */
    /* Powers of two, each 1 where the type is not scaled, the first two times kept. */
    float product; /* of products of dout and v; of the keys' kernel, as the next */
    float weight;  /* of weights that are summed */
    float delta;   /* of delta */
};

/* A kernel's sizes; X and Y say whether the own rows are in registers. */
template <typename PATH, int DIM, bool OWNS_KEYS, bool HAS_OPTIONS>
struct mma_backward_shape {
    static constexpr bool KEYS = OWNS_KEYS, OPTIONS = HAS_OPTIONS;
    static constexpr int D = DIM;
    static constexpr bool FULL = D == 128 && KEYS && OPTIONS && !PATH::ASYNC;
    static constexpr bool PAIRS = D > 128 || FULL; /* registers are full without */
    static constexpr int WARPS = (D == 256 && !KEYS) || FULL ? 8 : 4;
    static constexpr int STREAMED =
        PAIRS || (D == 128 && (OPTIONS || !PATH::ASYNC)) ? 16 : 32;
    static constexpr int STAGES = D == 256 && KEYS && !PATH::ASYNC ? 1 : 2;
    /* Whether there are registers to keep what the next step fetches. */
    static constexpr bool KEPT =
        PATH::ASYNC || !KEYS || !OPTIONS || (D > 32 && D < 192);
    static constexpr bool X = D <= 64 || (PAIRS && !KEYS), Y = X;
    /* Whose registers suffice for another block. */
    static constexpr bool SMALL = D == 32 || (D == 64 && !KEYS && PATH::ASYNC);
    static constexpr int BLOCKS = OPTIONS && SMALL ? 3 : D <= 64 ? 2 : 1;

    static constexpr int SHARING = PAIRS ? 2 : 1; /* warps of the same rows */
    static constexpr int MADE = D / SHARING;      /* dims of results of a warp */
    static constexpr int THREADS = WARPS * 32, ROWS = WARPS / SHARING * 16;
    static constexpr int OWN_BYTES = ROWS * D * 2, TILE_BYTES = STREAMED * D * 2;
    static constexpr int Y_AT = X ? 0 : OWN_BYTES;
    static constexpr int TILES_AT = Y_AT + (Y ? 0 : OWN_BYTES);
    static constexpr int NUMBERS_AT = TILES_AT + STAGES * 2 * TILE_BYTES;
    static constexpr int PRODUCTS_AT = NUMBERS_AT + (KEYS ? 4 * STREAMED * 4 : 0);
    static constexpr int PRODUCT_BYTES = 16 * STREAMED * 4; /* of a warp */
    static constexpr int BYTES = PRODUCTS_AT + (PAIRS ? WARPS * PRODUCT_BYTES : 0);
    static_assert(BYTES + (int)sizeof(mma_backward_block) <=
                      (PATH::ASYNC ? 101376 : 65536),
                  "what sm_86, or sm_75, has for a block");
    static_assert(2 * STREAMED <= THREADS, "a thread brings one of a tile's numbers");
};

/* Which of the warps of its rows this is, and the first of the rows. */
template <typename S>
DEVICE int
warp_share()
{
    return S::PAIRS ? (int)threadIdx.x / 32 % 2 : 0;
}

template <typename S>
DEVICE int
warp_row()
{
    return (int)threadIdx.x / 32 / S::SHARING * 16;
}

/* The dims of an array whose results a warp makes, as an array of their own. */
template <typename S>
DEVICE mma_rows
share_of(mma_rows rows)
{
    rows.data += warp_share<S>() * S::MADE;
    rows.dims -= warp_share<S>() * S::MADE;
    return rows;
}

/* What a thread keeps for all steps. */
template <typename PATH, typename S>
struct mma_backward_thread {
    mma_own<S::D, S::X ? S::D / 16 : 0> x; /* of a pair: what the warp multiplies */
    mma_own<S::D, S::Y ? S::D / 16 : 0> y;
    mma_reader<S::D> reader;
    smem base;
    float lse[2], delta[2], product[2]; /* of its own queries; delta is scaled */
    mma_tile<PATH, S::STREAMED, S::D, S::THREADS> u, v;
    mma_rows u_part, v_part; /* this thread's parts of the tiles to fetch next */
    const float *number_at;  /* lse or delta of one of their queries */
    bool has_number;         /* whether this thread fetches it */
    float number;            /* the one that it has fetched */
    float dx[S::MADE / 8][4], dy[S::KEYS ? S::MADE / 8 : 1][4];
};

/* ---- Numbers of a head ----------------------------------------------------------- */

/* What makes of products of dout and v their part of gradients with such a bound. */
DEVICE float
product_power(const mma_backward_block &block, int bound)
{
    const int dout = block.exponent[EXPONENT_DOUT], v = block.exponent[EXPONENT_V];

    return two_to(dout - 142 + v - 142 + 15 - bound);
}

/* 2^exponent scale, as two factors. */
DEVICE float2
scaled_by(float scale, int exponent)
{
    const float2 two = two_factors(exponent);

    return make_float2(two.x * scale, two.y);
}

/* The numbers of one head of q; by the block's first warp. */
template <typename T, typename S>
DEVICE void
begin_head(mma_backward_block *block, const mma_call &call, int64_t batch, int64_t head)
{
    const tfast_attention_args &args = call.args;
    int exponent[EXPONENTS] = {};

    if constexpr (T::SCALED) {
#pragma unroll
        for (int i = 0; i < EXPONENTS; i++) {
            exponent[i] = read_exponent(call.exponents, args, i, batch, head);
        }
    }
    if (threadIdx.x != 0) {
        return;
    }
    block->unit = unit_of<T, S>(args, exponent[EXPONENT_Q], exponent[EXPONENT_K]);
    block->product = block->weight = block->kept;
    if constexpr (T::SCALED) {
        const mma_head_powers powers = call.powers[batch * args.heads + head];
#pragma unroll
        for (int i = 0; i < EXPONENTS; i++) {
            block->exponent[i] = exponent[i];
        }
        block->product *= product_power(*block, powers.bound);
        block->weight *= two_to(powers.weight);
        block->delta = two_to(15 - powers.bound);
    }
}

/* ---- Rows' numbers --------------------------------------------------------------- */

/* lse so that whatever has none gets weight 0. */
DEVICE float
usable_lse(float lse)
{
    return lse == -INFINITY ? INFINITY : lse;
}

/* That of a query that may be past the last one. */
DEVICE float
lse_of(const tfast_attention_args &args, const attention_head &h, int64_t query)
{
    return query < h.n_q
               ? usable_lse(((const float *)args.lse)[lse_row(args, h) + query])
               : INFINITY;
}

/* The share of a query that may be past the last one. */
DEVICE float
share_at(const mma_call &call, const attention_head &h, int64_t query)
{
    return call.shares != nullptr && query < h.n_q
               ? call.shares[number_row(call.args, h) + query]
               : 1;
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
        own.template get<S::ROWS>(left, reader, own_at, warp_row<S>(), k);
#pragma unroll
        for (int n = 0; n < S::STREAMED / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4(right, reader.template right<S::STREAMED>(tile, n * 16, 2 * k));
            PATH::template mma<T>(s->at[2 * n], left, right);
            PATH::template mma<T>(s->at[2 * n + 1], left, right + 2);
        }
    }
}

/* Where a product of this warp's rows, the first or the second, lies in shared memory:
 * 4 floats of this lane, those of the next fragment 32 lanes further. */
template <typename S>
DEVICE float4 *
product_at(char *base, int which)
{
    const int warp = (int)threadIdx.x / 32 - warp_share<S>() + which;

    return (float4 *)(base + S::PRODUCTS_AT + warp * S::PRODUCT_BYTES) +
           threadIdx.x % 32;
}

/* Each warp of a pair makes one of the two products, for both. */
template <typename PATH, typename T, typename S>
DEVICE void
multiply_pair(const mma_backward_thread<PATH, S> &own, char *base, smem u_at)
{
    const int share = warp_share<S>();
    float4 *to = product_at<S>(base, share);
    mma_scores<S> s = {};

    multiply_own<PATH, T>(&s, own.x, own.base + share * S::Y_AT, own.reader,
                          u_at + share * S::TILE_BYTES);
#pragma unroll
    for (int n = 0; n < S::STREAMED / 8; n++) {
        to[n * 32] = {s.at[n][0], s.at[n][1], s.at[n][2], s.at[n][3]};
    }
    __syncthreads(); /* the next step's first barrier is the end of these */
}

template <typename S>
DEVICE void
read_product(mma_scores<S> *s, char *base, int which)
{
    const float4 *from = product_at<S>(base, which);

#pragma unroll
    for (int n = 0; n < S::STREAMED / 8; n++) {
        const float4 x = from[n * 32];
        s->at[n][0] = x.x;
        s->at[n][1] = x.y;
        s->at[n][2] = x.z;
        s->at[n][3] = x.w;
    }
}

/* out += weights . tile, for the dims that the warp makes */
template <typename PATH, typename T, typename S>
DEVICE void
add_step(float out[S::MADE / 8][4], const mma_scores<S> &s,
         const mma_reader<S::D> &reader, smem tile)
{
    const int first = warp_share<S>() * (S::MADE / 8);
    uint32_t w[S::STREAMED / 16][4];

    pack_weights<T>(w, s);
#pragma unroll
    for (int k = 0; k < S::STREAMED / 16; k++) {
#pragma unroll
        for (int n = 0; n < S::MADE / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4_trans(
                right, reader.template left<S::STREAMED>(tile, k * 16, first + 2 * n));
            PATH::template mma<T>(out[2 * n], w[k], right);
            PATH::template mma<T>(out[2 * n + 1], w[k], right + 2);
        }
    }
}

/* The same for a tile with elements that are not finite, as a pointer. */
template <typename T, typename S>
DEVICE void
add_step_carefully(float out[S::MADE / 8][4], const mma_scores<S> &s, const char *tile)
{
    typedef mma_layout<S::STREAMED, S::D> layout;
    constexpr bool WHOLE = S::MADE % layout::COLUMNS == 0; /* panels: so no swizzle */
    const int chunk = warp_share<S>() * (S::MADE / 8);

    add_carefully<T, S::MADE>(out, s, tile + (WHOLE ? layout::panel(chunk) : 0),
                              WHOLE ? 0 : chunk);
}

#endif
