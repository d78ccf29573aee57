/* Words of dropout (see vec_scalar_words.h) on the compiler's vector extensions. */
// clang-format off
#ifndef VEC_WIDE_WORDS_H
#define VEC_WIDE_WORDS_H

#include "kernels/philox_row.h"

#include <stdint.h>
#include <string.h>

#define EACH_LANE(type, width, expression)                                               \
    type r = {0};                                                                        \
    for (int i = 0; i < width; i++) { r[i] = (expression); }                             \
    return r

typedef uint64_t v8 __attribute__((vector_size(64)));
static inline v8 v8_set1(uint32_t x) { EACH_LANE(v8, 8, x); }
static inline v8 v8_count(uint32_t x) { EACH_LANE(v8, 8, x + (uint32_t)i); }
static inline v8 v8_xor(v8 x, v8 y) { return x ^ y; }
static inline v8 v8_mul(v8 x, uint32_t y) { EACH_LANE(v8, 8, (uint64_t)(uint32_t)x[i] * y); }
static inline v8 v8_high(v8 x) { return x >> 32; }
static inline void v8_store(uint32_t *p, v8 x)
{
    for (int i = 0; i < 8; i++) { p[i] = (uint32_t)x[i]; }
}
#undef EACH_LANE

extern philox_function tfast_wide_philox; /* of wide_words.c */
static inline void philox_words(uint32_t to[][4][PHILOX_PAIRS], philox_row row)
{
    tfast_wide_philox(to, row);
}

#endif
