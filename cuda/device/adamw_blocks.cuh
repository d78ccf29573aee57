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

/* A lane's elements as they lie in memory, 0 where there is none; float64 is rounded.
 * Loads only, so that those of several arrays are in flight together. */
DEVICE raw_vector
load_lane(const void *array, int dtype, const lane &at)
{
    raw_vector raw = {{0, 0, 0, 0}};

    if (at.whole) {
        return read_vector<LANE_ELEMENTS>(array, dtype, at.i);
    }
    EACH_ELEMENT
    {
        if (e >= at.have) {
            continue;
        }
        if (dtype == TFAST_F16 || dtype == TFAST_BF16) {
            const uint32_t half = ((const uint16_t *)array)[at.i + e];
            raw.word[e >> 1] |= half << 16 * (e & 1);
        } else {
            const float value = read_element<float>(array, dtype, at.i + e);
            raw.word[e] = __float_as_uint(value);
        }
    }
    return raw;
}

DEVICE void
widen_lane(float *values, const raw_vector &raw, int dtype)
{
    EACH_ELEMENT
    {
        values[e] = get_element(raw, dtype == TFAST_F64 ? TFAST_F32 : dtype, e);
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

/* The dtype of moments in codes, of a slot with scales. */
enum { CODES = -1 };

/* One moment: floats, or codes in the first word. */
DEVICE raw_vector
load_moment(const void *array, int dtype, const lane &at)
{
    if (dtype != CODES) {
        return load_lane(array, dtype, at);
    }
    return {{read_codes(array, at.i, at.have, at.whole), 0, 0, 0}};
}

/* `column`: the first of its scales. */
DEVICE void
widen_moment(float *values, const raw_vector &raw, int dtype, const float *scales,
             int column)
{
    if (dtype != CODES) {
        widen_lane(values, raw, dtype);
    } else if (column == 0) {
        decode_signed(values, raw.word[0], scales);
    } else {
        decode_square(values, raw.word[0], scales + column);
    }
}

DEVICE void
write_moment(void *array, const float *values, int dtype, const lane &at, float *scales,
             int column)
{
    if (dtype != CODES) {
        write_lane(array, values, dtype, at);
    } else {
        const uint32_t word = column == 0
                                  ? encode_signed(values, at.have, scales)
                                  : encode_square(values, at.have, scales + column);
        write_codes(array, at.i, at.have, at.whole, word);
    }
}

/* ---- Parameters that are not rounded to nearest ---------------------------------- */

/* The high or the low halves of words as 16-bit elements. */
DEVICE void
write_bits(void *array, const uint32_t *bits, int shift, const lane &at)
{
    uint16_t *to = (uint16_t *)array + at.i;

    if (at.whole) {
        const uint32_t low = bits[0] >> shift & 0xFFFF,
                       high = bits[2] >> shift & 0xFFFF;
        st_global_64(to, make_uint2(low | bits[1] >> shift << 16,
                                    high | bits[3] >> shift << 16));
        return;
    }
    EACH_ELEMENT
    {
        if (e < at.have) {
            to[e] = (uint16_t)(bits[e] >> shift);
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

/* How the slot's parameters are rounded; float32 is not. */
DEVICE int
rounding_of(const adamw_row *row, const dtypes &d)
{
    return d.param == TFAST_F32 ? (int)TFAST_NEAREST : (int)row->extra.rounding;
}

DEVICE void
widen_weights(float *weights, const adamw_row *row, const dtypes &d,
              const raw_vector &param, const raw_vector &tail)
{
    float tails[LANE_ELEMENTS];

    if (rounding_of(row, d) == TFAST_SPLIT) {
        EACH_ELEMENT
        {
            const int word = e >> 1, shift = 16 * (e & 1);
            weights[e] = tfast_half_join((uint16_t)(param.word[word] >> shift),
                                         (int16_t)(tail.word[word] >> shift));
        }
        return;
    }
    widen_lane(weights, param, d.param);
    if (rounding_of(row, d) == TFAST_KAHAN) {
        widen_lane(tails, tail, d.param);
        EACH_ELEMENT
        {
            weights[e] = weights[e] + tails[e];
        }
    }
}

/* Rare: once for 2^32 places. */
DEVICE_CALL tfast_half_key
make_key(uint64_t seed, int64_t step, uint32_t index, uint32_t high)
{
    return tfast_half_key_of(seed, step, index, high);
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
            random->key = make_key(random->seed, random->step, row->extra.index,
                                   (uint32_t)random->high);
        }
        const uint32_t word = tfast_half_word(random->key, (uint32_t)place);
        weights[e] = tfast_half_round(weights[e], d.param, word);
    }
}

DEVICE void
write_weights(const adamw_row *row, float *weights, const dtypes &d, const lane &at,
              half_random *random)
{
    if (rounding_of(row, d) == TFAST_SPLIT) {
        uint32_t both[LANE_ELEMENTS];
        EACH_ELEMENT
        {
            both[e] = tfast_half_split(weights[e]);
        }
        write_bits(row->param, both, 16, at);
        write_bits(row->extra.tail, both, 0, at);
        return;
    }
    if (rounding_of(row, d) == TFAST_STOCHASTIC) {
        round_weights(weights, row, d, at, random);
    }
    write_lane(row->param, weights, d.param, at);
    if (rounding_of(row, d) == TFAST_KAHAN) {
        EACH_ELEMENT
        {
            const float param = from_half(to_half(weights[e], d.param), d.param);
            weights[e] = tfast_half_tail(weights[e], param);
        }
        write_lane(row->extra.tail, weights, d.param, at);
    }
}

/* ---- Blocks ---------------------------------------------------------------------- */

/* A block as loaded: what each lane has of it, and its scales. */
struct raw_block {
    lane at;
    raw_vector param, tail, grad, exp_avg, exp_avg_sq;
    float scales[TFAST_CODE_SCALES];
};

DEVICE bool
has_amsgrad(const adamw_row *row, const dtypes &d)
{
    return d.extras && row->max_exp_avg_sq != nullptr;
}

/* Of the block's scales: the slot's first block has the first ones. */
DEVICE float *
scales_of(const adamw_row *row, const dtypes &d, int64_t first)
{
    const bool amsgrad = has_amsgrad(row, d);
    const int columns = amsgrad ? TFAST_CODE_SCALES_AMSGRAD : TFAST_CODE_SCALES;

    return row->scales + first / TFAST_CODE_BLOCK * columns;
}

/* The block that begins at element `first`, of a part that ends at `end`; `whole` says
 * that it is, and aligned. */
DEVICE void
load_block(raw_block *raw, const adamw_row *row, const dtypes &d, int64_t first,
           int64_t end, bool whole)
{
    const int begin = threadIdx.x % 32 * LANE_ELEMENTS;
    const int64_t left = end - first;
    const int count = left < TFAST_CODE_BLOCK ? (int)left : (int)TFAST_CODE_BLOCK;
    const int mine = count - begin;
    const int have = mine < 0 ? 0 : mine < LANE_ELEMENTS ? mine : LANE_ELEMENTS;

    raw->at = {first + begin, whole ? (int)LANE_ELEMENTS : have,
               whole || (count == TFAST_CODE_BLOCK && row->head == 0)};
    raw->param = load_lane(row->param, d.param, raw->at);
    if (d.param != TFAST_F32 && row->extra.tail != nullptr) {
        raw->tail = load_lane(row->extra.tail, d.param, raw->at);
    }
    raw->grad = load_lane(row->grad, d.grad, raw->at);
    raw->exp_avg = load_moment(row->exp_avg, d.state, raw->at);
    raw->exp_avg_sq = load_moment(row->exp_avg_sq, d.state, raw->at);
    if (d.state == CODES) {
        const float *scales = scales_of(row, d, first);
#pragma unroll
        for (int k = 0; k < TFAST_CODE_SCALES; k++) {
            raw->scales[k] = scales[k];
        }
    }
}

/* By one warp, which has loaded the block. */
DEVICE void
update_block(const adamw_row *row, const dtypes &d, int64_t first, const raw_block &raw,
             const scalars<float> &s, half_random *random)
{
    const bool amsgrad = has_amsgrad(row, d);
    const lane &at = raw.at;
    float *scales = scales_of(row, d, first);
    float p[LANE_ELEMENTS], g[LANE_ELEMENTS], m[LANE_ELEMENTS], v[LANE_ELEMENTS];
    float top[LANE_ELEMENTS] = {}, ema[LANE_ELEMENTS];

    if (amsgrad) {
        const raw_vector most = load_moment(row->max_exp_avg_sq, d.state, at);
        widen_moment(top, most, d.state, scales, 3);
    }
    widen_weights(p, row, d, raw.param, raw.tail);
    widen_lane(g, raw.grad, d.grad);
    widen_moment(m, raw.exp_avg, d.state, raw.scales, 0);
    widen_moment(v, raw.exp_avg_sq, d.state, raw.scales, 1);
    EACH_ELEMENT
    {
        update(&p[e], &g[e], &m[e], &v[e], &top[e], amsgrad, s);
        g[e] = s.zero_grad ? 0 : g[e];
    }
    if (s.store_grad) {
        write_lane(row->grad, g, d.grad, at);
    }
    if (d.extras && row->extra.ema != nullptr) {
        widen_lane(ema, load_lane(row->extra.ema, d.ema, at), d.ema);
        EACH_ELEMENT
        {
            ema[e] = averaged(ema[e], p[e], s);
        }
        write_lane(row->extra.ema, ema, d.ema, at);
    }
    if (d.extras && row->extra.copy != nullptr) {
        write_lane(row->extra.copy, p, d.copy, at);
    }
    write_weights(row, p, d, at, random);
    __syncwarp(); /* all lanes have read the scales */
    write_moment(row->exp_avg, m, d.state, at, scales, 0);
    write_moment(row->exp_avg_sq, v, d.state, at, scales, 1);
    if (amsgrad) {
        write_moment(row->max_exp_avg_sq, top, d.state, at, scales, 3);
    }
}

/* The whole blocks of elements begin .. end - 1 of a slot without amsgrad and extra
 * arrays; returns where the rest begins. In 64 registers: four blocks of threads on a
 * multiprocessor hide more of the loads than two that load ahead. */
template <int PARAM, int STATE>
DEVICE_CALL int64_t
update_whole_blocks(const adamw_row *row, int64_t begin, int64_t end,
                    const scalars<float> *s, uint64_t seed, int64_t step)
{
    const dtypes d = {PARAM, PARAM, STATE, false, 0, 0};
    const int64_t stop = end - TFAST_CODE_BLOCK + 1;
    half_random random = {seed, step, -1, {}};

#pragma unroll 1
    for (; begin < stop; begin += TFAST_CODE_BLOCK) {
        raw_block raw;
        load_block(&raw, row, d, begin, end, true);
        update_block(row, d, begin, raw, *s, &random);
    }
    return begin;
}

/* Elements begin .. end - 1, from a block's first one on, of any slot. */
DEVICE_CALL void
update_any_blocks(const adamw_row *row, int64_t begin, int64_t end,
                  const scalars<float> *s, uint64_t seed, int64_t step)
{
    const int state = row->scales != nullptr ? (int)CODES : row->state_dtype;
    const dtypes d = {row->param_dtype,     row->grad_dtype,      state, true,
                      row->extra.ema_dtype, row->extra.copy_dtype};
    half_random random = {seed, step, -1, {}};

#pragma unroll 1
    for (; begin < end; begin += TFAST_CODE_BLOCK) {
        raw_block raw;
        load_block(&raw, row, d, begin, end, false);
        update_block(row, d, begin, raw, *s, &random);
    }
}

/* The same; whole blocks of the usual slots have loops of their own. */
DEVICE void
update_blocks(const adamw_row *row, int64_t begin, int64_t end, const scalars<float> *s,
              uint64_t seed, int64_t step)
{
    const int param = row->param_dtype;
    const bool codes = row->scales != nullptr;
    const bool usual = row->head == 0 && row->grad_dtype == param &&
                       row->max_exp_avg_sq == nullptr && row->extra.ema == nullptr &&
                       row->extra.copy == nullptr;

    if (usual && codes && param == TFAST_F32) {
        begin = update_whole_blocks<TFAST_F32, CODES>(row, begin, end, s, seed, step);
    } else if (usual && codes && param == TFAST_BF16) {
        begin = update_whole_blocks<TFAST_BF16, CODES>(row, begin, end, s, seed, step);
    } else if (usual && param == TFAST_BF16 && row->state_dtype == TFAST_F32) {
        begin =
            update_whole_blocks<TFAST_BF16, TFAST_F32>(row, begin, end, s, seed, step);
    }
    if (begin < end) {
        update_any_blocks(row, begin, end, s, seed, step);
    }
}

#undef EACH_ELEMENT

#endif
