/* The host side of attention by tensor cores: which calls it takes, and with which
 * kernel. */
#include "attention_mma_backward.cuh"
#include "attention_mma_forward.cuh"

/* ---- Which path ------------------------------------------------------------------ */

/* What runs here was compiled for: 75, 80 or later. PTX for 75 that a newer device
 * translated counts as 75. */
static tfast_status
compiled_for(int *version)
{
    constexpr auto any =
        attention_mma_forward<path_80, mma_f16, mma_forward_shape<path_80, 32, false>>;
    const tfast_relaxed_scope relaxed; /* loads the kernel, if nothing has yet */
    cudaFuncAttributes attributes;

    CUDA_TRY(cudaFuncGetAttributes(&attributes, any));
    *version = attributes.ptxVersion;
    return TFAST_OK;
}

/* ---- What a call's arrays allow -------------------------------------------------- */

static bool
is_aligned(const tfast_attention_rows *rows, int64_t elements)
{
    return (uintptr_t)rows->data % (2 * (size_t)elements) == 0 &&
           rows->batch % elements == 0 && rows->head % elements == 0 &&
           rows->row % elements == 0;
}

static mma_call
call_of(const tfast_attention_args *args)
{
    return {*args,
            is_aligned(&args->q, 8) && is_aligned(&args->k, 8) &&
                is_aligned(&args->v, 8),
            is_aligned(&args->out, 2)};
}

static mma_call
backward_call_of(const tfast_attention_args *args)
{
    return {*args,
            is_aligned(&args->q, 8) && is_aligned(&args->k, 8) &&
                is_aligned(&args->v, 8) && is_aligned(&args->dout, 8),
            is_aligned(&args->dq, 2) && is_aligned(&args->dk, 2) &&
                is_aligned(&args->dv, 2)};
}

/* Whether scores are more than bounded products of a positive scale. */
static bool
has_options(const tfast_attention_args *args)
{
    return args->mask.data != nullptr || args->bias.data != nullptr ||
           args->alibi_slopes != nullptr || args->softcap != 0 || args->dropout_p > 0 ||
           !(args->scale > 0);
}

/* ---- Forward --------------------------------------------------------------------- */

template <typename PATH, typename T, typename S>
static tfast_status
launch_forward(const tfast_attention_args *args)
{
    constexpr auto kernel = attention_mma_forward<PATH, T, S>;
    const int64_t tiles = (args->n_q + S::ROWS - 1) / S::ROWS;

    if (S::BYTES > 48 << 10) {
        CUDA_TRY(cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    }
    LAUNCH(kernel, (unsigned)(tiles * args->heads * args->batch), S::THREADS, S::BYTES,
           (cudaStream_t)args->stream, call_of(args));
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_forward");
}

template <typename PATH, typename T, int D>
static tfast_status
forward_of_dim(const tfast_attention_args *args)
{
    return has_options(args)
               ? launch_forward<PATH, T, mma_forward_shape<PATH, D, true>>(args)
               : launch_forward<PATH, T, mma_forward_shape<PATH, D, false>>(args);
}

template <typename PATH, typename T>
static tfast_status
forward_of_type(const tfast_attention_args *args)
{
    const int64_t dim = args->dim > args->dim_v ? args->dim : args->dim_v;

    return dim <= 32   ? forward_of_dim<PATH, T, 32>(args)
           : dim <= 64 ? forward_of_dim<PATH, T, 64>(args)
           : dim <= 96 ? forward_of_dim<PATH, T, 96>(args)
                       : forward_of_dim<PATH, T, 128>(args);
}

/* ---- Backward -------------------------------------------------------------------- */

template <typename PATH, typename T, typename S>
static tfast_status
launch_backward(const tfast_attention_args *args)
{
    constexpr auto kernel = attention_mma_backward<PATH, T, S>;
    const int64_t rows = S::KEYS ? args->n_k : args->n_q;
    const int64_t heads = S::KEYS ? args->kv_heads : args->heads;
    const int64_t blocks = (rows + S::ROWS - 1) / S::ROWS * heads * args->batch;

    if (blocks == 0 ||
        (S::KEYS && args->dk.data == nullptr && args->dv.data == nullptr)) {
        return TFAST_OK;
    }
    if (S::BYTES > 48 << 10) {
        CUDA_TRY(cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    }
    LAUNCH(kernel, (unsigned)blocks, S::THREADS, S::BYTES, (cudaStream_t)args->stream,
           backward_call_of(args));
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_backward");
}

static tfast_status
launch_delta(const tfast_attention_args *args)
{
    const int64_t rows = (args->n_q + 3) / 4 * args->heads * args->batch;

    LAUNCH(attention_mma_delta, (unsigned)(rows < 1 << 20 ? rows : 1 << 20),
           DELTA_THREADS, 0, (cudaStream_t)args->stream, *args);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_delta");
}

/* dq comes last: until then it holds the rows' numbers. */
template <typename PATH, typename T, int D, bool OPTIONS>
static tfast_status
backward_of_shape(const tfast_attention_args *args)
{
    typedef mma_backward_shape<PATH, D, true, OPTIONS> keys;
    typedef mma_backward_shape<PATH, D, false, OPTIONS> queries;
    tfast_status status = launch_delta(args);

    if (status == TFAST_OK) {
        status = launch_backward<PATH, T, keys>(args);
    }
    return status == TFAST_OK ? launch_backward<PATH, T, queries>(args) : status;
}

template <typename PATH, typename T, int D>
static tfast_status
backward_of_dim(const tfast_attention_args *args)
{
    return has_options(args) ? backward_of_shape<PATH, T, D, true>(args)
                             : backward_of_shape<PATH, T, D, false>(args);
}

template <typename PATH, typename T>
static tfast_status
backward_of_type(const tfast_attention_args *args)
{
    const int64_t dim = args->dim > args->dim_v ? args->dim : args->dim_v;

    return dim <= 32   ? backward_of_dim<PATH, T, 32>(args)
           : dim <= 64 ? backward_of_dim<PATH, T, 64>(args)
                       : backward_of_dim<PATH, T, 128>(args);
}

/* ---- What a call needs ----------------------------------------------------------- */

/* The version of the path that takes the call, or 0 where there is none. */
static tfast_status
path_for(int *version, const tfast_attention_args *args)
{
    const int64_t rows = (args->n_q > args->n_k ? args->n_q : args->n_k) / 16 + 1;

    *version = 0;
    if ((args->dtype != TFAST_F16 && args->dtype != TFAST_BF16) || args->batch == 0 ||
        args->heads == 0 || args->dim > MMA_MAX_DIM || args->dim_v > MMA_MAX_DIM ||
        args->n_q > MMA_MAX_ROWS || args->n_k > MMA_MAX_ROWS ||
        rows > MMA_MAX_BLOCKS / args->heads / args->batch) {
        return TFAST_OK;
    }
    const tfast_status status = compiled_for(version);
    if (status == TFAST_OK && *version < 80 && args->dtype == TFAST_BF16) {
        *version = 0;
    }
    return status;
}

tfast_status
tfast_mma_attention(bool *taken, const tfast_attention_args *args)
{
    int version;
    const tfast_status status = path_for(&version, args);

    *taken = version != 0;
    if (status != TFAST_OK || !*taken) {
        return status;
    }
    if (version < 80) {
        return forward_of_type<path_75, mma_f16>(args);
    }
    return args->dtype == TFAST_F16 ? forward_of_type<path_80, mma_f16>(args)
                                    : forward_of_type<path_80, mma_bf16>(args);
}

tfast_status
tfast_mma_attention_backward(bool *taken, const tfast_attention_args *args)
{
    const bool has_room = args->dq.data != nullptr && args->dim >= 2 &&
                          is_aligned(&args->dq, 2) && args->n_q > 0;
    int version;
    const tfast_status status = path_for(&version, args);

    *taken = version != 0 && has_room;
    if (status != TFAST_OK || !*taken) {
        return status;
    }
    if (version < 80) {
        return backward_of_type<path_75, mma_f16>(args);
    }
    return args->dtype == TFAST_F16 ? backward_of_type<path_80, mma_f16>(args)
                                    : backward_of_type<path_80, mma_bf16>(args);
}
