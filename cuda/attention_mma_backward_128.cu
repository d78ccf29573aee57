/* Attention's backward by tensor cores: the kernels for tiles of 96 and 128 dims. */
#include "attention_mma_backward_launch.cuh"

template tfast_status tfast_mma_backward_of_dim<96>(const mma_backward_call &, int);
template tfast_status tfast_mma_backward_of_dim<128>(const mma_backward_call &, int);
