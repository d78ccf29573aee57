/* Launches of attention's forward for few queries and many keys. */
#include "attention_decode.cuh"

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

/* How many results of a split there are. */
static int64_t
results_of(const tfast_attention_args *args, const decode_plan &plan)
{
    return args->batch * args->kv_heads * plan.rows * plan.splits;
}

/* Whether the queries are so few that to split keys pays: where one tile of rows does,
 * where more of them still read the keys less often than a block for every head does,
 * and where such blocks would be few. */
static tfast_status
takes(int *version, const tfast_attention_args *args)
{
    const tfast_status status = tfast_mma_path(version, args);
    int64_t group, tiles;

    if (status != TFAST_OK || *version == 0) {
        return status;
    }
    group = args->heads / args->kv_heads;
    tiles = (args->n_q * group + DECODE_ROWS - 1) / DECODE_ROWS;
    if (args->n_q == 0 || args->n_k < 2 * DECODE_LEAST_KEYS ||
        tiles > DECODE_MAX_TILES ||
        (tiles > group && args->batch * args->heads >= DECODE_BLOCKS / 2) ||
        args->batch * args->heads > MMA_MAX_BLOCKS / args->n_q) {
        *version = 0;
    }
    return TFAST_OK;
}

tfast_status
tfast_decode_scratch(int64_t *bytes, const tfast_attention_args *args)
{
    int version;
    const tfast_status status = takes(&version, args);

    *bytes = 0;
    if (status == TFAST_OK && version != 0) {
        const decode_plan plan = plan_of(args);
        *bytes = results_of(args, plan) * (plan.pitch + 2) * (int64_t)sizeof(float);
    }
    return status;
}

static decode_call
call_of(const tfast_attention_args *args)
{
    const decode_plan plan = plan_of(args);
    float *sums = (float *)args->scratch;

    return {{*args,
             tfast_mma_is_aligned(&args->q, 8) && tfast_mma_is_aligned(&args->k, 8) &&
                 tfast_mma_is_aligned(&args->v, 8),
             false},
            plan,
            sums,
            (float2 *)(sums + results_of(args, plan) * plan.pitch)};
}

template <typename PATH, typename T, int D>
static tfast_status
launch_decode(const tfast_attention_args *args)
{
    typedef decode_shape<PATH, D> S;
    constexpr auto kernel = attention_decode<PATH, T, S>;
    const decode_call call = call_of(args);
    const decode_plan &plan = call.plan;
    const int64_t heads = args->batch * args->kv_heads;

    if (S::BYTES > 48 << 10) {
        CUDA_TRY(cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    }
    LAUNCH(kernel, (unsigned)(heads * plan.splits * plan.tiles), S::THREADS, S::BYTES,
           (cudaStream_t)args->stream, call);
    CUDA_TRY(cudaGetLastError());
    LAUNCH(attention_decode_combine, (unsigned)(heads * plan.rows), COMBINE_THREADS, 0,
           (cudaStream_t)args->stream, call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_decode_combine");
}

template <typename PATH, typename T>
static tfast_status
decode_of_type(const tfast_attention_args *args)
{
    const int64_t dim = args->dim > args->dim_v ? args->dim : args->dim_v;

    return dim <= 64 ? launch_decode<PATH, T, 64>(args)
                     : launch_decode<PATH, T, 128>(args);
}

tfast_status
tfast_decode_attention(bool *taken, const tfast_attention_args *args)
{
    int version;
    const tfast_status status = takes(&version, args);

    *taken = version != 0;
    if (status != TFAST_OK || !*taken) {
        return status;
    }
    if (version < 80) {
        return decode_of_type<path_75, mma_f16>(args);
    }
    return args->dtype == TFAST_F16 ? decode_of_type<path_80, mma_f16>(args)
                                    : decode_of_type<path_80, mma_bf16>(args);
}
