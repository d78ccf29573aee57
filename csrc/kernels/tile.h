/* Conversion of arrays of any dtype to `real` and back: tiles of up to TILE elements,
 * and single vectors, for loops that are specialised by dtype. Kernels convert dtypes
 * only here, except for pairs of bfloat16 (attention_tile.h). tile_read() pads the last
 * vector of a tile with zeros. tile_open() and tile_close() copy nothing if the tile is
 * whole vectors of an array of `real`.
 *
 * The kernels are compiled once for each instruction set and arithmetic type. The
 * including file must first include a vocabulary (csrc/simd/vec_*.h), which defines
 * `real` and its vector type `vr`. */
#ifndef TILE_H
#define TILE_H

#include "../half.h"
#include "../tfast.h"

#ifndef VR_WIDTH
#    error "include a vocabulary of csrc/simd/ first"
#endif

/* Elements of a tile: six tiles of float64 are 12 KB of a 32 KB L1 cache. */
enum { TILE = 256 };

/* How many elements ahead the kernels prefetch: 2 KB of float32. */
enum { PREFETCH = 512 };

/* Reads elements first .. first + n - 1. */
static inline void
tile_read(real *tile, const void *array, tfast_dtype dtype, int64_t first, int n)
{
    const uint16_t *half = (const uint16_t *)array + first;
    int i = 0;

    switch (dtype) {
    case TFAST_F32:
        for (; i < n; i++) {
            tile[i] = (real)((const float *)array)[first + i];
        }
        break;
    case TFAST_F64:
        for (; i < n; i++) {
            tile[i] = (real)((const double *)array)[first + i];
        }
        break;
    case TFAST_F16:
#if REAL_IS_F32
        for (; i + VR_WIDTH <= n; i += VR_WIDTH) {
            vr_store(tile + i, vr_load_f16(half + i));
        }
#endif
        for (; i < n; i++) {
            tile[i] = tfast_from_f16(half[i]);
        }
        break;
    default:
#if REAL_IS_F32
        for (; i + VR_WIDTH <= n; i += VR_WIDTH) {
            vr_store(tile + i, vr_load_bf16(half + i));
        }
#endif
        for (; i < n; i++) {
            tile[i] = tfast_from_bf16(half[i]);
        }
        break;
    }
    for (; i % VR_WIDTH != 0; i++) {
        tile[i] = 0;
    }
}

/* Writes elements first .. first + n - 1, rounded once; float64 is rounded twice to a
 * half type, first to float32. */
static inline void
tile_write(void *array, const real *tile, tfast_dtype dtype, int64_t first, int n)
{
    uint16_t *half = (uint16_t *)array + first;
    int i = 0;

    switch (dtype) {
    case TFAST_F32:
        for (; i < n; i++) {
            ((float *)array)[first + i] = (float)tile[i];
        }
        break;
    case TFAST_F64:
        for (; i < n; i++) {
            ((double *)array)[first + i] = (double)tile[i];
        }
        break;
    case TFAST_F16:
#if REAL_IS_F32
        for (; i + VR_WIDTH <= n; i += VR_WIDTH) {
            vr_store_f16(half + i, vr_load(tile + i));
        }
#endif
        for (; i < n; i++) {
            half[i] = tfast_to_f16((float)tile[i]);
        }
        break;
    default:
#if REAL_IS_F32
        for (; i + VR_WIDTH <= n; i += VR_WIDTH) {
            vr_store_bf16(half + i, vr_load(tile + i));
        }
#endif
        for (; i < n; i++) {
            half[i] = tfast_to_bf16((float)tile[i]);
        }
        break;
    }
}

/* Returns elements first .. first + n - 1 to read and write: in the array itself if
 * they are whole vectors of `real`, else a copy in `tile`. */
static inline real *
tile_open(real *tile, void *array, tfast_dtype dtype, int64_t first, int n)
{
    if (dtype == REAL_DTYPE && n % VR_WIDTH == 0) {
        return (real *)array + first;
    }
    tile_read(tile, array, dtype, first, n);
    return tile;
}

/* Writes back what tile_open() returned, if it was a copy. */
static inline void
tile_close(const real *opened, const real *tile, void *array, tfast_dtype dtype,
           int64_t first, int n)
{
    if (opened == tile) {
        tile_write(array, tile, dtype, first, n);
    }
}

/* ---- Vectors --------------------------------------------------------------------- */

/* Reads VR_WIDTH elements from i on. `dtype` is REAL_DTYPE, or for float32 also a half
 * type, and should be a compile-time constant where speed matters. */
static inline __attribute__((always_inline)) vr
vector_read(const void *array, tfast_dtype dtype, int64_t i)
{
#if REAL_IS_F32
    if (dtype == TFAST_F16) {
        return vr_load_f16((const uint16_t *)array + i);
    }
    if (dtype == TFAST_BF16) {
        return vr_load_bf16((const uint16_t *)array + i);
    }
#endif
    (void)dtype;
    return vr_load((const real *)array + i);
}

static inline __attribute__((always_inline)) void
vector_write(void *array, tfast_dtype dtype, int64_t i, vr value)
{
#if REAL_IS_F32
    if (dtype == TFAST_F16) {
        vr_store_f16((uint16_t *)array + i, value);
        return;
    }
    if (dtype == TFAST_BF16) {
        vr_store_bf16((uint16_t *)array + i, value);
        return;
    }
#endif
    (void)dtype;
    vr_store((real *)array + i, value);
}

/* Vectors that a loop over bfloat16 takes at once: 2 where converting two together is
 * cheaper. Their elements then alternate between the two. */
#ifdef V_TWO_BF16
enum { BF16_VECTORS = 2 };
#else
enum { BF16_VECTORS = 1 };
#endif

/* Reads `n` vectors from element i on. 2 are all of bfloat16. */
static inline __attribute__((always_inline)) void
vectors_read(vr *values, const void *array, tfast_dtype dtype, int64_t i, int n)
{
#ifdef V_TWO_BF16
    if (n == 2) {
        vr_load_two_bf16((const uint16_t *)array + i, &values[0], &values[1]);
        return;
    }
#endif
    (void)n;
    values[0] = vector_read(array, dtype, i);
}

static inline __attribute__((always_inline)) void
vectors_write(void *array, tfast_dtype dtype, int64_t i, const vr *values, int n)
{
#ifdef V_TWO_BF16
    if (n == 2) {
        vr_store_two_bf16((uint16_t *)array + i, values[0], values[1]);
        return;
    }
#endif
    (void)n;
    vector_write(array, dtype, i, values[0]);
}

/* Prefetches element i. */
static inline __attribute__((always_inline)) void
prefetch(const void *array, tfast_dtype dtype, int64_t i)
{
    __builtin_prefetch((const char *)array + i * (int64_t)tfast_dtype_size(dtype));
}

#endif
