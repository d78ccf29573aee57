/* The search for neighbours on the CPU: neighbour_search.c has the plan, grid and
 * threads, kernels/neighbours.h the loops of each instruction set. The search on a GPU
 * takes its limit and its message from here, too. */
#ifndef NEIGHBOUR_SEARCH_H
#define NEIGHBOUR_SEARCH_H

#include "tfast.h"

enum { TFAST_CLOUD_SLACK = 8 }; /* places past the end of an array that vectors touch */

/* The points of one graph, in the order of its grid, if it has one. */
typedef struct {
    const double *axis[TFAST_MAX_POINT_DIM]; /* coordinate d of the point at a place */
    const int32_t *index;                    /* its number in the graph */
} tfast_cloud;

typedef struct {
    /* Stores the numbers of the points at places first .. end - 1, except place `skip`
     * (-1: none), whose squared distance from `centre` is <= limit, and these squares,
     * in the order of places; returns how many there are. `found` and `squares` have
     * room for TFAST_CLOUD_SLACK more; `squares` may be NULL. */
    int64_t (*within)(const tfast_cloud *cloud, int dim, const double *centre,
                      double limit, int64_t first, int64_t end, int64_t skip,
                      int32_t *found, double *squares);
    /* Sorts n different numbers below INT32_MAX; `spare` has room for n. */
    void (*sort)(int32_t *values, int32_t *spare, int64_t n);
    /* Writes edges `at` .. at + n - 1: from found[i] + add to centre. May also write
     * anything to the edges behind them, up to at + room - 1; `found` has
     * TFAST_CLOUD_SLACK more numbers that may be read. */
    void (*emit)(const tfast_neighbours_args *args, int64_t at, int64_t room,
                 const int32_t *found, int64_t n, int64_t add, int64_t centre);
} tfast_neighbour_kernels;

/* A backend's plan begins with this. */
struct tfast_neighbours_plan {
    tfast_status (*fill)(tfast_neighbours_plan *plan,
                         const tfast_neighbours_args *args);
    void (*end)(tfast_neighbours_plan *plan);
};

/* The largest square of a distance that counts as within the radius. */
static inline double
tfast_neighbours_limit(const tfast_neighbours_args *args)
{
    const double square = args->radius * args->radius;

    return args->below ? nextafter(square, -INFINITY) : square;
}

static inline tfast_status
tfast_neighbours_not_finite(tfast_fail_function fail, const char *what, int64_t row)
{
    return fail(TFAST_EINVAL, "%s must be finite, got NaN or infinity in row %lld",
                what, (long long)row);
}

/* See tfast_neighbours_count(). */
tfast_status tfast_neighbours_plan_cpu(tfast_neighbours_plan **plan,
                                       tfast_neighbours_args *args,
                                       const tfast_neighbour_kernels *kernels);

#endif
