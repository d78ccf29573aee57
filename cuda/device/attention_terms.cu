#include "attention_mma_term.cuh"

#define CHECK(K, path, type, rows, threads, shared)                                    \
    CHECK_SHAPE(rows, threads, shared, mma_term_shape<path_##path>)

TERM_SHAPES(CHECK, )
TFAST_EXPORT(attention_terms)
