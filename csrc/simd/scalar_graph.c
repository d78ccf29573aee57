#include "graph_loops.h"

const tfast_graph_kernels *tfast_graph_kernels_scalar(void);

const tfast_graph_kernels *
tfast_graph_kernels_scalar(void)
{
    return &graph_kernels;
}
