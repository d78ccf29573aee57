/* Attention backward for bfloat16 that is multiplied as float16: which powers of two
 * make the gradients of scores fit.
 *
 * Of row i |dp_ij| <= |dout_i| |v_j|, and |v_j| <= sqrt(dim_v) times v's largest
 * element, so that
 *
 *   |ds_ij| <= p_ij (kept |dp_ij| + |delta_i|) < 2^bound_i
 *
 * where kept is dropout's factor. dq takes ds 2^(15 - bound) of each row by itself. dk
 * is a sum over rows, and over all heads that share the keys, whose q have exponents of
 * their own; there each head's ds has the one power with which all sums have the same
 * unit, that of the largest bound. So has dv, whose weights get a power, at most 1,
 * that makes up for the exponents of dout. */
#ifndef TFAST_ATTENTION_MMA_BACKWARD_SCALE_CUH
#define TFAST_ATTENTION_MMA_BACKWARD_SCALE_CUH

#include "attention_mma.cuh"

/* Exponents of one head of q: for dk and dv. */
struct mma_head_powers {
    int32_t bound;  /* of its gradients of scores, at least */
    int32_t weight; /* weights are multiplied by 2^weight, 0 or less */
    int32_t dk, dv; /* what sums are in units of, the same for all heads of a group */
};

/* What a launch passes to its kernel; the pointers are to scratch. */
struct mma_backward_call : mma_call {
    float *delta;            /* dout . out - dlse of each query: see number_row() */
    int32_t *bounds;         /* of each query: its exponent */
    mma_head_powers *powers; /* [batch, heads] */
};

/* Bounds stay where sums that are made with them are in float32's range. */
enum { LEAST_BOUND = -100, MOST_BOUND = 126 };

/* The first of this head's queries among all of the call's: [batch, heads, n_q], or
 * [heads, total_q]. */
DEVICE int64_t
number_row(const tfast_attention_args &args, const attention_head &h)
{
    return args.cu_seqlens_q == nullptr ? (h.batch * args.heads + h.head) * args.n_q
                                        : h.head * args.total_q + h.first_q;
}

/* 2^exponent, or 0 or the largest one where that is out of range. */
DEVICE float
two_to(int exponent)
{
    const int e = exponent > 127 ? 127 : exponent;

    return e < -126 ? 0 : __uint_as_float((uint32_t)(e + 127) << 23);
}

/* 2^exponent as two factors, so that only their product with a number may be out of
 * range. */
DEVICE float2
two_factors(int exponent)
{
    return make_float2(two_to(exponent / 2), two_to(exponent - exponent / 2));
}

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

#endif
