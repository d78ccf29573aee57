/* Attention: matrix products on tiles, and packing of their factors. A tile of scores
 * is [keys][ATTENTION_QUERIES] of `real`. Vector lanes are queries, so that maxima and
 * sums over keys need no horizontal operations. Queries are computed in panels of
 * PANEL, two vectors. All matrix products use one register tile, multiply().
 *
 * Scores are in units of log2, and scale includes log2 e, except on the general path:
 * see attention_unit(). */
#ifndef ATTENTION_TILE_H
#define ATTENTION_TILE_H

#include "attention_head.h"
#include "tile.h"
#include "vector_math.h"

#include <string.h>

#define PANEL (2 * VR_WIDTH)

/* ---- Sizes of a register tile ---------------------------------------------------- */

/* Calls f(rows, vectors, ...) with both as compile-time constants, so that sums can
 * stay in registers. */
#if V_ROWS == 12
#    define ATTENTION_ROWS(f, rows, vectors, ...)                                      \
        switch (rows) {                                                                \
        case 12:                                                                       \
            f(12, vectors, __VA_ARGS__);                                               \
            break;                                                                     \
        case 8:                                                                        \
            f(8, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        case 4:                                                                        \
            f(4, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        case 2:                                                                        \
            f(2, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        default:                                                                       \
            f(1, vectors, __VA_ARGS__);                                                \
        }
#else
#    define ATTENTION_ROWS(f, rows, vectors, ...)                                      \
        switch (rows) {                                                                \
        case 6:                                                                        \
            f(6, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        case 4:                                                                        \
            f(4, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        case 2:                                                                        \
            f(2, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        default:                                                                       \
            f(1, vectors, __VA_ARGS__);                                                \
        }
#endif
#define ATTENTION_STRIP(f, rows, vectors, ...)                                         \
    if ((vectors) == 2) {                                                              \
        ATTENTION_ROWS(f, rows, 2, __VA_ARGS__)                                        \
    } else {                                                                           \
        ATTENTION_ROWS(f, rows, 1, __VA_ARGS__)                                        \
    }
/* Calls f(rows, vectors, pairs, ...) with all three as compile-time constants. */
#define ATTENTION_PAIRED(f, rows, vectors, pairs, ...)                                 \
    if (V_PAIRS && (pairs)) {                                                          \
        ATTENTION_STRIP(f, rows, vectors, true, __VA_ARGS__)                           \
    } else {                                                                           \
        ATTENTION_STRIP(f, rows, vectors, false, __VA_ARGS__)                          \
    }

/* ---- Pairs of bfloat16 ----------------------------------------------------------- */

/* AVX512_BF16 has an instruction that multiplies pairs of bfloat16 and adds both
 * products in float32, as fast as a float32 FMA. The factors of a matrix product are
 * then stored as pairs along the inner dimension: a pair takes the place of a `real`,
 * and the inner dimension is half as long. Inputs are used without rounding; weights
 * and score gradients are rounded to bfloat16, as torch does; scale is applied after
 * the product. Products with multiply_careful() do not use pairs. */

static inline bool
has_pairs(const tfast_attention_args *args)
{
#if V_PAIRS
    return args->dtype == TFAST_BF16 && v_has_pairs();
#else
    (void)args;
    return false;
#endif
}

/* The length of an inner dimension of n elements: pairs, or single elements. */
static inline int64_t
product_depth(bool pairs, int64_t n)
{
    return pairs ? (n + 1) / 2 : n;
}

static inline __attribute__((always_inline)) vr
multiply_add(const bool pairs, vr a, vr b, vr c)
{
#if V_PAIRS
    if (pairs) {
        return vr_dot(a, b, c);
    }
#endif
    (void)pairs;
    return vr_madd(a, b, c);
}

static inline __attribute__((always_inline)) vr
pair_vectors(vr first, vr second)
{
#if V_PAIRS
    return vr_pair(first, second);
#else
    (void)second;
    return first;
#endif
}

/* Rounds x to bfloat16 and stores neighbouring lanes as pairs: half a vector. */
static inline __attribute__((always_inline)) void
store_pairs(real *to, vr x)
{
#if V_PAIRS
    vr_store_pairs(to, x);
#else
    (void)to;
    (void)x;
#endif
}

/* Packs each two of n rows into one row of pairs; an odd last row is paired with 0.
 * `width`, the number of columns, is a multiple of VR_WIDTH. */
static void
pair_rows(real *to, int64_t to_stride, const real *from, int64_t stride, int64_t n,
          int64_t width)
{
    for (int64_t i = 0; i < n; i += 2) {
        for (int64_t d = 0; d < width; d += VR_WIDTH) {
            const vr second =
                i + 1 < n ? vr_load(from + (i + 1) * stride + d) : vr_set1(0);

            vr_store(to + i / 2 * to_stride + d,
                     pair_vectors(vr_load(from + i * stride + d), second));
        }
    }
}

/* Packs each two neighbouring columns into pairs. Rows of `to` are stride / 2 apart. */
static void
pair_columns(real *to, const real *from, int64_t stride, int64_t n, int64_t width)
{
    for (int64_t i = 0; i < n; i++) {
        for (int64_t d = 0; d < width; d += VR_WIDTH) {
            store_pairs(to + (i * stride + d) / 2, vr_load(from + i * stride + d));
        }
    }
}

/* ---- The register tile ----------------------------------------------------------- */

/* The rows of the next register tile if n rows are left: a case of ATTENTION_ROWS.
 * Splits 16 (or 8) rows evenly, since a tile of 4 (or 2) rows is inefficient. */
static inline int
strip_rows(int64_t n)
{
#if V_ROWS == 12
    if (n >= 12 && n != 16) {
        return 12;
    }
    return n >= 8 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 1;
#else
    return n >= 6 && n != 8 ? 6 : n >= 4 ? 4 : n >= 2 ? 2 : 1;
#endif
}

/* c[r][v] += sum over k < depth of a[r][k] * b[k][v], of `real` or pairs. Row k of b is
 * `vectors` vectors at b + k * b_stride. a[r][k] is at r * a_stride + k, or with
 * `columns` at k * a_stride + r. rows, vectors, pairs and
 * columns are compile-time constants. */
static inline __attribute__((always_inline)) void
multiply_chain(const int rows, const int vectors, const bool pairs, const bool columns,
               const real *a, int64_t a_stride, const real *b, int64_t b_stride,
               int64_t depth, vr c[V_ROWS][2])
{
    const int64_t a_step = columns ? a_stride : 1;
    /* One base address per four rows: x86 addressing modes reach these from it. */
    const real *base[3] = {a, a + 4 * (columns ? 1 : a_stride),
                           a + 8 * (columns ? 1 : a_stride)};

#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++) {
        const vr b0 = vr_load(b), b1 = vectors == 2 ? vr_load(b + VR_WIDTH) : b0;

#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const vr x = vr_set1(base[r / 4][r % 4 * (columns ? 1 : a_stride)]);

            c[r][0] = multiply_add(pairs, x, b0, c[r][0]);
            if (vectors == 2) {
                c[r][1] = multiply_add(pairs, x, b1, c[r][1]);
            }
        }
        b += b_stride;
#if VR_WIDTH == 1
        /* stops GCC 12 from vectorising over k, which would read past b */
        __asm__("" : "+r"(b));
#endif
        base[0] += a_step;
        base[1] += a_step;
        base[2] += a_step;
    }
}

/* The same product. The scalar backend sums blocks of 8 products first, so that its
 * rounding error is comparable with that of the vector backends: the chain of additions
 * is shorter. */
static inline __attribute__((always_inline)) void
multiply(const int rows, const int vectors, const bool pairs, const bool columns,
         const real *a, int64_t a_stride, const real *b, int64_t b_stride,
         int64_t depth, vr c[V_ROWS][2])
{
#if VR_WIDTH == 1
    enum { BLOCK = 8 };

    for (; depth > BLOCK; depth -= BLOCK) {
        vr sum[V_ROWS][2] = {{0}};

        multiply_chain(rows, vectors, pairs, columns, a, a_stride, b, b_stride, BLOCK,
                       sum);
        for (int r = 0; r < rows; r++) {
            for (int v = 0; v < vectors; v++) {
                c[r][v] = vr_add(c[r][v], sum[r][v]);
            }
        }
        a += BLOCK * (columns ? a_stride : 1);
        b += BLOCK * b_stride;
    }
#endif
    multiply_chain(rows, vectors, pairs, columns, a, a_stride, b, b_stride, depth, c);
}

/* The same product, but terms with a[r][k] = 0 are skipped, even if b is NaN or
 * infinite: the weight of a forbidden key is 0. Slow; used only in the careful pass,
 * which repeats a computation whose result was not finite. */
static inline __attribute__((always_inline)) void
multiply_careful(const int rows, const int vectors, const bool columns, const real *a,
                 int64_t a_stride, const real *b, int64_t b_stride, int64_t depth,
                 vr c[V_ROWS][2])
{
    for (int64_t k = 0; k < depth; k++) {
        for (int r = 0; r < rows; r++) {
            const real x = columns ? a[k * a_stride + r] : a[r * a_stride + k];

            for (int v = 0; v < vectors && x != 0; v++) {
                c[r][v] = vr_madd(vr_set1(x), vr_load(b + k * b_stride + v * VR_WIDTH),
                                  c[r][v]);
            }
        }
    }
}

/* c <- factor * c + a . b. `factor` has one element a row; NULL: 1. */
typedef struct {
    const real *a, *b;
    int64_t a_stride, b_stride;
    int64_t skipped, depth; /* range of the inner dimension, see set_depth() */
    bool columns, careful, pairs;
    bool first; /* c is overwritten */
    const real *factor;
    real *c;
    int64_t c_stride;
} tile_product;

/* Restricts the inner dimension to elements begin .. end - 1, extended to whole
 * pairs. */
static inline void
set_depth(tile_product *p, int64_t begin, int64_t end)
{
    p->skipped = p->pairs ? begin / 2 : begin;
    p->depth = end > begin ? product_depth(p->pairs, end) - p->skipped : 0;
}

/* Applies the scale to products of pairs; otherwise the queries include it already. */
static inline __attribute__((always_inline)) void
scale_strip(const int rows, const int vectors, const bool pairs, vr c[V_ROWS][2],
            real scale)
{
    if (!pairs) {
        return;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            c[r][v] = vr_mul(c[r][v], vr_set1(scale));
        }
    }
}

static inline __attribute__((always_inline)) void
accumulate_strip(const int rows, const int vectors, const bool pairs,
                 const bool columns, const tile_product *p)
{
    vr c[V_ROWS][2];

    for (int r = 0; r < rows; r++) {
        c[r][0] = c[r][1] = vr_set1(0);
    }
    if (p->careful) {
        multiply_careful(rows, vectors, columns, p->a, p->a_stride, p->b, p->b_stride,
                         p->depth, c);
    } else {
        multiply(rows, vectors, pairs, columns, p->a, p->a_stride, p->b, p->b_stride,
                 p->depth, c);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        real *to = p->c + r * p->c_stride;

        for (int v = 0; v < vectors; v++) {
            /* The tile's product is summed separately, so that a chain of additions is
             * as long as a tile, not as the sequence. */
            if (!p->first && p->factor != NULL) {
                c[r][v] =
                    vr_madd(vr_set1(p->factor[r]), vr_load(to + v * VR_WIDTH), c[r][v]);
            } else if (!p->first) {
                c[r][v] = vr_add(vr_load(to + v * VR_WIDTH), c[r][v]);
            }
            vr_store(to + v * VR_WIDTH, c[r][v]);
        }
    }
}

static __attribute__((noinline)) void
accumulate_columns(int rows, int vectors, const tile_product *p)
{
    ATTENTION_PAIRED(accumulate_strip, rows, vectors, p->pairs, true, p)
}

/* ---- Packing --------------------------------------------------------------------- */

/* Converts n rows of `dim` elements to `real`, each padded with zeros to whole
 * vectors. */
static void
read_rows(real *to, int64_t to_stride, const void *array, tfast_dtype dtype,
          int64_t first, int64_t row, int64_t n, int64_t dim)
{
    for (int64_t i = 0; i < n; i++) {
        tile_read(to + i * to_stride, array, dtype, first + i * row, (int)dim);
    }
}

/* Returns n rows as `real`: in place if they have this dtype and are whole vectors (or,
 * with `broadcast`, are only read element by element), else converted to `copy`. Sets
 * `stride` to the stride of the returned rows. */
static const real *
open_rows(real *copy, int64_t copy_stride, const void *array, tfast_dtype dtype,
          int64_t first, int64_t row, int64_t n, int64_t dim, bool broadcast,
          int64_t *stride)
{
    if (dtype == REAL_DTYPE && (broadcast || dim % VR_WIDTH == 0)) {
        *stride = row;
        return (const real *)array + first;
    }
    read_rows(copy, copy_stride, array, dtype, first, row, n, dim);
    *stride = copy_stride;
    return copy;
}

/* Copies n rows of bfloat16, which are then pairs along the row, padded with zeros to a
 * whole vector. */
static void
read_pairs(real *to, int64_t to_stride, const uint16_t *from, int64_t row, int64_t n,
           int64_t dim)
{
    const size_t bytes = (size_t)dim * sizeof *from;
    const size_t whole = (size_t)attention_round_up(dim, 2 * VR_WIDTH) * sizeof *from;

    for (int64_t i = 0; i < n; i++) {
        char *at = (char *)(to + i * to_stride);

        memcpy(at, from + i * row, bytes);
        memset(at + bytes, 0, whole - bytes);
    }
}

/* Returns n rows as pairs along the row: in place if length, stride and address allow
 * it, else copied. */
static const real *
open_pairs(real *copy, int64_t copy_stride, const void *array, int64_t first,
           int64_t row, int64_t n, int64_t dim, int64_t *stride)
{
    const uint16_t *from = (const uint16_t *)array + first;

    if (dim % 2 == 0 && row % 2 == 0 && (uintptr_t)from % sizeof(real) == 0) {
        *stride = row / 2;
        return (const real *)(const void *)from;
    }
    read_pairs(copy, copy_stride, from, row, n, dim);
    *stride = copy_stride;
    return copy;
}

/* Packs n rows of bfloat16 into (n + 1) / 2 rows of pairs, each of two neighbouring
 * rows. `stage` holds two rows. */
static void
pack_pairs(real *to, int64_t to_stride, real *stage, const void *array, int64_t first,
           int64_t row, int64_t n, int64_t dim)
{
    const int64_t width = attention_round_up(dim, VR_WIDTH);

    for (int64_t i = 0; i < n; i += 2) {
        const int64_t here = attention_min(2, n - i);

        read_rows(stage, width, array, TFAST_BF16, first + i * row, row, here, dim);
        pair_rows(to + i / 2 * to_stride, to_stride, stage, width, here, width);
    }
}

/* Returns rows as factor a of multiply(), whose elements are broadcast: the inner
 * dimension runs along a row. */
static const real *
open_factor(bool pairs, real *copy, int64_t copy_stride, const void *array,
            tfast_dtype dtype, int64_t first, int64_t row, int64_t n, int64_t dim,
            int64_t *stride)
{
    return pairs ? open_pairs(copy, copy_stride, array, first, row, n, dim, stride)
                 : open_rows(copy, copy_stride, array, dtype, first, row, n, dim, true,
                             stride);
}

/* Returns rows as factor b of multiply(), whose columns are lanes: the inner dimension
 * runs across rows. `stage` holds two rows. */
static const real *
open_lanes(bool pairs, real *copy, int64_t copy_stride, real *stage, const void *array,
           tfast_dtype dtype, int64_t first, int64_t row, int64_t n, int64_t dim,
           int64_t *stride)
{
    if (!pairs) {
        return open_rows(copy, copy_stride, array, dtype, first, row, n, dim, false,
                         stride);
    }
    pack_pairs(copy, copy_stride, stage, array, first, row, n, dim);
    *stride = copy_stride;
    return copy;
}

/* Reads n rows times `scale`, each padded with zeros to a whole vector. */
static void
scale_rows(real *to, const void *array, tfast_dtype dtype, int64_t first, int64_t row,
           int64_t n, int64_t dim, real scale)
{
    const int64_t width = attention_round_up(dim, VR_WIDTH);
    const vr factor = vr_set1(scale);

    read_rows(to, width, array, dtype, first, row, n, dim);
    for (int64_t i = 0; i < n * width; i += VR_WIDTH) {
        vr_store(to + i, vr_mul(factor, vr_load(to + i)));
    }
}

/* Packs n rows times `scale` into panels [ceil(n / PANEL)][dim][PANEL], so that rows
 * become lanes. The missing rows of the last panel are 0. `stage` holds VR_WIDTH rows
 * of whole vectors. With `pairs` of bfloat16 the panels are [ceil(n / PANEL)][ceil(dim
 * / 2)][PANEL], and scale is not applied. */
static void
pack_panels(real *to, real *stage, bool pairs, const void *array, tfast_dtype dtype,
            int64_t first, int64_t row, int64_t n, int64_t dim, real scale)
{
    const int64_t depth = product_depth(pairs, dim);
    const int64_t width = attention_round_up(depth, VR_WIDTH);
    const vr factor = vr_set1(scale);

    for (int64_t i = 0; i < attention_round_up(n, PANEL); i += VR_WIDTH) {
        real *panel = to + i / PANEL * PANEL * depth + i % PANEL;
        const int64_t here = attention_max(0, attention_min(VR_WIDTH, n - i));
        int64_t stride = width;
        const real *rows = stage;

        if (pairs) {
            read_pairs(stage, width, (const uint16_t *)array + first + i * row, row,
                       here, dim);
        } else if (here == VR_WIDTH) {
            rows = open_rows(stage, width, array, dtype, first + i * row, row, here,
                             dim, false, &stride);
        } else {
            read_rows(stage, width, array, dtype, first + i * row, row, here, dim);
        }
        if (here < VR_WIDTH) {
            memset(stage + here * width, 0,
                   sizeof(real) * (size_t)((VR_WIDTH - here) * width));
        }
        for (int64_t d = 0; d < depth; d += VR_WIDTH) {
            vr block[VR_WIDTH];

            for (int r = 0; r < VR_WIDTH; r++) {
                block[r] = vr_load(rows + r * stride + d);
                if (!pairs) {
                    block[r] = vr_mul(factor, block[r]);
                }
            }
            vr_transpose(block);
            for (int r = 0; r < VR_WIDTH && d + r < depth; r++) {
                vr_store(panel + (d + r) * PANEL, block[r]);
            }
        }
    }
}

#endif
