#if defined(__x86_64__)
#    include "graph_loops.h"

const tfast_graph_kernels *tfast_graph_kernels_avx512(void);

const tfast_graph_kernels *
tfast_graph_kernels_avx512(void)
{
    return &graph_kernels;
}
#endif
