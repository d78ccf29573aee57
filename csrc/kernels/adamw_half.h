/* Half parameters that a step does not round to nearest: csrc/adamw_half.h has the
 * arithmetic. Chunks become float32 weights in the L1 cache, are stepped by the loops
 * of adamw.h, and rounded again. Compilers vectorise the plain loops here. */
#ifndef ADAMW_HALF_H
#define ADAMW_HALF_H

#include "../adamw_half.h"
#include "adamw_codes.h"

typedef struct {
    uint64_t seed;
    int64_t step;
} half_random;

/* The weights of elements first .. first + n - 1, n <= CHUNK. */
static void
read_weights(real *weights, const tfast_adamw_slot *slot,
             const tfast_adamw_extra *extra, int64_t first, int n)
{
    const uint16_t *param = (const uint16_t *)slot->param + first;
    const int16_t *rest = (const int16_t *)extra->tail + first;
    _Alignas(64) real tail[CHUNK];

    if (extra->rounding == TFAST_SPLIT) {
        for (int i = 0; i < n; i++) {
            weights[i] = tfast_half_join(param[i], rest[i]);
        }
        return;
    }
    tile_read(weights, slot->param, slot->param_dtype, first, n);
    if (extra->rounding == TFAST_KAHAN) {
        tile_read(tail, extra->tail, slot->param_dtype, first, n);
        for (int i = 0; i < n; i++) {
            weights[i] += tail[i];
        }
    }
}

/* Rounds weights up or down at random. */
static void
round_weights(real *weights, const tfast_adamw_extra *extra, int dtype, int64_t first,
              int n, const half_random *random)
{
    for (int i = 0; i < n;) {
        const int64_t place = tfast_half_place(extra, first + i);
        const int64_t row_left =
            extra->row == 0 ? n : extra->row - (first + i) % extra->row;
        const int64_t word_left = ((int64_t)1 << 32) - (place & 0xFFFFFFFF);
        const int64_t left = row_left < word_left ? row_left : word_left;
        const int end = left < n - i ? i + (int)left : n;
        const uint32_t from = (uint32_t)place - (uint32_t)i;
        const tfast_half_key key = tfast_half_key_of(
            random->seed, random->step, extra->index, (uint32_t)(place >> 32));

        if (dtype == TFAST_BF16) {
            for (; i < end; i++) {
                const uint32_t word = tfast_half_word(key, from + (uint32_t)i);
                weights[i] = tfast_half_round(weights[i], TFAST_BF16, word);
            }
        } else {
            for (; i < end; i++) {
                const uint32_t word = tfast_half_word(key, from + (uint32_t)i);
                weights[i] = tfast_half_round(weights[i], TFAST_F16, word);
            }
        }
    }
}

/* Writes parameters, and their tails if they have any; destroys the weights. */
static void
write_weights(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
              real *weights, int64_t first, int n, const half_random *random)
{
    uint16_t *param = (uint16_t *)slot->param + first;
    int16_t *rest = (int16_t *)extra->tail + first;
    _Alignas(64) real rounded[CHUNK];

    if (extra->rounding == TFAST_SPLIT) {
        for (int i = 0; i < n; i++) {
            const uint32_t both = tfast_half_split(weights[i]);
            param[i] = (uint16_t)(both >> 16);
            rest[i] = (int16_t)(uint16_t)both;
        }
        return;
    }
    if (extra->rounding == TFAST_STOCHASTIC) {
        round_weights(weights, extra, slot->param_dtype, first, n, random);
    }
    tile_write(slot->param, weights, slot->param_dtype, first, n);
    if (extra->rounding == TFAST_KAHAN) {
        tile_read(rounded, slot->param, slot->param_dtype, first, n);
        for (int i = 0; i < n; i++) {
            weights[i] = tfast_half_tail(weights[i], rounded[i]);
        }
        tile_write(extra->tail, weights, slot->param_dtype, first, n);
    }
}

#endif
