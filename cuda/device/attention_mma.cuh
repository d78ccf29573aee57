/* Attention by tensor cores: what the kernels share. Two instruction paths give the
 * same fragments, so that one source serves both:
 *
 *   path_75   m16n8k8, tiles by way of registers; float16, and bfloat16 as float16
 *   path_80   m16n8k16, tiles by cp.async; float16 and bfloat16
 *
 * Tiles in shared memory are 16 bits an element, dims past the arrays' zero. In a
 * fragment of 16 x 8 scores lane 4 g + t has columns 2 t, 2 t + 1 of rows g and g + 8;
 * two of them side by side, rounded, are the left operand of the next product.
 *
 * Instantiations, for each path and dtype: one a tile of dims (what a smaller one saves
 * is work), each once for bounds alone and once with options (which cost registers).
 * kernels.h has their shared memory, and the build writes their registers to
 * build/objects/cuda.json. By registers 2 blocks of 4 warps, or 1 of 8, fit on a
 * multiprocessor; by shared memory as many as fit into the 64 KB of sm_75, 100 of sm_86
 * and sm_89, 164 of sm_80 and 228 of sm_90.
 *
 * What the multiply-adds bound, at 4 (forward), 10 (backward) flops a score and dim and
 * dense float16 with float32 sums: T4 65, 3090 71, 4090 165, A100 312, H200 989
 * TFLOP/s; the backward makes 7 products where 5 are counted, so at most 5 / 7 of it.
 * mma.sync reaches about 60 % of H200's. */
#ifndef TFAST_ATTENTION_MMA_CUH
#define TFAST_ATTENTION_MMA_CUH

#include "attention_head.cuh"
#include "attention_mma_scale.cuh"

/* ---- Instruction paths ----------------------------------------------------------- */

/* Two products of depth 8 are one of depth 16, register for register. */
struct path_75 {
    static constexpr bool ASYNC = false;
    template <typename T>
    DEVICE void mma(float *c, const uint32_t *a, const uint32_t *b)
    {
        mma_m16n8k8_f16(c, a, b);
        mma_m16n8k8_f16(c, a + 2, b + 1);
    }
};

struct path_80 {
    static constexpr bool ASYNC = true;
    template <typename T>
    DEVICE void mma(float *c, const uint32_t *a, const uint32_t *b)
    {
        static_assert(!T::SCALED, "copies are not converted");
        if constexpr (T::MULTIPLIED == TFAST_BF16) {
            mma_m16n8k16_bf16(c, a, b);
        } else {
            mma_m16n8k16_f16(c, a, b);
        }
    }
};

/* ---- Rows in memory -------------------------------------------------------------- */

/* Rows of an array from `data` on. */
struct mma_rows {
    uint16_t *data;
    int64_t stride; /* in elements */
    int n, dims;
};

/* At most this many of the rows from `first` on. */
DEVICE int
mma_left(int64_t n, int64_t first, int most)
{
    return (int)clamped(n - first, 0, most);
}

DEVICE mma_rows
mma_queries(const tfast_attention_args &args, const attention_head &h,
            const tfast_attention_rows &rows, int64_t dims, int64_t first, int most)
{
    return {(uint16_t *)rows.data + query_row(args, h, rows, first), rows.row,
            mma_left(h.n_q, first, most), (int)dims};
}

/* Without keys past kv_lens. */
DEVICE mma_rows
mma_keys(const tfast_attention_args &args, const attention_head &h,
         const tfast_attention_rows &rows, int64_t dims, int64_t first, int most)
{
    return {(uint16_t *)rows.data + key_row(args, h, rows, first), rows.row,
            mma_left(h.n_k, first, most), (int)dims};
}

/* The column of element i of fragment n of a tile of scores; its row is i / 2. */
DEVICE int
fragment_column(int n, int i)
{
    return n * 8 + (int)(threadIdx.x % 4) * 2 + i % 2;
}

/* The same rows from a column on. With a lane's own columns so, all else about them is
 * constant, and takes no registers. */
DEVICE mma_rows
columns_from(const mma_rows &rows, int column)
{
    return {rows.data + column, rows.stride, rows.n, rows.dims - column};
}

/* Up to 8 elements, zeros behind them. Rarely used, so it is kept small. */
DEVICE uint4
gather_chunk(const uint16_t *from, int n)
{
    uint4 all = make_uint4(0, 0, 0, 0);

#pragma unroll 1
    for (int i = n < 8 ? n - 1 : 7; i >= 0; i--) {
        all.w = all.w << 16 | all.z >> 16;
        all.z = all.z << 16 | all.y >> 16;
        all.y = all.y << 16 | all.x >> 16;
        all.x = all.x << 16 | from[i];
    }
    return all;
}

/* Up to 8 of `left` elements. `chunks`: they begin at a multiple of 16 bytes. */
DEVICE uint4
read_chunk(const uint16_t *from, int left, bool chunks)
{
    return chunks && left >= 8 ? *(const uint4 *)from : gather_chunk(from, left);
}

/* Elements `column` and the next of a row. */
DEVICE uint32_t
read_pair(const mma_rows &rows, int row, int column, bool pairs)
{
    const uint16_t *from = rows.data + row * rows.stride + column;
    uint32_t low = 0, high = 0;

    if (row < rows.n && pairs && column + 1 < rows.dims) {
        return *(const uint32_t *)from;
    }
    if (row < rows.n) {
        low = column < rows.dims ? from[0] : 0;
        high = column + 1 < rows.dims ? from[1] : 0;
    }
    return low | high << 16;
}

DEVICE void
write_pair(const mma_rows &rows, int row, int column, uint32_t pair, bool pairs)
{
    uint16_t *to = rows.data + row * rows.stride + column;

    if (row >= rows.n) {
        return;
    }
    if (pairs && column + 1 < rows.dims) {
        *(uint32_t *)to = pair;
        return;
    }
    if (column < rows.dims) {
        to[0] = (uint16_t)pair;
    }
    if (column + 1 < rows.dims) {
        to[1] = (uint16_t)(pair >> 16);
    }
}

/* ---- Tiles in shared memory ------------------------------------------------------ */

/* ROWS x D elements, in panels of 64 or 32 columns, so that a row of one is 128 or 64
 * bytes; its chunks of 16 bytes are permuted by the row, so that the 8 rows an ldmatrix
 * reads lie in different banks. */
template <int ROWS, int D>
struct mma_layout {
    static constexpr int COLUMNS = D % 64 == 0 ? 64 : 32; /* of a panel */
    static constexpr int CHUNKS = COLUMNS / 8, ROW_BYTES = COLUMNS * 2;
    static constexpr int PANEL_BYTES = ROWS * ROW_BYTES, BYTES = ROWS * D * 2;

    DEVICE int swizzle(int row) { return CHUNKS == 8 ? row & 7 : row >> 1 & 3; }

    DEVICE int panel(int chunk) { return chunk / CHUNKS * PANEL_BYTES; }

    DEVICE int at(int row, int chunk)
    {
        return panel(chunk) + row * ROW_BYTES + (chunk % CHUNKS ^ swizzle(row)) * 16;
    }
};

/* Brings a tile from global memory, THREADS threads together: a block's or a warp's. */
template <typename PATH, int ROWS, int D, int THREADS>
struct mma_tile {
    typedef mma_layout<ROWS, D> layout;
    static constexpr int EACH = ROWS * D / 8 / THREADS; /* chunks of a thread */
    static_assert(ROWS * D / 8 % THREADS == 0, "all threads have the same to do");

    /* True if all chunks of a thread lie in one column of the tile, APART rows from
     * each other and with the same swizzle: their addresses are the first one's plus
     * constants. */
    static constexpr int APART = THREADS / (D / 8);
    static constexpr bool COLUMN = THREADS % (D / 8) == 0 && APART % 8 == 0;
    uint4 staged[PATH::ASYNC ? 1 : EACH];

    DEVICE unsigned thread() { return THREADS == 32 ? threadIdx.x % 32 : threadIdx.x; }

    /* The row and the chunk of this thread's chunk i. */
    DEVICE int row(int i)
    {
        return COLUMN ? i * APART + (int)(thread() / (D / 8))
                      : (int)((i * THREADS + thread()) / (D / 8));
    }

    DEVICE int chunk(int i)
    {
        return (int)(COLUMN ? thread() % (D / 8) : (i * THREADS + thread()) % (D / 8));
    }

    /* Bytes from the tile's beginning to chunk i. */
    DEVICE int at(int i)
    {
        return COLUMN ? layout::at(row(0), chunk(0)) + i * APART * layout::ROW_BYTES
                      : layout::at(row(i), chunk(i));
    }

    /* The rows that fetch_part() takes: from this thread's first chunk on if its chunks
     * are a column, with no rows if that column is behind the last of dims. */
    DEVICE mma_rows part_of(const mma_rows &rows)
    {
        const int left = rows.dims - chunk(0) * 8;

        if (!COLUMN) {
            return rows;
        }
        return {rows.data + row(0) * rows.stride + chunk(0) * 8, rows.stride,
                left > 0 ? rows.n - row(0) : 0, left};
    }

    /* From a part of a tile to that of the tile before it, `step` bytes on, which has
     * all rows. */
    DEVICE void step_back(mma_rows *part, int64_t step)
    {
        const int n = ROWS - (COLUMN ? row(0) : 0);

        part->data = (uint16_t *)((char *)part->data + step);
        part->n = !COLUMN || part->dims > 0 ? n : 0;
    }

    /* The row and the chunk of chunk i, counted from a part's first. */
    DEVICE int part_row(int i) { return COLUMN ? i * APART : row(i); }
    DEVICE int part_chunk(int i) { return COLUMN ? 0 : chunk(i); }

    DEVICE const uint16_t *source(const mma_rows &part, int i)
    {
        return part.data + part_row(i) * part.stride + part_chunk(i) * 8;
    }

    /* Chunks that are aligned and have 8 elements or none. */
    __device__ __forceinline__ void fetch_whole(smem to, const mma_rows &part)
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const bool any =
                part_row(i) < part.n && (COLUMN || part.dims > part_chunk(i) * 8);
            if constexpr (PATH::ASYNC) {
                cp_async_16(to + at(i), source(part, i), any);
            } else {
                staged[i] = make_uint4(0, 0, 0, 0);
                if (any) {
                    staged[i] = *(const uint4 *)source(part, i);
                }
            }
        }
    }

    /* Any chunks. Rarely used, so it is kept small: the loop is not unrolled, and the
     * staged chunks move up by one in each turn, because registers have no index. */
    __device__ __forceinline__ void fetch_any(smem to, mma_rows part)
    {
        part.data = opaque(part.data);
#pragma unroll 1
        for (int i = 0; i < EACH; i++) {
            const int left = part_row(i) < part.n ? part.dims - part_chunk(i) * 8 : 0;
            const uint4 x = gather_chunk(source(part, i), left);
            if constexpr (PATH::ASYNC) {
                st_shared_128(to + at(i), x);
            } else {
#pragma unroll
                for (int j = 0; j < EACH - 1; j++) {
                    staged[j] = staged[j + 1];
                }
                staged[EACH - 1] = x;
            }
        }
    }

    /* Chunks of path_75 that are no column: fetch_whole() would need registers that
     * these tiles, of more than 128 dims, do not have. */
    __device__ __forceinline__ void fetch_each(const mma_rows &part, bool whole)
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int left = row(i) < part.n ? part.dims - chunk(i) * 8 : 0;
            staged[i] = read_chunk(source(part, i), left, whole);
        }
    }

    /* Begins to fetch part_of() a tile's rows; rows past the end become zeros. Nobody
     * may read `to` any more. `whole`: as in mma_call. */
    __device__ __forceinline__ void fetch_part(smem to, const mma_rows &part,
                                               bool whole)
    {
        if constexpr (!COLUMN && !PATH::ASYNC) {
            fetch_each(part, whole);
        } else if (whole) {
            fetch_whole(to, part);
        } else {
            fetch_any(to, part);
        }
        if constexpr (PATH::ASYNC) {
            cp_async_commit();
        }
    }

    __device__ __forceinline__ void fetch(smem to, const mma_rows &rows, bool whole)
    {
        fetch_part(to, part_of(rows), whole);
    }

    /* Ends all but the last LATER fetches; a barrier must follow before a read.
     * Elements are multiplied by `power` where their type says so. */
    template <int LATER, typename T>
    __device__ __forceinline__ void land(smem to, float power)
    {
        if constexpr (PATH::ASYNC) {
            (void)power;
            cp_async_wait<LATER>();
        } else {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const uint4 x = staged[i];
                st_shared_128(to + at(i),
                              make_uint4(T::load(x.x, power), T::load(x.y, power),
                                         T::load(x.z, power), T::load(x.w, power)));
            }
        }
    }
};

/* A block's head and rows. Kept in shared memory, where they take no registers. */
struct mma_block {
    attention_head h;
    int64_t first, last;      /* its own rows: the last one too */
    int64_t k, v;             /* elements before the head's first key and value */
    int begin, end;           /* the tiles that it walks over, from the last one on */
    int free_begin, free_end; /* of these, where every query attends to every key */
    float unit;               /* what products of queries and keys are multiplied by */
    int exponent[EXPONENTS];  /* of the head's tensors, where they are scaled */
};

/* Whether the tile's elements that this thread has landed are finite; `at` is where
 * they are, as a pointer. */
template <typename T, typename TILE>
DEVICE bool
is_finite(const TILE &tile, const char *at)
{
    constexpr bool BF16 = T::MULTIPLIED == TFAST_BF16;
    constexpr uint32_t EXPONENTS = BF16 ? 0x7F807F80 : 0x7C007C00;
    constexpr uint32_t ONES = BF16 ? 0x00800080 : 0x04000400; /* of the exponents */
    uint32_t seen = 0; /* the sum reaches the sign where an exponent is full */

#pragma unroll
    for (int i = 0; i < TILE::EACH; i++) {
        const uint4 x = *(const uint4 *)(at + tile.at(i));
        seen |= ((x.x & EXPONENTS) + ONES) | ((x.y & EXPONENTS) + ONES) |
                ((x.z & EXPONENTS) + ONES) | ((x.w & EXPONENTS) + ONES);
    }
    return (seen & 0x80008000) == 0;
}

/* A lane's part of the addresses with which one ldmatrix.x4 reads 16 x 16 elements of a
 * tile of D columns. `chunk` is even. A tile begins at a multiple of ROW_BYTES, so the
 * chunk can be XORed into the whole address; row and panel are constants to add. */
template <int D>
struct mma_reader {
    typedef mma_layout<8, D> layout; /* of any number of rows, but for its panels */
    static constexpr bool KEPT = D <= 128; /* more dims leave no registers for it */
    int left_at, right_at;

    __device__ __forceinline__ mma_reader()
    {
        const unsigned lane = threadIdx.x % 32;
        left_at = lane % 16 * layout::ROW_BYTES +
                  (lane / 16 ^ layout::swizzle(lane % 8)) * 16;
        right_at = (lane / 16 * 8 + lane % 8) * layout::ROW_BYTES +
                   (lane / 8 % 2 ^ layout::swizzle(lane % 8)) * 16;
        if constexpr (KEPT) {
            left_at = opaque(left_at);
            right_at = opaque(right_at);
        }
    }

    /* Left operand of 16 rows from `row` on; also, transposed, the right operand whose
     * depth runs over the rows. */
    template <int ROWS>
    __device__ __forceinline__ smem left(smem tile, int row, int chunk) const
    {
        return at<ROWS>(tile, left_at, row, chunk);
    }

    /* Right operand whose columns are the rows: two of 8 columns. */
    template <int ROWS>
    __device__ __forceinline__ smem right(smem tile, int row, int chunk) const
    {
        return at<ROWS>(tile, right_at, row, chunk);
    }

    template <int ROWS>
    DEVICE smem at(smem tile, int lane_at, int row, int chunk)
    {
        const int bits = chunk % layout::CHUNKS * 16;
        const int more = mma_layout<ROWS, D>::panel(chunk) + row * layout::ROW_BYTES;

        return KEPT ? smem_xor(tile + lane_at, bits) + more
                    : tile + (lane_at ^ bits) + more;
    }
};

/* 16 rows of a warp as left operands: HELD pieces of 16 columns in registers, read from
 * global memory once, those behind them in shared memory. */
template <int D, int HELD>
struct mma_own {
    static constexpr int REST = D - HELD * 16; /* columns */
    static_assert(HELD == 0 || REST % 64 == 0, "the reader is the whole tile's");
    uint32_t piece[HELD == 0 ? 1 : HELD][4];

    template <typename T>
    __device__ __forceinline__ void read(const mma_rows &rows, int row, bool pairs,
                                         float power)
    {
        const mma_rows mine = columns_from(rows, fragment_column(0, 0));
        const int first = row + (int)threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < HELD * 4; i++) {
            const uint32_t pair = read_pair(mine, first + i % 2 * 8, i / 2 * 8, pairs);
            piece[i / 4][i % 4] = T::load(pair, power);
        }
    }

    /* The columns that are not in registers. */
    DEVICE mma_rows rest(const mma_rows &rows)
    {
        const bool any = rows.dims > HELD * 16;

        return {rows.data + (any ? HELD * 16 : 0), rows.stride, rows.n,
                rows.dims - HELD * 16};
    }

    /* Piece k; `tile` has the columns of rest(). */
    template <int ROWS>
    __device__ __forceinline__ void get(uint32_t a[4], const mma_reader<D> &reader,
                                        smem tile, int row, int k) const
    {
        if (k < HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[i] = piece[k][i];
            }
        } else {
            ldmatrix_x4(a, reader.template left<ROWS>(tile, row, 2 * (k - HELD)));
        }
    }
};

/* ---- Scores ---------------------------------------------------------------------- */

/* 16 x STREAMED scores of a warp, and what becomes of them. */
template <typename S>
struct mma_scores {
    static constexpr int AT_ONCE = S::STREAMED > 32 ? 2 : 1; /* see turn_fragments() */
    float at[S::STREAMED / 8][4];
};

/* Weights, rounded, as left operands. */
template <typename T, typename S>
DEVICE void
pack_weights(uint32_t w[S::STREAMED / 16][4], const mma_scores<S> &s)
{
#pragma unroll
    for (int n = 0; n < S::STREAMED / 8; n++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            w[n / 2][n % 2 * 2 + r] = T::pack(s.at[n][2 * r], s.at[n][2 * r + 1]);
        }
    }
}

/* Turns elements `first` and the next of each fragment into those of the one before it,
 * and of the first into the last. So fragments take turns to be the first, and a loop
 * over them whose body is long need not be unrolled, but for AT_ONCE of them, so that
 * it has at most 4 turns: each moves all scores. */
template <typename S>
DEVICE void
turn_fragments(mma_scores<S> *s, int first)
{
#pragma unroll
    for (int i = first; i < first + 2; i++) {
        const float x = s->at[0][i];
#pragma unroll
        for (int n = 0; n < S::STREAMED / 8 - 1; n++) {
            s->at[n][i] = s->at[n + 1][i];
        }
        s->at[S::STREAMED / 8 - 1][i] = x;
    }
}

/* out += weights . tile for DIMS dims from a chunk on of a tile with elements that are
 * not finite: those of weight 0 are left out. In float32; `tile` is where it lies in
 * shared memory, as a pointer. */
template <typename T, int DIMS, typename S>
DEVICE void
add_carefully(float out[DIMS / 8][4], mma_scores<S> s, const char *tile, int chunk)
{
    typedef mma_layout<S::STREAMED, S::D> layout;
    const int lane = threadIdx.x % 32, quad = lane / 4 * 4;

#pragma unroll 1
    for (int j = 0; j < S::STREAMED; j++) {
        const bool odd = j % 2 != 0;
        const float w0 =
            __shfl_sync(~0u, odd ? s.at[0][1] : s.at[0][0], quad + j / 2 % 4);
        const float w8 =
            __shfl_sync(~0u, odd ? s.at[0][3] : s.at[0][2], quad + j / 2 % 4);
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) {
            const uint32_t pair =
                *(const uint32_t *)(tile + layout::at(j, chunk + n) + lane % 4 * 4);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float x = from_half(pair >> 16 * i & 0xFFFF, T::MULTIPLIED);
                float *o0 = &out[n][i], *o8 = &out[n][2 + i];
                *o0 = w0 == 0 ? *o0 : fused(w0, x, *o0);
                *o8 = w8 == 0 ? *o8 : fused(w8, x, *o8);
            }
        }
        if (j % 8 == 7) {
            turn_fragments(&s, 0);
            turn_fragments(&s, 2);
        }
    }
}

/* ---- Rows of a fragment ---------------------------------------------------------- */

DEVICE float
quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float
quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

#endif
