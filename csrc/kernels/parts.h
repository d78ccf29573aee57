/* How threads share out a list of arrays: the elements, laid end to end with a fixed
 * cost for entering each array, are cut into one contiguous run a thread. All in
 * elements. */
#ifndef PARTS_H
#define PARTS_H

#include "../tfast.h"

/* How many runs a list is worth: one for each thread, but none shorter than `least`. */
static inline int
parts_worth(int64_t cost, int64_t least)
{
    const int64_t parts = cost / least, threads = tfast_num_threads();

    return parts < 1 ? 1 : (int)(parts < threads ? parts : threads);
}

/* Where run number `part` begins; in 128 bits, since cost * part may pass 2^63. */
static inline int64_t
part_begin(int64_t cost, int part, int parts)
{
    return (int64_t)((__int128)cost * part / parts);
}

/* Where a cut at `at`, counted from the array's start, falls among its elements. */
static inline int64_t
part_cut(int64_t at, int64_t numel, int64_t multiple)
{
    if (at <= 0) {
        return 0;
    }
    return at >= numel ? numel : at / multiple * multiple;
}

#endif
