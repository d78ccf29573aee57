/* AMP on a range of elements of one gradient: sums each chunk, then rewrites it. The
 * order of additions is that of amp_sum.h. */
#ifndef AMP_H
#define AMP_H

#include "amp_job.h"
#include "tile.h"
#include "vector_math.h"

/* Adds the squares of `rows` whole rows of TFAST_AMP_LANES elements to the lanes. The
 * sums are in eight vector registers, which hides the latency of FMA. If eight vectors
 * are narrower than a row, all rows are read for one group of lanes, then for the next.
 * Elements up to `ahead`, counted from `first`, may be prefetched. */
static inline __attribute__((always_inline)) void
amp_rows(real *lanes, const void *array, tfast_dtype dtype, int64_t first, int rows,
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
                prefetch(array, dtype, first + i + PREFETCH + k);
            }
            for (int k = 0; k < VECTORS; k++) {
                const vr x = vector_read(array, dtype, first + i + k * VR_WIDTH);
                sum[k] = vr_fma(x, x, sum[k]);
            }
        }
        for (int k = 0; k < VECTORS; k++) {
            vr_store(lanes + lane + k * VR_WIDTH, sum[k]);
        }
    }
}

/* Adds the squares of a last row of n < TFAST_AMP_LANES elements to the lanes. */
static inline __attribute__((always_inline)) void
amp_last_row(real *lanes, const void *array, tfast_dtype dtype, int64_t first, int n)
{
    int i = 0;

    for (; i + VR_WIDTH <= n; i += VR_WIDTH) {
        const vr x = vector_read(array, dtype, first + i);
        vr_store(lanes + i, vr_fma(x, x, vr_load(lanes + i)));
    }
    if (i < n) {
        _Alignas(64) real tile[VR_WIDTH];

        tile_read(tile, array, dtype, first + i, n - i);
        vr_store(lanes + i, vr_fma(vr_load(tile), vr_load(tile), vr_load(lanes + i)));
    }
}

/* Adds the squares of n elements to the lanes; element `first` begins a row. */
static inline __attribute__((always_inline)) void
amp_add_squares(real *lanes, const void *array, tfast_dtype dtype, int64_t first, int n,
                int64_t ahead)
{
    /* rows in a call, so that they stay in the L1 cache for every group of lanes */
    enum { ROWS = 8 };
    const int rows = n / TFAST_AMP_LANES;
    const int whole = rows * TFAST_AMP_LANES;

    for (int row = 0; row < rows; row += ROWS) {
        const int64_t i = row * TFAST_AMP_LANES;
        amp_rows(lanes, array, dtype, first + i, rows - row < ROWS ? rows - row : ROWS,
                 ahead - i);
    }
    amp_last_row(lanes, array, dtype, first + whole, n - whole);
}

/* The sum of the lanes: the upper half is added to the lower until one is left. */
static real
amp_fold(real *lanes)
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
amp_squares(const tfast_amp_tensor *tensor, int64_t first, int n)
{
    _Alignas(64) real lanes[TFAST_AMP_LANES] = {0};
    const void *array = tensor->data;
    const int64_t ahead = tensor->numel - first;

#if REAL_IS_F32
    if (tensor->dtype == TFAST_BF16) {
        amp_add_squares(lanes, array, TFAST_BF16, first, n, ahead);
    } else if (tensor->dtype == TFAST_F16) {
        amp_add_squares(lanes, array, TFAST_F16, first, n, ahead);
    } else
#endif
    {
        amp_add_squares(lanes, array, REAL_DTYPE, first, n, ahead);
    }
    return amp_fold(lanes);
}

/* The sum of a chunk's |x|. */
static double
amp_abs_sum(const tfast_amp_tensor *tensor, int64_t first, int n)
{
    _Alignas(64) real tile[TILE], lanes[TFAST_AMP_LANES] = {0};

    for (int at = 0; at < n; at += TILE) {
        const int count = n - at < TILE ? n - at : TILE;
        const real *x = tile_open(tile, tensor->data, tensor->dtype, first + at, count);

        for (int i = 0; i < count; i += VR_WIDTH) {
            real *lane = lanes + i % TFAST_AMP_LANES;
            vr_store(lane, vr_add(vr_load(lane), vector_abs(vr_load(x + i))));
        }
    }
    return amp_fold(lanes);
}

/* The largest or the smallest |x| of a chunk; NaN if any x is not finite. */
static double
amp_extreme(const tfast_amp_tensor *tensor, int64_t first, int n, bool largest)
{
    _Alignas(64) real tile[TILE], found[2 * VR_WIDTH], poison[VR_WIDTH];
    const vr zero = vr_set1(0);
    vr extreme = vr_set1(largest ? 0 : (real)INFINITY), not_finite = zero;

    for (int at = 0; at < n; at += TILE) {
        const int count = n - at < TILE ? n - at : TILE;
        real *x = tile_open(tile, tensor->data, tensor->dtype, first + at, count);

        for (int i = count; i % VR_WIDTH != 0; i++) {
            x[i] = x[0]; /* the padding is 0, the smallest; x is a copy here */
        }
        for (int i = 0; i < count; i += VR_WIDTH) {
            const vr magnitude = vector_abs(vr_load(x + i));
            extreme = largest ? vr_max(magnitude, extreme) : vr_min(magnitude, extreme);
            /* 0 while all x are finite, then NaN */
            not_finite = vr_fma(magnitude, zero, not_finite);
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

/* Multiplies n elements from `first` on by `number`, or with `clamp` limits them to
 * -number .. number. n is a multiple of VR_WIDTH. */
static inline __attribute__((always_inline)) void
amp_rewrite_as(void *array, tfast_dtype dtype, int64_t first, int64_t n, bool clamp,
               real number)
{
    const vr factor = vr_set1(number), least = vr_set1(-number);

    for (int64_t i = first; i < first + n; i += VR_WIDTH) {
        vr x = vector_read(array, dtype, i);
        /* with the operands in this order a NaN stays, and a negative bound replaces
         * all elements, as in torch.clamp */
        x = clamp ? vr_min(factor, vr_max(least, x)) : vr_mul(x, factor);
        vector_write(array, dtype, i, x);
    }
}

static void
amp_rewrite(const tfast_amp_tensor *tensor, int64_t first, int64_t n, bool clamp,
            double number)
{
    const int64_t whole = n / VR_WIDTH * VR_WIDTH;
    const int rest = (int)(n - whole);
    void *array = tensor->data;

    if (!clamp && (real)number == 1) {
        return;
    }
#if REAL_IS_F32
    if (tensor->dtype == TFAST_BF16) {
        amp_rewrite_as(array, TFAST_BF16, first, whole, clamp, (real)number);
    } else if (tensor->dtype == TFAST_F16) {
        amp_rewrite_as(array, TFAST_F16, first, whole, clamp, (real)number);
    } else
#endif
    {
        amp_rewrite_as(array, REAL_DTYPE, first, whole, clamp, (real)number);
    }
    if (rest > 0) {
        _Alignas(64) real tile[VR_WIDTH];

        tile_read(tile, array, tensor->dtype, first + whole, rest);
        amp_rewrite_as(tile, REAL_DTYPE, 0, VR_WIDTH, clamp, (real)number);
        tile_write(array, tile, tensor->dtype, first + whole, rest);
    }
}

/* The sum (or extreme) of a chunk in float64, element by element. Used for powers, and
 * if the result in `real` is not finite. Sets job->found if an element is not
 * finite. */
static double
amp_slow_sum(amp_job *job, const tfast_amp_tensor *tensor, int64_t first, int n)
{
    const amp_kind kind = job->kind;
    real tile[TILE];
    double lanes[TFAST_AMP_LANES];
    bool finite = true;

    for (int l = 0; l < TFAST_AMP_LANES; l++) {
        lanes[l] = kind == AMP_SMALLEST ? (double)INFINITY : 0;
    }
    for (int at = 0; at < n; at += TILE) {
        const int count = n - at < TILE ? n - at : TILE;

        tile_read(tile, tensor->data, tensor->dtype, first + at, count);
        for (int i = 0; i < count; i++) {
            double *lane = &lanes[i % TFAST_AMP_LANES];
            *lane = amp_join(kind, *lane, fabs((double)tile[i]), job->args->norm_type);
            finite = finite && isfinite(tile[i]);
        }
    }
    if (!finite) {
        atomic_store_explicit(&job->found, true, memory_order_relaxed);
    }
    if (kind != AMP_LARGEST && kind != AMP_SMALLEST) {
        for (int half = TFAST_AMP_LANES / 2; half > 0; half /= 2) {
            for (int l = 0; l < half; l++) {
                lanes[l] += lanes[l + half];
            }
        }
        return lanes[0];
    }
    for (int l = 1; l < TFAST_AMP_LANES; l++) {
        lanes[0] = amp_join(kind, lanes[0], lanes[l], 0);
    }
    return lanes[0];
}

static double
amp_chunk_sum(amp_job *job, const tfast_amp_tensor *tensor, int64_t first, int n)
{
    double sum;

    switch (job->kind) {
    case AMP_SQUARES:
        sum = amp_squares(tensor, first, n);
        break;
    case AMP_ABS:
        sum = amp_abs_sum(tensor, first, n);
        break;
    case AMP_LARGEST:
    case AMP_SMALLEST:
        sum = amp_extreme(tensor, first, n, job->kind == AMP_LARGEST);
        break;
    default:
        sum = (double)NAN;
    }
    return isfinite(sum) ? sum : amp_slow_sum(job, tensor, first, n);
}

/* Sums and rewrites elements first .. end - 1, chunk by chunk, so that a chunk is still
 * in the cache when it is rewritten. `chunk`: the index of the first in job->sums. */
static void
amp_span(amp_job *job, const tfast_amp_tensor *tensor, int64_t first, int64_t end,
         int64_t chunk)
{
    for (; first < end; first += TFAST_AMP_CHUNK, chunk++) {
        const int n =
            end - first < TFAST_AMP_CHUNK ? (int)(end - first) : TFAST_AMP_CHUNK;

        if (job->sums != NULL) {
            job->sums[chunk] = amp_chunk_sum(job, tensor, first, n);
        }
        if (job->rewrites) {
            amp_rewrite(tensor, first, n, job->clamp, job->number);
        }
    }
}

#endif
