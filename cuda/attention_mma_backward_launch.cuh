/* Launches of attention's backward by tensor cores: a file that includes this compiles
 * the kernels for the tiles of dims that it instantiates. */
#ifndef TFAST_ATTENTION_MMA_BACKWARD_LAUNCH_CUH
#define TFAST_ATTENTION_MMA_BACKWARD_LAUNCH_CUH

#include "attention_mma_backward.cuh"

/* Whether the call wants what the kernel makes. */
template <typename S>
static bool
is_wanted(const tfast_attention_args &args)
{
    return S::KEYS ? args.dk.data != nullptr || args.dv.data != nullptr
                   : args.dq.data != nullptr;
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

    if (blocks == 0 || !is_wanted<S>(args)) {
        return TFAST_OK;
    }
    const tfast_status status = ask_for_shared<S>(kernel);
    if (status != TFAST_OK) {
        return status;
    }
    LAUNCH(kernel, (unsigned)blocks, S::THREADS, S::BYTES, (cudaStream_t)args.stream,
           call);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_backward");
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

template <typename PATH, typename T, int D>
static tfast_status
backward_of_type(const mma_backward_call &call)
{
    constexpr int WITH_OPTIONS = D == 96 ? 128 : D; /* on sm_75 96 spilled registers */

    return tfast_mma_has_options(&call.args)
               ? backward_of_shape<PATH, T, WITH_OPTIONS, true>(call)
               : backward_of_shape<PATH, T, D, false>(call);
}

template <int D>
tfast_status
tfast_mma_backward_of_dim(const mma_backward_call &call, int version)
{
    if (version < 80) {
        return call.powers != nullptr
                   ? backward_of_type<path_75, mma_bf16_as_f16, D>(call)
                   : backward_of_type<path_75, mma_f16, D>(call);
    }
    return call.args.dtype == TFAST_F16 ? backward_of_type<path_80, mma_f16, D>(call)
                                        : backward_of_type<path_80, mma_bf16, D>(call);
}

#endif
