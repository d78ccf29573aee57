/* Launches of attention's backward by tensor cores. */
#include "attention_mma_backward.cuh"
#include "attention_scratch.cuh"

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
            scaled ? (int32_t *)(at + scratch.bounds) : nullptr,
            scaled ? (mma_head_powers *)(at + scratch.powers) : nullptr};
}

static bool
wants_keys(const tfast_attention_args *args)
{
    return args->dk.data != nullptr || args->dv.data != nullptr;
}

template <typename PATH, typename T, typename S>
static tfast_status
launch_backward(const mma_backward_call &call)
{
    constexpr auto kernel = attention_mma_backward<PATH, T, S>;
    const tfast_attention_args &args = call.args;
    const int64_t rows = S::KEYS ? args.n_k : args.n_q;
    const int64_t heads = S::KEYS ? args.kv_heads : args.heads;
    const int64_t blocks = (rows + S::ROWS - 1) / S::ROWS * heads * args.batch;

    if (blocks == 0 || !(S::KEYS ? wants_keys(&args) : args.dq.data != nullptr)) {
        return TFAST_OK;
    }
    if (S::BYTES > 48 << 10) {
        CUDA_TRY(cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    }
    LAUNCH(kernel, (unsigned)blocks, S::THREADS, S::BYTES, (cudaStream_t)args.stream,
           call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_backward");
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

/* What the kernels of gradients need to know. */
static tfast_status
prepare(const mma_backward_call &call)
{
    tfast_status status = tfast_mma_find_exponents(call, EXPONENTS);

    if (status == TFAST_OK) {
        status = launch_delta(call);
    }
    return status == TFAST_OK ? launch_powers(call) : status;
}

template <typename PATH, typename T, int D, bool OPTIONS>
static tfast_status
backward_of_shape(const mma_backward_call &call)
{
    typedef mma_backward_shape<PATH, D, true, OPTIONS> keys;
    typedef mma_backward_shape<PATH, D, false, OPTIONS> queries;
    const tfast_status status = launch_backward<PATH, T, keys>(call);

    return status == TFAST_OK ? launch_backward<PATH, T, queries>(call) : status;
}

/* 96 dims with options take the tile of 128: on sm_75 their own spilled registers. */
template <typename PATH, typename T, int D>
static tfast_status
backward_of_dim(const mma_backward_call &call)
{
    return tfast_mma_has_options(&call.args) ? backward_of_shape < PATH, T,
           D == 96 ? 128 : D,
           true > (call) : backward_of_shape<PATH, T, D, false>(call);
}

template <typename PATH, typename T>
static tfast_status
backward_of_type(const mma_backward_call &call)
{
    const tfast_attention_args &args = call.args;
    const int64_t dim = args.dim > args.dim_v ? args.dim : args.dim_v;

    return dim <= 32    ? backward_of_dim<PATH, T, 32>(call)
           : dim <= 64  ? backward_of_dim<PATH, T, 64>(call)
           : dim <= 96  ? backward_of_dim<PATH, T, 96>(call)
           : dim <= 128 ? backward_of_dim<PATH, T, 128>(call)
           : dim <= 192 ? backward_of_dim<PATH, T, 192>(call)
                        : backward_of_dim<PATH, T, 256>(call);
}

tfast_status
tfast_mma_attention_backward(bool *taken, const tfast_attention_args *args)
{
    int version;
    tfast_status status = tfast_mma_path(&version, args);

    *taken = version != 0;
    if (status != TFAST_OK || !*taken) {
        return status;
    }
    if (!wants_keys(args) && args->dq.data == nullptr) {
        return TFAST_OK;
    }
    const mma_backward_call call = call_of(args, version);
    status = prepare(call);
    if (status != TFAST_OK) {
        return status;
    }
    if (version < 80) {
        return call.powers != nullptr ? backward_of_type<path_75, mma_bf16_as_f16>(call)
                                      : backward_of_type<path_75, mma_f16>(call);
    }
    return args->dtype == TFAST_F16 ? backward_of_type<path_80, mma_f16>(call)
                                    : backward_of_type<path_80, mma_bf16>(call);
}
