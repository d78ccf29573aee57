#include "neighbour_find.h"

#include <math.h>
#include <stdlib.h>

enum {
    PIECE = 4096, /* places that are searched before room is made for more */
    SPARE = 64, /* of the nearest, besides twice as many, before the rest is dropped */
};

bool
tfast_neighbours_reserve(tfast_finding *f, int64_t n)
{
    const int64_t room = n + n / 2 + PIECE;
    void *found, *spare, *squares;

    if (n + TFAST_CLOUD_SLACK <= f->room) {
        return true;
    }
    found = realloc(f->found, (size_t)room * sizeof *f->found);
    f->found = found == NULL ? f->found : found;
    spare = realloc(f->spare, (size_t)room * sizeof *f->spare);
    f->spare = spare == NULL ? f->spare : spare;
    squares = realloc(f->squares, (size_t)room * sizeof *f->squares);
    f->squares = squares == NULL ? f->squares : squares;
    if (found == NULL || spare == NULL || squares == NULL) {
        return false;
    }
    f->room = room;
    return true;
}

static bool
is_before(const tfast_finding *f, int64_t i, double square, int32_t number)
{
    return f->squares[i] < square || (f->squares[i] == square && f->found[i] < number);
}

static void
swap(tfast_finding *f, int64_t i, int64_t j)
{
    const double square = f->squares[i];
    const int32_t number = f->found[i];

    f->squares[i] = f->squares[j];
    f->found[i] = f->found[j];
    f->squares[j] = square;
    f->found[j] = number;
}

/* Hoare's selection. */
void
tfast_select_nearest(tfast_finding *f, int64_t most)
{
    int64_t low = 0, high = f->n - 1;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        int64_t i = low, j = high;
        double square;
        int32_t number;

        if (is_before(f, middle, f->squares[low], f->found[low])) {
            swap(f, low, middle);
        }
        if (is_before(f, high, f->squares[low], f->found[low])) {
            swap(f, low, high);
        }
        if (is_before(f, high, f->squares[middle], f->found[middle])) {
            swap(f, middle, high);
        }
        square = f->squares[middle];
        number = f->found[middle];
        while (i <= j) {
            while (is_before(f, i, square, number)) {
                i++;
            }
            while (f->squares[j] > square ||
                   (f->squares[j] == square && f->found[j] > number)) {
                j--;
            }
            if (i <= j) {
                swap(f, i++, j--);
            }
        }
        if (most - 1 <= j) {
            high = j;
        } else if (most - 1 >= i) {
            low = i;
        } else {
            break;
        }
    }
    f->n = f->n < most ? f->n : most;
}

/* Searches places first .. end - 1. False: no memory. */
static bool
search_places(tfast_query *q, tfast_finding *f, int64_t first, int64_t end)
{
    const tfast_neighbour_kernels *kernels = q->kernels;

    for (; first < end; first += PIECE) {
        const int64_t stop = end - first < PIECE ? end : first + PIECE;
        int64_t n;

        if (!tfast_neighbours_reserve(f, f->n + stop - first)) {
            return false;
        }
        n = kernels->within(&q->graph->cloud, q->dim, q->centre, q->limit, first, stop,
                            q->place, f->found + f->n,
                            q->most < 0 ? NULL : f->squares + f->n);
        f->n += n;
        q->total += n;
        if (q->most >= 0 && f->n > 2 * q->most + SPARE) {
            tfast_select_nearest(f, q->most);
            q->limit = 0;
            for (int64_t i = 0; i < f->n; i++) {
                q->limit = fmax(q->limit, f->squares[i]);
            }
        }
    }
    return true;
}

/* Searches all cells within `radius`; *all is whether these are all the cells. */
static bool
search_cells(tfast_query *q, tfast_finding *f, double radius, bool *all)
{
    const tfast_grid *grid = &q->graph->grid;
    int64_t first[TFAST_GRID_AXES] = {0}, last[TFAST_GRID_AXES] = {0};
    int64_t rows = 1, outer[TFAST_GRID_AXES] = {1, 1, 1};
    const int inner = grid->n_axes - 1;

    *all = true;
    if (grid->n_axes == 0) {
        return search_places(q, f, 0, q->graph->n);
    }
    for (int a = 0; a < grid->n_axes; a++) {
        tfast_grid_range(grid, a, q->centre, radius, &first[a], &last[a]);
        *all = *all && first[a] == 0 && last[a] == grid->cells[a] - 1;
    }
    for (int a = 0; a < inner; a++) {
        outer[a] = last[a] - first[a] + 1;
        rows *= outer[a];
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t cell = 0, left = row;

        for (int a = inner - 1, scale = 1; a >= 0; a--) {
            cell += (first[a] + left % outer[a]) * scale;
            left /= outer[a];
            scale *= (int)grid->cells[a];
        }
        cell *= grid->cells[inner];
        if (!search_places(q, f, grid->start[cell + first[inner]],
                           grid->start[cell + last[inner] + 1])) {
            return false;
        }
    }
    return true;
}

bool
tfast_find_neighbours(tfast_query *q, tfast_finding *f)
{
    const double radius = q->radius;
    double reach = q->most < 0 ? radius : q->graph->grid.reach;
    bool all;

    for (;; reach *= 2) {
        const bool last = !(reach > 0) || reach >= radius;

        q->limit = last ? q->bound : fmin(q->bound, reach * reach);
        q->total = 0;
        f->n = 0;
        if (!search_cells(q, f, last ? radius : reach, &all)) {
            return false;
        }
        if (last || (q->most >= 0 && q->total >= q->most)) {
            return true;
        }
        if (all) {
            reach = radius; /* the limit was too low, not the box too small */
        }
    }
}
