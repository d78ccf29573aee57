/* AdamW on half parameters without a float32 master weight: how each step keeps what
 * rounding would lose. For the binding, the CPU kernels and cuda/device/.
 *
 * A step reads a parameter as a float32 weight, steps the weight, and rounds it to the
 * parameter again. What that cuts off may stay in a tail, of the parameter's dtype:
 *
 *   TFAST_STOCHASTIC  up or down at random, so that the mean is the weight. No tail
 *   TFAST_KAHAN       to nearest. The tail is weight - param, rounded, and
 *                     weight = param + tail
 *   TFAST_SPLIT       bfloat16 to nearest, ties away from 0: with ties to even the tail
 *                     would need 17 bits. The tail's 16 bits are an integer with sign:
 *                     bits(weight) = bits(param) * 2^16 + tail. Exact. The dtype is
 *                     not int16, because NCCL and gloo cannot send that
 */
#ifndef TFAST_ADAMW_HALF_H
#define TFAST_ADAMW_HALF_H

#include "attention_dropout.h"
#include "half.h"
#include "tfast.h"

typedef enum {
    TFAST_NEAREST, /* of parameters that are not half, too */
    TFAST_STOCHASTIC,
    TFAST_KAHAN,
    TFAST_SPLIT,
    TFAST_N_ROUNDINGS
} tfast_rounding;

/* ---- Random words ---------------------------------------------------------------- */

/* An element's word depends on the seed, the step, the parameter's index and the
 * element's place in the whole tensor, not on threads, ranks, addresses or backends. */
typedef struct {
    uint32_t word[2];
} tfast_half_key;

/* `high`: the place >> 32. */
TFAST_HOST_DEVICE static inline tfast_half_key
tfast_half_key_of(uint64_t seed, int64_t step, uint32_t index, uint32_t high)
{
    uint32_t word[4] = {(uint32_t)step, (uint32_t)(step >> 32), index, high};

    tfast_half_key key;

    tfast_philox(word, (uint32_t)seed, (uint32_t)(seed >> 32));
    key.word[0] = word[0];
    key.word[1] = word[1];
    return key;
}

/* MurmurHash3's finalizer (Appleby), which is a permutation: no two elements of a step
 * have the same word, and each bit of the place changes half of the word's. */
TFAST_HOST_DEVICE static inline uint32_t
tfast_half_word(tfast_half_key key, uint32_t place)
{
    uint32_t h = (place * 0x9E3779B9u) ^ key.word[0];

    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return (h ^ h >> 16) ^ key.word[1];
}

/* The place of the slot's element i in the whole tensor, of which the slot may be a
 * shard: rows of `row` elements, the first at `place` and `row_stride` apart. */
TFAST_HOST_DEVICE static inline int64_t
tfast_half_place(const tfast_adamw_extra *extra, int64_t i)
{
    if (extra->row == 0) {
        return extra->place + i;
    }
    return extra->place + i / extra->row * extra->row_stride + i % extra->row;
}

/* ---- Rounding -------------------------------------------------------------------- */

/* The weight, rounded up or down to a value of the dtype: up with a probability of its
 * distance from the lower value. What is beyond the largest finite value may become
 * infinite. Infinities and NaNs stay. */
TFAST_HOST_DEVICE static inline float
tfast_half_round(float weight, int dtype, uint32_t random)
{
    const uint32_t bits = tfast_bits_from_float(weight), size = bits & 0x7FFFFFFF;
    const uint32_t cut = dtype == TFAST_BF16 ? 0xFFFF : 0x1FFF;
    const uint32_t normal = (bits + (random & cut)) & ~cut;
    /* float16 below 2^-14 is a multiple of 2^-24 */
    const float units = tfast_float_from_bits(size) * 0x1p24f;
    const float below = (float)(int32_t)(units < 1024 ? units : 1024);
    const float part = (float)(random >> 8) * 0x1p-24f;
    const float unit = below + (units - below > part ? 1 : 0);
    const uint32_t small = tfast_bits_from_float(unit * 0x1p-24f) | (bits & 0x80000000);
    const bool is_small = dtype == TFAST_F16 && size < 0x38800000;

    return size >= 0x7F800000 ? weight
                              : tfast_float_from_bits(is_small ? small : normal);
}

/* The tail of a parameter that has been rounded from the weight. */
TFAST_HOST_DEVICE static inline float
tfast_half_tail(float weight, float param)
{
    const float tail = weight - param;

    return tail - tail == 0 ? tail : 0; /* 0 where either is infinite or NaN */
}

/* A tail below the half of an ulp stands beside any parameter, but not below 0: then
 * someone has zeroed the parameter. */
TFAST_HOST_DEVICE static inline float
tfast_half_join(uint16_t param, int16_t tail)
{
    const bool stale = (param & 0x7FFF) == 0 && tail < 0;

    return tfast_float_from_bits(((uint32_t)param << 16) +
                                 (stale ? 0 : (uint32_t)(int32_t)tail));
}

/* bits(param) in the high half, bits(tail) in the low half. */
TFAST_HOST_DEVICE static inline uint32_t
tfast_half_split(float weight)
{
    const uint32_t bits = tfast_bits_from_float(weight);

    if (weight != weight) {
        return 0x7FC00000;
    }
    return ((bits + 0x8000) & 0xFFFF0000) | (bits & 0xFFFF);
}

#endif
