/* Launches of attention's forward for few queries and many keys. */
#include "attention_decode.cuh"
#include "attention_scratch.cuh"

/* Whether the queries are so few that it pays to split the keys: where one tile of rows
 * does, where several read them less often than a block for every head, or where such
 * blocks would be few. `version` is tfast_mma_path()'s. */
static bool
is_taken(const tfast_attention_args *args, int version)
{
    const int64_t heads = args->batch * args->heads;
    int64_t group, tiles;

    if (version == 0 || args->dim > DECODE_MAX_DIM || args->dim_v > DECODE_MAX_DIM ||
        args->n_q == 0 || args->n_k < 2 * DECODE_LEAST_KEYS ||
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

    if (S::BYTES > 48 << 10) {
        CUDA_TRY(cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
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

    return args.dim <= 64 && args.dim_v <= 64 ? launch_decode<PATH, T, 64>(call)
                                              : launch_decode<PATH, T, 128>(call);
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
