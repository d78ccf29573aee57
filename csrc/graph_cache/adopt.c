/* Adoption: what dead writers have left is sealed and entered into the manifest. */
#include "frames.h"
#include "seal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

/* ---- Recovery of one file -------------------------------------------------------- */

/* The longest beginning of the file whose frames are all valid, up to its last commit
 * frame, is intact. What follows was either torn by a loss of power, and is cut off, or
 * was durable and has been damaged since. It was durable if
 *  1. a frame follows a commit frame there: the writer goes on after a commit only when
 *     that is on the disk; or
 *  2. a commit frame there names a commit frame there as the one before it; or
 *  3. the segment's header is damaged and there is any commit frame: the header is
 *     durable first. */
typedef struct {
    tfast_graph_schema *schema; /* NULL: the header is damaged */
    graph_index index;          /* of the records before `end` */
    graph_commits commits;
    int64_t end;     /* of the intact beginning */
    int64_t records; /* in it */
    int64_t lost;    /* records behind it */
    bool damaged;    /* what follows was durable */
} recovery;

/* Whether the payload of a record frame is there and right; *data is the frame. */
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

/* Takes a frame into the beginning; *intact is false where it is not valid. */
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

/* Counts what lies behind the intact beginning, which ends at r->end. */
static tfast_status
look_behind(recovery *r, graph_frames *frames)
{
    bool committed = r->schema == NULL;
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

/* Fills *r, which recovery_free() empties, also after an error. */
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
        return status; /* the disk, not what is on it */
    }
    if (r->schema != NULL && memcmp(header.uuid, uuid, 16) != 0) {
        tfast_graph_schema_free(r->schema);
        r->schema = NULL;
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
    int64_t graphs, lost;
    bool changed;      /* contents have segments that the manifest lacks */
    graph_error error; /* the first */
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

/* Seals the intact beginning of a locked file, or deletes the file where that has no
 * records. */
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

/* Locks a file that its writer has left; *alive and no lock where the writer lives.
 * Readers share the lock for a moment to find that out, and only a writer has it
 * exclusively. */
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
        /* Recovery must see what a loss of power would leave. After a failed sync the
         * system takes pages for written, shows them for as long as it keeps them, and
         * lets the next sync pass over them: so they are dropped first. */
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

/* A sealed segment whose writer died before it could enter it into the manifest. */
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
    TRY(memcmp(segment.uuid, uuid, 16) == 0
            ? enter(a, &entry)
            : graph_damage("%s must have the name of its own uuid: rename it back, or "
                           "delete it if it is a copy",
                           path));
fail:
    graph_segment_close(&segment);
    return status;
}

/* ---- All files of a cache -------------------------------------------------------- */

/* Goes on after an error, so that one bad file does not hold up the others, unless a
 * signal has ended a wait. */
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

/* Manifests that were not renamed: nobody goes on with them, as the lock is ours. */
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
