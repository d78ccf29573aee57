/* Kernels that come before attention's others by tensor cores: numbers of heads and of
 * rows that these need. */
#include "attention_mma_far.cuh"

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
    const int lane = threadIdx.x % 32, across = dims > 128  ? 32
                                                : dims > 64 ? 16
                                                : dims > 32 ? 8
                                                            : 4;
    const int left = dims - lane % across * 8;
    const int64_t n = keys ? h.n_k : h.n_q, step = EXPONENT_PARTS * (32 / across);
    int64_t row = part * (32 / across) + lane / across;
    int largest = LEAST_EXPONENT;

    for (; left > 0 && row < n; row += step) {
        const uint16_t *from =
            (const uint16_t *)array.data + lane % across * 8 +
            (keys ? key_row(args, h, array, row) : query_row(args, h, array, row));
        const uint4 x =
            call.chunks && left >= 8 ? *(const uint4 *)from : gather_chunk(from, left);
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

/* The bound of a query's gradients of scores; by a whole warp. The row's norm is that
 * of dout as it is multiplied: what float16 makes 0 does not count. */
DEVICE int
bound_of(const mma_call &call, const attention_head &h, int64_t query, float delta)
{
    const tfast_attention_args &args = call.args;
    const int dout =
        read_exponent(call.exponents, args, EXPONENT_DOUT, h.batch, h.head);
    const int v = read_exponent(call.exponents, args, EXPONENT_V, h.batch, h.head);
    const int64_t row = query_row(args, h, args.dout, query);
    const float power = power_of(dout);
    float sum = 0;

    for (int d = threadIdx.x % 32; d < args.dim_v; d += 32) {
        const float x =
            read_element<float>(args.dout.data, TFAST_BF16, row + d) * power;
        sum = fused(x, x, sum);
    }
    for (int by = 1; by < 32; by *= 2) {
        sum += __shfl_xor_sync(~0u, sum, by);
    }
    const int kept =
        args.dropout_p > 0 ? exponent_above((float)dropout_of(args, h).scale) : 0;
    const int product = exponent_above(sqrtf(sum)) + (dout - 142) + (v - 126) +
                        root_exponent(args.dim_v) + kept;
    const int other = exponent_above(delta);

    return (int)clamped((product > other ? product : other) + 1, LEAST_BOUND,
                        MOST_BOUND);
}

/* A warp a query; blocks go on until all rows of all heads are done. */
TFAST_KERNEL(DELTA_THREADS, 4)
attention_mma_delta(const __grid_constant__ mma_call call)
{
    const tfast_attention_args &args = call.args;
    const int64_t heads = args.heads * args.batch, warps = DELTA_THREADS / 32;
    const int64_t rows = (args.n_q + warps - 1) / warps;

    for (int64_t i = blockIdx.x; i < heads * rows; i += gridDim.x) {
        const int64_t query = i % rows * warps + threadIdx.x / 32, head = i / rows;
        const attention_head h =
            attention_head_of(args, head / args.heads, head % args.heads);
        if (query < h.n_q) {
            const float delta =
                delta_of<float>(args, h, query, (int)threadIdx.x % 32, 32);
            const int64_t row = number_row(args, h) + query;
            if (threadIdx.x % 32 == 0) {
                call.delta[row] = delta;
            }
            if (call.bounds != nullptr) {
                const int bound = bound_of(call, h, query, delta);
                if (threadIdx.x % 32 == 0) {
                    call.bounds[row] = bound;
                }
            }
        }
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
