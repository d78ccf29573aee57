/* A keyed permutation of 0 .. n - 1, the same on every machine for ever: otherwise a
 * saved position would mean nothing. */
#ifndef GRAPH_CACHE_SHUFFLE_H
#define GRAPH_CACHE_SHUFFLE_H

#include <stdint.h>

enum { GRAPH_HALVES = 16 };

/* A Feistel network on pairs (row, column), of which there are a few more than n; a
 * number outside is permuted on until it falls inside (Black and Rogaway, "Ciphers with
 * arbitrary finite domains", 2002). */
typedef struct {
    uint64_t n, rows, columns;
    uint64_t keys[GRAPH_HALVES];
    int halves; /* of rounds */
} graph_shuffle;

graph_shuffle graph_shuffle_of(int64_t n, uint64_t seed, uint64_t epoch);

/* Where i goes; 0 <= i < n. */
int64_t graph_shuffled(const graph_shuffle *shuffle, int64_t i);

/* out[i]: where first + i goes, for 0 <= i < n; all of them below the shuffle's n. */
void graph_shuffled_run(const graph_shuffle *shuffle, int64_t first, int64_t n,
                        int64_t *out);

#endif
