/* Attention's backward by tensor cores: the kernels for tiles of 192 and 256 dims. */
#include "attention_mma_backward_launch.cuh"

template tfast_status tfast_mma_backward_of_dim<192>(const mma_backward_call &, int);
template tfast_status tfast_mma_backward_of_dim<256>(const mma_backward_call &, int);
