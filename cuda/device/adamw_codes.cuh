/* AdamW's 8-bit state: a block by one warp. The order of roundings is that of
 * csrc/kernels/adamw_codes.h, so that the GPU and the CPU give the same bits. Included
 * by adamw_blocks.cuh. */
#ifndef TFAST_ADAMW_CODES_CUH
#define TFAST_ADAMW_CODES_CUH

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

DEVICE uint32_t
warp_max(uint32_t value)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, value);
#else
#    pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        const uint32_t other = __shfl_xor_sync(~0u, value, by);
        value = other > value ? other : value;
    }
    return value;
#endif
}

/* Of floats that are not negative, which as integers have the same order. */
DEVICE float
warp_largest(float value)
{
    return __uint_as_float(warp_max(__float_as_uint(value)));
}

DEVICE float
warp_smallest(float value)
{
    return __uint_as_float(~warp_max(~__float_as_uint(value)));
}

/* The integer nearest to x, ties to even, in the low byte; x is in 0 .. 255. Adding
 * 3 * 2^22 leaves units of 1, and needs no conversion to integer. */
DEVICE uint32_t
nearest_byte(float x)
{
    return __float_as_uint(x + 0x1.8p23f);
}

DEVICE uint32_t
pack_bytes(const uint32_t *words)
{
    return (words[0] & 0xFF) | (words[1] & 0xFF) << 8 | (words[2] & 0xFF) << 16 |
           words[3] << 24;
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

/* Code e of a word, less `zero`. */
DEVICE float
code_of(uint32_t word, int e, float zero)
{
    return __uint_as_float(0x4B000000u | (word >> 8 * e & 0xFF)) - (0x1p23f + zero);
}

DEVICE void
decode_signed(float *values, uint32_t word, const float *scales)
{
    EACH_ELEMENT
    {
        const float root = code_of(word, e, 128) * scales[0];
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
        const float root = fused(code_of(word, e, 0), scales[1], scales[0]);
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
    uint32_t codes[LANE_ELEMENTS];

    roots_of(roots, values, 1, CODE_BIAS_2, CODE_LEAST_2);
    EACH_ELEMENT
    {
        most = e < have ? fmaxf(roots[e], most) : most;
    }
    most = warp_largest(most);
    const float per_root = most > 0 ? 127.0f / most : 0;
    EACH_ELEMENT
    {
        const float size = roots[e] < 0 ? most : roots[e];
        const float root = roots[e] >= 0 && values[e] < 0 ? -size : size;
        codes[e] = nearest_byte(fused(root, per_root, 128.0f));
    }
    if (threadIdx.x % 32 == 0) {
        scales[0] = most / 127.0f;
    }
    return pack_bytes(codes);
}

DEVICE uint32_t
encode_square(const float *values, int have, float *scales)
{
    float roots[LANE_ELEMENTS], most = 0, lowest = INFINITY;
    uint32_t codes[LANE_ELEMENTS];

    roots_of(roots, values, 2, CODE_BIAS_4, CODE_LEAST_4);
    EACH_ELEMENT
    {
        if (e < have && roots[e] >= 0) {
            most = fmaxf(roots[e], most);
            lowest = fminf(roots[e], lowest);
        }
    }
    most = warp_largest(most);
    lowest = warp_smallest(lowest);
    const float low = lowest < most ? lowest : most, range = most - low;
    const float per_root = range > 0 ? 255.0f / range : 0;
    EACH_ELEMENT
    {
        const float code = ((roots[e] < 0 ? most : roots[e]) - low) * per_root;
        codes[e] = nearest_byte(fmaxf(code, fminf(code * 0x1p60f, 1)));
    }
    if (threadIdx.x % 32 == 0) {
        scales[0] = low;
        scales[1] = range / 255.0f;
    }
    return pack_bytes(codes);
}

#endif
