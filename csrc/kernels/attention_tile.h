/* Attention on tiles of scores, ATTENTION_KEYS by ATTENTION_QUERIES of REAL. A key's
 * scores lie side by side, so that queries are lanes: their maxima and sums need no
 * horizontal operation, and each vector operation serves a panel of PANEL queries.
 * Matrix products go through one register tile, `multiply`.
 *
 * Scores are in units of log2, and scale carries log2 e, but on the general way: see
 * attention_unit(). */

#undef PANEL
#define PANEL (2 * VR_WIDTH)

/* ---- Elementary functions -------------------------------------------------------- */

/* 2^(x * unit) where that is below 2^128 (2^1024): exactly 0 below half of the normal
 * numbers and for -infinity, NaN for NaN. Exactly 1 for 0: each tile multiplies the
 * sums so far by it, and early keys must not weigh more for that. Relative error 2e-7
 * (float32), 1e-15 (float64), but with a unit of log2 e up to 5e-8 times |x| more, for
 * log2 e is rounded, too. With n the integer nearest to x * unit, it is
 * 2^n * 2^(x * unit - n): adding `magic` leaves n plus the exponent's bias in the
 * lowest bits. Minimax polynomial in float32, Taylor's series in float64. `in_log2`
 * says that unit is 1, else it is log2 e. */
static inline __attribute__((always_inline)) vr
R(vector_power)(const bool in_log2, vr x)
{
#if REAL_IS_F32
    static const REAL c[] = {1,
                             0.6931470037f,
                             0.2402224541f,
                             0.05550730973f,
                             0.009671502747f,
                             0.001326470054f};
    const vr magic = vr_set1(12582912.f + 127);
    const double least = -127;
#else
    static const REAL c[] = {
        1.0,
        0.6931471805599453,
        0.2402265069591007,
        0.05550410866482158,
        0.009618129107628477,
        0.0013333558146428443,
        0.00015403530393381606,
        1.5252733804059838e-05,
        1.3215486790144305e-06,
        1.0178086009239696e-07,
        7.054911620801121e-09,
        4.445538271870812e-10,
        2.5678435993488196e-11,
        1.3691488853904124e-12,
    };
    const vr magic = vr_set1(6755399441055744. + 1023);
    const double least = -1023;
#endif
    const int last = sizeof c / sizeof *c - 1;
    const vr unit = vr_set1((REAL)LOG2E);
    const vr clamped = vr_max(vr_set1((REAL)(in_log2 ? least : least * LN2)), x);
    const vr shifted = in_log2 ? vr_add(clamped, magic) : vr_madd(clamped, unit, magic);
    const vr f = in_log2 ? vr_sub(clamped, vr_sub(shifted, magic))
                         : vr_madd(clamped, unit, vr_sub(magic, shifted));
    vr p = vr_set1(c[last]);

    for (int i = last - 1; i >= 0; i--) {
        p = vr_madd(p, f, vr_set1(c[i]));
    }
    return vr_mul(p, vr_pow2(shifted));
}

static inline __attribute__((always_inline)) vr
R(vector_exp2)(vr x)
{
    return R(vector_power)(true, x);
}

static inline __attribute__((always_inline)) vr
R(vector_exp)(vr x)
{
    return R(vector_power)(false, x);
}

/* log2 of a sum that is 0 or a normal number; NaN for NaN; anything for 0. In float32
 * by the series of atanh, for |z| < 0.172 to 1e-10, without a branch: a compiler makes
 * vectors of it. */
static inline double
R(logarithm)(double x)
{
#if REAL_IS_F32
    const uint64_t root_of_half = 0x3FE6A09E667F3BCD;
    uint64_t bits;
    int64_t exponent;
    double m, z, y;

    memcpy(&bits, &x, sizeof bits);
    exponent = (int64_t)(bits - root_of_half) >> 52;
    bits -= (uint64_t)exponent << 52;
    memcpy(&m, &bits, sizeof m);
    z = (m - 1) / (m + 1);
    y = z * z;
    y = 1 + y * (1. / 3 + y * (1. / 5 + y * (1. / 7 + y * (1. / 9 + y * (1. / 11)))));
    return (double)exponent + 2 * LOG2E * z * y + (x - x);
#else
    return log2(x);
#endif
}

static inline __attribute__((always_inline)) vr
R(vector_abs)(vr x)
{
    return vr_max(x, vr_sub(vr_set1(0), x));
}

/* tanh(x): Taylor's series near 0, where 1 - 2 / (e^2x + 1) would cancel. */
static inline vr
R(vector_tanh)(vr x)
{
#if REAL_IS_F32
    static const REAL c[] = {
        1,           -1.f / 3,         2.f / 15,          -17.f / 315,
        62.f / 2835, -1382.f / 155925, 21844.f / 6081075, -929569.f / 638512875};
    const vr far = vr_set1(0.5f), most = vr_set1(20);
#else
    static const REAL c[] = {
        1,          -1. / 3,         2. / 15,          -17. / 315,
        62. / 2835, -1382. / 155925, 21844. / 6081075, -929569. / 638512875};
    const vr far = vr_set1(0.1), most = vr_set1(40);
#endif
    const int last = sizeof c / sizeof *c - 1;
    const vr one = vr_set1(1), zero = vr_set1(0);
    const vr size = R(vector_abs)(x), square = vr_mul(x, x);
    const vr e = R(vector_exp2)(vr_mul(vr_min(most, size), vr_set1((REAL)(2 * LOG2E))));
    const vr large = vr_sub(one, vr_div(vr_set1(2), vr_add(e, one)));
    vr p = vr_set1(c[last]);

    for (int i = last - 1; i >= 0; i--) {
        p = vr_madd(p, square, vr_set1(c[i]));
    }
    return vr_if_less(size, far, vr_mul(p, x),
                      vr_if_less(x, zero, vr_sub(zero, large), large));
}

/* ---- Pairs of bfloat16 ----------------------------------------------------------- */

/* Some processors multiply pairs of bfloat16 and add up both products in float32, with
 * one instruction that is as fast as a multiply-add of float32. For that the factors of
 * a product of matrices lie as pairs along its inner dimension: a pair is moved like a
 * REAL, and there are half as many. Factors that are inputs stay as they are, weights
 * and their gradients are rounded as torch does it, scale comes after the product, and
 * the way of `careful` does without. On a Zen 4, whose peak doubles, forward and
 * backward became 1.9 and 1.8 times as fast with 2,048 rows of 64 elements, and 1.5 and
 * 1.6 times with 128 causal ones, of which half the time goes elsewhere. */

static inline bool
R(has_pairs)(const tfast_attention_args *args)
{
#if REAL_IS_F32 && V_PAIRS
    return args->dtype == TFAST_BF16 && v_has_pairs();
#else
    (void)args;
    return false;
#endif
}

/* Pairs, or single elements, that n elements are. */
static inline int64_t
R(depth)(bool pairs, int64_t n)
{
    return pairs ? (n + 1) / 2 : n;
}

static inline __attribute__((always_inline)) vr
R(multiply_add)(const bool pairs, vr a, vr b, vr c)
{
#if REAL_IS_F32 && V_PAIRS
    if (pairs) {
        return vf_dot(a, b, c);
    }
#endif
    (void)pairs;
    return vr_madd(a, b, c);
}

static inline __attribute__((always_inline)) vr
R(pair)(vr first, vr second)
{
#if REAL_IS_F32 && V_PAIRS
    return vf_pair(first, second);
#else
    (void)second;
    return first;
#endif
}

/* A vector's neighbours as pairs: half a vector. */
static inline __attribute__((always_inline)) void
R(store_pairs)(REAL *to, vr x)
{
#if REAL_IS_F32 && V_PAIRS
    vf_store_pairs(to, x);
#else
    (void)to;
    (void)x;
#endif
}

/* Columns 0 .. width - 1, whole vectors, of n rows: pairs of rows to rows of pairs. */
static void
R(pair_rows)(REAL *to, int64_t to_stride, const REAL *from, int64_t stride, int64_t n,
             int64_t width)
{
    for (int64_t i = 0; i < n; i += 2) {
        for (int64_t d = 0; d < width; d += VR_WIDTH) {
            const vr second =
                i + 1 < n ? vr_load(from + (i + 1) * stride + d) : vr_set1(0);

            vr_store(to + i / 2 * to_stride + d,
                     R(pair)(vr_load(from + i * stride + d), second));
        }
    }
}

/* The same as pairs of columns: rows are half as far apart. */
static void
R(pair_columns)(REAL *to, const REAL *from, int64_t stride, int64_t n, int64_t width)
{
    for (int64_t i = 0; i < n; i++) {
        for (int64_t d = 0; d < width; d += VR_WIDTH) {
            R(store_pairs)(to + (i * stride + d) / 2, vr_load(from + i * stride + d));
        }
    }
}

/* ---- The register tile ----------------------------------------------------------- */

/* How many rows the next strip of n takes: one of the cases of ATTENTION_STRIP. */
static inline int
R(strip_rows)(int64_t n)
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

/* c[r][v] += sum over k < depth of a[r][k] * b[k][v], of REAL or `pairs`. Row k of b is
 * `vectors` vectors at b + k * b_stride. a[r][k] is at r * a_stride + k, or with
 * `columns` at k * a_stride + r. Everything but a, b, their strides and depth is
 * constant. */
static inline __attribute__((always_inline)) void
R(multiply_chain)(const int rows, const int vectors, const bool pairs,
                  const bool columns, const REAL *a, int64_t a_stride, const REAL *b,
                  int64_t b_stride, int64_t depth, vr c[V_ROWS][2])
{
    const int64_t a_step = columns ? a_stride : 1;
    /* A base for each four rows: the strides of the rest fit x86's addressing. */
    const REAL *base[3] = {a, a + 4 * (columns ? 1 : a_stride),
                           a + 8 * (columns ? 1 : a_stride)};

#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++) {
        const vr b0 = vr_load(b), b1 = vectors == 2 ? vr_load(b + VR_WIDTH) : b0;

#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const vr x = vr_set1(base[r / 4][r % 4 * (columns ? 1 : a_stride)]);

            c[r][0] = R(multiply_add)(pairs, x, b0, c[r][0]);
            if (vectors == 2) {
                c[r][1] = R(multiply_add)(pairs, x, b1, c[r][1]);
            }
        }
        b += b_stride;
#if VF_WIDTH == 1
        __asm__("" : "+r"(b)); /* GCC 12 vectorizes over k, and loads a row too many */
#endif
        base[0] += a_step;
        base[1] += a_step;
        base[2] += a_step;
    }
}

/* The same. One lane, whose rounding is compared with that of libraries of many, adds
 * up in blocks, with a chain of additions as short as a block. */
static inline __attribute__((always_inline)) void
R(multiply)(const int rows, const int vectors, const bool pairs, const bool columns,
            const REAL *a, int64_t a_stride, const REAL *b, int64_t b_stride,
            int64_t depth, vr c[V_ROWS][2])
{
#if VF_WIDTH == 1
    enum { BLOCK = 8 };

    for (; depth > BLOCK; depth -= BLOCK) {
        vr sum[V_ROWS][2] = {{0}};

        R(multiply_chain)
        (rows, vectors, pairs, columns, a, a_stride, b, b_stride, BLOCK, sum);
        for (int r = 0; r < rows; r++) {
            for (int v = 0; v < vectors; v++) {
                c[r][v] = vr_add(c[r][v], sum[r][v]);
            }
        }
        a += BLOCK * (columns ? a_stride : 1);
        b += BLOCK * b_stride;
    }
#endif
    R(multiply_chain)
    (rows, vectors, pairs, columns, a, a_stride, b, b_stride, depth, c);
}

/* The same where an a of 0 makes the product 0 whatever b is: slow, for tiles in which
 * a NaN or an infinity may belong to elements that do not count. */
static inline __attribute__((always_inline)) void
R(multiply_careful)(const int rows, const int vectors, const bool columns,
                    const REAL *a, int64_t a_stride, const REAL *b, int64_t b_stride,
                    int64_t depth, vr c[V_ROWS][2])
{
    for (int64_t k = 0; k < depth; k++) {
        for (int r = 0; r < rows; r++) {
            const REAL x = columns ? a[k * a_stride + r] : a[r * a_stride + k];

            for (int v = 0; v < vectors && x != 0; v++) {
                c[r][v] = vr_madd(vr_set1(x), vr_load(b + k * b_stride + v * VR_WIDTH),
                                  c[r][v]);
            }
        }
    }
}

/* What `accumulate` adds to where; `factor` is each row's, NULL for 1. */
typedef struct {
    const REAL *a, *b;
    int64_t a_stride, b_stride;
    int64_t skipped, depth; /* along the inner dimension, in pairs or single */
    bool columns, careful, pairs;
    bool first; /* there is nothing yet in c */
    const REAL *factor;
    REAL *c;
    int64_t c_stride;
} R(product);

/* Elements begin .. end - 1 of the inner dimension, and with pairs what begins or ends
 * in the middle of one. */
static inline void
R(set_depth)(R(product) * p, int64_t begin, int64_t end)
{
    p->skipped = p->pairs ? begin / 2 : begin;
    p->depth = end > begin ? R(depth)(p->pairs, end) - p->skipped : 0;
}

/* The scale that factors of pairs did not get. */
static inline __attribute__((always_inline)) void
R(scale_strip)(const int rows, const int vectors, const bool pairs, vr c[V_ROWS][2],
               REAL scale)
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
R(accumulate_strip)(const int rows, const int vectors, const bool pairs,
                    const bool columns, const R(product) * p)
{
    vr c[V_ROWS][2];

    for (int r = 0; r < rows; r++) {
        c[r][0] = c[r][1] = vr_set1(0);
    }
    if (p->careful) {
        R(multiply_careful)
        (rows, vectors, columns, p->a, p->a_stride, p->b, p->b_stride, p->depth, c);
    } else {
        R(multiply)
        (rows, vectors, pairs, columns, p->a, p->a_stride, p->b, p->b_stride, p->depth,
         c);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        REAL *to = p->c + r * p->c_stride;

        for (int v = 0; v < vectors; v++) {
            /* The sum of this block is formed first: a chain of additions is as long
             * as a block, not as the sequence. */
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
R(accumulate_columns)(int rows, int vectors, const R(product) * p)
{
    ATTENTION_PAIRED(R(accumulate_strip), rows, vectors, p->pairs, true, p)
}

/* ---- Packing --------------------------------------------------------------------- */

/* n rows of `dim` elements as REAL, each followed by zeros up to a whole vector. */
static void
R(read_rows)(REAL *to, int64_t to_stride, const void *array, tfast_dtype dtype,
             int64_t first, int64_t row, int64_t n, int64_t dim)
{
    for (int64_t i = 0; i < n; i++) {
        R(tile_read)(to + i * to_stride, array, dtype, first + i * row, (int)dim);
    }
}

/* Rows where they are if they can be read as whole vectors (or, with `broadcast`, are
 * only read element by element), else a copy. Sets the stride of what it returns. */
static const REAL *
R(open_rows)(REAL *copy, int64_t copy_stride, const void *array, tfast_dtype dtype,
             int64_t first, int64_t row, int64_t n, int64_t dim, bool broadcast,
             int64_t *stride)
{
    if (dtype == REAL_DTYPE && (broadcast || dim % VR_WIDTH == 0)) {
        *stride = row;
        return (const REAL *)array + first;
    }
    R(read_rows)(copy, copy_stride, array, dtype, first, row, n, dim);
    *stride = copy_stride;
    return copy;
}

/* n rows of bfloat16 as pairs along them, filled up with zeros to a whole vector. */
static void
R(read_pairs)(REAL *to, int64_t to_stride, const uint16_t *from, int64_t row, int64_t n,
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

/* The same where they are, if whole pairs can be read there, or else copied. */
static const REAL *
R(open_pairs)(REAL *copy, int64_t copy_stride, const void *array, int64_t first,
              int64_t row, int64_t n, int64_t dim, int64_t *stride)
{
    const uint16_t *from = (const uint16_t *)array + first;

    if (dim % 2 == 0 && row % 2 == 0 && (uintptr_t)from % sizeof(REAL) == 0) {
        *stride = row / 2;
        return (const REAL *)(const void *)from;
    }
    R(read_pairs)(copy, copy_stride, from, row, n, dim);
    *stride = copy_stride;
    return copy;
}

/* n rows of bfloat16, two at a time, as n / 2 rows of pairs. `stage` holds two. */
static void
R(pack_pairs)(REAL *to, int64_t to_stride, REAL *stage, const void *array,
              int64_t first, int64_t row, int64_t n, int64_t dim)
{
    const int64_t width = attention_round_up(dim, VR_WIDTH);

    for (int64_t i = 0; i < n; i += 2) {
        const int64_t here = attention_min(2, n - i);

        R(read_rows)(stage, width, array, TFAST_BF16, first + i * row, row, here, dim);
        R(pair_rows)(to + i / 2 * to_stride, to_stride, stage, width, here, width);
    }
}

/* Rows as a factor that is broadcast: along them is the inner dimension. */
static const REAL *
R(open_factor)(bool pairs, REAL *copy, int64_t copy_stride, const void *array,
               tfast_dtype dtype, int64_t first, int64_t row, int64_t n, int64_t dim,
               int64_t *stride)
{
    return pairs ? R(open_pairs)(copy, copy_stride, array, first, row, n, dim, stride)
                 : R(open_rows)(copy, copy_stride, array, dtype, first, row, n, dim,
                                true, stride);
}

/* Rows as a factor whose columns are lanes: the inner dimension is across them. `stage`
 * holds two rows. */
static const REAL *
R(open_lanes)(bool pairs, REAL *copy, int64_t copy_stride, REAL *stage,
              const void *array, tfast_dtype dtype, int64_t first, int64_t row,
              int64_t n, int64_t dim, int64_t *stride)
{
    if (!pairs) {
        return R(open_rows)(copy, copy_stride, array, dtype, first, row, n, dim, false,
                            stride);
    }
    R(pack_pairs)(copy, copy_stride, stage, array, first, row, n, dim);
    *stride = copy_stride;
    return copy;
}

/* n rows times `scale`, each filled up with zeros to a whole vector. */
static void
R(scale_rows)(REAL *to, const void *array, tfast_dtype dtype, int64_t first,
              int64_t row, int64_t n, int64_t dim, REAL scale)
{
    const int64_t width = attention_round_up(dim, VR_WIDTH);
    const vr factor = vr_set1(scale);

    R(read_rows)(to, width, array, dtype, first, row, n, dim);
    for (int64_t i = 0; i < n * width; i += VR_WIDTH) {
        vr_store(to + i, vr_mul(factor, vr_load(to + i)));
    }
}

/* n rows times `scale`, as panels [n / PANEL][dim][PANEL]: queries become lanes. The
 * last panel's missing rows are 0. `stage` holds VR_WIDTH rows of whole vectors. With
 * `pairs`, of bfloat16, they are [n / PANEL][dim / 2][PANEL], and scale is 1. */
static void
R(pack_panels)(REAL *to, REAL *stage, bool pairs, const void *array, tfast_dtype dtype,
               int64_t first, int64_t row, int64_t n, int64_t dim, REAL scale)
{
    const int64_t depth = R(depth)(pairs, dim);
    const int64_t width = attention_round_up(depth, VR_WIDTH);
    const vr factor = vr_set1(scale);

    for (int64_t i = 0; i < attention_round_up(n, PANEL); i += VR_WIDTH) {
        REAL *panel = to + i / PANEL * PANEL * depth + i % PANEL;
        const int64_t here = attention_max(0, attention_min(VR_WIDTH, n - i));
        int64_t stride = width;
        const REAL *rows = stage;

        if (pairs) {
            R(read_pairs)
            (stage, width, (const uint16_t *)array + first + i * row, row, here, dim);
        } else if (here == VR_WIDTH) {
            rows = R(open_rows)(stage, width, array, dtype, first + i * row, row, here,
                                dim, false, &stride);
        } else {
            R(read_rows)(stage, width, array, dtype, first + i * row, row, here, dim);
        }
        if (here < VR_WIDTH) {
            memset(stage + here * width, 0,
                   sizeof(REAL) * (size_t)((VR_WIDTH - here) * width));
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
