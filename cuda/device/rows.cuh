/* What kernels over a list of arrays share: finding the row that a work item belongs
 * to, and knowing which block is the last to finish. A row has first_item and end_item,
 * counted over all rows, and is a multiple of 16 bytes. */
#ifndef TFAST_ROWS_CUH
#define TFAST_ROWS_CUH

#include "common.cuh"

/* The last of n rows whose first item is not behind `item`, by a whole warp: each round
 * splits what is left in 32. Rows without items share their first_item with the next
 * one, so the row found has some. */
template <typename ROW>
DEVICE const ROW *
find_row(const ROW *rows, int64_t n, int item)
{
    const int lane = threadIdx.x % 32;
    int64_t low = 0, high = n;

    while (high - low > 1) {
        const int64_t part = (high - low + 31) / 32, probe = low + lane * part;
        const bool before = probe < high && rows[probe].first_item <= item;
        const int parts = __popc(__ballot_sync(~0u, before));
        low += (parts - 1) * part;
        high = low + part < high ? low + part : high;
    }
    return rows + low;
}

/* By one warp: its copy of the row that `item` is in. */
template <typename ROW>
DEVICE void
hold_row(ROW *own, const ROW *rows, int64_t n, int item)
{
    const int lane = threadIdx.x % 32;
    const ROW *row = find_row(rows, n, item);

    __syncwarp(); /* all lanes are done with the row before */
    if (lane < (int)(sizeof *row / sizeof(uint4))) {
        ((uint4 *)own)[lane] = ((const uint4 *)row)[lane];
    }
    __syncwarp();
}

/* By a whole block: whether it is the last one to finish, and so sees what all the
 * others wrote. `blocks_done` is 0 between launches. */
DEVICE bool
last_block(uint32_t *blocks_done)
{
    SHARED(bool, last, 1);

    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        /* back to 0 for the next launch when the last block counts */
        last[0] = atomicInc(blocks_done, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last[0];
}

#endif
