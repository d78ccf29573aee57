/* Which calls of attention tensor cores take, with which instructions, and by which
 * powers of two their elements are scaled. */
#include "attention_mma.cuh"

/* Tells what this library's kernels were compiled for. */
TFAST_KERNEL(32, 1)
attention_probe() {}

/* 75, 80 or later. PTX for 75 that a newer device translated counts as 75. */
static tfast_status
compiled_for(int *version)
{
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
    return compiled_for(version);
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

/* ---- Exponents ------------------------------------------------------------------- */

enum { EXPONENT_THREADS = 128 };

DEVICE const tfast_attention_rows &
rows_of_tensor(const tfast_attention_args &args, int tensor)
{
    return tensor == EXPONENT_Q   ? args.q
           : tensor == EXPONENT_K ? args.k
           : tensor == EXPONENT_V ? args.v
                                  : args.dout;
}

/* The larger of an exponent and those of two elements; not of infinity and NaN. */
DEVICE int
larger_exponent(int largest, uint32_t pair)
{
    const int low = pair >> 7 & 0xFF, high = pair >> 23 & 0xFF;

    largest = low > largest && low < 255 ? low : largest;
    return high > largest && high < 255 ? high : largest;
}

/* Of one lane's share of a head's rows: a chunk of every so many. Only of rows that are
 * multiplied: not of keys past kv_lens. */
DEVICE int
largest_exponent(const mma_call &call, const attention_head &h, int tensor, int part)
{
    const tfast_attention_args &args = call.args;
    const tfast_attention_rows &array = rows_of_tensor(args, tensor);
    const bool keys = is_of_keys(tensor);
    const int dims =
        (int)(tensor == EXPONENT_Q || tensor == EXPONENT_K ? args.dim : args.dim_v);
    const int lane = threadIdx.x % 32, across = dims > 128  ? 32
                                                : dims > 64 ? 16
                                                : dims > 32 ? 8
                                                            : 4;
    const int left = dims - lane % across * 8;
    const int64_t n = keys ? h.n_k : h.n_q, step = EXPONENT_PARTS * (32 / across);
    int64_t row = part * (32 / across) + lane / across;
    int largest = LEAST_EXPONENT;

    for (; left > 0 && row < n; row += step) {
        const uint16_t *from =
            (const uint16_t *)array.data + lane % across * 8 +
            (keys ? key_row(args, h, array, row) : query_row(args, h, array, row));
        const uint4 x =
            call.chunks && left >= 8 ? *(const uint4 *)from : gather_chunk(from, left);
        largest = larger_exponent(larger_exponent(largest, x.x), x.y);
        largest = larger_exponent(larger_exponent(largest, x.z), x.w);
    }
    return largest;
}

/* A warp a part of a head; blocks go on until all are done. */
TFAST_KERNEL(EXPONENT_THREADS, 8)
attention_mma_exponents(const __grid_constant__ mma_call call, int tensors)
{
    const tfast_attention_args &args = call.args;
    const int64_t warps = EXPONENT_THREADS / 32, heads = args.batch * args.heads;
    const int64_t works = tensors * heads * EXPONENT_PARTS;

    for (int64_t i = blockIdx.x; i < works / warps; i += gridDim.x) {
        const int64_t work = i * warps + threadIdx.x / 32, item = work / EXPONENT_PARTS;
        const int tensor = (int)(item / heads), part = (int)(work % EXPONENT_PARTS);
        const int64_t batch = item % heads / args.heads, own = item % args.heads;
        const bool keys = is_of_keys(tensor);
        if (own < (keys ? args.kv_heads : args.heads)) {
            const int64_t head = keys ? own * (args.heads / args.kv_heads) : own;
            const attention_head h = attention_head_of(args, batch, head);
            const int largest = warp_max(largest_exponent(call, h, tensor, part));
            if (threadIdx.x % 32 == 0) {
                exponent_parts(call.exponents, args, tensor, batch, own)[part] =
                    largest;
            }
        }
    }
}

tfast_status
tfast_mma_find_exponents(const mma_call &call, int tensors)
{
    const tfast_attention_args &args = call.args;
    const int64_t blocks =
        tensors * args.batch * args.heads * EXPONENT_PARTS / (EXPONENT_THREADS / 32);

    if (call.exponents == nullptr) {
        return TFAST_OK;
    }
    LAUNCH(attention_mma_exponents, (unsigned)(blocks < 1 << 20 ? blocks : 1 << 20),
           EXPONENT_THREADS, 0, (cudaStream_t)args.stream, call, tensors);
    return tfast_cuda_status(cudaGetLastError(), "launch of attention_mma_exponents");
}
