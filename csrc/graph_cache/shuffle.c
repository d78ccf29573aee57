/* A keyed permutation of 0 .. n - 1 that needs no memory. */
#include "shuffle.h"

#include <math.h>

/* With GRAPH_HALVES, permutations of up to 6 are equally likely as far as chi squared
 * of 15,000 draws can tell; with 12 those of 6 are not, with 8 those of 5. Many need
 * less. */
enum { HALVES_OF_MANY = 8, MANY = 1024 };

/* SplitMix64's last step (Steele, Lea and Flood, 2014). */
static uint64_t
mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

graph_shuffle
graph_shuffle_of(int64_t graphs, uint64_t seed, uint64_t epoch)
{
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    const uint64_t n = graphs > 1 ? (uint64_t)graphs : 1;
    const uint64_t key = mix(mix(seed + golden) + golden * (epoch + 1));
    graph_shuffle p = {.n = n, .rows = (uint64_t)ceil(sqrt((double)n))};

    p.columns = (n + p.rows - 1) / p.rows;
    p.halves = n < MANY ? GRAPH_HALVES : HALVES_OF_MANY;
    for (int i = 0; i < p.halves; i++) {
        p.keys[i] = mix(key + golden * (uint64_t)(i + 1));
    }
    return p;
}

/* x moved by a number in 0 .. size - 1 that depends on `other`. */
static uint64_t
moved(uint64_t x, uint64_t size, uint64_t key, uint64_t other)
{
    x += (uint64_t)((unsigned __int128)mix(key + other) * size >> 64);
    return x < size ? x : x - size;
}

int64_t
graph_shuffled(const graph_shuffle *p, int64_t i)
{
    uint64_t x = (uint64_t)i;

    do {
        uint64_t row = x / p->columns, column = x % p->columns;

        for (int k = 0; k < p->halves; k += 2) {
            row = moved(row, p->rows, p->keys[k], column);
            column = moved(column, p->columns, p->keys[k + 1], row);
        }
        x = row * p->columns + column;
    } while (x >= p->n);
    return (int64_t)x;
}
