/* Launches of attention's forward by tensor cores. */
#include "attention_mma_forward.cuh"
#include "attention_scratch.cuh"

mma_call
tfast_mma_forward_call(const tfast_attention_args *args, int version)
{
    const attention_scratch scratch = attention_scratch_of(args, version, false);
    char *at = (char *)args->scratch;

    return {*args,
            is_scaled(args, version) ? (int32_t *)(at + scratch.exponents) : nullptr,
            tfast_mma_is_aligned(&args->q, 8) && tfast_mma_is_aligned(&args->k, 8) &&
                tfast_mma_is_aligned(&args->v, 8),
            tfast_mma_is_aligned(&args->out, 2)};
}

template <typename PATH, typename T, typename S>
static tfast_status
launch_forward(const mma_call &call)
{
    constexpr auto kernel = attention_mma_forward<PATH, T, S>;
    const tfast_attention_args &args = call.args;
    const int64_t tiles = (args.n_q + S::ROWS - 1) / S::ROWS;
    const tfast_status status = ask_for_shared<S>(kernel);

    if (status != TFAST_OK) {
        return status;
    }
    LAUNCH(kernel, (unsigned)(tiles * args.heads * args.batch), S::THREADS, S::BYTES,
           (cudaStream_t)args.stream, call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_forward");
}

template <typename PATH, typename T, int D>
static tfast_status
forward_of_dim(const mma_call &call)
{
    return tfast_mma_has_options(&call.args)
               ? launch_forward<PATH, T, mma_forward_shape<PATH, D, true>>(call)
               : launch_forward<PATH, T, mma_forward_shape<PATH, D, false>>(call);
}

template <typename PATH, typename T>
static tfast_status
forward_of_type(const mma_call &call)
{
    const tfast_attention_args &args = call.args;
    const int64_t dim = args.dim > args.dim_v ? args.dim : args.dim_v;

    return dim <= 32    ? forward_of_dim<PATH, T, 32>(call)
           : dim <= 64  ? forward_of_dim<PATH, T, 64>(call)
           : dim <= 96  ? forward_of_dim<PATH, T, 96>(call)
           : dim <= 128 ? forward_of_dim<PATH, T, 128>(call)
           : dim <= 192 ? forward_of_dim<PATH, T, 192>(call)
                        : forward_of_dim<PATH, T, 256>(call);
}

tfast_status
tfast_mma_attention(bool *taken, const tfast_attention_args *args)
{
    int version;
    tfast_status status = tfast_mma_path(&version, args);

    *taken = version != 0;
    if (status != TFAST_OK || !*taken) {
        return status;
    }
    const mma_call call = tfast_mma_forward_call(args, version);
    status = tfast_mma_find_exponents(call, EXPONENT_V + 1);
    if (status != TFAST_OK) {
        return status;
    }
    if (version < 80) {
        return call.exponents != nullptr
                   ? forward_of_type<path_75, mma_bf16_as_f16>(call)
                   : forward_of_type<path_75, mma_f16>(call);
    }
    return args->dtype == TFAST_F16 ? forward_of_type<path_80, mma_f16>(call)
                                    : forward_of_type<path_80, mma_bf16>(call);
}
