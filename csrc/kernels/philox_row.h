/* Random words for attention's dropout: the interface of csrc/simd/SET_words.c. */
#ifndef PHILOX_ROW_H
#define PHILOX_ROW_H

#include <stdint.h>

enum { PHILOX_PAIRS = 8 };

/* Eight pairs of queries with n_quads quads of keys: see tfast_attention() in tfast.h.
 */
typedef struct {
    uint64_t seed;
    uint32_t head, first_pair, first_quad;
    int n_quads;
} philox_row;

/* Stores the four words of each quad and pair. */
typedef void philox_function(uint32_t to[][4][PHILOX_PAIRS], philox_row row);

#endif
