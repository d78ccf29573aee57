/* Attention backward for bfloat16 that is multiplied as float16: which powers of two
 * make the gradients of scores fit.
 *
 * Of row i |dp_ij| <= |dout_i| |v_j|, and |v_j| <= sqrt(dim_v) times v's largest
 * element, so that
 *
 *   |ds_ij| <= p_ij (kept |dp_ij| + |delta_i|) < 2^bound_i
 *
 * where kept is dropout's factor. dq takes ds 2^(15 - bound) of each row by itself. dk
 * is a sum over rows, and over all heads that share the keys, whose q have exponents of
 * their own; there each head's ds has the one power with which all sums have the same
 * unit, that of the largest bound. So has dv, whose weights get a power, at most 1,
 * that makes up for the exponents of dout. Kernels in attention_mma_backward.cu find
 * them. */
#ifndef TFAST_ATTENTION_MMA_BACKWARD_SCALE_CUH
#define TFAST_ATTENTION_MMA_BACKWARD_SCALE_CUH

#include "attention_mma.cuh"

/* Exponents of one head of q: for dk and dv. */
struct mma_head_powers {
    int32_t bound;  /* of its gradients of scores, at least */
    int32_t weight; /* weights are multiplied by 2^weight, 0 or less */
    int32_t dk, dv; /* what sums are in units of, the same for all heads of a group */
};

/* What a launch passes to its kernel; the pointers are to scratch. */
struct mma_backward_call : mma_call {
    float *delta;            /* dout . out - dlse of each query: see number_row() */
    float *shares;           /* of each query: see share_of(); NULL: all 1 */
    int32_t *bounds;         /* of each query: its exponent */
    mma_head_powers *powers; /* [batch, heads] */
};

/* Launches the kernels of gradients with tiles of D dims; `version` is
 * tfast_mma_path()'s. They take long to compile, so that three files share them:
 * attention_mma_backward_64.cu has those of 32 and 64 dims, _128.cu those of 96 and
 * 128, _256.cu those of 192 and 256. */
template <int D>
tfast_status tfast_mma_backward_of_dim(const mma_backward_call &call, int version);

/* In attention_mma_term.cu: the gradients of the call's options, from what the kernels
 * before those of gradients have found; `version` is tfast_mma_path()'s. */
tfast_status tfast_mma_option_gradients(const mma_backward_call &call, int version);

/* 2^exponent, or 0 or the largest one where that is out of range. */
DEVICE float
two_to(int exponent)
{
    const int e = exponent > 127 ? 127 : exponent;

    return e < -126 ? 0 : __uint_as_float((uint32_t)(e + 127) << 23);
}

/* 2^exponent as two factors, so that only their product with a number may be out of
 * range. */
DEVICE float2
two_factors(int exponent)
{
    return make_float2(two_to(exponent / 2), two_to(exponent - exponent / 2));
}

#endif
