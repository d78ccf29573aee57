/* Metrics of predicted trajectories, agent by agent: see tfast_trajectory() in tfast.h.
 * The distances of a mode are computed in `real`, tile by tile, and added in float64
 * to lanes whose number no instruction set changes. */
#ifndef TRAJECTORY_H
#define TRAJECTORY_H

#include "tile.h"
#include "trajectory_probability.h"

#include <math.h>
#include <string.h>

enum {
    TRAJECTORY_ROW = 16,        /* steps; step t is added to sum t % 16 */
    TRAJECTORY_TILE = 3 * TILE, /* coordinates of TILE steps in 3 dimensions */
    TRAJECTORY_BY_FDE = 1 << TFAST_FDE | 1 << TFAST_MIN_FDE | 1 << TFAST_BRIER_MIN_FDE,
    TRAJECTORY_BY_ADE = 1 << TFAST_MIN_ADE | 1 << TFAST_BRIER_MIN_ADE,
    TRAJECTORY_BRIER = 1 << TFAST_BRIER_MIN_ADE | 1 << TFAST_BRIER_MIN_FDE
};

/* One agent: which of its steps count, and a tile of its target. */
typedef struct {
    const tfast_trajectory_args *args;
    int64_t agent;
    int64_t counted;  /* steps that count */
    int64_t end;      /* one past the last step that counts */
    int64_t final;    /* the final step; -1: it does not count */
    int64_t loaded;   /* first step in `target` and `keep`; -1: none */
    int64_t readable; /* rows of pred that begin at an element before this one can be
                           read in place, also past their mode's last step */
    int kept;         /* steps before which all of `keep` is 1; -1: by the mask */
    real target[TRAJECTORY_TILE];
    real keep[TILE]; /* 1: the step counts; 0: not, or past the end */
} trajectory_agent;

typedef struct {
    double sum[TRAJECTORY_ROW];
    real largest[TRAJECTORY_ROW];
} trajectory_lanes;

/* Errors of one mode. */
typedef struct {
    double ade, fde, largest;
} trajectory_errors;

static real
trajectory_read(const void *array, tfast_dtype dtype, int64_t i)
{
    switch (dtype) {
    case TFAST_F32:
        return (real)((const float *)array)[i];
    case TFAST_F64:
        return (real)((const double *)array)[i];
    case TFAST_F16:
        return tfast_from_f16(((const uint16_t *)array)[i]);
    default:
        return tfast_from_bf16(((const uint16_t *)array)[i]);
    }
}

/* Copies the coordinates of n <= TILE steps from element `first` on to `tile`, and
 * zeros up to a whole row. `strides`: of a step and of a coordinate. */
static void
trajectory_copy(real *tile, const void *array, tfast_dtype dtype, int64_t first,
                const int64_t *strides, int n, int dim)
{
    const int end = (n + TRAJECTORY_ROW - 1) / TRAJECTORY_ROW * TRAJECTORY_ROW * dim;

    if (strides[1] == 1 && strides[0] == dim) {
        tile_read(tile, array, dtype, first, n * dim);
    } else {
        for (int t = 0; t < n; t++) {
            for (int d = 0; d < dim; d++) {
                tile[t * dim + d] = trajectory_read(
                    array, dtype, first + t * strides[0] + d * strides[1]);
            }
        }
    }
    for (int i = n * dim; i < end; i++) {
        tile[i] = 0;
    }
}

/* Sums of the squared coordinates of VR_WIDTH steps. No multiplication and addition are
 * fused, so that all instruction sets round alike. */
static inline __attribute__((always_inline)) vr
trajectory_squares(const real *p, const real *q, const int dim)
{
    real squares[3 * VR_WIDTH], sums[VR_WIDTH];

    if (dim == 2) {
        const vr low = vr_sub(vr_load(p), vr_load(q));
        const vr high = vr_sub(vr_load(p + VR_WIDTH), vr_load(q + VR_WIDTH));
        return vr_add_pairs(vr_mul(low, low), vr_mul(high, high));
    }
    for (int i = 0; i < 3; i++) {
        const vr x = vr_sub(vr_load(p + i * VR_WIDTH), vr_load(q + i * VR_WIDTH));
        vr_store(squares + i * VR_WIDTH, vr_mul(x, x));
    }
    for (int t = 0; t < VR_WIDTH; t++) {
        sums[t] = squares[3 * t] + squares[3 * t + 1] + squares[3 * t + 2];
    }
    return vr_load(sums);
}

/* Adds the distances of a row of steps to the sums and stores them. */
static inline __attribute__((always_inline)) void
trajectory_row(trajectory_lanes *lanes, const real *p, const real *q, real *distances,
               const real *keep, const int dim, const bool largest)
{
    const vr zero = vr_set1(0);

    for (int t = 0; t < TRAJECTORY_ROW; t += VR_WIDTH) {
        vr d = vr_sqrt(trajectory_squares(p + t * dim, q + t * dim, dim));

        if (keep != NULL) {
            d = vr_if_less(zero, vr_load(keep + t), d, zero);
        }
        vr_accumulate(lanes->sum + t, d);
        vr_store(distances + t, d);
        if (largest) {
            vr_store(lanes->largest + t, vr_max(d, vr_load(lanes->largest + t)));
        }
    }
}

/* The same for n steps. The last row of p may hold anything behind its n steps, where
 * `keep` is 0. Without `masked`, `keep` is read in that row only. */
static inline __attribute__((always_inline)) void
trajectory_rows(trajectory_lanes *lanes, const real *p, const real *q, real *distances,
                const real *keep, int n, const int dim, const bool masked,
                const bool largest)
{
    int t = 0;

    for (; t + TRAJECTORY_ROW <= n; t += TRAJECTORY_ROW) {
        trajectory_row(lanes, p + t * dim, q + t * dim, distances + t,
                       masked ? keep + t : NULL, dim, largest);
    }
    if (t < n) {
        trajectory_row(lanes, p + t * dim, q + t * dim, distances + t, keep + t, dim,
                       largest);
    }
}

/* Loads the target, and what steps count, from step `at` on. */
static void
trajectory_load(trajectory_agent *a, int64_t at, int n)
{
    const tfast_trajectory_args *args = a->args;
    const int64_t *strides = args->target_stride;

    trajectory_copy(a->target, args->target, (tfast_dtype)args->target_dtype,
                    a->agent * strides[0] + at * strides[1], strides + 1, n,
                    (int)args->dim);
    if (args->mask != NULL || n != a->kept) {
        const bool *mask = args->mask;
        const int64_t stride = args->mask_stride[1];
        int t = 0;

        if (mask == NULL) {
            for (; t < n; t++) {
                a->keep[t] = 1;
            }
        } else {
            mask += a->agent * args->mask_stride[0] + at * stride;
            for (; t < n; t++) {
                a->keep[t] = mask[t * stride];
            }
        }
        for (; t % TRAJECTORY_ROW != 0; t++) {
            a->keep[t] = 0;
        }
        a->kept = mask == NULL ? n : -1;
    }
    a->loaded = at;
}

/* Adds the distances of n <= TILE steps of a mode from step `at` on. */
static void
trajectory_tile(trajectory_agent *a, int64_t mode, trajectory_lanes *lanes,
                real *distances, int64_t at, int n)
{
    const tfast_trajectory_args *args = a->args;
    const int64_t *strides = args->pred_stride;
    const int64_t first = a->agent * strides[0] + mode * strides[1] + at * strides[2];
    const int dim = (int)args->dim;
    const bool masked = a->counted < a->end;
    const bool largest = args->definition == TFAST_TRAJECTORY_NUSCENES;
    real tile[TRAJECTORY_TILE];
    const real *p = tile;

    if (first < a->readable) {
        p = (const real *)args->pred + first;
    } else {
        trajectory_copy(tile, args->pred, (tfast_dtype)args->pred_dtype, first,
                        strides + 2, n, dim);
    }
    if (a->loaded != at) {
        trajectory_load(a, at, n);
    }
    if (dim == 2 && !masked && !largest) {
        trajectory_rows(lanes, p, a->target, distances, a->keep, n, 2, false, false);
    } else if (dim == 2) {
        trajectory_rows(lanes, p, a->target, distances, a->keep, n, 2, true, true);
    } else {
        trajectory_rows(lanes, p, a->target, distances, a->keep, n, 3, true, true);
    }
}

/* Halves that are added to each other. Loops of fixed lengths stay in registers. */
static double
trajectory_sum(const double *sum)
{
    double eight[8], four[4];

    for (int l = 0; l < 8; l++) {
        eight[l] = sum[l] + sum[l + 8];
    }
    for (int l = 0; l < 4; l++) {
        four[l] = eight[l] + eight[l + 4];
    }
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static trajectory_errors
trajectory_measure(trajectory_agent *a, int64_t mode)
{
    real distances[TILE];
    trajectory_lanes lanes = {{0}, {0}};
    trajectory_errors errors = {.fde = (double)NAN};

    for (int64_t at = 0; at < a->end; at += TILE) {
        const int n = a->end - at < TILE ? (int)(a->end - at) : TILE;

        trajectory_tile(a, mode, &lanes, distances, at, n);
        if (a->final >= at && a->final < at + n) {
            errors.fde = distances[a->final - at];
        }
    }
    errors.ade = trajectory_sum(lanes.sum) / (double)a->counted;
    if (a->args->definition == TFAST_TRAJECTORY_NUSCENES) {
        for (int l = 0; l < TRAJECTORY_ROW; l++) {
            const double largest = lanes.largest[l];

            errors.largest = largest > errors.largest ? largest : errors.largest;
        }
    }
    return errors;
}

/* Finds which steps of the agent count. */
static void
trajectory_steps(trajectory_agent *a)
{
    const tfast_trajectory_args *args = a->args;

    a->counted = a->end = args->steps;
    if (args->mask != NULL) {
        const bool *mask = args->mask + a->agent * args->mask_stride[0];
        const int64_t stride = args->mask_stride[1];

        while (a->end > 0 && !mask[(a->end - 1) * stride]) {
            a->end--;
        }
        a->counted = 0;
        for (int64_t t = 0; t < a->end; t++) {
            a->counted += mask[t * stride];
        }
    }
    a->final = args->strict_final && a->end < args->steps ? -1 : a->end - 1;
}

/* Whether a mode is one of the top_k most probable. */
static bool
trajectory_is_top(const tfast_trajectory_args *args, int64_t agent, int64_t mode)
{
    const double p = args->top_k == 0 || args->top_k >= args->modes
                         ? -1
                         : trajectory_probability(args, agent, mode);
    int64_t before = 0;

    if (p < 0) {
        return true;
    }
    for (int64_t other = 0; other < args->modes; other++) {
        const double q = trajectory_probability(args, agent, other);
        before += q > p || (q == p && other < mode);
    }
    return before < args->top_k;
}

/* The metrics that the agent has, a bit for each. */
static uint8_t
trajectory_found(const trajectory_agent *a)
{
    const tfast_trajectory_definition definition = a->args->definition;
    int found = (1 << TFAST_TRAJECTORY_METRICS) - 1;

    if (a->counted == 0) {
        return 0;
    }
    if (a->args->probabilities == NULL) {
        found &= ~TRAJECTORY_BRIER;
    }
    if (a->final < 0) {
        found &= ~TRAJECTORY_BY_FDE;
        found &= definition == TFAST_TRAJECTORY_NUSCENES ? ~0 : ~(1 << TFAST_MISS);
        found &= definition == TFAST_TRAJECTORY_AV2 ? ~TRAJECTORY_BY_ADE : ~0;
    }
    return (uint8_t)found;
}

/* The most probable mode: the first of the largest probability, or -1 if one is NaN.
 * Sets *outside if one is outside of [0, 1]. */
static int64_t
trajectory_most_probable(const tfast_trajectory_args *args, int64_t agent,
                         bool *outside)
{
    double most = -1;
    int64_t found = 0;

    for (int64_t mode = 0; args->probabilities != NULL && mode < args->modes; mode++) {
        const double p = trajectory_probability(args, agent, mode);

        *outside = *outside || trajectory_is_outside(p);
        if (isnan(p)) {
            found = -1;
        }
        if (p > most && found >= 0) {
            most = p;
            found = mode;
        }
    }
    return found;
}

/* Writes the metrics of an agent that has steps, whose mode `most` is the most
 * probable one. False: one of its numbers is NaN. */
static bool
trajectory_values(trajectory_agent *a, int64_t most, double *values)
{
    const tfast_trajectory_args *args = a->args;
    const tfast_trajectory_definition definition = args->definition;
    trajectory_errors least = {INFINITY, INFINITY, INFINITY};
    int64_t of_ade = most, of_fde = most; /* the modes with the least */
    double ade_of_fde = INFINITY, term_of_ade = 0, term_of_fde = 0;

    for (int64_t mode = 0; mode < args->modes && most >= 0; mode++) {
        trajectory_errors errors;

        if (!trajectory_is_top(args, a->agent, mode)) {
            continue;
        }
        errors = trajectory_measure(a, mode);
        if (isnan(errors.ade)) {
            return false;
        }
        if (mode == most) {
            values[TFAST_ADE] = errors.ade;
            values[TFAST_FDE] = errors.fde;
        }
        if (errors.ade < least.ade) {
            least.ade = errors.ade;
            of_ade = mode;
        }
        if (errors.fde < least.fde) {
            least.fde = errors.fde;
            ade_of_fde = errors.ade;
            of_fde = mode;
        }
        least.largest = errors.largest < least.largest ? errors.largest : least.largest;
    }
    if (definition == TFAST_TRAJECTORY_AV2) {
        least.ade = ade_of_fde;
        of_ade = of_fde;
    }
    if (args->probabilities != NULL && most >= 0) {
        term_of_ade = 1 - trajectory_probability(args, a->agent, of_ade);
        term_of_fde = 1 - trajectory_probability(args, a->agent, of_fde);
    }
    values[TFAST_MIN_ADE] = least.ade;
    values[TFAST_MIN_FDE] = least.fde;
    values[TFAST_BRIER_MIN_ADE] = least.ade + term_of_ade * term_of_ade;
    values[TFAST_BRIER_MIN_FDE] = least.fde + term_of_fde * term_of_fde;
    values[TFAST_MISS] =
        definition == TFAST_TRAJECTORY_NUSCENES ? least.largest >= args->miss_threshold
        : definition == TFAST_TRAJECTORY_AV2    ? least.fde > args->miss_threshold
                                             : values[TFAST_FDE] > args->miss_threshold;
    return most >= 0;
}

/* The elements of pred at which a tile may begin that is read in place: none unless
 * pred is dense and of `real`, and not the last ones, where a row may pass its end. */
static int64_t
trajectory_readable(const tfast_trajectory_args *args)
{
    const int64_t *strides = args->pred_stride;
    const int64_t mode = args->steps * args->dim, agent = args->modes * mode;
    const bool dense = strides[3] == 1 && strides[2] == args->dim &&
                       (strides[1] == mode || args->modes == 1) && strides[0] == agent;
    const int64_t over = TRAJECTORY_TILE;

    return dense && args->pred_dtype == REAL_DTYPE ? args->n * agent - over : 0;
}

static bool
trajectory_agents(const tfast_trajectory_args *args, int64_t first, int64_t end,
                  double *values, uint8_t *found)
{
    trajectory_agent a = {.args = args, .readable = trajectory_readable(args)};
    bool outside = false;

    for (a.agent = first; a.agent < end; a.agent++) {
        const int64_t most = trajectory_most_probable(args, a.agent, &outside);
        bool valid;

        trajectory_steps(&a);
        a.loaded = -1;
        *found = trajectory_found(&a);
        valid = *found != 0 && trajectory_values(&a, most, values);
        for (int m = 0; m < TFAST_TRAJECTORY_METRICS; m++) {
            values[m] = valid && (*found >> m & 1) != 0 ? values[m] : (double)NAN;
        }
        values += TFAST_TRAJECTORY_METRICS;
        found++;
    }
    return !outside;
}

#endif
