/* Which graph a row of packed points belongs to, for the CPU and the GPU. */
#ifndef NEIGHBOUR_GRAPH_H
#define NEIGHBOUR_GRAPH_H

#include "libc.h"

/* The last graph with ptr[graph] <= row. */
TFAST_HOST_DEVICE static inline int64_t
tfast_graph_of(const int64_t *ptr, int64_t n_graphs, int64_t row)
{
    int64_t low = 0, high = n_graphs - 1;

    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;

        if (ptr[middle] <= row) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

#endif
