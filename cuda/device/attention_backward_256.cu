/* Tiles of 192 and 256 dims; all of them in one file would take minutes to compile. */
#include "attention_mma_backward.cuh"

BACKWARD_SHAPES_256(CHECK_BACKWARD, )
TFAST_EXPORT(attention_backward_256)
