#include "neighbour_grid.h"

#include <math.h>
#include <stdlib.h>

enum { SAMPLED = 1024 };

/* Where most of a graph's points lie along one dimension. */
typedef struct {
    double low, high;
} extent;

static int
compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The middle 98 % of a sample with a quarter added on each side, but no more than all
 * points: a few that lie far away would otherwise leave the others in one cell. */
static extent
find_extent(const double *points, int64_t n, int dim, int d)
{
    const int64_t step = (n + SAMPLED - 1) / SAMPLED;
    double sample[SAMPLED], low = points[d], high = points[d], margin;
    int64_t m = 0;

    for (int64_t i = 0; i < n; i++) {
        const double x = points[i * dim + d];

        low = x < low ? x : low;
        high = x > high ? x : high;
    }
    for (int64_t i = 0; i < n; i += step) {
        sample[m++] = points[i * dim + d];
    }
    qsort(sample, (size_t)m, sizeof *sample, compare);
    margin = 0.25 * (sample[m - 1 - m / 100] - sample[m / 100]);
    low = fmax(low, sample[m / 100] - margin);
    high = fmin(high, sample[m - 1 - m / 100] + margin);
    return (extent){low, high};
}

/* The number of cells of this edge along one axis, at most n. */
static int64_t
count_cells(double length, double edge, int64_t n)
{
    const double cells = length / edge;

    return !(cells >= 1) ? 1 : cells >= (double)n ? n : (int64_t)cells + 1;
}

int64_t
tfast_grid_cells(const tfast_grid *grid)
{
    int64_t cells = 1;

    for (int a = 0; a < grid->n_axes; a++) {
        cells *= grid->cells[a];
    }
    return cells;
}

/* Sets the counts of cells for one edge; returns whether there are at most n cells. */
static bool
try_edge(tfast_grid *grid, const double *lengths, double edge, int64_t n)
{
    double cells = 1;

    for (int a = 0; a < grid->n_axes; a++) {
        grid->cells[a] = count_cells(lengths[a], edge, n);
        cells *= (double)grid->cells[a];
    }
    return cells <= (double)n;
}

/* Chooses the longest dimensions as axes, the longest last. */
static void
choose_axes(tfast_grid *grid, double *lengths, const double *points, int64_t n, int dim)
{
    grid->n_axes = 0;
    for (int d = 0; d < dim; d++) {
        const extent found = find_extent(points, n, dim, d);
        const double length = found.high - found.low;
        int at = 0;

        if (!(length > 0) || !isfinite(length)) {
            continue;
        }
        if (grid->n_axes < TFAST_GRID_AXES) { /* makes room for the shortest */
            for (int a = grid->n_axes++; a > 0; a--) {
                lengths[a] = lengths[a - 1];
                grid->dimension[a] = grid->dimension[a - 1];
                grid->low[a] = grid->low[a - 1];
            }
        } else if (length <= lengths[0]) {
            continue;
        }
        for (; at + 1 < grid->n_axes && lengths[at + 1] < length; at++) {
            lengths[at] = lengths[at + 1];
            grid->dimension[at] = grid->dimension[at + 1];
            grid->low[at] = grid->low[at + 1];
        }
        lengths[at] = length;
        grid->dimension[at] = d;
        grid->low[at] = found.low;
    }
}

void
tfast_grid_plan(tfast_grid *grid, const double *points, int64_t n, int dim,
                double radius, int64_t most)
{
    double lengths[TFAST_GRID_AXES] = {0}, edge, longest, volume = 1;

    choose_axes(grid, lengths, points, n, dim);
    if (grid->n_axes == 0) {
        grid->reach = radius;
        return;
    }
    longest = lengths[grid->n_axes - 1];
    for (int a = 0; a < grid->n_axes; a++) {
        volume *= lengths[a] / longest;
    }
    grid->reach = radius;
    if (most >= 0) { /* a ball of this radius holds about 1.5 * most points */
        static const double ball[] = {2.0, 3.14, 4.19};
        const double share = (1.5 * (double)most + 1) / (double)n;

        volume *= share / ball[grid->n_axes - 1];
        grid->reach = fmin(radius, longest * pow(volume, 1.0 / grid->n_axes));
    }
    edge = fmax(grid->reach, longest / (double)n);
    while (!try_edge(grid, lengths, edge, n)) {
        edge *= 1.25;
    }
    for (int a = 0; a < grid->n_axes; a++) {
        grid->inverse[a] = (double)grid->cells[a] / lengths[a];
    }
}

/* The cell along one axis of a coordinate; a monotonous function of it. */
static int64_t
cell_along(const tfast_grid *grid, int axis, double x)
{
    const double cell = (x - grid->low[axis]) * grid->inverse[axis];
    const int64_t last = grid->cells[axis] - 1;

    return !(cell > 0) ? 0 : cell >= (double)last ? last : (int64_t)cell;
}

int64_t
tfast_grid_cell(const tfast_grid *grid, const double *point)
{
    int64_t cell = 0;

    for (int a = 0; a < grid->n_axes; a++) {
        cell = cell * grid->cells[a] + cell_along(grid, a, point[grid->dimension[a]]);
    }
    return cell;
}

void
tfast_grid_range(const tfast_grid *grid, int axis, const double *point, double radius,
                 int64_t *first, int64_t *last)
{
    const double x = point[grid->dimension[axis]];
    const double margin = radius * 0x1p-40 + fabs(x) * 0x1p-50;

    *first = cell_along(grid, axis, x - radius - margin);
    *last = cell_along(grid, axis, x + radius + margin);
}
