/* Adoption: seals the segments of dead writers and adds them to the manifest. */
#include "frames.h"
#include "seal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

/* ---- Recovery of one file -------------------------------------------------------- */

/* The intact prefix of a file is its longest prefix of valid frames that ends with a
 * commit frame. The tail behind it either was torn by a loss of power, and is cut off,
 * or was durable and has been damaged since, and must be kept. It was durable if
 *  1. the tail has a frame behind a commit frame: a writer appends after a commit only
 *     once the commit is on disk; or
 *  2. a commit frame in the tail has a `previous` that is also in the tail; or
 *  3. the segment's header is damaged and the file has a commit frame: the header is
 *     synced before any frame is written. */
typedef struct {
    tfast_graph_schema *schema; /* NULL: the header is damaged */
    graph_index index;          /* of the records in the intact prefix */
    graph_commits commits;
    int64_t end;     /* offset of the tail */
    int64_t records; /* in the intact prefix */
    int64_t lost;    /* records found in the tail */
    bool damaged;    /* the tail was durable */
} recovery;

/* *whole: a record's payload is complete and its checksum right. *data: the frame. */
static tfast_status
is_whole(graph_frames *frames, const graph_frame *frame, const uint8_t **data,
         bool *whole)
{
    const size_t head = frames->schema->record_bytes;
    tfast_status status = graph_frames_data(frames, frame->at, frame->bytes, data);

    *whole = status == TFAST_OK && *data != NULL &&
             graph_crc(*data + head, (size_t)frame->bytes - head) ==
                 ((const graph_record *)*data)->payload_crc;
    return status;
}

/* Extends the intact prefix by the next frame; *intact is false if it is not valid. */
static tfast_status
extend(recovery *r, graph_frames *frames, const graph_frame *frame, bool *intact)
{
    const uint8_t *data;
    tfast_status status = TFAST_OK;

    *intact = false;
    if (frame->kind == GRAPH_RECORD_FRAME) {
        TRY(is_whole(frames, frame, &data, intact));
        if (*intact) {
            const graph_record *record = (const graph_record *)data;

            TRY(graph_index_reserve(&r->index));
            graph_index_add(&r->index, frame->at, frame->bytes,
                            (const uint32_t *)(record + 1));
            graph_commits_add(&r->commits, record);
        }
    } else if (frame->kind == GRAPH_COMMIT_FRAME) {
        TRY(graph_frames_data(frames, frame->at, frame->bytes, &data));
        *intact = data != NULL && graph_commits_take(&r->commits, data, frame->at);
        if (*intact) {
            r->end = frame->at + frame->bytes;
            r->records = r->index.records;
        }
    }
fail:
    return status;
}

/* Scans the tail: counts its records and decides whether it was durable. */
static tfast_status
look_behind(recovery *r, graph_frames *frames)
{
    bool committed = r->schema == NULL; /* signs 1 and 3: the next frame is a proof */
    graph_frame frame;
    tfast_status status;

    frames->at = r->end;
    for (;;) {
        TRY(graph_frames_next(frames, &frame));
        if (frame.kind == GRAPH_END) {
            break;
        }
        if (frame.kind == GRAPH_GAP) {
            continue;
        }
        r->damaged = r->damaged || committed;
        r->lost += frame.kind == GRAPH_RECORD_FRAME;
        if (frame.kind == GRAPH_COMMIT_FRAME) {
            const uint8_t *data;

            TRY(graph_frames_data(frames, frame.at, sizeof(graph_commit), &data));
            r->damaged = r->damaged ||
                         ((const graph_commit *)data)->previous > r->commits.previous;
            committed = true;
        }
    }
fail:
    return status;
}

static void
recovery_free(recovery *r)
{
    tfast_graph_schema_free(r->schema);
    graph_index_free(&r->index);
}

static tfast_status
wrong_name(const char *path)
{
    return graph_damage("%s must have the name of its own uuid: rename it back, or "
                        "delete it if it is a copy",
                        path);
}

/* Fills *r. The caller calls recovery_free(), also after an error. */
static tfast_status
recover(recovery *r, int file, const char *path, const uint8_t uuid[16])
{
    graph_frames frames = {.file = -1};
    graph_header header;
    graph_frame frame;
    bool intact;
    int64_t begin, bytes;
    tfast_status status;

    memset(r, 0, sizeof *r);
    TRY(graph_size(file, path, &bytes));
    status = graph_segment_header(file, path, bytes, &header, &r->schema, &begin);
    if (status != TFAST_OK && (status != TFAST_EIO || graph_errno() != 0)) {
        return status; /* an I/O error, not a damaged header */
    }
    if (r->schema != NULL && memcmp(header.uuid, uuid, 16) != 0) {
        return wrong_name(path);
    }
    TRY(graph_frames_open(&frames, file, path, uuid, r->schema, false));
    r->commits.seed = frames.seed;
    if (r->schema != NULL) {
        r->index.n_counts = r->schema->header.n_counts;
        r->end = frames.at = begin;
        do {
            TRY(graph_frames_next(&frames, &frame));
            TRY(extend(r, &frames, &frame, &intact));
        } while (intact);
        r->index.records = r->records;
    }
    TRY(look_behind(r, &frames));
fail:
    graph_frames_close(&frames);
    return status;
}

/* ---- Files ----------------------------------------------------------------------- */

typedef struct {
    const char *directory;
    graph_contents contents;
    int64_t graphs, lost; /* results of tfast_graph_adopt() */
    bool changed;         /* `contents` has segments that the manifest on disk lacks */
    graph_error error;    /* of the first file that failed */
} adoption;

static tfast_status
enter(adoption *a, const graph_manifest_segment *entry)
{
    const tfast_status status = graph_contents_add(&a->contents, entry);

    if (status == TFAST_OK) {
        a->graphs += (int64_t)entry->records;
        a->changed = true;
    }
    return status;
}

/* Cuts off the tail of a locked file and seals it, or deletes it if the intact prefix
 * has no records. A tail that was durable is an error. */
static tfast_status
settle(adoption *a, int file, const char *path, const uint8_t uuid[16],
       const recovery *r)
{
    graph_manifest_segment entry;
    tfast_status status;
    int error;

    if (r->damaged) {
        return graph_damage("%s must be as it was committed, but is damaged after %lld "
                            "graphs: `trainfast cache repair` keeps what can be read",
                            path, (long long)r->records);
    }
    a->lost += r->lost;
    if (r->records == 0) {
        error = graph_io_table->unlink(path);
        return error < 0 && error != -ENOENT /* its writer may have deleted it */
                   ? graph_io_error("delete", path, error)
                   : graph_directory_sync(a->directory);
    }
    error = graph_io_table->truncate(file, r->end);
    if (error < 0) {
        return graph_io_error("truncate", path, error);
    }
    TRY(graph_seal(file, a->directory, uuid, &r->index, r->end, r->commits.previous,
                   true, &entry));
    TRY(enter(a, &entry));
fail:
    return status;
}

/* Locks a file exclusively if its writer is dead; otherwise sets *alive. The first try
 * is for a shared lock, which only a writer's exclusive lock refuses: readers hold a
 * shared lock for a moment when they make the same test. */
static tfast_status
lock_left(int file, const char *path, bool *alive)
{
    const int error = graph_io_table->lock(file, LOCK_SH | LOCK_NB);

    *alive = error == -EWOULDBLOCK;
    if (*alive) {
        return TFAST_OK;
    }
    return error < 0 ? graph_io_error("lock", path, error)
                     : graph_lock_file(file, path);
}

static tfast_status
adopt_open(adoption *a, const uint8_t uuid[16])
{
    char path[GRAPH_PATH_BYTES];
    recovery r = {.schema = NULL};
    bool alive;
    int file = -1;
    tfast_status status;

    TRY(graph_path(path, a->directory, "open", uuid, ""));
    status = graph_open(path, O_RDWR, &file);
    if (file == -ENOENT) { /* its writer has closed or deleted it */
        return TFAST_OK;
    }
    TRY(status);
    TRY(lock_left(file, path, &alive));
    if (!alive) {
        /* Recovery must see what is on disk. After a failed sync Linux marks the pages
         * as clean, so later syncs succeed although the page cache differs from the
         * disk. Dropping the cached pages makes reads go to the disk. */
        TRY(graph_datasync(file, path));
        graph_io_table->forget(file);
        TRY(recover(&r, file, path, uuid));
        TRY(settle(a, file, path, uuid, &r));
    }
fail:
    recovery_free(&r);
    if (file >= 0) {
        graph_unlock(file);
    }
    return status;
}

/* Adds a sealed segment whose writer died before it could add it to the manifest. */
static tfast_status
adopt_sealed(adoption *a, const uint8_t uuid[16])
{
    char path[GRAPH_PATH_BYTES];
    graph_manifest_segment entry = {.records = 0};
    graph_segment segment = {.file = -1};
    tfast_status status;

    if (graph_contents_has(&a->contents, uuid)) {
        return TFAST_OK;
    }
    TRY(graph_path(path, a->directory, "segment", uuid, ""));
    TRY(graph_segment_open(&segment, path, true));
    TRY(graph_datasync(segment.file, path)); /* its writer may not have been durable */
    memcpy(entry.uuid, uuid, sizeof entry.uuid);
    entry.records = (uint64_t)segment.records;
    entry.bytes = (uint64_t)segment.bytes;
    entry.trailer_crc = segment.trailer.crc;
    if (memcmp(segment.uuid, uuid, 16) != 0) {
        TRY(wrong_name(path));
    }
    TRY(graph_directory_sync(a->directory)); /* its name, for the same reason */
    TRY(enter(a, &entry));
fail:
    graph_segment_close(&segment);
    return status;
}

/* ---- All files of a cache -------------------------------------------------------- */

/* Adopts each file. Goes on after an error, so that one bad file does not block the
 * others, but stops if a signal has ended a wait. */
static void
adopt_files(adoption *a, const graph_uuids *uuids,
            tfast_status (*adopt)(adoption *a, const uint8_t uuid[16]))
{
    for (int64_t i = 0; i < uuids->n && a->error.status != TFAST_EINTR; i++) {
        const tfast_status status = adopt(a, uuids->data[i]);

        if (status != TFAST_OK && a->error.status == TFAST_OK) {
            graph_keep_error(&a->error, status);
        }
    }
}

/* Deletes manifests that were never renamed. The caller holds the cache's lock, so no
 * other process is writing them. */
static void
delete_temporary(const char *directory, const graph_uuids *temporary)
{
    char path[GRAPH_PATH_BYTES];

    for (int64_t i = 0; i < temporary->n; i++) {
        if (graph_path(path, directory, "manifest", temporary->data[i], ".tmp") ==
            TFAST_OK) {
            graph_io_table->unlink(path);
        }
    }
}

tfast_status
tfast_graph_adopt(const char *path, int64_t *graphs, int64_t *lost)
{
    adoption a = {.directory = path};
    graph_listing listing = {.manifest = false};
    int lock;
    tfast_status status;

    *graphs = *lost = 0;
    status = graph_lock_cache(path, &lock);
    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_list(&listing, path));
    TRY(graph_contents_load(&a.contents, path));
    delete_temporary(path, &listing.temporary);
    adopt_files(&a, &listing.open, adopt_open);
    adopt_files(&a, &listing.sealed, adopt_sealed);
    if (a.changed) {
        TRY(graph_contents_store(&a.contents, path, true));
    }
    status = graph_return_error(&a.error);
fail:
    graph_listing_free(&listing);
    graph_contents_free(&a.contents);
    graph_unlock(lock);
    *graphs = a.graphs;
    *lost = a.lost;
    return status;
}
