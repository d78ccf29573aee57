/* The begin and end of a build; the end sets the order and deletes unused segments. */
#include "manifest.h"

#include <errno.h>
#include <stdlib.h>

tfast_status
tfast_graph_build_begin(const char *path)
{
    graph_contents contents = {.order = NULL};
    int lock;
    tfast_status status = graph_directory_make(path, true, &lock);

    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_contents_load(&contents, path));
    if (!contents.head.building) {
        contents.head.building = 1;
        TRY(graph_contents_store(&contents, path, true));
    }
fail:
    graph_contents_free(&contents);
    graph_unlock(lock);
    return status;
}

tfast_status
tfast_graph_is_building(const char *path, bool *building)
{
    graph_contents contents = {.order = NULL};
    tfast_status status;

    TRY(graph_contents_load(&contents, path));
    *building = contents.head.building != 0;
fail:
    graph_contents_free(&contents);
    return status;
}

/* records[n]: the record numbers of the new order, in which no record may occur twice.
 * order NULL: the first n graphs. used[s]: the order has a record of segment s. */
static tfast_status
find_records(const graph_contents *contents, const uint64_t *order, uint64_t n,
             uint64_t *records, bool *used)
{
    const uint64_t n_graphs = contents->head.n_graphs;
    uint64_t *segment_of; /* of each record; UINT64_MAX once it has been taken */
    tfast_status status;

    TRY(graph_alloc(&segment_of, contents->n_records, sizeof *segment_of));
    for (uint64_t s = 0, at = 0; s < contents->head.n_segments; s++) {
        for (uint64_t i = 0; i < contents->segments[s].records; i++) {
            segment_of[at++] = s;
        }
    }
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t graph = order == NULL ? i : order[i];
        const uint64_t record = graph >= n_graphs         ? UINT64_MAX
                                : contents->order == NULL ? graph
                                                          : contents->order[graph];

        if (record == UINT64_MAX || segment_of[record] == UINT64_MAX) {
            TRY(tfast_fail(TFAST_EINVAL,
                           "order must have each of %llu graphs at most once, got %llu "
                           "at %llu; leave out repeated ones",
                           (unsigned long long)n_graphs, (unsigned long long)graph,
                           (unsigned long long)i));
        }
        records[i] = record;
        used[segment_of[record]] = true;
        segment_of[record] = UINT64_MAX;
    }
fail:
    free(segment_of);
    return status;
}

/* Makes `records` the order and takes ownership of it. NULL, or an order in which graph
 * i is record i, is stored as no order. */
static void
set_order(graph_contents *contents, uint64_t *records, uint64_t n)
{
    bool identity = n == contents->n_records;

    for (uint64_t i = 0; i < n && identity; i++) {
        identity = records == NULL || records[i] == i;
    }
    if (contents->order != records) {
        free(contents->order);
    }
    if (identity) {
        free(records);
        records = NULL;
    }
    contents->order = records;
    contents->head.ordered = !identity;
    contents->head.n_graphs = n;
}

/* Removes unused segments from `contents` and renumbers the records of the others. */
static tfast_status
drop_unused(graph_contents *contents, const bool *used)
{
    graph_manifest *head = &contents->head;
    uint64_t *shift; /* per record: how many records before it are dropped */
    uint64_t kept = 0, at = 0, dropped = 0;
    tfast_status status;

    TRY(graph_alloc(&shift, contents->n_records, sizeof *shift));
    for (uint64_t s = 0; s < head->n_segments; s++) {
        for (uint64_t i = 0; i < contents->segments[s].records; i++) {
            shift[at++] = dropped;
        }
        if (used[s]) {
            contents->segments[kept++] = contents->segments[s];
        } else {
            dropped += contents->segments[s].records;
        }
    }
    head->n_segments = kept;
    contents->n_records -= dropped;
    for (uint64_t i = 0; i < head->n_graphs && contents->order != NULL; i++) {
        contents->order[i] -= shift[contents->order[i]];
    }
    set_order(contents, contents->order, head->n_graphs);
fail:
    free(shift);
    return status;
}

/* Deletes unused segments. The stored manifest lists them already, with an order that
 * has none of their records; then the files are deleted; then a manifest without them
 * is stored. After a crash at any point readers need no deleted file, and adoption adds
 * no unused one. */
static tfast_status
delete_unused(graph_contents *contents, const char *directory, bool *used)
{
    char path[GRAPH_PATH_BYTES];
    bool any = false;
    tfast_status status = TFAST_OK;

    for (uint64_t s = 0; s < contents->head.n_segments; s++) {
        if (!used[s]) {
            int error;

            TRY(graph_path(path, directory, "segment", contents->segments[s].uuid, ""));
            error = graph_io_table->unlink(path);
            used[s] = error < 0 &&
                      error != -ENOENT; /* not deleted: stays listed, never read */
            any = any || !used[s];
        }
    }
    if (any) {
        TRY(graph_directory_sync(directory));
        TRY(drop_unused(contents, used));
        TRY(graph_contents_store(contents, directory, true));
    }
fail:
    return status;
}

/* Stores the cache with a new order of n graphs (NULL: the first n), and deletes the
 * segments that it does not need. */
static tfast_status
reorder(graph_contents *contents, const char *path, const uint64_t *order, uint64_t n,
        bool building)
{
    uint64_t *records;
    bool *used = NULL;
    tfast_status status;

    TRY(graph_alloc(&records, n, sizeof *records));
    TRY(graph_alloc(&used, contents->head.n_segments, sizeof *used));
    TRY(find_records(contents, order, n, records, used));
    set_order(contents, records, n);
    records = NULL;
    contents->head.building = building;
    TRY(graph_contents_store(contents, path, true));
    TRY(delete_unused(contents, path, used));
fail:
    free(records);
    free(used);
    return status;
}

tfast_status
tfast_graph_build_end(const char *path, const uint64_t *order, int64_t n)
{
    graph_contents contents = {.order = NULL};
    uint64_t graphs;
    int lock;
    tfast_status status = graph_lock_cache(path, &lock);

    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_contents_load(&contents, path));
    graphs = order == NULL ? contents.head.n_graphs : (uint64_t)n;
    if (graphs > contents.head.n_graphs) {
        TRY(tfast_fail(TFAST_EINVAL,
                       "order must have at most %llu graphs, got %llu; leave out "
                       "repeated ones",
                       (unsigned long long)contents.head.n_graphs,
                       (unsigned long long)graphs));
    }
    TRY(reorder(&contents, path, order, graphs, false));
fail:
    graph_contents_free(&contents);
    graph_unlock(lock);
    return status;
}

tfast_status
tfast_graph_build_anew(const char *path)
{
    graph_contents contents = {.order = NULL};
    int lock;
    tfast_status status = graph_lock_cache(path, &lock);

    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_contents_load(&contents, path));
    TRY(reorder(&contents, path, NULL, 0, true));
fail:
    graph_contents_free(&contents);
    graph_unlock(lock);
    return status;
}
