/* The graph cache's kernels (see graph_kernels.h): a plain loop for each pair of input
 * and output type, which the compiler vectorises for each instruction set. Additions
 * wrap, so loops with an unsigned output type also serve the signed type of that width.
 */
#ifndef GRAPH_LOOPS_H
#define GRAPH_LOOPS_H

#include "../graph_kernels.h"
#include "crc32c.h"

#include <string.h>

/* Equals GRAPH_AS_U8 of graph_cache/format.h; u16, u32, i8, i16, i32 follow it. */
enum { GRAPH_KERNEL_U8 = 2 };

#define GRAPH_WIDEN(name, to, from)                                                    \
    static void name(void *restrict out, const void *restrict in, int64_t n,           \
                     int64_t add)                                                      \
    {                                                                                  \
        to *restrict target = out;                                                     \
        const from *restrict source = in;                                              \
        const to more = (to)add;                                                       \
                                                                                       \
        for (int64_t i = 0; i < n; i++) {                                              \
            target[i] = (to)((to)source[i] + more);                                    \
        }                                                                              \
    }

GRAPH_WIDEN(graph_widen_u8_to_1, uint8_t, uint8_t)
GRAPH_WIDEN(graph_widen_u8_to_2, uint16_t, uint8_t)
GRAPH_WIDEN(graph_widen_u8_to_4, uint32_t, uint8_t)
GRAPH_WIDEN(graph_widen_u16_to_2, uint16_t, uint16_t)
GRAPH_WIDEN(graph_widen_u16_to_4, uint32_t, uint16_t)
GRAPH_WIDEN(graph_widen_u32_to_4, uint32_t, uint32_t)
GRAPH_WIDEN(graph_widen_i8_to_2, uint16_t, int8_t)
GRAPH_WIDEN(graph_widen_i8_to_4, uint32_t, int8_t)
GRAPH_WIDEN(graph_widen_i16_to_4, uint32_t, int16_t)
GRAPH_WIDEN(graph_add_8, uint64_t, uint64_t)

#if defined(__AVX512F__)

/* Widens to 64 bits, the usual case of indices, eight elements at a time. gcc would
 * vectorise by full vectors of the narrow type and leave the rest, most of a small
 * graph, to a scalar loop. The last eight elements may overlap the previous eight, and
 * are then written twice. */
#    define GRAPH_WIDEN_TO_8(name, from)                                               \
        static void name(void *restrict out, const void *restrict in, int64_t n,       \
                         int64_t add)                                                  \
        {                                                                              \
            uint64_t *restrict target = out;                                           \
            const from *restrict source = in;                                          \
                                                                                       \
            if (n < 8) {                                                               \
                for (int64_t i = 0; i < n; i++) {                                      \
                    target[i] = (uint64_t)source[i] + (uint64_t)add;                   \
                }                                                                      \
                return;                                                                \
            }                                                                          \
            for (int64_t i = 0; i < n; i += 8) {                                       \
                const int64_t at = i < n - 8 ? i : n - 8;                              \
                                                                                       \
                for (int64_t j = at; j < at + 8; j++) {                                \
                    target[j] = (uint64_t)source[j] + (uint64_t)add;                   \
                }                                                                      \
            }                                                                          \
        }

#else
#    define GRAPH_WIDEN_TO_8(name, from) GRAPH_WIDEN(name, uint64_t, from)
#endif

GRAPH_WIDEN_TO_8(graph_widen_u8_to_8, uint8_t)
GRAPH_WIDEN_TO_8(graph_widen_u16_to_8, uint16_t)
GRAPH_WIDEN_TO_8(graph_widen_u32_to_8, uint32_t)
GRAPH_WIDEN_TO_8(graph_widen_i8_to_8, int8_t)
GRAPH_WIDEN_TO_8(graph_widen_i16_to_8, int16_t)
GRAPH_WIDEN_TO_8(graph_widen_i32_to_8, int32_t)

typedef void graph_widen_function(void *restrict, const void *restrict, int64_t,
                                  int64_t);

/* log2(bytes) for 1, 2, 4 and 8: the column of the tables below. */
static inline int
graph_size_class(int bytes)
{
    return bytes == 8 ? 3 : bytes / 2;
}

static void
graph_widen(void *out, int out_bytes, const void *in, int stored, int64_t n,
            int64_t add)
{
    static graph_widen_function *const functions[6][4] = {
        {graph_widen_u8_to_1, graph_widen_u8_to_2, graph_widen_u8_to_4,
         graph_widen_u8_to_8},
        {NULL, graph_widen_u16_to_2, graph_widen_u16_to_4, graph_widen_u16_to_8},
        {NULL, NULL, graph_widen_u32_to_4, graph_widen_u32_to_8},
        {graph_widen_u8_to_1, graph_widen_i8_to_2, graph_widen_i8_to_4,
         graph_widen_i8_to_8},
        {NULL, graph_widen_u16_to_2, graph_widen_i16_to_4, graph_widen_i16_to_8},
        {NULL, NULL, graph_widen_u32_to_4, graph_widen_i32_to_8},
    };

    functions[stored - GRAPH_KERNEL_U8][graph_size_class(out_bytes)](out, in, n, add);
}

static void
graph_add(void *out, const void *in, int bytes, int64_t n, int64_t add)
{
    static graph_widen_function *const functions[4] = {
        graph_widen_u8_to_1, graph_widen_u16_to_2, graph_widen_u32_to_4, graph_add_8};

    functions[graph_size_class(bytes)](out, in, n, add);
}

#define GRAPH_RANGE(name, type)                                                        \
    static void name(const void *in, int64_t n, int64_t *low, int64_t *high)           \
    {                                                                                  \
        const type *source = in;                                                       \
        type least = source[0], most = source[0];                                      \
                                                                                       \
        for (int64_t i = 1; i < n; i++) {                                              \
            least = source[i] < least ? source[i] : least;                             \
            most = source[i] > most ? source[i] : most;                                \
        }                                                                              \
        *low = (int64_t)least;                                                         \
        *high = (int64_t)most;                                                         \
    }

GRAPH_RANGE(graph_range_u8, uint8_t)
GRAPH_RANGE(graph_range_u16, uint16_t)
GRAPH_RANGE(graph_range_u32, uint32_t)
GRAPH_RANGE(graph_range_u64, uint64_t)
GRAPH_RANGE(graph_range_i8, int8_t)
GRAPH_RANGE(graph_range_i16, int16_t)
GRAPH_RANGE(graph_range_i32, int32_t)
GRAPH_RANGE(graph_range_i64, int64_t)

#if defined(__AVX2__)

/* Range of 32 .. 512 values, the indices of a small graph. graph_range_u8() would spend
 * most of its time in the scalar loop after the last full vector. Here the last vector
 * overlaps the previous one instead, which does not change a minimum or maximum. */
static void
graph_range_u8_short(const void *in, int64_t n, int64_t *low, int64_t *high)
{
    typedef uint8_t vector __attribute__((vector_size(32)));
    const uint8_t *source = in;
    vector least, most, x;
    uint8_t first = source[0], last = source[0];

    memcpy(&least, source, sizeof least);
    most = least;
    for (int64_t i = 32; i < n; i += 32) {
        memcpy(&x, source + (i < n - 32 ? i : n - 32), sizeof x);
        least = ((vector)(x < least) & x) | (~(vector)(x < least) & least);
        most = ((vector)(x > most) & x) | (~(vector)(x > most) & most);
    }
    for (int lane = 0; lane < 32; lane++) {
        first = least[lane] < first ? least[lane] : first;
        last = most[lane] > last ? most[lane] : last;
    }
    *low = first;
    *high = last;
}

#else

static void
graph_range_u8_short(const void *in, int64_t n, int64_t *low, int64_t *high)
{
    graph_range_u8(in, n, low, high);
}

#endif

typedef void graph_range_function(const void *, int64_t, int64_t *, int64_t *);

static void
graph_range(const void *in, int bytes, int is_signed, int64_t n, int64_t *low,
            int64_t *high)
{
    static graph_range_function *const functions[2][4] = {
        {graph_range_u8, graph_range_u16, graph_range_u32, graph_range_u64},
        {graph_range_i8, graph_range_i16, graph_range_i32, graph_range_i64}};

    if (bytes == 1 && !is_signed && n >= 32 && n <= 512) {
        graph_range_u8_short(in, n, low, high);
        return;
    }
    functions[is_signed != 0][graph_size_class(bytes)](in, n, low, high);
    if (!is_signed) { /* values above INT64_MAX were cast to negative numbers */
        *low = *low < 0 ? INT64_MAX : *low;
        *high = *high < 0 ? INT64_MAX : *high;
    }
}

#define GRAPH_NARROW(name, to, from)                                                   \
    static void name(void *restrict out, const void *restrict in, int64_t n)           \
    {                                                                                  \
        to *restrict target = out;                                                     \
        const from *restrict source = in;                                              \
                                                                                       \
        for (int64_t i = 0; i < n; i++) {                                              \
            target[i] = (to)source[i];                                                 \
        }                                                                              \
    }

GRAPH_NARROW(graph_narrow_1_to_1, uint8_t, uint8_t)
GRAPH_NARROW(graph_narrow_2_to_1, uint8_t, uint16_t)
GRAPH_NARROW(graph_narrow_4_to_1, uint8_t, uint32_t)
GRAPH_NARROW(graph_narrow_8_to_1, uint8_t, uint64_t)
GRAPH_NARROW(graph_narrow_2_to_2, uint16_t, uint16_t)
GRAPH_NARROW(graph_narrow_4_to_2, uint16_t, uint32_t)
GRAPH_NARROW(graph_narrow_8_to_2, uint16_t, uint64_t)
GRAPH_NARROW(graph_narrow_4_to_4, uint32_t, uint32_t)
GRAPH_NARROW(graph_narrow_8_to_4, uint32_t, uint64_t)

typedef void graph_narrow_function(void *restrict, const void *restrict, int64_t);

static void
graph_narrow(void *out, int stored, const void *in, int in_bytes, int64_t n)
{
    static graph_narrow_function *const functions[3][4] = {
        {graph_narrow_1_to_1, graph_narrow_2_to_1, graph_narrow_4_to_1,
         graph_narrow_8_to_1},
        {NULL, graph_narrow_2_to_2, graph_narrow_4_to_2, graph_narrow_8_to_2},
        {NULL, NULL, graph_narrow_4_to_4, graph_narrow_8_to_4},
    };

    functions[(stored - GRAPH_KERNEL_U8) % 3][graph_size_class(in_bytes)](out, in, n);
}

static void
graph_fill(int64_t *out, int64_t n, int64_t value)
{
    for (int64_t i = 0; i < n; i++) {
        out[i] = value;
    }
}

static const tfast_graph_kernels graph_kernels = {
    .crc32c = graph_crc32c,
    .widen = graph_widen,
    .add = graph_add,
    .range = graph_range,
    .narrow = graph_narrow,
    .fill = graph_fill,
};

#endif
