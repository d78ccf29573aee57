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
 * that makes up for the exponents of dout. Kernels in attention_rows.cu find
 * them. */
#ifndef TFAST_ATTENTION_MMA_BACKWARD_SCALE_CUH
#define TFAST_ATTENTION_MMA_BACKWARD_SCALE_CUH

#include "attention_mma.cuh"

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
