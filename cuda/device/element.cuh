/* Elements of any dtype in a kernel: one at a time, or as raw vectors that are loaded
 * first and converted later, so that the loads of several arrays are in flight
 * together. Where `dtype` is a compile-time constant its branches vanish; otherwise
 * they are uniform. */
#ifndef TFAST_ELEMENT_CUH
#define TFAST_ELEMENT_CUH

#include "common.cuh"

/* ---- Conversions: widening is exact, narrowing rounds to nearest even ------------ */

/* By integers: sm_75 has no instruction for it. */
DEVICE uint32_t
to_bf16(float value)
{
    const uint32_t bits = __float_as_uint(value);

    return value != value ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

DEVICE float
from_half(uint32_t half, int dtype)
{
    return dtype == TFAST_BF16 ? __uint_as_float(half << 16) : cvt_f32_f16(half);
}

DEVICE uint32_t
to_half(float value, int dtype)
{
    return dtype == TFAST_BF16 ? to_bf16(value) : cvt_rn_f16_f32(value);
}

/* ---- Arithmetic ------------------------------------------------------------------ */

DEVICE float
fused(float a, float b, float c)
{
    return fmaf(a, b, c);
}

DEVICE double
fused(double a, double b, double c)
{
    return fma(a, b, c);
}

/* ---- One element ----------------------------------------------------------------- */

template <typename REAL>
DEVICE REAL
read_element(const void *array, int dtype, int64_t i)
{
    if (dtype == TFAST_F32) {
        return (REAL)((const float *)array)[i];
    }
    if (dtype == TFAST_F64) {
        return (REAL)((const double *)array)[i];
    }
    return (REAL)from_half(((const uint16_t *)array)[i], dtype);
}

/* A double becomes a half type by way of float, as on the CPU. */
template <typename REAL>
DEVICE void
write_element(void *array, int dtype, int64_t i, REAL value)
{
    if (dtype == TFAST_F32) {
        ((float *)array)[i] = (float)value;
    } else if (dtype == TFAST_F64) {
        ((double *)array)[i] = (double)value;
    } else {
        ((uint16_t *)array)[i] = (uint16_t)to_half((float)value, dtype);
    }
}

/* ---- Vectors of 4 elements, or of 8 in a half type ------------------------------- */

/* N elements as they lie in memory: in all words, or in the first two for 4 halves. */
struct raw_vector {
    uint32_t word[4];
};

/* Element i is the vector's first; its address is a multiple of the vector's bytes. */
template <int N>
DEVICE raw_vector
read_vector(const void *array, int dtype, int64_t i)
{
    if (N == 4 && dtype != TFAST_F32) {
        const uint2 half = *(const uint2 *)((const uint16_t *)array + i);
        return {{half.x, half.y, 0, 0}};
    }
    const uint4 full = N == 4 ? *(const uint4 *)((const float *)array + i)
                              : *(const uint4 *)((const uint16_t *)array + i);
    return {{full.x, full.y, full.z, full.w}};
}

template <int N>
DEVICE void
write_vector(void *array, int dtype, int64_t i, const raw_vector &raw)
{
    const uint32_t *w = raw.word;

    if (N == 4 && dtype != TFAST_F32) {
        st_global_64((uint16_t *)array + i, make_uint2(w[0], w[1]));
    } else {
        void *to = N == 4 ? (void *)((float *)array + i) : (uint16_t *)array + i;
        st_global_128(to, make_uint4(w[0], w[1], w[2], w[3]));
    }
}

/* Element e of a vector; e must be a constant once loops are unrolled. */
DEVICE float
get_element(const raw_vector &raw, int dtype, int e)
{
    if (dtype == TFAST_F32) {
        return __uint_as_float(raw.word[e & 3]);
    }
    return from_half(raw.word[e >> 1] >> 16 * (e & 1) & 0xFFFF, dtype);
}

DEVICE void
set_element(raw_vector *raw, int dtype, int e, float value)
{
    if (dtype == TFAST_F32) {
        raw->word[e & 3] = __float_as_uint(value);
    } else {
        const uint32_t half = to_half(value, dtype), shift = 16 * (e & 1);
        raw->word[e >> 1] = (raw->word[e >> 1] & ~(0xFFFFu << shift)) | half << shift;
    }
}

#endif
