/* Graphs of few points are searched point by point; larger ones get a grid. Threads
 * share out the centres twice: to list each one's neighbours, and, once the caller has
 * made the arrays, to write the edges. A centre's edges have a fixed place, so the
 * result does not depend on the threads. */
#include "neighbour_search.h"

#include "half.h"
#include "neighbour_find.h"
#include "neighbour_graph.h"
#include "threads.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    GRID_POINTS = 1024, /* from so many points on a graph gets a grid, */
    GRID_CENTRES = 32,  /* and from so many centres on */
    CHUNK = 64,         /* centres that a thread takes at once */
    BLOCK = 1 << 14,    /* numbers in a block of lists: 64 KiB, since malloc() maps
                           blocks from 128 KiB on, and each call would page them in */
    SERIAL = 1 << 18,   /* pairs that are not worth another thread */
};

/* Lists of neighbours. */
typedef struct block {
    struct block *next;
    int32_t numbers[];
} block;

typedef struct {
    tfast_neighbours_plan plan;
    const tfast_neighbour_kernels *kernels;
    double limit;          /* of squared distances, inclusive */
    bool itself;           /* the points are the centres */
    int64_t *offsets;      /* [centres + 1]: each centre's first edge */
    const int32_t **lists; /* [centres]: numbers of its neighbours, in order */
    _Atomic(block *) blocks;
    double *axes;   /* [dim, n + TFAST_CLOUD_SLACK] */
    int32_t *index; /* [n + TFAST_CLOUD_SLACK] */
    int32_t *start; /* [n + n_graphs]: of the grids */
    tfast_point_graph *graphs;
} search;

/* One parallel phase. */
typedef struct {
    search *s;
    const tfast_neighbours_args *args;
    _Atomic int64_t next;
    _Atomic int64_t bad; /* the first row that is not finite, or n */
    _Atomic bool failed; /* no memory */
} phase;

/* ---- Points ---------------------------------------------------------------------- */

/* Reads one point; false if a coordinate is not finite. */
static bool
load_point(double *out, const tfast_neighbours_args *args, const tfast_points *points,
           int64_t row)
{
    const int64_t at = row * points->row;
    double norm = 0, sum = 0;

    for (int d = 0; d < (int)args->dim; d++) {
        const int64_t i = at + d * points->column;

        switch (args->dtype) {
        case TFAST_F64:
            out[d] = ((const double *)points->data)[i];
            break;
        case TFAST_F32:
            out[d] = ((const float *)points->data)[i];
            break;
        case TFAST_F16:
            out[d] = tfast_from_f16(((const uint16_t *)points->data)[i]);
            break;
        default:
            out[d] = tfast_from_bf16(((const uint16_t *)points->data)[i]);
        }
        sum += out[d] - out[d]; /* NaN for infinities, too */
        norm += out[d] * out[d];
    }
    if (args->unit && norm > 0) {
        for (int d = 0; d < (int)args->dim; d++) {
            out[d] /= sqrt(norm);
        }
    }
    return sum == 0;
}

static void
note_bad(phase *job, int64_t row)
{
    int64_t old = job->bad;

    while (row < old && !atomic_compare_exchange_weak(&job->bad, &old, row)) {
    }
}

/* Copies the points of a graph to its cloud. */
static void
prepare_plain(phase *job, const tfast_point_graph *g, double *axis, int64_t stride,
              int32_t *index)
{
    double point[TFAST_MAX_POINT_DIM] = {0};

    for (int64_t i = 0; i < g->n; i++) {
        if (!load_point(point, job->args, &job->args->points, g->first + i)) {
            note_bad(job, g->first + i);
        }
        for (int d = 0; d < (int)job->args->dim; d++) {
            axis[d * stride + i] = point[d];
        }
        index[i] = (int32_t)i;
    }
}

/* The same in the order of a grid, which it plans. */
static void
prepare_grid(phase *job, tfast_point_graph *g, double *axis, int64_t stride,
             int32_t *index, int32_t *start)
{
    const int dim = (int)job->args->dim;
    double *points = malloc((size_t)g->n * (size_t)dim * sizeof *points);
    bool finite = points != NULL;
    int64_t cells, place = 0;

    if (points == NULL) {
        job->failed = true;
    }
    for (int64_t i = 0; i < g->n && points != NULL; i++) {
        if (!load_point(points + i * dim, job->args, &job->args->points,
                        g->first + i)) {
            note_bad(job, g->first + i);
            finite = false;
        }
    }
    if (!finite) {
        free(points);
        return;
    }
    tfast_grid_plan(&g->grid, points, g->n, dim, job->args->radius,
                    job->args->first ? -1 : job->args->most);
    cells = tfast_grid_cells(&g->grid);
    g->grid.start = start;
    memset(start, 0, (size_t)(cells + 1) * sizeof *start);
    for (int64_t i = 0; i < g->n; i++) {
        start[tfast_grid_cell(&g->grid, points + i * dim) + 1]++;
    }
    for (int64_t c = 0; c < cells; c++) { /* from counts to where each cell begins */
        const int64_t n = start[c + 1];

        start[c + 1] = (int32_t)place;
        place += n;
    }
    for (int64_t i = 0; i < g->n; i++) { /* ends with where each cell ends */
        const int64_t at = start[tfast_grid_cell(&g->grid, points + i * dim) + 1]++;

        for (int d = 0; d < dim; d++) {
            axis[d * stride + at] = points[i * dim + d];
        }
        index[at] = (int32_t)i;
    }
    free(points);
}

static void
prepare_part(void *context, int part, int parts)
{
    phase *job = context;
    search *s = job->s;
    const tfast_neighbours_args *args = job->args;
    const tfast_points *centres = s->itself ? &args->points : &args->centres;
    const int64_t stride = args->points.n + TFAST_CLOUD_SLACK;

    (void)part;
    (void)parts;
    for (int64_t i = job->next++; i < args->n_graphs; i = job->next++) {
        tfast_point_graph *g = &s->graphs[i];
        double *axis = s->axes + (g->first = args->points.ptr[i]);

        g->n = args->points.ptr[i + 1] - g->first;
        g->grid.n_axes = 0;
        g->grid.reach = args->radius;
        for (int d = 0; d < (int)args->dim; d++) {
            g->cloud.axis[d] = axis + d * stride;
        }
        g->cloud.index = s->index + g->first;
        if (g->n < GRID_POINTS ||
            centres->ptr[i + 1] - centres->ptr[i] < GRID_CENTRES) {
            prepare_plain(job, g, axis, stride, s->index + g->first);
        } else {
            prepare_grid(job, g, axis, stride, s->index + g->first,
                         s->start + g->first + i);
        }
    }
}

/* ---- Lists ----------------------------------------------------------------------- */

/* Adds a point to those that were found. */
static bool
add_found(tfast_finding *f, int64_t number)
{
    if (!tfast_neighbours_reserve(f, f->n + 1)) {
        return false;
    }
    f->found[f->n++] = (int32_t)number;
    return true;
}

/* Lists the neighbours of a centre in order. `own`: its number if it is its own
 * neighbour beside those that are searched for, else -1. */
static bool
list_neighbours(const phase *job, tfast_query *q, tfast_finding *f, int64_t own)
{
    const int64_t most = job->args->most;

    q->most = job->args->first ? -1 : most;
    f->n = 0;
    if (most != 0 && !tfast_find_neighbours(q, f)) {
        return false;
    }
    if (q->most > 0) {
        tfast_select_nearest(f, most);
    } else if (most > 0) {
        job->s->kernels->sort(f->found, f->spare, f->n);
        f->n = f->n < most ? f->n : most;
    }
    if (own >= 0 && !add_found(f, own)) {
        return false;
    }
    if (q->graph->grid.n_axes > 0 || most >= 0) {
        job->s->kernels->sort(f->found, f->spare, f->n);
    }
    return true;
}

/* A thread's room for lists. */
typedef struct {
    int32_t *at;
    int64_t left;
} room;

/* Keeps what was found as the list of centre `row`. */
static bool
keep_list(search *s, room *r, const tfast_finding *f, int64_t row)
{
    if (f->n + TFAST_CLOUD_SLACK > r->left) {
        const int64_t most = f->n + TFAST_CLOUD_SLACK, n = most > BLOCK ? most : BLOCK;
        block *b = malloc(sizeof *b + (size_t)n * sizeof *b->numbers);

        if (b == NULL) {
            return false;
        }
        b->next = s->blocks;
        while (!atomic_compare_exchange_weak(&s->blocks, &b->next, b)) {
        }
        *r = (room){b->numbers, n};
    }
    s->lists[row] = r->at;
    s->offsets[row + 1] = f->n;
    for (int64_t i = 0; i < f->n; i += TFAST_CLOUD_SLACK) { /* with what lies behind */
        memcpy(r->at + i, f->found + i, TFAST_CLOUD_SLACK * sizeof *r->at);
    }
    r->at += f->n;
    r->left -= f->n;
    return true;
}

/* Lists the neighbours of the centre that is number i in the order of the search. */
static bool
take_centre(const phase *job, const int64_t *ptr, int64_t i, int64_t g,
            tfast_finding *f, room *r)
{
    const tfast_neighbours_args *args = job->args;
    search *s = job->s;
    double centre[TFAST_MAX_POINT_DIM] = {0};
    tfast_query q = {.kernels = s->kernels,
                     .graph = &s->graphs[g],
                     .dim = (int)args->dim,
                     .centre = centre,
                     .radius = args->radius,
                     .bound = s->limit,
                     .place = -1};
    int64_t row = i, own = -1;

    if (s->itself) { /* in the order of the grid, so that near centres follow */
        const int64_t place = i - ptr[g], number = q.graph->cloud.index[place];
        const bool loop = args->loop && s->limit >= 0;

        row = ptr[g] + number;
        for (int d = 0; d < (int)args->dim; d++) {
            centre[d] = q.graph->cloud.axis[d][place];
        }
        own = loop && args->most >= 0 ? number : -1;
        q.place = loop && args->most < 0 ? -1 : place; /* -1: the search finds it */
    } else {
        load_point(centre, args, &args->centres, i);
    }
    return list_neighbours(job, &q, f, own) && keep_list(s, r, f, row);
}

static void
list_part(void *context, int part, int parts)
{
    phase *job = context;
    const tfast_neighbours_args *args = job->args;
    const tfast_points *centres = job->s->itself ? &args->points : &args->centres;
    tfast_finding f = {0};
    room r = {0};

    (void)part;
    (void)parts;
    for (int64_t i = atomic_fetch_add(&job->next, CHUNK);
         i < centres->n && !job->failed; i = atomic_fetch_add(&job->next, CHUNK)) {
        const int64_t end = centres->n - i < CHUNK ? centres->n : i + CHUNK;
        int64_t g = tfast_graph_of(centres->ptr, args->n_graphs, i);

        for (int64_t j = i; j < end; j++) {
            while (centres->ptr[g + 1] <= j) {
                g++;
            }
            if (!take_centre(job, centres->ptr, j, g, &f, &r)) {
                job->failed = true;
                break;
            }
        }
    }
    free(f.found);
    free(f.spare);
    free(f.squares);
}

/* ---- Edges ----------------------------------------------------------------------- */

static void
store(const tfast_neighbours_args *args, void *out, int64_t i, double value)
{
    switch (args->dtype) {
    case TFAST_F64:
        ((double *)out)[i] = value;
        break;
    case TFAST_F32:
        ((float *)out)[i] = (float)value;
        break;
    case TFAST_F16:
        ((uint16_t *)out)[i] = tfast_to_f16((float)value);
        break;
    default:
        ((uint16_t *)out)[i] = tfast_to_bf16((float)value);
    }
}

/* Writes the features of edges at .. end - 1, from the points first + list[i] to the
 * centre `row`. */
static void
write_features(const tfast_neighbours_args *args, const tfast_points *centres,
               int64_t row, const int32_t *list, int64_t first, int64_t at, int64_t end)
{
    const int dim = (int)args->dim;
    double point[TFAST_MAX_POINT_DIM] = {0}, centre[TFAST_MAX_POINT_DIM] = {0};

    load_point(centre, args, centres, row);
    for (int64_t e = at; e < end; e++) {
        double square = 0, distance;

        load_point(point, args, &args->points, first + list[e - at]);
        for (int d = 0; d < dim; d++) {
            point[d] -= centre[d];
            square += point[d] * point[d];
        }
        distance = sqrt(square);
        if (args->distance != NULL) {
            store(args, args->distance, e, distance);
        }
        for (int d = 0; d < dim; d++) {
            const int64_t i = e * dim + d;

            if (args->relative_position != NULL) {
                store(args, args->relative_position, i, point[d]);
            }
            if (args->unit_vector != NULL) {
                store(args, args->unit_vector, i,
                      distance > 0 ? point[d] / distance : 0);
            }
        }
    }
}

static void
write_part(void *context, int part, int parts)
{
    phase *job = context;
    const tfast_neighbours_args *args = job->args;
    const search *s = job->s;
    const tfast_points *centres = s->itself ? &args->points : &args->centres;
    const bool features = args->distance != NULL || args->relative_position != NULL ||
                          args->unit_vector != NULL;

    (void)part;
    (void)parts;
    for (int64_t i = atomic_fetch_add(&job->next, CHUNK); i < centres->n;
         i = atomic_fetch_add(&job->next, CHUNK)) {
        const int64_t end = centres->n - i < CHUNK ? centres->n : i + CHUNK;
        int64_t g = tfast_graph_of(centres->ptr, args->n_graphs, i);

        for (int64_t row = i; row < end; row++) {
            const int64_t at = s->offsets[row], n = s->offsets[row + 1] - at;

            while (centres->ptr[g + 1] <= row) {
                g++;
            }
            s->kernels->emit(args, at, s->offsets[end] - at, s->lists[row], n,
                             args->points.ptr[g], row);
            if (features) {
                write_features(args, centres, row, s->lists[row], args->points.ptr[g],
                               at, at + n);
            }
        }
    }
}

/* ---- The two functions of a plan ------------------------------------------------- */

static void
end(tfast_neighbours_plan *plan)
{
    search *s = (search *)plan;

    for (block *b = s->blocks, *next; b != NULL; b = next) {
        next = b->next;
        free(b);
    }
    free(s->offsets);
    free(s->lists);
    free(s->axes);
    free(s->index);
    free(s->start);
    free(s->graphs);
    free(s);
}

static tfast_status
no_memory(void)
{
    return tfast_fail(TFAST_ENOMEM, "no memory for the search for neighbours");
}

static int
count_parts(const tfast_neighbours_args *args)
{
    int64_t pairs = 0;

    for (int64_t g = 0; g < args->n_graphs && pairs < SERIAL; g++) {
        const int64_t n = args->points.ptr[g + 1] - args->points.ptr[g];

        pairs += n < SERIAL ? n * n : SERIAL;
    }
    return pairs < SERIAL ? 1 : tfast_num_threads();
}

static tfast_status
fill(tfast_neighbours_plan *plan, const tfast_neighbours_args *args)
{
    phase job = {.s = (search *)plan, .args = args};

    tfast_parallel(count_parts(args), write_part, &job);
    return TFAST_OK;
}

static search *
new_search(const tfast_neighbours_args *args, const tfast_neighbour_kernels *kernels)
{
    const size_t n = (size_t)args->points.n + TFAST_CLOUD_SLACK;
    const bool itself = args->centres.data == NULL;
    const size_t centres = (size_t)(itself ? args->points.n : args->centres.n);
    search *s = calloc(1, sizeof *s);

    if (s == NULL) {
        return NULL;
    }
    s->plan.fill = fill;
    s->plan.end = end;
    s->kernels = kernels;
    s->limit = tfast_neighbours_limit(args);
    s->itself = itself;
    s->offsets = calloc(centres + 1, sizeof *s->offsets);
    s->lists = malloc((centres + 1) * sizeof *s->lists);
    s->axes = malloc(n * (size_t)args->dim * sizeof *s->axes);
    s->index = malloc(n * sizeof *s->index);
    s->start = malloc((n + (size_t)args->n_graphs) * sizeof *s->start);
    s->graphs = malloc(((size_t)args->n_graphs + 1) * sizeof *s->graphs);
    if (s->offsets == NULL || s->lists == NULL || s->axes == NULL || s->index == NULL ||
        s->start == NULL || s->graphs == NULL) {
        end(&s->plan);
        return NULL;
    }
    for (int64_t d = 0; d < args->dim; d++) { /* what vectors read past the points */
        memset(s->axes + (d + 1) * (int64_t)n - TFAST_CLOUD_SLACK, 0,
               TFAST_CLOUD_SLACK * sizeof *s->axes);
    }
    memset(s->index + args->points.n, 0, TFAST_CLOUD_SLACK * sizeof *s->index);
    return s;
}

/* The first centre that is not finite, or their number. */
static int64_t
find_bad_centre(const tfast_neighbours_args *args)
{
    double centre[TFAST_MAX_POINT_DIM];

    for (int64_t i = 0; i < args->centres.n; i++) {
        if (!load_point(centre, args, &args->centres, i)) {
            return i;
        }
    }
    return args->centres.n;
}

tfast_status
tfast_neighbours_plan_cpu(tfast_neighbours_plan **plan, tfast_neighbours_args *args,
                          const tfast_neighbour_kernels *kernels)
{
    search *s = new_search(args, kernels);
    phase job = {.s = s, .args = args, .bad = args->points.n};
    const int parts = count_parts(args);
    tfast_status status = TFAST_OK;
    int64_t n, bad;

    if (s == NULL) {
        return no_memory();
    }
    n = s->itself ? args->points.n : args->centres.n;
    bad = s->itself ? n : find_bad_centre(args);
    tfast_parallel(parts, prepare_part, &job);
    if (job.bad < args->points.n) {
        status = tfast_neighbours_not_finite(tfast_fail, "points", job.bad);
    } else if (bad < n) {
        status = tfast_neighbours_not_finite(tfast_fail, "centres", bad);
    } else if (!job.failed) {
        job.next = 0;
        tfast_parallel(parts, list_part, &job);
    }
    if (job.failed) {
        status = no_memory();
    }
    if (status != TFAST_OK) {
        end(&s->plan);
        return status;
    }
    for (int64_t i = 0; i < n; i++) {
        s->offsets[i + 1] += s->offsets[i];
    }
    args->n_edges = s->offsets[n];
    *plan = &s->plan;
    return TFAST_OK;
}
