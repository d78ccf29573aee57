/* A build's beginning and end, and whether a cache may be opened. */
#include "seal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

/* ---- Beginning and end ----------------------------------------------------------- */

tfast_status
tfast_graph_build_begin(const char *path)
{
    graph_contents contents = {0};
    tfast_status status;
    int lock;

    status = graph_directory_make(path, true, &lock);
    if (status != TFAST_OK) {
        return status;
    }
    status = graph_contents_load(&contents, path);
    if (status == TFAST_OK && !contents.head.building) {
        contents.head.building = 1;
        status = graph_contents_store(&contents, path, true);
    }
    graph_contents_free(&contents);
    graph_unlock(lock);
    return status;
}

/* *records: what each graph of the new order is, each at most once. `used` says of each
 * segment whether it has one of them. */
static tfast_status
find_records(const graph_contents *contents, const uint64_t *order, uint64_t n,
             uint64_t *records, bool *used)
{
    uint64_t n_graphs = contents->head.n_graphs;
    uint64_t *segment_of = malloc(contents->n_records * sizeof *segment_of + 1);
    tfast_status status = TFAST_OK;

    if (segment_of == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for %llu records",
                          (unsigned long long)contents->n_records);
    }
    for (uint64_t s = 0, at = 0; s < contents->head.n_segments; s++) {
        for (uint64_t i = 0; i < contents->segments[s].records; i++) {
            segment_of[at++] = s;
        }
    }
    for (uint64_t i = 0; i < n && status == TFAST_OK; i++) {
        uint64_t graph = order == NULL ? i : order[i];
        uint64_t record = graph >= n_graphs         ? UINT64_MAX
                          : contents->order == NULL ? graph
                                                    : contents->order[graph];

        if (record == UINT64_MAX || segment_of[record] == UINT64_MAX) {
            status = tfast_fail(TFAST_EINVAL,
                                "order must have each of %llu graphs at most once, got "
                                "%llu at %llu",
                                (unsigned long long)n_graphs, (unsigned long long)graph,
                                (unsigned long long)i);
        } else {
            records[i] = record;
            used[segment_of[record]] = true;
            segment_of[record] = UINT64_MAX;
        }
    }
    free(segment_of);
    return status;
}

/* Takes over `records`, which is NULL or in the order that they lie: no order. */
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

/* Takes segments that are not used out of the numbering. */
static tfast_status
drop_unused(graph_contents *contents, const bool *used)
{
    graph_manifest *head = &contents->head;
    uint64_t *shift = malloc(contents->n_records * sizeof *shift + 1);
    uint64_t kept = 0, at = 0, dropped = 0, n = head->n_graphs;
    uint64_t *order = contents->order;

    if (shift == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for %llu records",
                          (unsigned long long)contents->n_records);
    }
    for (uint64_t s = 0; s < head->n_segments; s++) {
        uint64_t records = contents->segments[s].records;

        for (uint64_t i = 0; i < records; i++) {
            shift[at++] = dropped;
        }
        if (used[s]) {
            contents->segments[kept++] = contents->segments[s];
        } else {
            dropped += records;
        }
    }
    head->n_segments = kept;
    contents->n_records -= dropped;
    for (uint64_t i = 0; i < n && order != NULL; i++) {
        order[i] -= shift[order[i]];
    }
    set_order(contents, order, n);
    free(shift);
    return TFAST_OK;
}

/* Deletes what the order has left out. First the manifest says that it is not wanted,
 * then the files go, then the manifest forgets them: whenever this stops, no segment is
 * missed, and none comes back. */
static tfast_status
delete_unused(graph_contents *contents, const char *directory, bool *used)
{
    char path[GRAPH_PATH_BYTES];
    bool any = false;
    tfast_status status = TFAST_OK;

    for (uint64_t s = 0; s < contents->head.n_segments && status == TFAST_OK; s++) {
        if (!used[s]) {
            int error;

            status =
                graph_path(path, directory, "segment", contents->segments[s].uuid, "");
            error = status == TFAST_OK ? graph_io_table->unlink(path) : 0;
            used[s] = error < 0 && error != -ENOENT; /* it stays: listed, unread */
            any = any || !used[s];
        }
    }
    if (status == TFAST_OK && any) {
        status = graph_directory_sync(directory);
        status = status == TFAST_OK ? drop_unused(contents, used) : status;
        status = status == TFAST_OK ? graph_contents_store(contents, directory, true)
                                    : status;
    }
    return status;
}

static tfast_status
end_locked(graph_contents *contents, const char *path, const uint64_t *order, int64_t n)
{
    tfast_status status = graph_contents_load(contents, path);
    uint64_t graphs = order == NULL ? contents->head.n_graphs : (uint64_t)n;
    uint64_t *records = NULL;
    bool *used = NULL;

    if (status != TFAST_OK) {
        return status;
    }
    if (graphs > contents->head.n_graphs) {
        return tfast_fail(TFAST_EINVAL, "order must have at most %llu graphs, got %llu",
                          (unsigned long long)contents->head.n_graphs,
                          (unsigned long long)graphs);
    }
    records = malloc(graphs * sizeof *records + 1);
    used = calloc(1, contents->head.n_segments + 1);
    if (records == NULL || used == NULL) {
        status = tfast_fail(TFAST_ENOMEM, "no memory for the order of %llu graphs",
                            (unsigned long long)graphs);
    } else {
        status = find_records(contents, order, graphs, records, used);
    }
    if (status == TFAST_OK) {
        set_order(contents, records, graphs);
        records = NULL;
        contents->head.building = 0;
        status = graph_contents_store(contents, path, true);
    }
    if (status == TFAST_OK) {
        status = delete_unused(contents, path, used);
    }
    free(records);
    free(used);
    return status;
}

tfast_status
tfast_graph_build_end(const char *path, const uint64_t *order, int64_t n)
{
    graph_contents contents = {0};
    tfast_status status;
    int lock;

    if (n < 0) {
        return tfast_fail(TFAST_EINVAL, "n must be >= 0, got %lld", (long long)n);
    }
    status = graph_lock_cache(path, &lock);
    if (status != TFAST_OK) {
        return status;
    }
    status = end_locked(&contents, path, order, n);
    graph_contents_free(&contents);
    graph_unlock(lock);
    return status;
}

/* ---- May it be opened? ----------------------------------------------------------- */

typedef struct {
    int64_t segments; /* that are not in the manifest */
    bool alive;       /* a writer is */
} pending;

/* Whoever adopts or repairs reads what is in it: that takes as long as the file is. */
static void
look_at_open(pending *p, const char *path)
{
    int file = graph_io_table->open(path, O_RDONLY);

    if (file < 0) {
        return;
    }
    p->segments++;
    p->alive =
        p->alive || graph_io_table->lock(file, LOCK_SH | LOCK_NB) == -EWOULDBLOCK;
    graph_io_table->lock(file, LOCK_UN); /* somebody may want to adopt it */
    graph_io_table->close(file);
}

static void
look_at_sealed(pending *p, const char *path)
{
    int file = graph_io_table->open(path, O_RDONLY);

    if (file == -ENOENT) {
        return; /* a build that has ended since has deleted it */
    }
    p->segments++;
    if (file >= 0) {
        graph_io_table->close(file);
    }
}

static tfast_status
incomplete(const char *directory, const graph_contents *contents, const pending *p)
{
    const char *what = p->alive ? "which is being written"
                       : contents->head.building
                           ? "whose build has not ended"
                           : "which a writer has left without closing it";
    const char *remedy = p->alive
                             ? "wait until it is closed, or open those with partial"
                             : "what was committed is safe: build it again to go on, "
                               "or keep it with `trainfast cache repair`";

    return graph_damage(
        "path must be a complete cache, got %s, %s: %lld graphs are sealed; %s",
        directory, what, (long long)contents->head.n_graphs, remedy);
}

tfast_status
graph_must_be_closed(const char *directory, const graph_listing *listing,
                     const graph_contents *contents)
{
    char path[GRAPH_PATH_BYTES];
    pending p = {0};

    for (int64_t i = 0; i < listing->n_open; i++) {
        if (graph_path(path, directory, "open", listing->open[i], "") != TFAST_OK) {
            return TFAST_EINVAL;
        }
        look_at_open(&p, path);
    }
    for (int64_t i = 0; i < listing->n_sealed; i++) {
        const uint8_t *uuid = listing->sealed[i];

        if (graph_path(path, directory, "segment", uuid, "") != TFAST_OK) {
            return TFAST_EINVAL;
        }
        if (!graph_contents_has(contents, uuid)) {
            look_at_sealed(&p, path);
        }
    }
    return p.segments == 0 && !contents->head.building
               ? TFAST_OK
               : incomplete(directory, contents, &p);
}
