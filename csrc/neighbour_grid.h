/* A grid of cells over the points of one graph, so that a search looks at the cells
 * around a centre only. */
#ifndef NEIGHBOUR_GRID_H
#define NEIGHBOUR_GRID_H

#include "tfast.h"

enum { TFAST_GRID_AXES = 3 };

/* The points of a cell have neighbouring places: start[cell] .. start[cell + 1] - 1,
 * ordered by their numbers. Cells along the last axis follow each other. */
typedef struct {
    int n_axes; /* 0: no grid, all points are in one cell */
    int dimension[TFAST_GRID_AXES];
    int64_t cells[TFAST_GRID_AXES];
    double low[TFAST_GRID_AXES], inverse[TFAST_GRID_AXES];
    double reach;         /* a radius within which a few points are expected */
    const int32_t *start; /* [number of cells + 1] */
} tfast_grid;

/* Chooses axes and cells for n points with coordinate d of point i at
 * points[i * dim + d], for searches within `radius`. There are at most n cells. */
void tfast_grid_plan(tfast_grid *grid, const double *points, int64_t n, int dim,
                     double radius, int64_t most);

int64_t tfast_grid_cells(const tfast_grid *grid);

/* The cell of a point. */
int64_t tfast_grid_cell(const tfast_grid *grid, const double *point);

/* Sets first .. last to the cells along one axis that may hold points within `radius`
 * of `point`, with a margin for rounding. */
void tfast_grid_range(const tfast_grid *grid, int axis, const double *point,
                      double radius, int64_t *first, int64_t *last);

#endif
