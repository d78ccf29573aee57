/* float16 and bfloat16 to and from float32, one element, exact and rounded to nearest
 * even. The vector forms in simd/ and the device forms in cuda/ give the same bits
 * (NaNs stay NaN, their payload is free). */
#ifndef TFAST_HALF_H
#define TFAST_HALF_H

#include <stdint.h>
#include <string.h>

static inline float
tfast_float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t
tfast_bits_from_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float
tfast_from_bf16(uint16_t half)
{
    return tfast_float_from_bits((uint32_t)half << 16);
}

static inline uint16_t
tfast_to_bf16(float value)
{
    const uint32_t bits = tfast_bits_from_float(value);

    if (value != value) {
        return 0x7FC0;
    }
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float
tfast_from_f16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7FFF;

    if (magnitude >= 0x7C00) { /* infinity or NaN: the exponent becomes all ones */
        return tfast_float_from_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    }
    /* Reading the bits as a float32 is 2^112 too small, for subnormals as well. */
    return tfast_float_from_bits(
        sign |
        tfast_bits_from_float(tfast_float_from_bits(magnitude << 13) * 0x1p112f));
}

static inline uint16_t
tfast_to_f16(float value)
{
    const uint32_t bits = tfast_bits_from_float(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7FFFFFFF;

    if (magnitude > 0x7F800000) {
        return (uint16_t)(sign | 0x7E00);
    }
    if (magnitude >= 0x477FF000) { /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7C00);
    }
    if (magnitude <
        0x38800000) { /* below 2^-14: 0.5 + x has a float16 subnormal's ulp */
        const float shifted = tfast_float_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (tfast_bits_from_float(shifted) - 0x3F000000));
    }
    return (uint16_t)(sign |
                      (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

#endif
