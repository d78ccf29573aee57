#include "attention_mma_forward.cuh"

#define CHECK(K, path, type, dims, options, rows, threads, shared)                     \
    CHECK_SHAPE(rows, threads, shared, mma_forward_shape<path_##path, dims, options>)

FORWARD_SHAPES(CHECK, )
TFAST_EXPORT(attention_forward)
