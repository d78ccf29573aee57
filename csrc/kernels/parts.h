/* How a list of arrays is shared among threads: the elements, laid end to end with a
 * fixed cost for starting each array, are cut into one contiguous range for each
 * thread. Costs, lengths and positions are in elements. */
#ifndef PARTS_H
#define PARTS_H

#include "../tfast.h"
#include "../threads.h"

/* The number of ranges: one for each thread, but none of them shorter than `least`. */
static inline int
parts_worth(int64_t cost, int64_t least)
{
    const int64_t parts = cost / least, threads = tfast_num_threads();

    return parts < 1 ? 1 : (int)(parts < threads ? parts : threads);
}

/* Where range number `part` begins; in 128 bits, since cost * part may exceed 2^63. */
static inline int64_t
part_begin(int64_t cost, int part, int parts)
{
    return (int64_t)((__int128)cost * part / parts);
}

/* Converts a cut at `at`, counted from the array's start, to one of its elements:
 * rounded down to a multiple of `multiple`, within 0 .. numel. */
static inline int64_t
part_cut(int64_t at, int64_t numel, int64_t multiple)
{
    if (at <= 0) {
        return 0;
    }
    return at >= numel ? numel : at / multiple * multiple;
}

#endif
