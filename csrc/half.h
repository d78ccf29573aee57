/* Converts one float16 or bfloat16 to float32 (exact) and back (rounded to nearest
 * even). The vector versions in simd/ and the device versions in cuda/ give the same
 * bits, except for the payload of NaNs. */
#ifndef TFAST_HALF_H
#define TFAST_HALF_H

#include "libc.h"

#ifndef __CUDACC_RTC__
#    include <string.h>
#endif

TFAST_HOST_DEVICE static inline float
tfast_float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

TFAST_HOST_DEVICE static inline uint32_t
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
    /* The bits, read as float32, are the value * 2^-112, also for subnormals. */
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
        0x38800000) { /* < 2^-14: the ulp of 0.5 + x is that of float16 subnormals */
        const float shifted = tfast_float_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (tfast_bits_from_float(shifted) - 0x3F000000));
    }
    return (uint16_t)(sign |
                      (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

#endif
