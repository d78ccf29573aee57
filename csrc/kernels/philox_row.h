/* Attention's random words of dropout: what a unit SET_words.c exports. */
#ifndef PHILOX_ROW_H
#define PHILOX_ROW_H

#include <stdint.h>

enum { PHILOX_PAIRS = 8 };

/* Pairs of queries first .. first + 7 with quads of keys quad .. quad + n - 1; see
 * tfast_attention() in tfast.h. */
typedef struct {
    uint64_t seed;
    uint32_t head, first, quad;
    int n;
} philox_row;

/* Stores the four words of each quad and pair. */
typedef void philox_function(uint32_t to[][4][PHILOX_PAIRS], philox_row row);

#endif
