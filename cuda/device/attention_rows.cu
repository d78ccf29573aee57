/* Kernels that come before attention's others by tensor cores: numbers of heads and of
 * rows that these need. */
#include "attention_mma_far.cuh"

/* Of a warp, each with chunks of 8 elements: so many share a row of at most 256. */
DEVICE int
lanes_of_row(int64_t dims)
{
    return dims > 128 ? 32 : dims > 64 ? 16 : dims > 32 ? 8 : 4;
}

/* ---- Exponents ------------------------------------------------------------------- */

DEVICE const tfast_attention_rows &
rows_of_tensor(const tfast_attention_args &args, int tensor)
{
    return tensor == EXPONENT_Q   ? args.q
           : tensor == EXPONENT_K ? args.k
           : tensor == EXPONENT_V ? args.v
                                  : args.dout;
}

/* The larger of an exponent and those of two elements; not of infinity and NaN. */
DEVICE int
larger_exponent(int largest, uint32_t pair)
{
    const int low = pair >> 7 & 0xFF, high = pair >> 23 & 0xFF;

    largest = low > largest && low < 255 ? low : largest;
    return high > largest && high < 255 ? high : largest;
}

/* Of one lane's share of a head's rows: a chunk of every so many. Only of rows that are
 * multiplied: not of keys past kv_lens. */
DEVICE int
largest_exponent(const mma_call &call, const attention_head &h, int tensor, int part)
{
    const tfast_attention_args &args = call.args;
    const tfast_attention_rows &array = rows_of_tensor(args, tensor);
    const bool keys = is_of_keys(tensor);
    const int dims =
        (int)(tensor == EXPONENT_Q || tensor == EXPONENT_K ? args.dim : args.dim_v);
    const int lane = threadIdx.x % 32, across = lanes_of_row(dims);
    const int left = dims - lane % across * 8;
    const int64_t n = keys ? h.n_k : h.n_q, step = EXPONENT_PARTS * (32 / across);
    int64_t row = part * (32 / across) + lane / across;
    int largest = LEAST_EXPONENT;

    for (; left > 0 && row < n; row += step) {
        const uint16_t *from =
            (const uint16_t *)array.data + lane % across * 8 +
            (keys ? key_row(args, h, array, row) : query_row(args, h, array, row));
        const uint4 x = read_chunk(from, left, call.chunks);
        largest = larger_exponent(larger_exponent(largest, x.x), x.y);
        largest = larger_exponent(larger_exponent(largest, x.z), x.w);
    }
    return largest;
}

/* A warp a part of a head; blocks go on until all are done. */
TFAST_KERNEL(EXPONENT_THREADS, 8)
attention_mma_exponents(const __grid_constant__ exponents_call call)
{
    const tfast_attention_args &args = call.mma.args;
    const int64_t warps = EXPONENT_THREADS / 32, heads = args.batch * args.heads;
    const int64_t works = call.tensors * heads * EXPONENT_PARTS;

    for (int64_t i = blockIdx.x; i < works / warps; i += gridDim.x) {
        const int64_t work = i * warps + threadIdx.x / 32, item = work / EXPONENT_PARTS;
        const int tensor = (int)(item / heads), part = (int)(work % EXPONENT_PARTS);
        const int64_t batch = item % heads / args.heads, own = item % args.heads;
        const bool keys = is_of_keys(tensor);
        if (own < (keys ? args.kv_heads : args.heads)) {
            const int64_t head = keys ? own * (args.heads / args.kv_heads) : own;
            const attention_head h = attention_head_of(args, batch, head);
            const int largest = warp_max(largest_exponent(call.mma, h, tensor, part));
            if (threadIdx.x % 32 == 0) {
                exponent_parts(call.mma.exponents, args, tensor, batch, own)[part] =
                    largest;
            }
        }
    }
}

/* ---- Numbers of queries ---------------------------------------------------------- */

/* Bounds stay where sums that are made with them are in float32's range. */
enum { LEAST_BOUND = -100, MOST_BOUND = 126 };

/* An e with |x| < 2^e; a low one for infinity and NaN, which stay that whatever they
 * are multiplied by. */
DEVICE int
exponent_above(float x)
{
    const int exponent = (int)(__float_as_uint(x) >> 23 & 0xFF);

    return (exponent == 255 ? 0 : exponent) - 126;
}

/* An e with sqrt(n) <= 2^e. */
DEVICE int
root_exponent(int64_t n)
{
    return n <= 1 ? 0 : n <= 4 ? 1 : n <= 16 ? 2 : n <= 64 ? 3 : 4;
}

/* The exponents of dout and v of a head. */
struct mma_exponents {
    int dout, v;
};

/* The bound of a query's gradients of scores, from the sum of the squares of its dout
 * as it is multiplied: what float16 makes 0 does not count. */
DEVICE int
bound_of(const tfast_attention_args &args, const attention_head &h,
         const mma_exponents &of, float squares, float delta)
{
    const int kept =
        args.dropout_p > 0 ? exponent_above((float)dropout_of(args, h).scale) : 0;
    const int product = exponent_above(sqrtf(squares)) + (of.dout - 142) +
                        (of.v - 126) + root_exponent(args.dim_v) + kept;
    const int other = exponent_above(delta);

    return (int)clamped((product > other ? product : other) + 1, LEAST_BOUND,
                        MOST_BOUND);
}

/* Sums over some of a query's dims: of dout . out, and of squares as above. */
struct row_sums {
    float products, squares;
};

template <typename T>
DEVICE row_sums
sums_of_chunk(const uint4 &dout, const uint4 &out, float power)
{
    const raw_vector x = {{dout.x, dout.y, dout.z, dout.w}};
    const raw_vector y = {{out.x, out.y, out.z, out.w}};
    float products[4] = {0, 0, 0, 0}; /* short sums are rounded less */
    float squares = 0;

#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float element = get_element(x, T::DTYPE, e), scaled = element * power;
        products[e % 4] = fused(element, get_element(y, T::DTYPE, e), products[e % 4]);
        squares = fused(scaled, scaled, squares);
    }
    return {(products[0] + products[1]) + (products[2] + products[3]), squares};
}

/* Those of whole rows, from a lane's. */
template <typename T>
DEVICE row_sums
sums_of_lanes(row_sums sums, int lanes)
{
    for (int by = 1; by < lanes; by *= 2) {
        sums.products += __shfl_xor_sync(~0u, sums.products, by);
        if constexpr (T::SCALED) {
            sums.squares += __shfl_xor_sync(~0u, sums.squares, by);
        }
    }
    return sums;
}

/* Of DELTA_ROWS queries from `first` on; by a block. */
template <typename T>
DEVICE void
find_delta(const mma_call &call, const attention_head &h, int64_t first)
{
    const tfast_attention_args &args = call.args;
    const int across = lanes_of_row(args.dim_v), column = threadIdx.x % across * 8;
    const int left = (int)args.dim_v - column;
    const float *dlse = (const float *)args.dlse;
    mma_exponents of = {};

    if constexpr (T::SCALED) {
        of.dout = read_exponent(call.exponents, args, EXPONENT_DOUT, h.batch, h.head);
        of.v = read_exponent(call.exponents, args, EXPONENT_V, h.batch, h.head);
    }
    for (int r = threadIdx.x / across; r < DELTA_ROWS; r += DELTA_THREADS / across) {
        const int64_t query = first + r;
        row_sums sums = {0, 0};
        if (query < h.n_q && left > 0) {
            const uint16_t *dout = (const uint16_t *)args.dout.data + column +
                                   query_row(args, h, args.dout, query);
            const uint16_t *out = (const uint16_t *)args.out.data + column +
                                  query_row(args, h, args.out, query);
            sums = sums_of_chunk<T>(read_chunk(dout, left, call.chunks),
                                    read_chunk(out, left, call.chunks),
                                    T::SCALED ? power_of(of.dout) : 1);
        }
        sums = sums_of_lanes<T>(sums, across);
        if (query < h.n_q && column == 0) {
            const float delta =
                sums.products - (dlse == nullptr ? 0 : dlse[lse_row(args, h) + query]);
            const int64_t row = number_row(args, h) + query;
            call.delta[row] = delta;
            if constexpr (T::SCALED) {
                call.bounds[row] = bound_of(args, h, of, sums.squares, delta);
            }
        }
    }
}

/* Blocks go on until all rows of all heads are done. */
template <typename T>
TFAST_KERNEL(DELTA_THREADS, 4)
attention_mma_delta(const __grid_constant__ mma_call call)
{
    const tfast_attention_args &args = call.args;
    const int64_t tiles = (args.n_q + DELTA_ROWS - 1) / DELTA_ROWS;

    for (int64_t i = blockIdx.x; i < tiles * args.heads * args.batch; i += gridDim.x) {
        const int64_t head = i / tiles;
        const attention_head h =
            attention_head_of(args, head / args.heads, head % args.heads);
        find_delta<T>(call, h, i % tiles * DELTA_ROWS);
    }
}

/* ---- Powers of heads ------------------------------------------------------------- */

/* The largest bound of a head's queries; by the whole block. */
DEVICE int
largest_bound(const mma_call &call, const attention_head &h)
{
    SHARED(int, of_warp, POWERS_THREADS / 32);
    const int32_t *bounds = call.bounds + number_row(call.args, h);
    int largest = LEAST_BOUND;

    for (int64_t i = threadIdx.x; i < h.n_q; i += POWERS_THREADS) {
        largest = bounds[i] > largest ? bounds[i] : largest;
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = largest;
    }
    __syncthreads();
    largest = of_warp[0];
    for (int i = 1; i < POWERS_THREADS / 32; i++) {
        largest = of_warp[i] > largest ? of_warp[i] : largest;
    }
    __syncthreads(); /* before the next head's are written */
    return largest;
}

/* A block all heads that share keys; blocks go on until all are done. */
TFAST_KERNEL(POWERS_THREADS, 2)
attention_mma_powers(const __grid_constant__ mma_call call)
{
    const tfast_attention_args &args = call.args;
    const int64_t group = args.heads / args.kv_heads;

    for (int64_t i = blockIdx.x; i < args.batch * args.kv_heads; i += gridDim.x) {
        const int64_t batch = i / args.kv_heads, first = i % args.kv_heads * group;
        int dk = LEAST_BOUND + LEAST_EXPONENT, dv = LEAST_EXPONENT;
        for (int64_t head = first; head < first + group; head++) {
            const int bound = largest_bound(call, attention_head_of(args, batch, head));
            const int q = read_exponent(call.exponents, args, EXPONENT_Q, batch, head);
            const int dout =
                read_exponent(call.exponents, args, EXPONENT_DOUT, batch, head);
            dk = bound + q > dk ? bound + q : dk;
            dv = dout > dv ? dout : dv;
        }
        for (int64_t head = first; head < first + group; head++) {
            const int q = read_exponent(call.exponents, args, EXPONENT_Q, batch, head);
            const int dout =
                read_exponent(call.exponents, args, EXPONENT_DOUT, batch, head);
            if (threadIdx.x == 0) {
                call.powers[batch * args.heads + head] = {dk - q, dout - dv, dk, dv};
            }
        }
    }
}

TFAST_EXPORT(attention_rows)
