/* The order in which norms are summed, and the scalars computed from a norm. The CPU
 * kernels and cuda/device/ share this file and give the same bits; both are compiled
 * without contraction of a * b + c (-ffp-contract=off, -fmad=false).
 *
 * The order of additions. Each tensor is cut, from its first element in memory on, into
 * chunks of TFAST_AMP_CHUNK elements; chunks are numbered across all tensors (an empty
 * tensor has none).
 *
 * Inside a chunk, lane l of TFAST_AMP_LANES adds the terms of the chunk's elements
 * l, l + LANES, l + 2 * LANES ... in this order, starting at 0: fma(x, x, sum) for the
 * 2-norm, sum + |x| for the 1-norm, in float32 (float64 for float64 tensors). Elements
 * past the end of a tensor count as 0. Then the lanes are reduced by halves: lane l
 * adds lane l + 64, then l + 32, ... 16, 8, 4, 2, 1, in the same type. The chunk's sum
 * is lane 0 converted to float64. If it is not finite, the chunk is summed again
 * in the same order in float64, where squares of float32 and half types cannot
 * overflow, and each element is checked for infinity and NaN.
 *
 * Over the chunks, in float64: accumulator k of TFAST_AMP_SUMS adds the sums of chunks
 * k, k + SUMS, ... in this order, starting at 0. Then the accumulators are reduced by
 * halves: accumulator k adds k + 128, then k + 64, ... 1.
 *
 * For the largest and the smallest |x| the order does not matter; NaN propagates. */
#ifndef TFAST_AMP_SUM_H
#define TFAST_AMP_SUM_H

#include "tfast.h"

#ifdef __CUDACC__
#    define TFAST_AMP_BOTH __host__ __device__
#else
#    define TFAST_AMP_BOTH
#endif

enum { TFAST_AMP_CHUNK = 8192, TFAST_AMP_LANES = 128, TFAST_AMP_SUMS = 256 };

/* The norm of the elements / scale, from the sum of |x|^p over all elements (for p =
 * +-infinity the largest or smallest |x|). */
TFAST_AMP_BOTH static inline double
tfast_amp_norm(double sum, double norm_type, double scale)
{
    if (norm_type == 2) {
        return sqrt(sum) / scale;
    }
    if (norm_type == 1 || isinf(norm_type)) {
        return sum / scale;
    }
    return pow(sum, 1 / norm_type) / scale;
}

/* min(1, max_norm / (norm + 1e-6)) as in clip_grad_norm_, which multiplies by a float32
 * reciprocal instead of dividing. NaN stays NaN. */
TFAST_AMP_BOTH static inline double
tfast_amp_clip_coef(double norm, double max_norm, bool in_float64)
{
    const float narrow = 1.0f / ((float)norm + 1e-6f) * (float)max_norm;
    const double coef = in_float64 ? 1.0 / (norm + 1e-6) * max_norm : (double)narrow;

    return coef > 1 ? 1 : coef;
}

/* The multiplier of all elements, in double; the kernel rounds it once to its type. If
 * only one of factor and scale is given, this is the multiplier that torch uses. */
TFAST_AMP_BOTH static inline double
tfast_amp_multiplier(double factor, double scale)
{
    return factor / scale;
}

#endif
