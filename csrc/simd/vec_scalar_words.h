/* v8: eight 64-bit words, for Philox (kernels/philox.h). v8_count(x) is x, x + 1 ..
 * x + 7. v8_mul(a, x) is the 64-bit product of each low half of a and x. v8_high moves
 * the high halves into the low halves. v8_store stores the low halves as uint32_t.
 * philox_words() is the one that SET_words.c compiles from them. */
// clang-format off
#ifndef VEC_SCALAR_WORDS_H
#define VEC_SCALAR_WORDS_H

#include "../kernels/philox_row.h"

#include <stdint.h>

typedef struct { uint64_t lane[8]; } v8;
#define EACH_OF_8(expression)                                                            \
    v8 r;                                                                                \
    for (int i = 0; i < 8; i++) { r.lane[i] = (expression); }                            \
    return r
static inline v8 v8_set1(uint32_t x) { EACH_OF_8(x); }
static inline v8 v8_count(uint32_t x) { EACH_OF_8(x + (uint32_t)i); }
static inline v8 v8_xor(v8 x, v8 y) { EACH_OF_8(x.lane[i] ^ y.lane[i]); }
static inline v8 v8_mul(v8 x, uint32_t y) { EACH_OF_8((uint64_t)(uint32_t)x.lane[i] * y); }
static inline v8 v8_high(v8 x) { EACH_OF_8(x.lane[i] >> 32); }
static inline void v8_store(uint32_t *p, v8 x)
{
    for (int i = 0; i < 8; i++) { p[i] = (uint32_t)x.lane[i]; }
}
#undef EACH_OF_8

extern philox_function tfast_scalar_philox; /* of scalar_words.c */
static inline void philox_words(uint32_t to[][4][PHILOX_PAIRS], philox_row row)
{
    tfast_scalar_philox(to, row);
}

#endif
