/* The host side of the search for neighbours. The numbers of edges are read from the
 * device before their arrays can be made, so every search waits for it once. */
#include "host.h"
#include "neighbour_search.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    tfast_neighbours_plan plan; /* first */
    neighbours_call call;
    int64_t lists; /* see layout */
} search;

/* ---- Scratch --------------------------------------------------------------------- */

/* Of the nearest only: a list of what has been found for each of so many warps, with
 * room for twice the neighbours that are wanted, so that it is rarely full. */
enum { MOST_LISTS = 4096, SPARE = 128, MOST_LIST_BYTES = 64 << 20 };

/* Where the parts of the scratch begin, and how large it is. */
typedef struct {
    size_t found, ptr, centres_ptr, offsets, points, centres, keys, numbers;
    size_t bytes;
    int64_t room, lists;
} layout;

static size_t
take(layout *l, size_t bytes)
{
    const size_t at = l->bytes;

    l->bytes += (bytes + TFAST_SCRATCH_ALIGNMENT - 1) / TFAST_SCRATCH_ALIGNMENT *
                TFAST_SCRATCH_ALIGNMENT;
    return at;
}

static bool
is_wide(const tfast_neighbours_args *args)
{
    return args->dtype == TFAST_F64 || args->unit;
}

static bool
is_of_nearest(const tfast_neighbours_args *args)
{
    return args->most >= 0 && !args->first;
}

static int64_t
count_centres(const tfast_neighbours_args *args)
{
    return args->centres.data == NULL ? args->points.n : args->centres.n;
}

static void
take_lists(layout *l, const tfast_neighbours_args *args)
{
    const size_t entry = sizeof(uint64_t) + sizeof(uint32_t);
    const int64_t warps = NEIGHBOUR_WARPS, centres = count_centres(args);
    int64_t largest = 0, most;

    for (int64_t g = 0; g < args->n_graphs; g++) {
        const int64_t n = args->points.ptr[g + 1] - args->points.ptr[g];
        largest = n > largest ? n : largest;
    }
    /* `most` of the points, and the centre itself */
    most = (args->most < largest ? args->most : largest) + 1;
    l->room = 2 * most + SPARE;
    l->room = l->room < largest + 32 ? l->room : largest + 32;
    l->lists = MOST_LIST_BYTES / ((int64_t)entry * l->room);
    l->lists = l->lists < MOST_LISTS ? l->lists : MOST_LISTS;
    l->lists = l->lists < centres ? l->lists : centres;
    l->lists = l->lists < 1 ? 1 : l->lists;
    l->lists = (l->lists + warps - 1) / warps * warps; /* whole blocks */
    l->keys = take(l, sizeof(uint64_t) * (size_t)(l->lists * l->room));
    l->numbers = take(l, sizeof(uint32_t) * (size_t)(l->lists * l->room));
}

static layout
layout_of(const tfast_neighbours_args *args)
{
    const size_t real = is_wide(args) ? sizeof(double) : sizeof(float);
    const size_t point = real * (args->dim > 4 ? 8 : 4);
    const size_t ptr_bytes = sizeof(int64_t) * ((size_t)args->n_graphs + 1);
    const size_t centres = (size_t)count_centres(args);
    layout l = {0};

    l.found = take(&l, sizeof(neighbours_found));
    l.ptr = l.centres_ptr = take(&l, ptr_bytes);
    if (args->centres.data != NULL) {
        l.centres_ptr = take(&l, ptr_bytes);
    }
    l.offsets = take(&l, sizeof(int64_t) * (centres + 1));
    l.points = l.centres = take(&l, point * (size_t)args->points.n);
    if (args->centres.data != NULL) {
        l.centres = take(&l, point * centres);
    }
    if (is_of_nearest(args)) {
        take_lists(&l, args);
    }
    return l;
}

tfast_status
tfast_cuda_neighbours_scratch(int64_t *bytes, const tfast_neighbours_args *args)
{
    *bytes = (int64_t)layout_of(args).bytes;
    return TFAST_OK;
}

static neighbours_call
call_of(const layout *l, const tfast_neighbours_args *args)
{
    char *at = args->scratch;

    return (neighbours_call){*args,
                             tfast_neighbours_limit(args),
                             count_centres(args),
                             (neighbours_found *)(at + l->found),
                             (const int64_t *)(at + l->ptr),
                             (const int64_t *)(at + l->centres_ptr),
                             (int64_t *)(at + l->offsets),
                             at + l->points,
                             at + l->centres,
                             (uint64_t *)(at + l->keys),
                             (uint32_t *)(at + l->numbers),
                             (uint32_t)l->room};
}

/* ---- Launches -------------------------------------------------------------------- */

/* `wide` is the kernel behind `kernel`, for doubles. */
static tfast_status
launch(int kernel, const search *s, int64_t blocks)
{
    return LAUNCH(kernel + is_wide(&s->call.args), blocks < 1 ? 1 : blocks,
                  s->call.args.stream, s->call);
}

/* As many blocks as `rows` fill, or as fill the device. */
static tfast_status
launch_for_rows(int kernel, const search *s, int64_t rows, int rows_of_block)
{
    const int64_t wanted = (rows + rows_of_block - 1) / rows_of_block;
    int full;
    const tfast_status status = tfast_full_grid(&full, kernel + is_wide(&s->call.args));

    return status == TFAST_OK ? launch(kernel, s, wanted < full ? wanted : full)
                              : status;
}

static tfast_status
launch_for_centres(int kernel, const search *s)
{
    return launch_for_rows(kernel, s, s->call.n_centres, NEIGHBOUR_WARPS);
}

/* What the scratch begins with: zeros for what is found, and where the graphs begin. */
static char *
make_table(const layout *l, const tfast_neighbours_args *args)
{
    const size_t ptr_bytes = sizeof(int64_t) * ((size_t)args->n_graphs + 1);
    char *table = calloc(1, l->offsets);

    if (table != NULL) {
        memcpy(table + l->ptr, args->points.ptr, ptr_bytes);
        if (args->centres.data != NULL) {
            memcpy(table + l->centres_ptr, args->centres.ptr, ptr_bytes);
        }
    }
    return table;
}

static tfast_status
check_found(const neighbours_found *found, const search *s)
{
    const tfast_neighbours_args *args = &s->call.args;
    const bool is_point = found->bad_point != 0;

    if (found->bad_point == 0 && found->bad_centre == 0) {
        return TFAST_OK;
    }
    return tfast_neighbours_not_finite(
        tfast_cuda_fail, is_point ? "points" : "centres",
        is_point ? args->points.n - (int64_t)found->bad_point
                 : args->centres.n - (int64_t)found->bad_centre);
}

/* Enqueues the count, from the upload of the table, which is `bytes` long, to the copy
 * of what is found. */
static tfast_status
enqueue_count(neighbours_found *found, const search *s, const char *table, size_t bytes)
{
    const CUdeviceptr scratch = (CUdeviceptr)(uintptr_t)s->call.args.scratch;
    const CUstream stream = s->call.args.stream;
    const int64_t points = s->call.args.points.n, centres = s->call.n_centres;
    tfast_status status;

    CU_TRY(cuMemcpyHtoDAsync, (scratch, table, bytes, stream));
    status = launch_for_rows(KERNEL_neighbours_prepare, s,
                             points > centres ? points : centres, NEIGHBOUR_THREADS);
    if (status == TFAST_OK) {
        status = launch_for_centres(KERNEL_neighbours_count, s);
    }
    if (status == TFAST_OK) {
        status = LAUNCH(KERNEL_neighbours_scan, 1, stream, s->call);
    }
    if (status == TFAST_OK) {
        CU_TRY(cuMemcpyDtoHAsync, (found, scratch, sizeof *found, stream));
    }
    return status;
}

static tfast_status
count(search *s, const layout *l, int64_t *n_edges)
{
    const CUstream stream = s->call.args.stream;
    neighbours_found found = {0};
    tfast_status status, waited;
    char *table;
    int capture;

    CU_TRY(cuStreamIsCapturing, (stream, &capture));
    if (capture != CU_STREAM_CAPTURE_STATUS_NONE) {
        return tfast_cuda_fail(TFAST_EINVAL,
                               "stream must not capture during a search for "
                               "neighbours: the host reads how many edges there are");
    }
    table = make_table(l, &s->call.args);
    if (table == NULL) {
        return tfast_cuda_fail(TFAST_ENOMEM, "out of memory for a table");
    }
    status = enqueue_count(&found, s, table, l->offsets);
    /* Also after a failure: copies of `table` or to `found` may be under way. */
    waited = tfast_cuda_status(tfast_cuda_driver.cuStreamSynchronize(stream),
                               "cuStreamSynchronize");
    free(table);
    if (status == TFAST_OK) {
        status = waited;
    }
    *n_edges = found.n_edges;
    return status == TFAST_OK ? check_found(&found, s) : status;
}

/* ---- The plan -------------------------------------------------------------------- */

static tfast_status
fill(tfast_neighbours_plan *plan, const tfast_neighbours_args *args)
{
    search *s = (search *)plan;
    tfast_device_scope scope;
    tfast_status status = tfast_enter_device(&scope, args->device.index);

    s->call.args = *args;
    if (status == TFAST_OK) {
        status = is_of_nearest(args)
                     ? launch(KERNEL_neighbours_nearest, s, s->lists / NEIGHBOUR_WARPS)
                     : launch_for_centres(KERNEL_neighbours_fill, s);
    }
    tfast_leave_device(&scope);
    return status;
}

static void
end(tfast_neighbours_plan *plan)
{
    free(plan);
}

tfast_status
tfast_cuda_neighbours_count(tfast_neighbours_plan **plan, tfast_neighbours_args *args)
{
    const layout l = layout_of(args);
    search *s = malloc(sizeof *s);
    tfast_device_scope scope;
    tfast_status status;

    if (s == NULL) {
        return tfast_cuda_fail(TFAST_ENOMEM, "out of memory");
    }
    *s = (search){{fill, end}, call_of(&l, args), l.lists};
    status = tfast_enter_device(&scope, args->device.index);
    if (status == TFAST_OK) {
        status = count(s, &l, &args->n_edges);
    }
    tfast_leave_device(&scope);
    if (status != TFAST_OK) {
        free(s);
        return status;
    }
    *plan = &s->plan;
    return TFAST_OK;
}
