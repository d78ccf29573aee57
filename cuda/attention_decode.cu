/* Attention's forward for few queries and many keys: its launches, and the kernel that
 * adds up what splits of the keys have found. */
#include "attention_decode.cuh"
#include "attention_scratch.cuh"

/* ---- All blocks' results --------------------------------------------------------- */

enum { COMBINE_WARPS = 8, COMBINE_THREADS = COMBINE_WARPS * 32 };

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

/* ---- Which calls, and how they are divided --------------------------------------- */

/* Whether the queries are so few that it pays to split the keys: where one tile of rows
 * does, where several read them less often than a block for every head, or where such
 * blocks would be few. `version` is tfast_mma_path()'s. */
static bool
is_taken(const tfast_attention_args *args, int version)
{
    const int64_t heads = args->batch * args->heads;
    int64_t group, tiles;

    if (version == 0 || args->n_q == 0 || args->n_k < 2 * DECODE_LEAST_KEYS ||
        heads > MMA_MAX_BLOCKS / args->n_q) {
        return false;
    }
    group = args->heads / args->kv_heads;
    tiles = (args->n_q * group + DECODE_ROWS - 1) / DECODE_ROWS;
    return tiles <= DECODE_MAX_TILES && (tiles <= group || heads < DECODE_BLOCKS / 2);
}

static decode_plan
plan_of(const tfast_attention_args *args)
{
    const int64_t rows = args->n_q * (args->heads / args->kv_heads);
    const int64_t tiles = (rows + DECODE_ROWS - 1) / DECODE_ROWS;
    const int64_t works = args->batch * args->kv_heads * tiles;
    const int64_t wanted = (DECODE_BLOCKS + works - 1) / works;
    const int64_t most = args->n_k / DECODE_LEAST_KEYS;

    return {rows, tiles, wanted < most ? wanted : most, (args->dim_v + 3) / 4 * 4};
}

/* Rows of results: one for each row of queries and each split. */
static int64_t
results_of(const tfast_attention_args *args, const decode_plan &plan)
{
    return args->batch * args->kv_heads * plan.rows * plan.splits;
}

int64_t
tfast_decode_results(const tfast_attention_args *args, int version)
{
    if (!is_taken(args, version)) {
        return 0;
    }
    const decode_plan plan = plan_of(args);
    return results_of(args, plan) * (plan.pitch + 2) * (int64_t)sizeof(float);
}

static decode_call
call_of(const tfast_attention_args *args, int version)
{
    const attention_scratch scratch = attention_scratch_of(args, version, false);
    const decode_plan plan = plan_of(args);
    float *sums = (float *)((char *)args->scratch + scratch.results);

    return {tfast_mma_forward_call(args, version), plan, sums,
            (float2 *)(sums + results_of(args, plan) * plan.pitch)};
}

template <typename PATH, typename T, int D>
static tfast_status
launch_decode(const decode_call &call)
{
    typedef decode_shape<PATH, D> S;
    constexpr auto kernel = attention_decode<PATH, T, S>;
    const decode_plan &plan = call.plan;
    const tfast_attention_args &args = call.mma.args;
    const cudaStream_t stream = (cudaStream_t)args.stream;
    const int64_t heads = args.batch * args.kv_heads;
    const tfast_status status = ask_for_shared<S>(kernel);

    if (status != TFAST_OK) {
        return status;
    }
    LAUNCH(kernel, (unsigned)(heads * plan.splits * plan.tiles), S::THREADS, S::BYTES,
           stream, call);
    LAUNCH(attention_decode_combine, (unsigned)(heads * plan.rows), COMBINE_THREADS, 0,
           stream, call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_decode");
}

template <typename PATH, typename T>
static tfast_status
decode_of_type(const decode_call &call)
{
    const tfast_attention_args &args = call.mma.args;
    const int64_t dim = args.dim > args.dim_v ? args.dim : args.dim_v;

    return dim <= 64    ? launch_decode<PATH, T, 64>(call)
           : dim <= 128 ? launch_decode<PATH, T, 128>(call)
           : dim <= 192 ? launch_decode<PATH, T, 192>(call)
                        : launch_decode<PATH, T, 256>(call);
}

tfast_status
tfast_decode_attention(bool *taken, const tfast_attention_args *args)
{
    int version;
    tfast_status status = tfast_mma_path(&version, args);

    *taken = status == TFAST_OK && is_taken(args, version);
    if (!*taken) {
        return status;
    }
    const decode_call call = call_of(args, version);
    status = tfast_mma_find_exponents(call.mma, EXPONENT_V + 1);
    if (status != TFAST_OK) {
        return status;
    }
    if (version < 80) {
        return call.mma.exponents != nullptr
                   ? decode_of_type<path_75, mma_bf16_as_f16>(call)
                   : decode_of_type<path_75, mma_f16>(call);
    }
    return args->dtype == TFAST_F16 ? decode_of_type<path_80, mma_f16>(call)
                                    : decode_of_type<path_80, mma_bf16>(call);
}
