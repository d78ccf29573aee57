/* The 8-bit state of AdamW: csrc/adamw_codes.h has the code. Chunks of blocks are
 * decoded to float32 in the L1 cache, stepped by the loops of adamw.h, and encoded
 * again. cuda/device/adamw_codes.cuh repeats the order of operations. */
#ifndef ADAMW_CODES_H
#define ADAMW_CODES_H

#include "../adamw_codes.h"
#include "tile.h"

#include <string.h>

enum {
    BLOCK = TFAST_CODE_BLOCK,
    CHUNK = 4 * BLOCK /* elements decoded at a time: 2 KB of each moment */
};

/* Decodes a block: exp_avg, or with decode_square() exp_avg_sq. Whole vectors, so the
 * last vector of a tensor may go beyond n. */
static inline __attribute__((always_inline)) void
decode_signed(real *tile, const uint8_t *codes, int n, const float *scales)
{
    const vr step = vr_set1(scales[0]), zero = vr_set1(-128 * scales[0]);
    const vr least = vr_set1(CODE_LEAST_2);

    for (int i = 0; i < n; i += VR_WIDTH) {
        const vr root = vr_fma(vr_load_u8(codes + i), step, zero); /* rounded once */
        const vr size = vr_bits_up(vr_add(vr_abs(root), least), 1, CODE_BIAS_2);
        vr_store(tile + i, vr_copysign(size, root));
    }
}

static inline __attribute__((always_inline)) void
decode_square(real *tile, const uint8_t *codes, int n, const float *scales)
{
    const vr low = vr_set1(scales[0]), step = vr_set1(scales[1]);
    const vr least = vr_set1(CODE_LEAST_4);

    for (int i = 0; i < n; i += VR_WIDTH) {
        const vr root = vr_fma(vr_load_u8(codes + i), step, low);
        vr_store(tile + i, vr_bits_up(vr_add(root, least), 2, CODE_BIAS_4));
    }
}

/* Replaces the roots of infinities and NaNs, of either sign, by the largest other root,
 * which is returned. The parameter of such an element is lost, as with float32 state,
 * but not the state of its block. */
static real
replace_infinite(real *roots, int n, real infinite)
{
    real most = 0;

    for (int i = 0; i < n; i++) {
        const real size = roots[i] < 0 ? -roots[i] : roots[i];
        most = size < infinite && size > most ? size : most;
    }
    for (int i = 0; i < n; i++) {
        if (roots[i] >= infinite || roots[i] <= -infinite) {
            roots[i] = most;
        }
    }
    return most;
}

/* Encodes n values, a multiple of VR_WIDTH; destroys them. What is not finite has a
 * root of CODE_INFINITE_2 or more; as a square, which has no sign, CODE_INFINITE_4. */
static inline __attribute__((always_inline)) void
encode_signed(uint8_t *codes, real *tile, int n, float *scales)
{
    const vr least = vr_set1(CODE_LEAST_2);
    vr most = vr_set1(0);

    for (int i = 0; i < n; i += VR_WIDTH) {
        const vr m = vr_load(tile + i);
        const vr root = vr_sub(vr_bits_down(vr_abs(m), 1, CODE_BIAS_2), least);
        most = vr_max(root, most);
        vr_store(tile + i, vr_copysign(root, m));
    }
    real largest = vr_largest(most);
    if (largest >= CODE_INFINITE_2) {
        largest = replace_infinite(tile, n, CODE_INFINITE_2);
    }
    const vr per_root = vr_set1(largest > 0 ? 127.0f / largest : 0.0f);
    for (int i = 0; i < n; i += VR_WIDTH) {
        vr_store_u8(codes + i, vr_fma(vr_load(tile + i), per_root, vr_set1(128)));
    }
    scales[0] = largest / 127.0f;
}

static inline __attribute__((always_inline)) void
encode_square(uint8_t *codes, real *tile, int n, float *scales)
{
    const vr least = vr_set1(CODE_LEAST_4);
    const vr one = vr_set1(1), huge = vr_set1(0x1p60f);
    vr most = vr_set1(0), lowest = vr_set1(CODE_INFINITE_4);

    for (int i = 0; i < n; i += VR_WIDTH) {
        const vr v = vr_load(tile + i);
        const vr root = vr_sub(vr_bits_down(v, 2, CODE_BIAS_4), least);
        most = vr_max(root, most);
        lowest = vr_min(root, lowest);
        vr_store(tile + i, root);
    }
    real high = vr_largest(most), low = -vr_largest(vr_sub(vr_set1(0), lowest));
    if (high >= CODE_INFINITE_4) {
        high = replace_infinite(tile, n, CODE_INFINITE_4);
        low = low < high ? low : high;
    }
    const real range = high - low;
    const vr per_root = vr_set1(range > 0 ? 255.0f / range : 0.0f);
    const vr from = vr_set1(low);
    for (int i = 0; i < n; i += VR_WIDTH) {
        const vr code = vr_mul(vr_sub(vr_load(tile + i), from), per_root);
        /* at least 1, unless it is 0 */
        vr_store_u8(codes + i, vr_max(code, vr_min(vr_mul(code, huge), one)));
    }
    scales[0] = low;
    scales[1] = range / 255.0f;
}

/* ---- A tensor's last block, which may end inside a vector ------------------------ */

/* The codes first .. first + n - 1 to read: in the array if they are whole vectors. */
static inline const uint8_t *
codes_open(uint8_t *copy, const void *array, int64_t first, int n)
{
    const uint8_t *codes = (const uint8_t *)array + first;

    if (n % VR_WIDTH == 0) {
        return codes;
    }
    memset(copy, 0, BLOCK);
    memcpy(copy, codes, (size_t)n);
    return copy;
}

/* Repeats the first value up to a whole vector, which changes no scale; returns the
 * new length. */
static inline int
tile_fill(real *tile, int n)
{
    while (n % VR_WIDTH != 0) {
        tile[n++] = tile[0];
    }
    return n;
}

/* One moment of the first n elements, at most a CHUNK. `at`: the moment's first column
 * in the scales, of which a block has `columns`. */
static void
decode_chunk(real *tile, const void *array, int n, const float *scales, int columns,
             int at)
{
    for (int i = 0; i < n; i += BLOCK, scales += columns) {
        const int count = n - i < BLOCK ? n - i : BLOCK;
        uint8_t copy[BLOCK];
        const uint8_t *codes = codes_open(copy, array, i, count);

        if (at == 0) {
            decode_signed(tile + i, codes, count, scales);
        } else {
            decode_square(tile + i, codes, count, scales + at);
        }
    }
}

static void
encode_chunk(void *array, real *tile, int n, float *scales, int columns, int at)
{
    for (int i = 0; i < n; i += BLOCK, scales += columns) {
        const int count = n - i < BLOCK ? n - i : BLOCK;
        const int padded = tile_fill(tile + i, count);
        uint8_t copy[BLOCK], *own = (uint8_t *)array + i;
        uint8_t *codes = padded == count ? own : copy;

        if (at == 0) {
            encode_signed(codes, tile + i, padded, scales);
        } else {
            encode_square(codes, tile + i, padded, scales + at);
        }
        if (codes == copy) {
            memcpy(own, copy, (size_t)count);
        }
    }
}

#endif
