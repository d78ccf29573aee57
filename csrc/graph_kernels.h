/* The graph cache's inner loops, compiled once for each instruction set. All sets give
 * the same bits. */
#ifndef TFAST_GRAPH_KERNELS_H
#define TFAST_GRAPH_KERNELS_H

#include "libc.h"

typedef struct tfast_graph_kernels {
    /* CRC-32C of a message that ends with these bytes. `crc`: the CRC of the bytes
     * before them; 0: none. */
    uint32_t (*crc32c)(uint32_t crc, const void *data, size_t bytes);
    /* out[i] = in[i] + add, as integers of out_bytes (1, 2, 4, 8), at least as wide as
     * those of `in`, whose dtype is `stored`: GRAPH_AS_U8 .. GRAPH_AS_I32 of
     * graph_cache/format.h. `out` and `in` are aligned to their elements and must not
     * overlap. */
    void (*widen)(void *out, int out_bytes, const void *in, int stored, int64_t n,
                  int64_t add);
    /* out[i] = in[i] + add for integers of `bytes` (1, 2, 4, 8). */
    void (*add)(void *out, const void *in, int bytes, int64_t n, int64_t add);
    /* The smallest and the largest of n >= 1 integers, `bytes` wide, signed or not. An
     * unsigned 64-bit value above INT64_MAX counts as INT64_MAX. */
    void (*range)(const void *in, int bytes, int is_signed, int64_t n, int64_t *low,
                  int64_t *high);
    /* The inverse of widen: `stored` is the dtype of `out`, which every value fits. */
    void (*narrow)(void *out, int stored, const void *in, int in_bytes, int64_t n);
    /* out[i] = value: fills batch vectors with the number of a graph. */
    void (*fill)(int64_t *out, int64_t n, int64_t value);
} tfast_graph_kernels;

#endif
