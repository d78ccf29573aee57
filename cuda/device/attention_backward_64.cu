/* Tiles of 32 and 64 dims; all of them in one file would take minutes to compile. */
#include "attention_mma_backward.cuh"

BACKWARD_SHAPES_64(CHECK_BACKWARD, )
TFAST_EXPORT(attention_backward_64)
