/* What attention's host files share. Paths are those of kernels.h: 75 or 80. */
#ifndef TFAST_CUDA_ATTENTION_H
#define TFAST_CUDA_ATTENTION_H

#include "host.h"

/* ---- Which kernels --------------------------------------------------------------- */

/* A grid's x has 31 bits, as the number of a tile has. */
static const int64_t MMA_MAX_DIM = 256, MMA_MAX_BLOCKS = 0x7FFFFFFF;
static const int64_t MMA_MAX_ROWS = (int64_t)1 << 35;

/* In attention_mma.c: the path that takes the call; 0 where there are no tensor cores
 * for it. */
tfast_status tfast_mma_path(int *path, const tfast_attention_args *args);

/* Of these kernels for the 4 pairs of a path and a type, in the order of kernels.h, the
 * call's. */
int tfast_mma_kernel(const tfast_attention_args *args, int path, int f16_75,
                     int bf16_75, int f16_80, int bf16_80);

/* Whether scores are more than bounded products of a positive scale. */
bool tfast_mma_has_options(const tfast_attention_args *args);

/* Whether bfloat16 is multiplied as float16. */
static inline bool
is_scaled(const tfast_attention_args *args, int path)
{
    return path == 75 && args->dtype == TFAST_BF16;
}

/* Which of the tiles 32, 64, 96, 128, 192, 256 has room for the dims. */
static inline int
tile_of_dims(const tfast_attention_args *args)
{
    const int64_t dim = args->dim > args->dim_v ? args->dim : args->dim_v;

    return dim <= 32    ? 0
           : dim <= 64  ? 1
           : dim <= 96  ? 2
           : dim <= 128 ? 3
           : dim <= 192 ? 4
                        : 5;
}

/* Enough blocks for so many works; what is past it the blocks do after their first. */
static inline int64_t
blocks_of(int64_t works, int64_t most)
{
    return works < most ? works : most;
}

static const int64_t MOST_BLOCKS = 1 << 30;

static inline int64_t
divided_up(int64_t x, int64_t by)
{
    return (x + by - 1) / by;
}

/* ---- Calls ----------------------------------------------------------------------- */

/* In attention_mma.c: what the forward's launches pass, and the backward's. */
mma_call tfast_mma_forward_call(const tfast_attention_args *args, int path);
mma_call tfast_mma_backward_call(const tfast_attention_args *args, int path);

/* Launches what finds the exponents of the call's first `tensors` tensors, if it has a
 * place for them. Its `chunks` must hold for all of these. */
tfast_status tfast_mma_find_exponents(const mma_call *call, int tensors);

/* In attention_forward.c and attention_backward.c: these do the call if there are
 * kernels for it. */
tfast_status tfast_mma_attention(bool *taken, const tfast_attention_args *args);
tfast_status tfast_mma_attention_backward(bool *taken,
                                          const tfast_attention_args *args);

/* In attention_decode.c: the same for calls of few queries and many keys, and bytes of
 * the results of splits of the keys. */
tfast_status tfast_decode_attention(bool *taken, const tfast_attention_args *args);
int64_t tfast_decode_results(const tfast_attention_args *args, int path);

/* In attention_terms.c: the gradients of the call's options, from what the kernels
 * before those of gradients have found, and bytes of parts of sums. */
tfast_status tfast_mma_option_gradients(const mma_call *call, int path);
int64_t tfast_mma_term_parts(const tfast_attention_args *args);

/* The terms of a call. */
attention_term tfast_bias_term(const tfast_attention_args *args);
attention_term tfast_alibi_term(const tfast_attention_args *args);

/* ---- Scratch --------------------------------------------------------------------- */

/* Where each part begins, in bytes: a multiple of TFAST_SCRATCH_ALIGNMENT. Parts that a
 * call has no use for have no bytes. Kernels get pointers. */
typedef struct {
    int64_t exponents; /* int32 [EXPONENTS, batch * heads, EXPONENT_PARTS]: see
                          device/attention_mma_scale.cuh */
    int64_t results;   /* of splits of the keys: see decode_call */
    int64_t delta;     /* float [batch, heads, n_q] or [heads, total_q]: the backward's
                          dout . out - dlse */
    int64_t shares;    /* float or, in float64, double, as delta: see share_of() */
    int64_t bounds; /* int32, as delta: see device/attention_mma_backward_scale.cuh */
    int64_t powers; /* mma_head_powers [batch, heads]: the same */
    int64_t parts;  /* of sums of terms: see mma_term_call */
    int64_t bytes;  /* of all parts */
} attention_scratch;

/* In attention_mma.c. `path` is 0 for plain kernels. */
attention_scratch tfast_attention_scratch_of(const tfast_attention_args *args, int path,
                                             bool backward);

/* Whether rows may be far (see is_far()) by more than their products: only then are
 * there shares. */
static inline bool
may_be_far(const tfast_attention_args *args)
{
    return (args->mask.data != NULL && args->mask.dtype != TFAST_BOOL) ||
           args->bias.data != NULL || args->alibi_slopes != NULL;
}

#endif
