/* What dead writers have left, and builds: who may open a cache when. */
#include "seal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

/* ---- Adopting -------------------------------------------------------------------- */

typedef struct {
    const char *directory;
    graph_contents contents;
    graph_manifest_segment *found; /* sealed ones to enter into the manifest */
    int64_t n_found;
    int64_t graphs, lost;
    bool deleted;
    tfast_status error; /* the first, with its number and message */
    int error_number;
    char message[TFAST_MESSAGE_BYTES];
} adoption;

static void
note(adoption *a, const graph_manifest_segment *entry)
{
    a->found[a->n_found++] = *entry;
    a->graphs += (int64_t)entry->records;
}

/* Seals what was committed of a locked file, or deletes it where that is nothing. */
static tfast_status
settle(adoption *a, int file, const char *path, const uint8_t uuid[16],
       const graph_recovery *r)
{
    graph_manifest_segment entry = {.records = 0};
    tfast_status status;
    int error;

    if (r->damaged) {
        return graph_damage("%s must be as it was committed, but is damaged after %lld "
                            "graphs: `trainfast cache repair` keeps what can be read",
                            path, (long long)r->index.records);
    }
    a->lost += r->lost;
    if (r->index.records == 0) {
        error = graph_io_table->unlink(path);
        a->deleted = true;
        return error < 0 && error != -ENOENT /* its writer has done so meanwhile */
                   ? graph_io_error("delete", path, error)
                   : TFAST_OK;
    }
    memcpy(entry.uuid, uuid, sizeof entry.uuid);
    error = graph_io_table->truncate(file, r->end);
    if (error < 0) {
        return graph_io_error("truncate", path, error);
    }
    status = graph_seal(file, path, &r->index, r->end, r->last_commit, true, &entry);
    if (status == TFAST_OK) {
        status = graph_seal_name(a->directory, uuid, true);
    }
    if (status == TFAST_OK) {
        note(a, &entry);
    }
    return status;
}

/* Locks what a dead writer has left; false where its writer is alive. Readers share the
 * lock for a moment to find that out, and only a writer has it for itself. */
static bool
lock_dead(int file, const char *path, tfast_status *status)
{
    int error = graph_io_table->lock(file, LOCK_SH | LOCK_NB);

    *status = TFAST_OK;
    if (error == -EWOULDBLOCK) {
        return false;
    }
    *status =
        error < 0 ? graph_io_error("lock", path, error) : graph_lock_file(file, path);
    return *status == TFAST_OK;
}

/* What recovery is to see is what a loss of power would leave. Where a sync has failed,
 * its writer's or another adoption's, the system takes the pages for written, shows
 * them for as long as it keeps them, and lets the next sync pass over them. */
static tfast_status
see_the_disk(int file, const char *path)
{
    int error = graph_io_table->datasync(file);

    if (error < 0) {
        return graph_io_error("sync", path, error);
    }
    graph_io_table->forget(file);
    return TFAST_OK;
}

static tfast_status
adopt_open(adoption *a, const uint8_t uuid[16])
{
    char path[GRAPH_PATH_BYTES];
    graph_recovery recovery;
    tfast_status status = graph_path(path, a->directory, "open", uuid, "");
    int file;

    if (status != TFAST_OK) {
        return status;
    }
    file = graph_io_table->open(path, O_RDWR);
    if (file < 0) { /* its writer has closed or deleted it */
        return file == -ENOENT ? TFAST_OK : graph_io_error("open", path, file);
    }
    if (lock_dead(file, path, &status)) {
        status = see_the_disk(file, path);
        status =
            status == TFAST_OK ? graph_recover(&recovery, file, path, uuid) : status;
        if (status == TFAST_OK) {
            status = settle(a, file, path, uuid, &recovery);
            graph_recovery_free(&recovery);
        }
    }
    graph_unlock(file);
    return status;
}

/* A sealed segment whose writer died before it could enter it. */
static tfast_status
adopt_sealed(adoption *a, const uint8_t uuid[16])
{
    char path[GRAPH_PATH_BYTES];
    graph_manifest_segment entry = {.records = 0};
    graph_segment segment;
    tfast_status status = graph_path(path, a->directory, "segment", uuid, "");
    int error;

    if (status == TFAST_OK) {
        status = graph_segment_open(&segment, path, true);
    }
    if (status != TFAST_OK) {
        return status;
    }
    error = graph_io_table->datasync(segment.file); /* it may have been for scratch */
    memcpy(entry.uuid, uuid, sizeof entry.uuid);
    entry.records = (uint64_t)segment.records;
    entry.bytes = (uint64_t)segment.bytes;
    entry.trailer_crc = segment.trailer.crc;
    if (error < 0) {
        status = graph_io_error("sync", path, error);
    } else if (memcmp(segment.uuid, uuid, 16) == 0) {
        note(a, &entry);
    } else {
        status = graph_damage("%s must have the name of its own uuid", path);
    }
    graph_segment_close(&segment);
    return status;
}

/* Goes on after an error, so that one bad file does not hold up the others, unless a
 * signal wants an end; the first error is kept. */
static void
adopt_all(adoption *a, const graph_listing *listing)
{
    const int64_t n = listing->n_open + listing->n_sealed;

    for (int64_t i = 0; i < n && a->error != TFAST_EINTR; i++) {
        tfast_status status;

        if (i < listing->n_open) {
            status = adopt_open(a, listing->open[i]);
        } else if (graph_contents_has(&a->contents,
                                      listing->sealed[i - listing->n_open])) {
            continue;
        } else {
            status = adopt_sealed(a, listing->sealed[i - listing->n_open]);
        }
        if (status != TFAST_OK && a->error == TFAST_OK) {
            a->error = status;
            a->error_number = graph_errno();
            snprintf(a->message, sizeof a->message, "%s", tfast_message());
        }
    }
}

/* Names that no manifest writer will come back to, because the lock is ours. */
static void
delete_temporary(const char *directory, const graph_listing *listing)
{
    char path[GRAPH_PATH_BYTES];

    for (int64_t i = 0; i < listing->n_temporary; i++) {
        if (graph_path(path, directory, "manifest", listing->temporary[i], ".tmp") ==
            TFAST_OK) {
            graph_io_table->unlink(path);
        }
    }
}

static tfast_status
enter_found(adoption *a)
{
    tfast_status status = TFAST_OK;

    if (a->deleted) {
        status = graph_directory_sync(a->directory);
    }
    for (int64_t i = 0; i < a->n_found && status == TFAST_OK; i++) {
        status = graph_contents_add(&a->contents, &a->found[i]);
    }
    return status == TFAST_OK && a->n_found > 0
               ? graph_contents_store(&a->contents, a->directory, true)
               : status;
}

static tfast_status
adopt_locked(adoption *a)
{
    graph_listing listing;
    tfast_status status = graph_list(&listing, a->directory);
    size_t room = (size_t)(listing.n_open + listing.n_sealed);

    if (status == TFAST_OK) {
        status = graph_contents_load(&a->contents, a->directory);
    }
    if (status == TFAST_OK) {
        a->found = malloc(room * sizeof *a->found + 1);
        if (a->found == NULL) {
            status = tfast_fail(TFAST_ENOMEM, "no memory for %zu segments", room);
        }
    }
    if (status == TFAST_OK) {
        delete_temporary(a->directory, &listing);
        adopt_all(a, &listing);
        status = enter_found(a);
    }
    graph_listing_free(&listing);
    graph_contents_free(&a->contents);
    free(a->found);
    return a->error == TFAST_OK
               ? status
               : graph_fail_again(a->error, a->error_number, a->message);
}

tfast_status
tfast_graph_adopt(const char *path, int64_t *graphs, int64_t *lost)
{
    adoption a = {.directory = path};
    tfast_status status;
    int lock;

    *graphs = *lost = 0;
    status = graph_lock_cache(path, &lock);
    if (status != TFAST_OK) {
        return status;
    }
    status = adopt_locked(&a);
    graph_unlock(lock);
    *graphs = a.graphs;
    *lost = a.lost;
    return status;
}
