/* AdamW by blocks of TFAST_CODE_BLOCK elements, one warp a block and 4 elements a lane:
 * slots with 8-bit state, and slots whose half parameter is not rounded to nearest.
 * Included by adamw_kernel.cuh. */
#ifndef TFAST_ADAMW_BLOCKS_CUH
#define TFAST_ADAMW_BLOCKS_CUH

#include "adamw_codes.h"
#include "adamw_half.h"

enum { LANE_ELEMENTS = TFAST_CODE_BLOCK / 32 };

/* Loops over a lane's elements, which are in registers, must be unrolled. */
#define EACH_ELEMENT _Pragma("unroll") for (int e = 0; e < LANE_ELEMENTS; e++)

#include "adamw_codes.cuh"

/* ---- A lane ---------------------------------------------------------------------- */

/* A lane's elements of every array: `have` of them, from i on. */
struct lane {
    int64_t i;
    int have;
    bool whole; /* all are there, and aligned */
};

DEVICE void
read_lane(float *values, const void *array, int dtype, const lane &at)
{
    raw_vector raw;

    if (at.whole) {
        raw = read_vector<LANE_ELEMENTS>(array, dtype, at.i);
    }
    EACH_ELEMENT
    {
        values[e] = at.whole      ? get_element(raw, dtype, e)
                    : e < at.have ? read_element<float>(array, dtype, at.i + e)
                                  : 0;
    }
}

DEVICE void
write_lane(void *array, const float *values, int dtype, const lane &at)
{
    raw_vector raw = {{0, 0, 0, 0}};

    if (at.whole) {
        EACH_ELEMENT
        {
            set_element(&raw, dtype, e, values[e]);
        }
        write_vector<LANE_ELEMENTS>(array, dtype, at.i, raw);
        return;
    }
    EACH_ELEMENT
    {
        if (e < at.have) {
            write_element(array, dtype, at.i + e, values[e]);
        }
    }
}

/* One moment: floats, or codes of a block with these scales. `at`: its first column. */
DEVICE void
read_moment(float *values, const adamw_row *row, const void *array, int dtype,
            const lane &at, const float *scales, int column)
{
    if (row->scales == nullptr) {
        read_lane(values, array, dtype, at);
    } else if (column == 0) {
        decode_signed(values, read_codes(array, at.i, at.have, at.whole), scales);
    } else {
        decode_square(values, read_codes(array, at.i, at.have, at.whole),
                      scales + column);
    }
}

DEVICE void
write_moment(const adamw_row *row, void *array, const float *values, int dtype,
             const lane &at, float *scales, int column)
{
    if (row->scales == nullptr) {
        write_lane(array, values, dtype, at);
    } else {
        const uint32_t word = column == 0
                                  ? encode_signed(values, at.have, scales)
                                  : encode_square(values, at.have, scales + column);
        write_codes(array, at.i, at.have, at.whole, word);
    }
}

/* ---- Parameters that are not rounded to nearest ---------------------------------- */

/* 16-bit elements as they are. */
DEVICE void
read_bits(uint32_t *bits, const void *array, const lane &at)
{
    EACH_ELEMENT
    {
        bits[e] = e < at.have ? ((const uint16_t *)array)[at.i + e] : 0;
    }
}

DEVICE void
write_bits(void *array, const uint32_t *bits, int shift, const lane &at)
{
    EACH_ELEMENT
    {
        if (e < at.have) {
            ((uint16_t *)array)[at.i + e] = (uint16_t)(bits[e] >> shift);
        }
    }
}

/* The random words of one step, and for which high half of a place its key is. */
struct half_random {
    uint64_t seed;
    int64_t step;
    int64_t high;
    tfast_half_key key;
};

DEVICE void
read_weights(float *weights, const adamw_row *row, const dtypes &d, const lane &at)
{
    if (row->extra.rounding == TFAST_SPLIT) {
        uint32_t param[LANE_ELEMENTS], tail[LANE_ELEMENTS];
        read_bits(param, row->param, at);
        read_bits(tail, row->extra.tail, at);
        EACH_ELEMENT
        {
            weights[e] = tfast_half_join((uint16_t)param[e], (int16_t)tail[e]);
        }
        return;
    }
    read_lane(weights, row->param, d.param, at);
    if (row->extra.rounding == TFAST_KAHAN) {
        float tail[LANE_ELEMENTS];
        read_lane(tail, row->extra.tail, d.param, at);
        EACH_ELEMENT
        {
            weights[e] = weights[e] + tail[e];
        }
    }
}

DEVICE void
round_weights(float *weights, const adamw_row *row, const dtypes &d, const lane &at,
              half_random *random)
{
    EACH_ELEMENT
    {
        const int64_t place = tfast_half_place(&row->extra, at.i + e);
        if (place >> 32 != random->high) {
            random->high = place >> 32;
            random->key = tfast_half_key_of(random->seed, random->step,
                                            row->extra.index, (uint32_t)random->high);
        }
        const uint32_t word = tfast_half_word(random->key, (uint32_t)place);
        weights[e] = tfast_half_round(weights[e], d.param, word);
    }
}

DEVICE void
write_weights(const adamw_row *row, float *weights, const dtypes &d, const lane &at,
              half_random *random)
{
    if (row->extra.rounding == TFAST_SPLIT) {
        uint32_t both[LANE_ELEMENTS];
        EACH_ELEMENT
        {
            both[e] = tfast_half_split(weights[e]);
        }
        write_bits(row->param, both, 16, at);
        write_bits(row->extra.tail, both, 0, at);
        return;
    }
    if (row->extra.rounding == TFAST_STOCHASTIC) {
        round_weights(weights, row, d, at, random);
    }
    write_lane(row->param, weights, d.param, at);
    if (row->extra.rounding == TFAST_KAHAN) {
        EACH_ELEMENT
        {
            const float param = from_half(to_half(weights[e], d.param), d.param);
            weights[e] = tfast_half_tail(weights[e], param);
        }
        write_lane(row->extra.tail, weights, d.param, at);
    }
}

/* ---- Blocks ---------------------------------------------------------------------- */

/* The block of elements first .. first + count - 1, by one warp. */
DEVICE void
update_block(const adamw_row *row, const dtypes &d, int64_t first, int count,
             const scalars<float> &s, half_random *random)
{
    const bool amsgrad = row->max_exp_avg_sq != nullptr;
    const int begin = threadIdx.x % 32 * LANE_ELEMENTS, left = count - begin;
    const lane at = {first + begin,
                     left < 0               ? 0
                     : left < LANE_ELEMENTS ? left
                                            : LANE_ELEMENTS,
                     count == TFAST_CODE_BLOCK && row->head == 0};
    const int columns = amsgrad ? TFAST_CODE_SCALES_AMSGRAD : TFAST_CODE_SCALES;
    float *scales = row->scales + first / TFAST_CODE_BLOCK * columns;
    float p[LANE_ELEMENTS], g[LANE_ELEMENTS], m[LANE_ELEMENTS], v[LANE_ELEMENTS];
    float top[LANE_ELEMENTS] = {}, ema[LANE_ELEMENTS];

    read_weights(p, row, d, at);
    read_lane(g, row->grad, d.grad, at);
    read_moment(m, row, row->exp_avg, d.state, at, scales, 0);
    read_moment(v, row, row->exp_avg_sq, d.state, at, scales, 1);
    if (amsgrad) {
        read_moment(top, row, row->max_exp_avg_sq, d.state, at, scales, 3);
    }
    EACH_ELEMENT
    {
        update(&p[e], &g[e], &m[e], &v[e], &top[e], amsgrad, s);
        g[e] = s.zero_grad ? 0 : g[e];
    }
    if (s.store_grad) {
        write_lane(row->grad, g, d.grad, at);
    }
    if (row->extra.ema != nullptr) {
        read_lane(ema, row->extra.ema, d.ema, at);
        EACH_ELEMENT
        {
            ema[e] = averaged(ema[e], p[e], s);
        }
        write_lane(row->extra.ema, ema, d.ema, at);
    }
    if (row->extra.copy != nullptr) {
        write_lane(row->extra.copy, p, d.copy, at);
    }
    write_weights(row, p, d, at, random);
    __syncwarp(); /* all lanes have read the scales */
    write_moment(row, row->exp_avg, m, d.state, at, scales, 0);
    write_moment(row, row->exp_avg_sq, v, d.state, at, scales, 1);
    if (amsgrad) {
        write_moment(row, row->max_exp_avg_sq, top, d.state, at, scales, 3);
    }
}

/* Elements begin .. end - 1, from a block's first element on. */
DEVICE void
update_blocks(const adamw_row *row, const dtypes &d, int64_t begin, int64_t end,
              const scalars<float> &s, uint64_t seed, int64_t step)
{
    half_random random = {seed, step, -1, {}};

#pragma unroll 1
    for (int64_t i = begin; i < end; i += TFAST_CODE_BLOCK) {
        const int64_t left = end - i;
        update_block(row, d, i,
                     left < TFAST_CODE_BLOCK ? (int)left : (int)TFAST_CODE_BLOCK, s,
                     &random);
    }
}

#undef EACH_ELEMENT

#endif
