/* Attention's forward for few queries and many keys, and the kernel that adds up what
 * splits of the keys have found. */
#include "attention_decode.cuh"

#define CHECK(K, path, type, dims, rows, threads, shared)                              \
    CHECK_SHAPE(rows, threads, shared, decode_shape<path_##path, dims>)

/* ---- All blocks' results --------------------------------------------------------- */

enum { COMBINE_WARPS = COMBINE_THREADS / 32 };

/* A row of one head, and what all splits have for it. */
struct combined_row {
    attention_head h;
    int64_t query;
    const float2 *numbers;
    const float *sums;
    float top, sum; /* with the sink */
    bool empty;
};

DEVICE combined_row
row_to_combine(const decode_call &call)
{
    const tfast_attention_args &args = call.mma.args;
    const decode_plan &plan = call.plan;
    const int64_t group = args.heads / args.kv_heads, head = blockIdx.x / plan.rows;
    const int64_t row = blockIdx.x % plan.rows, first = blockIdx.x * plan.splits;

    return {attention_head_of(args, head / args.kv_heads,
                              head % args.kv_heads * group + row % group),
            row / group,
            call.numbers + first,
            call.sums + first * plan.pitch,
            -INFINITY,
            0,
            true};
}

/* By a whole warp, a lane every 32nd split. */
DEVICE void
sum_numbers(combined_row *row, const decode_call &call)
{
    const tfast_attention_args &args = call.mma.args;
    const float *sinks = (const float *)args.sinks;
    const float sink = sinks == nullptr ? -INFINITY : sinks[row->h.head];
    const int lane = threadIdx.x % 32;
    float top = sink, sum = 0;

    for (int64_t split = lane; split < call.plan.splits; split += 32) {
        top = fmaxf(top, row->numbers[split].x);
    }
    for (int by = 1; by < 32; by *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, by));
    }
    row->top = top == -INFINITY ? 0 : top;
    for (int64_t split = lane; split < call.plan.splits; split += 32) {
        const float2 number = row->numbers[split];
        sum = fused(number.y, exponential(number.x - row->top), sum);
        row->empty = row->empty && number.y == 0;
    }
    for (int by = 1; by < 32; by *= 2) {
        sum += __shfl_xor_sync(~0u, sum, by);
    }
    row->empty = __all_sync(~0u, row->empty);
    row->sum = sum + exponential(sink - row->top);
}

/* Dims `dim` to dim + 3 of the splits that are this warp's. */
DEVICE float4
add_splits(const combined_row &row, const decode_plan &plan, int64_t dim)
{
    float4 sum = {0, 0, 0, 0};

#pragma unroll 4
    for (int64_t split = threadIdx.x / 32; split < plan.splits;
         split += COMBINE_WARPS) {
        const float2 number = row.numbers[split];
        const float fade = exponential(number.x - row.top);
        if (number.y != 0) {
            const float4 x = *(const float4 *)(row.sums + split * plan.pitch + dim);
            sum = {fused(x.x, fade, sum.x), fused(x.y, fade, sum.y),
                   fused(x.z, fade, sum.z), fused(x.w, fade, sum.w)};
        }
    }
    return sum;
}

TFAST_KERNEL(COMBINE_THREADS, 4)
attention_decode_combine(const __grid_constant__ decode_call call)
{
    SHARED(float4, sums, COMBINE_WARPS * TFAST_ATTENTION_MAX_DIM / 4);
    const tfast_attention_args &args = call.mma.args;
    const int64_t dim_v = args.dim_v;
    combined_row row = row_to_combine(call);

    if (row.query >= row.h.n_q) {
        return;
    }
    sum_numbers(&row, call);
    for (int part = threadIdx.x % 32; part * 4 < dim_v; part += 32) {
        sums[(int)threadIdx.x / 32 * (TFAST_ATTENTION_MAX_DIM / 4) + part] =
            add_splits(row, call.plan, part * 4);
    }
    __syncthreads();
    if (threadIdx.x == 0 && args.lse != nullptr) {
        ((float *)args.lse)[lse_row(args, row.h) + row.query] =
            row.empty ? -INFINITY : row.top + logf(row.sum);
    }
    if (threadIdx.x < dim_v) {
        const double kept = args.dropout_p > 0 ? dropout_of(args, row.h).scale : 1;
        const float *own = (const float *)sums + threadIdx.x;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < COMBINE_WARPS; w++) {
            sum += own[w * TFAST_ATTENTION_MAX_DIM];
        }
        write_element(args.out.data, args.dtype,
                      query_row(args, row.h, args.out, row.query) + threadIdx.x,
                      row.empty ? 0 : sum * ((float)kept / row.sum));
    }
}

DECODE_SHAPES(CHECK, )
TFAST_EXPORT(attention_decode)
