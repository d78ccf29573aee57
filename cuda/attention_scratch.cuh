/* How attention by tensor cores divides a call's scratch. Host side only: kernels get
 * pointers. */
#ifndef TFAST_ATTENTION_SCRATCH_CUH
#define TFAST_ATTENTION_SCRATCH_CUH

#include "attention_mma_scale.cuh"

/* Where each part begins, in bytes: a multiple of TFAST_SCRATCH_ALIGNMENT. Parts that a
 * call has no use for have no bytes. */
struct attention_scratch {
    int64_t exponents; /* int32 [EXPONENTS, batch * heads, EXPONENT_PARTS]: see
                          attention_mma_scale.cuh */
    int64_t results;   /* of splits of the keys: see attention_decode.cuh */
    int64_t delta;     /* float [batch, heads, n_q] or [heads, total_q]: the backward's
                          dout . out - dlse */
    int64_t shares;    /* float or, in float64, double, as delta: see share_of() */
    int64_t bounds;    /* int32, as delta: see attention_mma_backward_scale.cuh */
    int64_t powers;    /* mma_head_powers [batch, heads]: the same */
    int64_t parts;     /* of sums of terms: see attention_mma_term.cuh */
    int64_t bytes;     /* of all parts */
};

/* Puts a part of so many bytes behind the others. */
static inline int64_t
place_scratch(attention_scratch *scratch, int64_t bytes)
{
    const int64_t at = scratch->bytes, unit = TFAST_SCRATCH_ALIGNMENT;

    scratch->bytes += (bytes + unit - 1) / unit * unit;
    return at;
}

/* In attention_decode.cu: bytes of the results of splits of the keys. */
int64_t tfast_decode_results(const tfast_attention_args *args, int version);

/* In attention_mma_term.cu: bytes of parts of sums. */
int64_t tfast_mma_term_parts(const tfast_attention_args *args);

/* Whether bfloat16 is multiplied as float16; `version` is tfast_mma_path()'s. */
static inline bool
is_scaled(const tfast_attention_args *args, int version)
{
    return version != 0 && version < 80 && args->dtype == TFAST_BF16;
}

/* Whether rows may be far (see is_far()) by more than their products: only then are
 * there shares. */
static inline bool
may_be_far(const tfast_attention_args *args)
{
    return (args->mask.data != nullptr && args->mask.dtype != TFAST_BOOL) ||
           args->bias.data != nullptr || args->alibi_slopes != nullptr;
}

static inline attention_scratch
attention_scratch_of(const tfast_attention_args *args, int version, bool backward)
{
    const int64_t heads = args->batch * args->heads;
    const int64_t rows =
        args->cu_seqlens_q == nullptr ? args->batch * args->n_q : args->total_q;
    attention_scratch scratch = {};

    scratch.exponents = place_scratch(
        &scratch,
        is_scaled(args, version) ? EXPONENTS * heads * EXPONENT_PARTS * 4 : 0);
    scratch.results =
        place_scratch(&scratch, backward ? 0 : tfast_decode_results(args, version));
    scratch.delta =
        place_scratch(&scratch, backward && version != 0 ? rows * args->heads * 4 : 0);
    scratch.shares = place_scratch(
        &scratch, backward && may_be_far(args)
                      ? rows * args->heads * (args->dtype == TFAST_F64 ? 8 : 4)
                      : 0);
    if (backward && is_scaled(args, version)) {
        scratch.bounds = place_scratch(&scratch, rows * args->heads * 4);
        scratch.powers = place_scratch(&scratch, heads * 16);
    }
    if (backward && version != 0) {
        scratch.parts = place_scratch(&scratch, tfast_mma_term_parts(args));
    }
    return scratch;
}

#endif
