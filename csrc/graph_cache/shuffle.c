/* A keyed permutation of 0 .. n - 1 that needs no memory. */
#include "shuffle.h"

#include <math.h>

/* Half rounds of the Feistel network: GRAPH_HALVES for less than MANY graphs, which a
 * chi-squared test needs to find all permutations of up to 6 graphs equally likely, and
 * HALVES_OF_MANY otherwise. */
enum { HALVES_OF_MANY = 8, MANY = 1024 };

/* The output function of SplitMix64 (Steele, Lea and Flood, 2014). */
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

/* The round function: x plus a pseudo-random number in 0 .. size - 1 that depends on
 * `key` and `other`, modulo size. x < size. */
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

/* Permutes LANES numbers at a time: the rounds of one number depend on each other,
 * those of different numbers do not, so the processor overlaps them. */
void
graph_shuffled_run(const graph_shuffle *p, int64_t first, int64_t n, int64_t *out)
{
    enum { LANES = 8 };
    uint64_t row[LANES], column[LANES];

    for (int64_t at = 0; at < n; at += LANES) {
        const int64_t lanes = n - at < LANES ? n - at : LANES;

        for (int64_t i = 0; i < LANES; i++) {
            const uint64_t x = (uint64_t)(first + at + (i < lanes ? i : 0));

            row[i] = x / p->columns;
            column[i] = x % p->columns;
        }
        for (int k = 0; k < p->halves; k += 2) {
            for (int i = 0; i < LANES; i++) {
                row[i] = moved(row[i], p->rows, p->keys[k], column[i]);
            }
            for (int i = 0; i < LANES; i++) {
                column[i] = moved(column[i], p->columns, p->keys[k + 1], row[i]);
            }
        }
        for (int64_t i = 0; i < lanes; i++) {
            const int64_t x = (int64_t)(row[i] * p->columns + column[i]);

            out[at + i] = (uint64_t)x < p->n ? x : graph_shuffled(p, x);
        }
    }
}
