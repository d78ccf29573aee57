/* The gradient of a term of the scores, whoever makes it: a block owns a tile of the
 * term and adds up the gradients of all scores that it is broadcast to. */
#ifndef TFAST_ATTENTION_TERM_CUH
#define TFAST_ATTENTION_TERM_CUH

#include "common.cuh"

/* Sums up TILE x TILE numbers in shared memory, rows TILE + 1 apart, over the
 * dimensions in which the term is broadcast: what is left is in the first row, column
 * or element. Row i of a column is thread i's, who may read it without a barrier; of
 * the rest all threads may read any. */
template <int TILE, typename REAL>
DEVICE void
reduce_tile(REAL *tile, bool rows, bool columns)
{
    constexpr int PITCH = TILE + 1;
    const int own = threadIdx.x;

    __syncthreads();
    if (rows && own < TILE) {
        double sum = 0;
        for (int i = 0; i < TILE; i++) {
            sum += (double)tile[i * PITCH + own];
        }
        tile[own] = (REAL)sum;
    }
    __syncthreads();
    if (columns && own < (rows ? 1 : TILE)) {
        double sum = 0;
        for (int i = 0; i < TILE; i++) {
            sum += (double)tile[own * PITCH + i];
        }
        tile[own * PITCH] = (REAL)sum;
    }
}

#endif
