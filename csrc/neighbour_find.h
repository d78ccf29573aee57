/* The neighbours of one centre, on the CPU. */
#ifndef NEIGHBOUR_FIND_H
#define NEIGHBOUR_FIND_H

#include "neighbour_grid.h"
#include "neighbour_search.h"

/* The points of one graph. */
typedef struct {
    tfast_cloud cloud;
    tfast_grid grid;
    int64_t first, n; /* its rows of the points */
} tfast_point_graph;

/* What was found for one centre; zeroed at first, and used again for the next one. */
typedef struct {
    int32_t *found;  /* numbers of points in their graph */
    int32_t *spare;  /* for sorting */
    double *squares; /* of distances, where the query has `most` */
    int64_t n, room;
} tfast_finding;

typedef struct {
    const tfast_neighbour_kernels *kernels;
    const tfast_point_graph *graph;
    int dim;
    const double *centre;
    double radius;
    double bound;  /* of squared distances, inclusive */
    int64_t place; /* of the point that must not be found, or -1 */
    int64_t most;  /* the nearest that are wanted; others may be found, too. Negative:
                      all. */
    /* While it runs: */
    double limit;  /* of squared distances: lower once enough were found */
    int64_t total; /* found so far, also those that were dropped */
} tfast_query;

/* Finds the neighbours of a centre. False: no memory. */
bool tfast_find_neighbours(tfast_query *q, tfast_finding *f);

/* Keeps the `most` nearest of what was found, in any order. */
void tfast_select_nearest(tfast_finding *f, int64_t most);

/* Makes room for n numbers. False: no memory. */
bool tfast_neighbours_reserve(tfast_finding *f, int64_t n);

#endif
