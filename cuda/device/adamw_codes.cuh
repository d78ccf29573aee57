/* AdamW on a block of 8-bit state: one warp, 4 elements a lane. The order of roundings
 * is that of csrc/kernels/adamw_codes.h, so that the GPU and the CPU give the same
 * bits. Included by adamw_kernel.cuh. */
#ifndef TFAST_ADAMW_CODES_CUH
#define TFAST_ADAMW_CODES_CUH

#include "adamw_codes.h"

enum { LANE_ELEMENTS = TFAST_CODE_BLOCK / 32 };

/* `values` are in registers: loops over them must be unrolled. */
#define EACH_ELEMENT _Pragma("unroll") for (int e = 0; e < LANE_ELEMENTS; e++)

DEVICE float
bits_down(float value, int n, uint32_t k)
{
    return __uint_as_float((__float_as_uint(value) >> n) + k);
}

DEVICE float
bits_up(float value, int n, uint32_t k)
{
    return __uint_as_float((__float_as_uint(value) - k) << n);
}

DEVICE float
warp_largest(float value)
{
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        const float other = __shfl_xor_sync(~0u, value, by);
        value = other > value ? other : value;
    }
    return value;
}

/* The lane's codes, byte e for element e; `have` of them are in the array. */
DEVICE uint32_t
read_codes(const void *array, int64_t i, int have, bool whole)
{
    const uint8_t *codes = (const uint8_t *)array + i;
    uint32_t word = 0;

    if (whole) {
        return *(const uint32_t *)codes;
    }
    EACH_ELEMENT
    {
        word |= e < have ? (uint32_t)codes[e] << 8 * e : 0;
    }
    return word;
}

DEVICE void
write_codes(void *array, int64_t i, int have, bool whole, uint32_t word)
{
    uint8_t *codes = (uint8_t *)array + i;

    if (whole) {
        *(uint32_t *)codes = word;
        return;
    }
    EACH_ELEMENT
    {
        if (e < have) {
            codes[e] = (uint8_t)(word >> 8 * e);
        }
    }
}

DEVICE float
code_of(uint32_t word, int e)
{
    return (float)(word >> 8 * e & 0xFF);
}

DEVICE void
decode_signed(float *values, uint32_t word, const float *scales)
{
    EACH_ELEMENT
    {
        const float root = (code_of(word, e) - 128.0f) * scales[0];
        const float size = root < 0 ? -root : root;
        const float m = bits_up(size + CODE_LEAST_2, 1, CODE_BIAS_2);
        values[e] = root < 0 ? -m : m;
    }
}

DEVICE void
decode_square(float *values, uint32_t word, const float *scales)
{
    EACH_ELEMENT
    {
        const float root = fused(code_of(word, e), scales[1], scales[0]);
        values[e] = bits_up(root + CODE_LEAST_4, 2, CODE_BIAS_4);
    }
}

/* The roots of |values|, negative for what is not finite. */
DEVICE void
roots_of(float *roots, const float *values, int n, uint32_t bias, float least)
{
    EACH_ELEMENT
    {
        const float size = values[e] < 0 ? -values[e] : values[e];
        const float root = bits_down(size, n, bias) - least;
        roots[e] = size < INFINITY ? root : -1;
    }
}

DEVICE uint32_t
encode_signed(const float *values, int have, float *scales)
{
    float roots[LANE_ELEMENTS], most = 0;
    uint32_t word = 0;

    roots_of(roots, values, 1, CODE_BIAS_2, CODE_LEAST_2);
    EACH_ELEMENT
    {
        most = e < have && roots[e] > most ? roots[e] : most;
    }
    most = warp_largest(most);
    const float per_root = most > 0 ? 127.0f / most : 0;
    EACH_ELEMENT
    {
        const float size = roots[e] < 0 ? most : roots[e];
        const float root = roots[e] >= 0 && values[e] < 0 ? -size : size;
        word |= (uint32_t)(int)rintf(fused(root, per_root, 128.0f)) << 8 * e;
    }
    if (threadIdx.x % 32 == 0) {
        scales[0] = most / 127.0f;
    }
    return word;
}

DEVICE uint32_t
encode_square(const float *values, int have, float *scales)
{
    float roots[LANE_ELEMENTS], most = 0, lowest = -INFINITY; /* lowest: negated */
    uint32_t word = 0;

    roots_of(roots, values, 2, CODE_BIAS_4, CODE_LEAST_4);
    EACH_ELEMENT
    {
        if (e < have && roots[e] >= 0) {
            most = roots[e] > most ? roots[e] : most;
            lowest = -roots[e] > lowest ? -roots[e] : lowest;
        }
    }
    most = warp_largest(most);
    lowest = -warp_largest(lowest);
    const float low = lowest < most ? lowest : most, range = most - low;
    const float per_root = range > 0 ? 255.0f / range : 0;
    EACH_ELEMENT
    {
        const float code = ((roots[e] < 0 ? most : roots[e]) - low) * per_root;
        const float least = code * 0x1p60f < 1 ? code * 0x1p60f : 1;
        word |= (uint32_t)(int)rintf(code > least ? code : least) << 8 * e;
    }
    if (threadIdx.x % 32 == 0) {
        scales[0] = low;
        scales[1] = range / 255.0f;
    }
    return word;
}

/* The lane's elements of an array of floats. */
DEVICE void
read_lane(float *values, const void *array, int dtype, int64_t i, int have, bool whole)
{
    raw_vector raw;

    if (whole) {
        raw = read_vector<LANE_ELEMENTS>(array, dtype, i);
    }
    EACH_ELEMENT
    {
        values[e] = whole      ? get_element(raw, dtype, e)
                    : e < have ? read_element<float>(array, dtype, i + e)
                               : 0;
    }
}

DEVICE void
write_lane(void *array, const float *values, int dtype, int64_t i, int have, bool whole)
{
    raw_vector raw = {{0, 0, 0, 0}};

    if (whole) {
        EACH_ELEMENT
        {
            set_element(&raw, dtype, e, values[e]);
        }
        write_vector<LANE_ELEMENTS>(array, dtype, i, raw);
        return;
    }
    EACH_ELEMENT
    {
        if (e < have) {
            write_element(array, dtype, i + e, values[e]);
        }
    }
}

/* The block of elements first .. first + count - 1, by one warp. */
DEVICE void
update_block(const adamw_row *row, const dtypes &d, int64_t first, int count,
             const scalars<float> &s)
{
    const bool amsgrad = row->max_exp_avg_sq != nullptr;
    const bool whole = count == TFAST_CODE_BLOCK && row->head == 0;
    const int at = threadIdx.x % 32 * LANE_ELEMENTS, left = count - at;
    const int have = left < 0 ? 0 : left < LANE_ELEMENTS ? left : LANE_ELEMENTS;
    const int64_t i = first + at;
    const int columns = amsgrad ? TFAST_CODE_SCALES_AMSGRAD : TFAST_CODE_SCALES;
    float *scales = row->scales + first / TFAST_CODE_BLOCK * columns;
    float p[LANE_ELEMENTS], g[LANE_ELEMENTS], m[LANE_ELEMENTS], v[LANE_ELEMENTS];
    float top[LANE_ELEMENTS] = {}, ema[LANE_ELEMENTS];

    read_lane(p, row->param, d.param, i, have, whole);
    read_lane(g, row->grad, d.grad, i, have, whole);
    decode_signed(m, read_codes(row->exp_avg, i, have, whole), scales);
    decode_square(v, read_codes(row->exp_avg_sq, i, have, whole), scales + 1);
    if (amsgrad) {
        const uint32_t word = read_codes(row->max_exp_avg_sq, i, have, whole);
        decode_square(top, word, scales + 3);
    }
    EACH_ELEMENT
    {
        update(&p[e], &g[e], &m[e], &v[e], &top[e], amsgrad, s);
        g[e] = s.zero_grad ? 0 : g[e];
    }
    write_lane(row->param, p, d.param, i, have, whole);
    if (s.store_grad) {
        write_lane(row->grad, g, d.grad, i, have, whole);
    }
    if (row->ema != nullptr) {
        read_lane(ema, row->ema, d.ema, i, have, whole);
        EACH_ELEMENT
        {
            ema[e] = averaged(ema[e], p[e], s);
        }
        write_lane(row->ema, ema, d.ema, i, have, whole);
    }
    if (row->copy != nullptr) {
        write_lane(row->copy, p, d.copy, i, have, whole);
    }
    __syncwarp(); /* all lanes have read the scales */
    write_codes(row->exp_avg, i, have, whole, encode_signed(m, have, scales));
    write_codes(row->exp_avg_sq, i, have, whole, encode_square(v, have, scales + 1));
    if (amsgrad) {
        const uint32_t word = encode_square(top, have, scales + 3);
        write_codes(row->max_exp_avg_sq, i, have, whole, word);
    }
}

/* Elements begin .. end - 1, from a block's first element on. */
DEVICE void
update_blocks(const adamw_row *row, const dtypes &d, int64_t begin, int64_t end,
              const scalars<float> &s)
{
#pragma unroll 1
    for (int64_t i = begin; i < end; i += TFAST_CODE_BLOCK) {
        const int64_t left = end - i;
        update_block(row, d, i,
                     left < TFAST_CODE_BLOCK ? (int)left : (int)TFAST_CODE_BLOCK, s);
    }
}

#undef EACH_ELEMENT

#endif
