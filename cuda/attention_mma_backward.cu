/* Attention's backward by tensor cores, but for the kernels of gradients themselves:
 * numbers of rows that these need, and which of them a call takes. */
#include "attention_mma_far.cuh"
#include "attention_scratch.cuh"

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
bound_of(const mma_backward_call &call, const attention_head &h, int64_t query,
         float delta)
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

enum { DELTA_THREADS = 128 };

/* A warp a query; blocks go on until all rows of all heads are done. */
TFAST_KERNEL(DELTA_THREADS, 4)
attention_mma_delta(const __grid_constant__ mma_backward_call call)
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

enum { POWERS_THREADS = 256 };

/* The largest bound of a head's queries; by the whole block. */
DEVICE int
largest_bound(const mma_backward_call &call, const attention_head &h)
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
attention_mma_powers(const __grid_constant__ mma_backward_call call)
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

/* ---- Launches -------------------------------------------------------------------- */

static mma_backward_call
call_of(const tfast_attention_args *args, int version)
{
    const attention_scratch scratch = attention_scratch_of(args, version, true);
    char *at = (char *)args->scratch;

    const bool scaled = is_scaled(args, version);

    return {{*args, scaled ? (int32_t *)(at + scratch.exponents) : nullptr,
             tfast_mma_is_aligned(&args->q, 8) && tfast_mma_is_aligned(&args->k, 8) &&
                 tfast_mma_is_aligned(&args->v, 8) &&
                 tfast_mma_is_aligned(&args->dout, 8),
             tfast_mma_is_aligned(&args->dq, 2) && tfast_mma_is_aligned(&args->dk, 2) &&
                 tfast_mma_is_aligned(&args->dv, 2)},
            (float *)(at + scratch.delta),
            may_be_far(args) ? (float *)(at + scratch.shares) : nullptr,
            scaled ? (int32_t *)(at + scratch.bounds) : nullptr,
            scaled ? (mma_head_powers *)(at + scratch.powers) : nullptr};
}

static tfast_status
launch_delta(const mma_backward_call &call)
{
    const tfast_attention_args &args = call.args;
    const int64_t rows = (args.n_q + 3) / 4 * args.heads * args.batch;

    if (rows == 0) {
        return TFAST_OK;
    }
    LAUNCH(attention_mma_delta, (unsigned)(rows < 1 << 20 ? rows : 1 << 20),
           DELTA_THREADS, 0, (cudaStream_t)args.stream, call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_delta");
}

static tfast_status
launch_powers(const mma_backward_call &call)
{
    const int64_t works = call.args.batch * call.args.kv_heads;

    if (call.powers == nullptr) {
        return TFAST_OK;
    }
    LAUNCH(attention_mma_powers, (unsigned)(works < 1 << 20 ? works : 1 << 20),
           POWERS_THREADS, 0, (cudaStream_t)call.args.stream, call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_powers");
}

template <typename PATH, typename T>
static tfast_status
launch_shares(const mma_backward_call &call)
{
    typedef mma_far_shape S;
    const tfast_attention_args &args = call.args;
    const int64_t works = (args.n_q + S::ROWS - 1) / S::ROWS * args.heads * args.batch;
    constexpr auto kernel = attention_mma_shares<PATH, T>;

    if (works == 0) {
        return TFAST_OK;
    }
    LAUNCH(kernel, (unsigned)(works < 1 << 20 ? works : 1 << 20), S::BLOCK, 0,
           (cudaStream_t)args.stream, call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_shares");
}

static tfast_status
find_shares(const mma_backward_call &call, int version)
{
    if (call.shares == nullptr) {
        return TFAST_OK;
    }
    if (version < 80) {
        return call.powers != nullptr ? launch_shares<path_75, mma_bf16_as_f16>(call)
                                      : launch_shares<path_75, mma_f16>(call);
    }
    return call.args.dtype == TFAST_F16 ? launch_shares<path_80, mma_f16>(call)
                                        : launch_shares<path_80, mma_bf16>(call);
}

/* What the kernels of gradients need to know. */
static tfast_status
prepare(const mma_backward_call &call, int version)
{
    tfast_status status = tfast_mma_find_exponents(call, EXPONENTS);

    if (status == TFAST_OK) {
        status = launch_delta(call);
    }
    if (status == TFAST_OK) {
        status = find_shares(call, version);
    }
    return status == TFAST_OK ? launch_powers(call) : status;
}

/* Those of q, k and v. */
static tfast_status
launch_gradients(const mma_backward_call &call, int version)
{
    const tfast_attention_args &args = call.args;
    const int64_t dim = args.dim > args.dim_v ? args.dim : args.dim_v;

    return dim <= 32    ? tfast_mma_backward_of_dim<32>(call, version)
           : dim <= 64  ? tfast_mma_backward_of_dim<64>(call, version)
           : dim <= 96  ? tfast_mma_backward_of_dim<96>(call, version)
           : dim <= 128 ? tfast_mma_backward_of_dim<128>(call, version)
           : dim <= 192 ? tfast_mma_backward_of_dim<192>(call, version)
                        : tfast_mma_backward_of_dim<256>(call, version);
}

static bool
is_any_wanted(const tfast_attention_args *args)
{
    return args->dq.data != nullptr || args->dk.data != nullptr ||
           args->dv.data != nullptr || args->dbias != nullptr ||
           args->dalibi != nullptr || args->dsinks != nullptr;
}

tfast_status
tfast_mma_attention_backward(bool *taken, const tfast_attention_args *args)
{
    int version;
    tfast_status status = tfast_mma_path(&version, args);

    *taken = version != 0;
    if (status != TFAST_OK || !*taken || !is_any_wanted(args)) {
        return status;
    }
    const mma_backward_call call = call_of(args, version);
    status = prepare(call, version);
    if (status == TFAST_OK) {
        status = launch_gradients(call, version);
    }
    return status == TFAST_OK ? tfast_mma_option_gradients(call, version) : status;
}
