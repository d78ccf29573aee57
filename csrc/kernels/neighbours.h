/* The loops of the search for neighbours (neighbour_search.c), in float64. */
#ifndef NEIGHBOURS_H
#define NEIGHBOURS_H

#include "../neighbour_search.h"

#include <string.h>

_Static_assert(VR_WIDTH <= TFAST_CLOUD_SLACK, "vectors touch places past the end");

/* See `within` of tfast_neighbour_kernels. Inlined for each number of dimensions and
 * for whether squares are stored. */
static inline __attribute__((always_inline)) int64_t
find_within(const tfast_cloud *cloud, const int dim, const double *centre, double limit,
            int64_t first, int64_t end, int64_t skip, int32_t *found, double *squares)
{
    const vr bound = vr_set1(limit);
    const int32_t *index = cloud->index;
    const double *axis[TFAST_MAX_POINT_DIM];
    int64_t n = 0;
    vr at[TFAST_MAX_POINT_DIM];

    for (int d = 0; d < dim; d++) {
        at[d] = vr_set1(centre[d]);
        axis[d] = cloud->axis[d];
    }
    for (int64_t place = first; place < end; place += VR_WIDTH) {
        vr sum = vr_sub(vr_load(axis[0] + place), at[0]);
        uint32_t mask;

        sum = vr_mul(sum, sum);
        for (int d = 1; d < dim; d++) {
            const vr gap = vr_sub(vr_load(axis[d] + place), at[d]);

            sum = vr_add(sum, vr_mul(gap, gap));
        }
        mask = vr_mask_le(sum, bound);
        if (end - place < VR_WIDTH) {
            mask &= (1u << (end - place)) - 1;
        }
        if ((uint64_t)(skip - place) < VR_WIDTH) {
            mask &= ~(1u << (skip - place));
        }
        vr_compress_indices(found + n, index + place, mask);
        if (squares != NULL) {
            vr_compress(squares + n, sum, mask);
        }
        n += __builtin_popcount(mask);
    }
    return n;
}

static int64_t
within(const tfast_cloud *cloud, int dim, const double *centre, double limit,
       int64_t first, int64_t end, int64_t skip, int32_t *found, double *squares)
{
    if (squares != NULL) {
        return find_within(cloud, dim, centre, limit, first, end, skip, found, squares);
    }
    return dim == 2
               ? find_within(cloud, 2, centre, limit, first, end, skip, found, NULL)
           : dim == 3
               ? find_within(cloud, 3, centre, limit, first, end, skip, found, NULL)
               : find_within(cloud, dim, centre, limit, first, end, skip, found, NULL);
}

enum { RANKED = 32 }; /* numbers that are sorted at once */

/* Sorts n <= RANKED different numbers: the place of each is the count of smaller ones.
 * The loops have fixed lengths, so that compilers make vectors of them. */
static void
sort_by_rank(int32_t *values, int64_t n)
{
    int32_t padded[RANKED], sorted[RANKED], rank[RANKED] = {0};

    for (int64_t i = 0; i < RANKED; i++) {
        padded[i] = i < n ? values[i] : INT32_MAX;
    }
    for (int64_t i = 0; i < n; i++) {
        for (int j = 0; j < RANKED; j++) {
            rank[j] += padded[i] < padded[j];
        }
    }
    for (int64_t i = 0; i < n; i++) {
        sorted[rank[i]] = padded[i];
    }
    memcpy(values, sorted, (size_t)n * sizeof *values);
}

/* Merges the sorted runs a[0 .. n_a) and a[n_a .. n). */
static void
merge(int32_t *out, const int32_t *a, int64_t n_a, int64_t n)
{
    int64_t i = 0, j = n_a;

    for (int64_t k = 0; k < n; k++) {
        const bool left = j >= n || (i < n_a && a[i] < a[j]);

        out[k] = left ? a[i++] : a[j++];
    }
}

static void
sort(int32_t *values, int32_t *spare, int64_t n)
{
    int32_t *from = values, *to = spare;

    for (int64_t i = 0; i < n; i += RANKED) {
        sort_by_rank(values + i, n - i < RANKED ? n - i : RANKED);
    }
    for (int64_t width = RANKED; width < n; width *= 2) {
        int32_t *swap = from;

        for (int64_t i = 0; i < n; i += 2 * width) {
            const int64_t both = n - i < 2 * width ? n - i : 2 * width;

            merge(to + i, from + i, both < width ? both : width, both);
        }
        from = to;
        to = swap;
    }
    if (from != values) {
        memcpy(values, from, (size_t)n * sizeof *values);
    }
}

static void
emit(const tfast_neighbours_args *args, int64_t at, int64_t room, const int32_t *found,
     int64_t n, int64_t add, int64_t centre)
{
    /* Whole vectors where they fit: the processor would mispredict the end of a loop
     * over the rest. */
    const int64_t whole = (n + TFAST_CLOUD_SLACK - 1) & -TFAST_CLOUD_SLACK;
    const int64_t end = whole <= room ? whole : n;

    if (args->short_indices) {
        int32_t *restrict neighbours = (int32_t *)args->neighbour + at;
        int32_t *restrict centres = (int32_t *)args->centre + at;

        for (int64_t i = 0; i < end; i++) {
            neighbours[i] = (int32_t)(found[i] + add);
            centres[i] = (int32_t)centre;
        }
    } else {
        int64_t *restrict neighbours = (int64_t *)args->neighbour + at;
        int64_t *restrict centres = (int64_t *)args->centre + at;

        for (int64_t i = 0; i < end; i++) {
            neighbours[i] = found[i] + add;
            centres[i] = centre;
        }
    }
}

#define NEIGHBOUR_KERNELS                                                              \
    {                                                                                  \
        .within = within, .sort = sort, .emit = emit                                   \
    }

#endif
