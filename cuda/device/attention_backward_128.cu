/* Tiles of 96 and 128 dims; all of them in one file would take minutes to compile. */
#include "attention_mma_backward.cuh"

BACKWARD_SHAPES_128(CHECK_BACKWARD, )
TFAST_EXPORT(attention_backward_128)
