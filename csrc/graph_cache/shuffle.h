/* A keyed permutation of 0 .. n - 1. It must be the same on every machine and in every
 * later version, because saved positions refer to it. */
#ifndef GRAPH_CACHE_SHUFFLE_H
#define GRAPH_CACHE_SHUFFLE_H

#include <stdint.h>

enum { GRAPH_HALVES = 16 }; /* most half rounds */

/* A Feistel network on pairs (row, column), with rows * columns >= n. A
 * result >= n is permuted again until it is below n (cycle walking: Black and Rogaway,
 * "Ciphers with arbitrary finite domains", 2002). */
typedef struct {
    uint64_t n, rows, columns;
    uint64_t keys[GRAPH_HALVES]; /* one for each half round */
    int halves;                  /* number of half rounds; even */
} graph_shuffle;

graph_shuffle graph_shuffle_of(int64_t n, uint64_t seed, uint64_t epoch);

/* The image of i; 0 <= i < n. */
int64_t graph_shuffled(const graph_shuffle *shuffle, int64_t i);

/* out[i]: the image of first + i, for 0 <= i < n; first + n <= shuffle->n. */
void graph_shuffled_run(const graph_shuffle *shuffle, int64_t first, int64_t n,
                        int64_t *out);

#endif
