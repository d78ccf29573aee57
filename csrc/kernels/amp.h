/* One chunk of a gradient: its sums, its rewriting. Once for every instruction set and
 * for float32 and float64 arithmetic (REAL, vr; see adamw.h). The order of additions is
 * that of amp_sum.h. */

/* Adds the squares of `rows` whole rows of TFAST_AMP_LANES elements to the lanes, in
 * registers: 8 vectors of sums hide the latency of fma; where they are not a whole row,
 * one group of lanes goes down the rows after another. `ahead` elements from `first` on
 * may be prefetched. */
static inline __attribute__((always_inline)) void
R(amp_rows)(REAL *lanes, const void *array, tfast_dtype dtype, int64_t first, int rows,
            int64_t ahead)
{
    enum { VECTORS = 8, GROUP = VECTORS * VR_WIDTH };
    const int line = 64 / (int)tfast_dtype_size(dtype);

    for (int lane = 0; lane < TFAST_AMP_LANES; lane += GROUP) {
        vr sum[VECTORS];

        for (int k = 0; k < VECTORS; k++) {
            sum[k] = vr_load(lanes + lane + k * VR_WIDTH);
        }
        for (int row = 0; row < rows; row++) {
            const int64_t i = lane + row * TFAST_AMP_LANES;

            for (int k = 0; i + PREFETCH < ahead && k < GROUP; k += line) {
                R(prefetch)(array, dtype, first + i + PREFETCH + k);
            }
            for (int k = 0; k < VECTORS; k++) {
                const vr x = R(vector_read)(array, dtype, first + i + k * VR_WIDTH);
                sum[k] = vr_fma(x, x, sum[k]);
            }
        }
        for (int k = 0; k < VECTORS; k++) {
            vr_store(lanes + lane + k * VR_WIDTH, sum[k]);
        }
    }
}

/* Adds the squares of a last row that is not whole. */
static inline __attribute__((always_inline)) void
R(amp_last_row)(REAL *lanes, const void *array, tfast_dtype dtype, int64_t first, int n)
{
    int i = 0;

    for (; i + VR_WIDTH <= n; i += VR_WIDTH) {
        const vr x = R(vector_read)(array, dtype, first + i);
        vr_store(lanes + i, vr_fma(x, x, vr_load(lanes + i)));
    }
    if (i < n) {
        _Alignas(64) REAL tile[VR_WIDTH];

        R(tile_read)(tile, array, dtype, first + i, n - i);
        vr_store(lanes + i, vr_fma(vr_load(tile), vr_load(tile), vr_load(lanes + i)));
    }
}

/* Adds the squares of n elements from `first` on, where a row begins. */
static inline __attribute__((always_inline)) void
R(amp_add_squares)(REAL *lanes, const void *array, tfast_dtype dtype, int64_t first,
                   int n, int64_t ahead)
{
    /* at a time, so that every group of lanes finds them in the L1 */
    enum { ROWS = 8 };
    const int rows = n / TFAST_AMP_LANES;
    const int whole = rows * TFAST_AMP_LANES;

    for (int row = 0; row < rows; row += ROWS) {
        const int64_t i = row * TFAST_AMP_LANES;
        R(amp_rows)
        (lanes, array, dtype, first + i, rows - row < ROWS ? rows - row : ROWS,
         ahead - i);
    }
    R(amp_last_row)(lanes, array, dtype, first + whole, n - whole);
}

/* The lanes' sum, halving them. */
static REAL
R(amp_fold)(REAL *lanes)
{
    int half = TFAST_AMP_LANES / 2;

    for (; half >= VR_WIDTH; half /= 2) {
        for (int l = 0; l < half; l += VR_WIDTH) {
            vr_store(lanes + l, vr_add(vr_load(lanes + l), vr_load(lanes + l + half)));
        }
    }
    for (; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            lanes[l] += lanes[l + half];
        }
    }
    return lanes[0];
}

/* The sum of the squares of a chunk: n elements from `first` on. */
static double
R(amp_squares)(const tfast_amp_tensor *tensor, int64_t first, int n)
{
    _Alignas(64) REAL lanes[TFAST_AMP_LANES] = {0};
    const void *array = tensor->data;
    const int64_t ahead = tensor->numel - first;

#if REAL_IS_F32
    if (tensor->dtype == TFAST_BF16) {
        R(amp_add_squares)(lanes, array, TFAST_BF16, first, n, ahead);
    } else if (tensor->dtype == TFAST_F16) {
        R(amp_add_squares)(lanes, array, TFAST_F16, first, n, ahead);
    } else
#endif
    {
        R(amp_add_squares)(lanes, array, REAL_DTYPE, first, n, ahead);
    }
    return R(amp_fold)(lanes);
}

/* |x|, also of NaN: b where neither is greater. */
static inline vr
R(amp_abs)(vr x)
{
    return vr_max(x, vr_sub(vr_set1(0), x));
}

/* The sum of a chunk's |x|. */
static double
R(amp_abs_sum)(const tfast_amp_tensor *tensor, int64_t first, int n)
{
    _Alignas(64) REAL tile[TILE], lanes[TFAST_AMP_LANES] = {0};

    for (int at = 0; at < n; at += TILE) {
        const int count = n - at < TILE ? n - at : TILE;
        const REAL *x =
            R(tile_open)(tile, tensor->data, tensor->dtype, first + at, count);

        for (int i = 0; i < count; i += VR_WIDTH) {
            REAL *lane = lanes + i % TFAST_AMP_LANES;
            vr_store(lane, vr_add(vr_load(lane), R(amp_abs)(vr_load(x + i))));
        }
    }
    return R(amp_fold)(lanes);
}

/* The largest or the smallest |x| of a chunk; NaN where not all are finite. */
static double
R(amp_extreme)(const tfast_amp_tensor *tensor, int64_t first, int n, bool largest)
{
    _Alignas(64) REAL tile[TILE], found[2 * VR_WIDTH], poison[VR_WIDTH];
    const vr zero = vr_set1(0);
    vr extreme = vr_set1(largest ? 0 : (REAL)INFINITY), not_finite = zero;

    for (int at = 0; at < n; at += TILE) {
        const int count = n - at < TILE ? n - at : TILE;
        REAL *x = R(tile_open)(tile, tensor->data, tensor->dtype, first + at, count);

        for (int i = count; i % VR_WIDTH != 0; i++) {
            x[i] = x[0]; /* in place of the padding; x is a copy here */
        }
        for (int i = 0; i < count; i += VR_WIDTH) {
            const vr magnitude = R(amp_abs)(vr_load(x + i));
            extreme = largest ? vr_max(magnitude, extreme) : vr_min(magnitude, extreme);
            not_finite = vr_fma(magnitude, zero, not_finite); /* 0, or NaN for ever */
        }
    }
    vr_store(found, extreme);
    vr_store(poison, not_finite);
    for (int l = 0; l < VR_WIDTH; l++) {
        found[0] = (found[l] > found[0]) == largest ? found[l] : found[0];
        poison[0] += poison[l];
    }
    return found[0] + poison[0];
}

/* n elements from `first` on times `number`, or held to -number .. number. */
static inline __attribute__((always_inline)) void
R(amp_rewrite_as)(void *array, tfast_dtype dtype, int64_t first, int64_t n, bool clamp,
                  REAL number)
{
    const vr factor = vr_set1(number), least = vr_set1(-number);

    for (int64_t i = first; i < first + n; i += VR_WIDTH) {
        vr x = R(vector_read)(array, dtype, i);
        /* in this order NaN stays, and a negative bound is what everything becomes */
        x = clamp ? vr_min(factor, vr_max(least, x)) : vr_mul(x, factor);
        R(vector_write)(array, dtype, i, x);
    }
}

static void
R(amp_rewrite)(const tfast_amp_tensor *tensor, int64_t first, int64_t n, bool clamp,
               double number)
{
    const int64_t whole = n / VR_WIDTH * VR_WIDTH;
    const int rest = (int)(n - whole);
    void *array = tensor->data;

    if (!clamp && (REAL)number == 1) {
        return;
    }
#if REAL_IS_F32
    if (tensor->dtype == TFAST_BF16) {
        R(amp_rewrite_as)(array, TFAST_BF16, first, whole, clamp, (REAL)number);
    } else if (tensor->dtype == TFAST_F16) {
        R(amp_rewrite_as)(array, TFAST_F16, first, whole, clamp, (REAL)number);
    } else
#endif
    {
        R(amp_rewrite_as)(array, REAL_DTYPE, first, whole, clamp, (REAL)number);
    }
    if (rest > 0) {
        _Alignas(64) REAL tile[VR_WIDTH];

        R(tile_read)(tile, array, tensor->dtype, first + whole, rest);
        R(amp_rewrite_as)(tile, REAL_DTYPE, 0, VR_WIDTH, clamp, (REAL)number);
        R(tile_write)(array, tile, tensor->dtype, first + whole, rest);
    }
}
