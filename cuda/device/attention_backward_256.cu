/* Tiles of 192 and 256 dims; all of them in one file would take minutes to compile. */
#include "attention_mma_backward.cuh"

#define CHECK(K, path, type, dims, keys, options, rows, threads, shared)               \
    CHECK_SHAPE(rows, threads, shared,                                                 \
                mma_backward_shape<path_##path, dims, keys, options>)

BACKWARD_SHAPES_256(CHECK, )
TFAST_EXPORT(attention_backward_256)
