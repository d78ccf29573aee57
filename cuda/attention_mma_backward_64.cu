/* Attention's backward by tensor cores: the kernels for tiles of 32 and 64 dims. */
#include "attention_mma_backward_launch.cuh"

template tfast_status tfast_mma_backward_of_dim<32>(const mma_backward_call &, int);
template tfast_status tfast_mma_backward_of_dim<64>(const mma_backward_call &, int);
