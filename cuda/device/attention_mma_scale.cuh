/* Element types of attention by tensor cores: what lies in memory, and what is
 * multiplied. sm_75 multiplies float16 alone, so bfloat16 becomes float16 on its way to
 * shared memory, times a power of two for each head of each tensor. The largest finite
 * element then lies in [2^15, 2^16): elements down to 2^-32 of it keep all their bits,
 * smaller ones are off by at most 2^-40 of it.
 *
 * A launch before the others finds the exponents: EXPONENT_PARTS of a head each look at
 * their share of its rows, and the largest is taken by whoever needs it, a lane a part.
 */
#ifndef TFAST_ATTENTION_MMA_SCALE_CUH
#define TFAST_ATTENTION_MMA_SCALE_CUH

#include "attention_head.cuh"

/* Exponents are bfloat16's 8 bits, at least this: so 2^126 is the largest power. */
enum { LEAST_EXPONENT = 16 };

/* ---- Element types --------------------------------------------------------------- */

/* pack() rounds two numbers for a product, store() for memory; load() makes of two
 * elements in memory what is multiplied. */
struct mma_f16 {
    static constexpr int DTYPE = TFAST_F16, MULTIPLIED = TFAST_F16;
    static constexpr bool SCALED = false;
    DEVICE uint32_t pack(float low, float high) { return pack_f16(low, high); }
    DEVICE uint32_t store(float low, float high) { return pack_f16(low, high); }
    DEVICE uint32_t load(uint32_t pair, float) { return pair; }
};

struct mma_bf16 {
    static constexpr int DTYPE = TFAST_BF16, MULTIPLIED = TFAST_BF16;
    static constexpr bool SCALED = false;
    DEVICE uint32_t pack(float low, float high) { return pack_bf16(low, high); }
    DEVICE uint32_t store(float low, float high) { return pack_bf16(low, high); }
    DEVICE uint32_t load(uint32_t pair, float) { return pair; }
};

/* bfloat16 in memory, multiplied as float16. */
struct mma_bf16_as_f16 {
    static constexpr int DTYPE = TFAST_BF16, MULTIPLIED = TFAST_F16;
    static constexpr bool SCALED = true;

    DEVICE uint32_t pack(float low, float high) { return pack_f16(low, high); }

    DEVICE uint32_t store(float low, float high)
    {
        return to_bf16(low) | to_bf16(high) << 16;
    }

    DEVICE uint32_t load(uint32_t pair, float power)
    {
        return pack_f16(__uint_as_float(pair << 16) * power,
                        __uint_as_float(pair & 0xFFFF0000) * power);
    }
};

/* ---- Powers ---------------------------------------------------------------------- */

/* 2^(15 + 127 - exponent): what elements are multiplied by. */
DEVICE float
power_of(int exponent)
{
    return __uint_as_float((uint32_t)(15 + 254 - exponent) << 23);
}

/* Its reciprocal: what gives sums of them back. */
DEVICE float
power_back(int exponent)
{
    return __uint_as_float((uint32_t)(exponent - 15) << 23);
}

/* Whether a tensor's heads are those of keys. */
DEVICE bool
is_of_keys(int tensor)
{
    return tensor == EXPONENT_K || tensor == EXPONENT_V;
}

/* Where the parts of one head of a tensor are; `head` is one of the tensor's own. */
DEVICE int32_t *
exponent_parts(int32_t *exponents, const tfast_attention_args &args, int tensor,
               int64_t batch, int64_t head)
{
    const int64_t item = tensor * args.batch + batch;

    return exponents + (item * args.heads + head) * EXPONENT_PARTS;
}

/* The largest of x in a warp. */
DEVICE int
warp_max(int x)
{
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_xor_sync(~0u, x, by);
        x = other > x ? other : x;
    }
    return x;
}

/* The exponent that one of q's heads has to do with, by a whole warp. */
DEVICE int
read_exponent(int32_t *exponents, const tfast_attention_args &args, int tensor,
              int64_t batch, int64_t head)
{
    const int64_t own = is_of_keys(tensor) ? head / (args.heads / args.kv_heads) : head;

    return warp_max(
        exponent_parts(exponents, args, tensor, batch, own)[threadIdx.x % 32]);
}

/* What elements of one of the block's tensors are multiplied by, and what gives sums of
 * them back. */
template <typename T, typename BLOCK>
DEVICE float
power_in(const BLOCK &block, int tensor)
{
    return T::SCALED ? power_of(block.exponent[tensor]) : 1;
}

template <typename T, typename BLOCK>
DEVICE float
power_out(const BLOCK &block, int tensor)
{
    return T::SCALED ? power_back(block.exponent[tensor]) : 1;
}

/* What products of queries and keys are multiplied by, with these exponents of theirs:
 * for log2's units, or with OPTIONS as score_of() takes it. Powers that are out of
 * float32's range may end at its bounds: with these all scores are 0, or far apart. */
template <typename T, typename S>
DEVICE float
unit_of(const tfast_attention_args &args, int q, int k)
{
    double unit = !S::OPTIONS         ? args.scale * 1.4426950408889634
                  : args.softcap != 0 ? args.scale / args.softcap
                                      : args.scale;

    if constexpr (T::SCALED) {
        unit *= (double)power_back(q) * power_back(k);
    }
    const float bounded =
        fmaxf(fminf((float)unit, largest<float>()), -largest<float>());
    return S::OPTIONS ? bounded : fmaxf(bounded, 1.17549435e-38f);
}

#endif
