/* Which calls of attention tensor cores take, and with which instructions. */
#include "attention_mma.cuh"

/* Tells what this library's kernels were compiled for. */
TFAST_KERNEL(32, 1)
attention_probe() {}

/* 75, 80 or later. PTX for 75 that a newer device translated counts as 75. */
static tfast_status
compiled_for(int *version)
{
    const tfast_relaxed_scope relaxed; /* loads the kernel, if nothing has yet */
    cudaFuncAttributes attributes;

    CUDA_TRY(cudaFuncGetAttributes(&attributes, attention_probe));
    *version = attributes.ptxVersion;
    return TFAST_OK;
}

tfast_status
tfast_mma_path(int *version, const tfast_attention_args *args)
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

bool
tfast_mma_is_aligned(const tfast_attention_rows *rows, int64_t elements)
{
    return (uintptr_t)rows->data % (2 * (size_t)elements) == 0 &&
           rows->batch % elements == 0 && rows->head % elements == 0 &&
           rows->row % elements == 0;
}

bool
tfast_mma_has_options(const tfast_attention_args *args)
{
    return args->mask.data != nullptr || args->bias.data != nullptr ||
           args->alibi_slopes != nullptr || args->softcap != 0 || args->dropout_p > 0 ||
           !(args->scale > 0);
}
