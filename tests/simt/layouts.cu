/* How often shared memory must be asked for the tiles of attention_mma.cuh: for each
 * layout a line with the wavefronts of its stores, 16 bytes a lane, and of ldmatrix,
 * and how many these would be if no two rows met in a bank. */
#include "attention_mma.cuh"
#include "driver_twin.h"

#include <cstdio>
#include <vector>

/* Begins as a thread of a kernel does: stores its part of a tile, then reads all of it
 * as both operands. `at` gets where each store goes. */
template <int ROWS, int D, int THREADS>
TFAST_KERNEL(THREADS, 1)
store_and_read(int *at)
{
    typedef mma_tile<path_75, ROWS, D, THREADS> tile;
    SHARED(uint4, base, ROWS * D / 8);
    const smem to = smem_address(base);
    const mma_reader<D> reader;
    uint32_t operand[4];

    for (int i = 0; i < tile::EACH; i++) {
        const int place = tile::layout::at(tile::row(i), tile::chunk(i));
        at[i * THREADS + threadIdx.x] = place;
        st_shared_128(to + place, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
    for (int row = 0; row < ROWS; row += 16) {
        for (int chunk = 0; chunk < D / 8; chunk += 2) {
            ldmatrix_x4(operand, reader.template left<ROWS>(to, row, chunk));
            ldmatrix_x4_trans(operand, reader.template left<ROWS>(to, row, chunk));
            ldmatrix_x4(operand, reader.template right<ROWS>(to, row, chunk));
        }
    }
}

/* 8 lanes store at a time: a wavefront for each that shares 4 banks with another. */
static int
wavefronts_of_stores(const std::vector<int> &at)
{
    int total = 0;

    for (size_t first = 0; first < at.size(); first += 8) {
        int hits[8] = {}, worst = 0;
        for (size_t i = first; i < first + 8; i++) {
            const int count = ++hits[at[i] / 16 % 8];
            worst = count > worst ? count : worst;
        }
        total += worst;
    }
    return total;
}

template <int ROWS, int D, int THREADS>
static void
report()
{
    std::vector<int> at(ROWS * D / 8);
    uint64_t before[2], after[2];

    tfast_simt_matrices(before);
    LAUNCH((store_and_read<ROWS, D, THREADS>), 1, THREADS, 0, at.data());
    tfast_simt_matrices(after);
    printf("dims %d, %d rows, %d threads: stores %d of %d, matrices %d of %d\n", D,
           ROWS, THREADS, wavefronts_of_stores(at), ROWS * D / 64,
           (int)(after[1] - before[1]), (int)(after[0] - before[0]));
}

template <int D>
static void
report_dims()
{
    report<32, D, 128>();
    report<64, D, 128>();
    report<64, D, 256>();
}

int
main()
{
    report_dims<32>();
    report_dims<64>();
    report_dims<96>();
    report_dims<128>();
    report<32, 192, 96>();
    report<32, 256, 128>();
    return 0;
}
