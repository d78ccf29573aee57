/* Attention's host side: by tensor cores where there are kernels for the case,
 * otherwise by the plain ones, which do everything. */
#include "attention_mma.cuh"
#include "attention_plain_far.cuh"
#include "attention_scratch.cuh"

/* A grid's x has 31 bits; what is past it the blocks do after their first. */
static const int64_t MOST_BLOCKS = 1 << 30;

static int64_t
tiles_of(int64_t n)
{
    return (n + TILE - 1) / TILE;
}

static unsigned
blocks_of(int64_t works)
{
    return (unsigned)(works < MOST_BLOCKS ? works : MOST_BLOCKS);
}

tfast_status
tfast_cuda_attention_scratch(int64_t *bytes, const tfast_attention_args *args,
                             bool backward)
{
    tfast_device_scope scope;
    tfast_status status = scope.enter(args->device.index);
    int version = 0;

    if (status == TFAST_OK) {
        status = tfast_mma_path(&version, args);
    }
    *bytes =
        status == TFAST_OK ? attention_scratch_of(args, version, backward).bytes : 0;
    return status;
}

/* ---- Forward --------------------------------------------------------------------- */

template <typename REAL>
static tfast_status
forward(const tfast_attention_args *args)
{
    const int64_t works = tiles_of(args->n_q) * args->heads * args->batch;

    LAUNCH(attention_plain_forward<REAL>, blocks_of(works), PLAIN_THREADS, 0,
           (cudaStream_t)args->stream, *args, works);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_plain_forward");
}

tfast_status
tfast_cuda_attention(const tfast_attention_args *args)
{
    tfast_device_scope scope;
    tfast_status status = scope.enter(args->device.index);
    bool taken = false;

    if (status == TFAST_OK) {
        status = tfast_decode_attention(&taken, args);
    }
    if (status == TFAST_OK && !taken) {
        status = tfast_mma_attention(&taken, args);
    }
    if (status != TFAST_OK || taken) {
        return status;
    }
    return args->dtype == TFAST_F64 ? forward<double>(args) : forward<float>(args);
}

/* ---- Backward -------------------------------------------------------------------- */

template <typename REAL>
static tfast_status
launch_shares(const tfast_attention_args *args)
{
    const int64_t works = tiles_of(args->n_q) * args->heads * args->batch;

    if (args->scratch == nullptr || works == 0) {
        return TFAST_OK;
    }
    LAUNCH(attention_plain_shares<REAL>, blocks_of(works), PLAIN_THREADS, 0,
           (cudaStream_t)args->stream, *args, works);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_plain_shares");
}

template <typename REAL>
static tfast_status
launch_dq(const tfast_attention_args *args)
{
    const int64_t works = tiles_of(args->n_q) * args->heads * args->batch;

    if (args->dq.data == nullptr || works == 0) {
        return TFAST_OK;
    }
    LAUNCH(attention_plain_dq<REAL>, blocks_of(works), PLAIN_THREADS, 0,
           (cudaStream_t)args->stream, *args, works);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_plain_dq");
}

template <typename REAL>
static tfast_status
launch_dkv(const tfast_attention_args *args)
{
    const int64_t works = tiles_of(args->n_k) * args->kv_heads * args->batch;

    if ((args->dk.data == nullptr && args->dv.data == nullptr) || works == 0) {
        return TFAST_OK;
    }
    LAUNCH(attention_plain_dkv<REAL>, blocks_of(works), PLAIN_THREADS, 0,
           (cudaStream_t)args->stream, *args, works);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_plain_dkv");
}

template <typename REAL>
static tfast_status
launch_term(const tfast_attention_args *args, const attention_term &term)
{
    const int64_t *stride = term.stride;
    const plain_term_grid grid = {{
        stride[0] == 0 ? 1 : args->batch,
        stride[1] == 0 ? 1 : args->heads,
        stride[2] == 0 ? 1 : tiles_of(args->n_q),
        stride[3] == 0 ? 1 : tiles_of(args->n_k),
    }};
    const int64_t works = grid.n[0] * grid.n[1] * grid.n[2] * grid.n[3];

    if (term.data == nullptr || works == 0) {
        return TFAST_OK;
    }
    LAUNCH(attention_plain_term<REAL>, blocks_of(works), PLAIN_THREADS, 0,
           (cudaStream_t)args->stream, *args, term, grid, works);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_plain_term");
}

template <typename REAL>
static tfast_status
launch_dsinks(const tfast_attention_args *args)
{
    if (args->dsinks == nullptr || args->heads == 0) {
        return TFAST_OK;
    }
    LAUNCH(attention_plain_dsinks<REAL>, blocks_of(args->heads), PLAIN_THREADS, 0,
           (cudaStream_t)args->stream, *args);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_plain_dsinks");
}

template <typename REAL>
static tfast_status
backward(const tfast_attention_args *args)
{
    tfast_status status = launch_shares<REAL>(args);

    if (status == TFAST_OK) {
        status = launch_dq<REAL>(args);
    }
    if (status == TFAST_OK) {
        status = launch_dkv<REAL>(args);
    }
    if (status == TFAST_OK) {
        status = launch_term<REAL>(args, bias_term(*args));
    }
    if (status == TFAST_OK) {
        status = launch_term<REAL>(args, alibi_term(*args));
    }
    return status == TFAST_OK ? launch_dsinks<REAL>(args) : status;
}

tfast_status
tfast_cuda_attention_backward(const tfast_attention_args *args)
{
    tfast_device_scope scope;
    tfast_status status = scope.enter(args->device.index);
    bool taken = false;

    if (status == TFAST_OK) {
        status = tfast_mma_attention_backward(&taken, args);
    }
    if (status != TFAST_OK || taken) {
        return status;
    }
    tfast_attention_args own = *args;
    own.scratch = may_be_far(args) ? args->scratch : nullptr;
    return args->dtype == TFAST_F64 ? backward<double>(&own) : backward<float>(&own);
}
