/* Frames one after another, and what recovery takes of a file that is not sealed. */
#include "scan.h"

#include <stdlib.h>
#include <string.h>

enum { PIECE = 1 << 20, BLOCK = 512 };

/* ---- Window ---------------------------------------------------------------------- */

/* Block by block, with zeros for those that cannot be read. */
static void
read_leniently(graph_window *window, int64_t at, int64_t bytes)
{
    for (int64_t done = 0; done < bytes;) {
        int64_t n = BLOCK - (at + done) % BLOCK;

        n = n < bytes - done ? n : bytes - done;
        if (graph_read_all(window->file, window->path, window->data + done, (size_t)n,
                           at + done) != TFAST_OK) {
            memset(window->data + done, 0, (size_t)n);
        }
        done += n;
    }
}

tfast_status
graph_window_get(graph_window *window, int64_t at, int64_t bytes, const uint8_t **piece)
{
    int64_t wanted = bytes < PIECE ? PIECE : bytes;
    tfast_status status;

    *piece = NULL;
    if (at > window->bytes || bytes > window->bytes - at) {
        return TFAST_OK;
    }
    if (at >= window->at && at + bytes <= window->at + window->filled) {
        *piece = window->data + (at - window->at);
        return TFAST_OK;
    }
    if (wanted > window->bytes - at) {
        wanted = window->bytes - at;
    }
    window->filled = 0;
    if (window->room < wanted) {
        free(window->data);
        window->data = malloc((size_t)wanted);
        window->room = window->data == NULL ? 0 : wanted;
        if (window->data == NULL) {
            return tfast_fail(TFAST_ENOMEM, "no memory for %lld bytes of %s",
                              (long long)wanted, window->path);
        }
    }
    status =
        graph_read_all(window->file, window->path, window->data, (size_t)wanted, at);
    if (status == TFAST_EIO && window->lenient) {
        read_leniently(window, at, wanted);
        status = TFAST_OK;
    }
    if (status != TFAST_OK) {
        return status;
    }
    window->at = at;
    window->filled = wanted;
    *piece = window->data;
    return TFAST_OK;
}

void
graph_window_free(graph_window *window)
{
    free(window->data);
    window->data = NULL;
    window->room = window->filled = 0;
}

/* ---- Frames ---------------------------------------------------------------------- */

static tfast_status
commit_at(graph_window *window, int64_t at, graph_frame_kind *kind,
          const uint8_t **frame, int64_t *bytes)
{
    graph_commit commit;
    int64_t all = graph_commit_bytes(at), left = window->bytes - at;
    tfast_status status;

    if (window->lenient && all > left) {
        all = left;
    }
    status = graph_window_get(window, at, all, frame);
    if (status != TFAST_OK || *frame == NULL || all < (int64_t)sizeof commit) {
        return status;
    }
    memcpy(&commit, *frame, sizeof commit);
    if (commit.crc == graph_commit_crc(window->seed, &commit) &&
        commit.records <= (uint64_t)at / sizeof(graph_record) && /* as fit before it */
        (window->lenient ||
         graph_all_zero(*frame + sizeof commit, all - (int64_t)sizeof commit))) {
        *kind = GRAPH_COMMIT_FRAME;
        *bytes = all;
    }
    return TFAST_OK;
}

static tfast_status
record_at(graph_window *window, const tfast_graph_schema *schema, int64_t at,
          bool whole, graph_frame_kind *kind, const uint8_t **frame, int64_t *bytes)
{
    int64_t before = (int64_t)schema->record_bytes;
    graph_record record;
    tfast_status status = graph_window_get(window, at, before, frame);

    if (status != TFAST_OK || *frame == NULL) {
        return status;
    }
    memcpy(&record, *frame, sizeof record);
    *bytes = (int64_t)record.units * GRAPH_UNIT;
    if (graph_record_header_crc(schema, window->seed, *frame) != record.header_crc ||
        *bytes < before) {
        return TFAST_OK;
    }
    if (whole) {
        status = graph_window_get(window, at, *bytes, frame);
        if (status != TFAST_OK || *frame == NULL || /* it may have been read again: */
            graph_record_header_crc(schema, window->seed, *frame) !=
                record.header_crc ||
            graph_crc(*frame + before, (size_t)(*bytes - before)) !=
                record.payload_crc) {
            return status;
        }
    }
    *kind = GRAPH_RECORD_FRAME;
    return TFAST_OK;
}

tfast_status
graph_frame_at(graph_window *window, const tfast_graph_schema *schema, int64_t at,
               bool whole, graph_frame_kind *kind, const uint8_t **frame,
               int64_t *bytes)
{
    uint32_t magic;
    tfast_status status = graph_window_get(window, at, sizeof magic, frame);

    *kind = GRAPH_NO_FRAME;
    *bytes = 0;
    if (status != TFAST_OK || *frame == NULL) {
        return status;
    }
    memcpy(&magic, *frame, sizeof magic);
    if (magic == GRAPH_COMMIT_MAGIC) {
        return commit_at(window, at, kind, frame, bytes);
    }
    if (magic == GRAPH_RECORD_MAGIC && schema != NULL) {
        return record_at(window, schema, at, whole, kind, frame, bytes);
    }
    return TFAST_OK;
}

tfast_status
graph_frame_after(graph_window *window, const tfast_graph_schema *schema, int64_t *at,
                  graph_frame_kind *kind, const uint8_t **frame, int64_t *bytes)
{
    *kind = GRAPH_NO_FRAME;
    for (; *at + GRAPH_UNIT <= window->bytes; *at += GRAPH_UNIT) {
        tfast_status status =
            graph_frame_at(window, schema, *at, false, kind, frame, bytes);

        if (status != TFAST_OK || *kind != GRAPH_NO_FRAME) {
            return status;
        }
    }
    *at = window->bytes;
    return TFAST_OK;
}

/* ---- Index ----------------------------------------------------------------------- */

tfast_status
graph_index_reserve(graph_index *index)
{
    int64_t room = index->room * 2 + 256;
    void *offsets, *units, *counts;

    if (index->records < index->room) {
        return TFAST_OK;
    }
    offsets = realloc(index->offsets, (size_t)room * sizeof *index->offsets);
    index->offsets = offsets == NULL ? index->offsets : offsets;
    units = realloc(index->units, (size_t)room * sizeof *index->units);
    index->units = units == NULL ? index->units : units;
    counts = realloc(index->counts, (size_t)room * index->n_counts * 4 + 1);
    index->counts = counts == NULL ? index->counts : counts;
    if (offsets == NULL || units == NULL || counts == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the index of %lld graphs",
                          (long long)room);
    }
    index->room = room;
    return TFAST_OK;
}

void
graph_index_add(graph_index *index, int64_t offset, int64_t bytes,
                const uint32_t *counts)
{
    int64_t i = index->records++;

    index->offsets[i] = (uint64_t)offset;
    index->units[i] = (uint32_t)(bytes / GRAPH_UNIT);
    memcpy(index->counts + i * index->n_counts, counts, (size_t)index->n_counts * 4);
}

void
graph_index_free(graph_index *index)
{
    free(index->offsets);
    free(index->units);
    free(index->counts);
    memset(index, 0, sizeof *index);
}

/* ---- Recovery -------------------------------------------------------------------- */

/* What the frames from the beginning on have said so far. */
typedef struct {
    graph_recovery *to;
    graph_window *window;
    int64_t at;        /* of the next frame */
    int64_t committed; /* records */
    uint32_t group_crc;
} walk;

/* Whether a commit frame confirms exactly the records before it. */
static bool
take_commit(walk *w, const uint8_t *frame)
{
    graph_recovery *r = w->to;
    graph_commit commit;

    memcpy(&commit, frame, sizeof commit);
    if (commit.records != (uint64_t)r->index.records ||
        commit.previous != (uint64_t)r->last_commit ||
        commit.group_crc != w->group_crc || commit.reserved != 0) {
        return false;
    }
    w->committed = r->index.records;
    w->group_crc = 0;
    r->last_commit = w->at;
    r->end = w->at + graph_commit_bytes(w->at);
    return true;
}

static tfast_status
take_record(walk *w, const uint8_t *frame, int64_t bytes)
{
    const graph_record *record = (const graph_record *)frame;
    tfast_status status = graph_index_reserve(&w->to->index);

    if (status == TFAST_OK) {
        w->group_crc = graph_crc_more(w->group_crc, &record->header_crc, 4);
        graph_index_add(&w->to->index, w->at, bytes, (const uint32_t *)(record + 1));
    }
    return status;
}

/* The longest beginning of valid frames. */
static tfast_status
walk_frames(walk *w)
{
    graph_frame_kind kind = GRAPH_NO_FRAME;
    const uint8_t *frame;
    int64_t bytes;

    for (;; w->at += bytes) {
        tfast_status status = graph_frame_at(w->window, w->to->schema, w->at, true,
                                             &kind, &frame, &bytes);

        if (status == TFAST_OK && kind == GRAPH_RECORD_FRAME) {
            status = take_record(w, frame, bytes);
        }
        if (status != TFAST_OK || kind == GRAPH_NO_FRAME ||
            (kind == GRAPH_COMMIT_FRAME && !take_commit(w, frame))) {
            return status;
        }
    }
}

/* Counts what lies behind the last commit frame. A writer goes on after a commit only
 * when that has reached the disk: so a commit frame there with any frame behind it, or
 * that names one there as the one before, means that what was durable has been damaged
 * since. Without a header every commit frame means it, because the header is made
 * durable first. */
static tfast_status
look_behind(graph_recovery *r, graph_window *window)
{
    graph_frame_kind kind;
    graph_commit commit;
    const uint8_t *frame;
    int64_t at = r->end, bytes;
    bool committed = r->schema == NULL;

    for (;; at += bytes) {
        tfast_status status =
            graph_frame_after(window, r->schema, &at, &kind, &frame, &bytes);

        if (status != TFAST_OK || kind == GRAPH_NO_FRAME) {
            return status;
        }
        r->damaged = r->damaged || committed;
        if (kind == GRAPH_COMMIT_FRAME) {
            memcpy(&commit, frame, sizeof commit);
            r->damaged = r->damaged || commit.previous > (uint64_t)r->last_commit;
            committed = true;
        }
        r->lost += kind == GRAPH_RECORD_FRAME;
        bytes = kind == GRAPH_RECORD_FRAME ? GRAPH_UNIT : bytes;
    }
}

tfast_status
graph_recover(graph_recovery *recovery, int file, const char *path,
              const uint8_t uuid[16])
{
    graph_window window = {.file = file, .path = path, .seed = graph_crc(uuid, 16)};
    walk w = {.to = recovery, .window = &window};
    tfast_status status;

    memset(recovery, 0, sizeof *recovery);
    window.bytes = graph_io_table->size(file);
    if (window.bytes < 0) {
        return graph_io_error("read", path, (int)window.bytes);
    }
    status = graph_segment_header(file, path, window.bytes, &recovery->header,
                                  &recovery->schema, &recovery->begin);
    if (status != TFAST_OK && (status != TFAST_EIO || graph_errno() != 0)) {
        return status; /* the disk, not what is on it */
    }
    if (recovery->schema != NULL && memcmp(recovery->header.uuid, uuid, 16) == 0) {
        recovery->index.n_counts = recovery->schema->header.n_counts;
        recovery->end = w.at = recovery->begin;
        status = walk_frames(&w);
        recovery->index.records = w.committed;
    } else {
        tfast_graph_schema_free(recovery->schema);
        recovery->schema = NULL;
        recovery->end = 0;
        status = TFAST_OK;
    }
    if (status == TFAST_OK) {
        status = look_behind(recovery, &window);
    }
    graph_window_free(&window);
    if (status != TFAST_OK) {
        graph_recovery_free(recovery);
    }
    return status;
}

void
graph_recovery_free(graph_recovery *recovery)
{
    tfast_graph_schema_free(recovery->schema);
    graph_index_free(&recovery->index);
    memset(recovery, 0, sizeof *recovery);
}
