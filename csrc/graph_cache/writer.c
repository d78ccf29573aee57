/* A writer: creates its segment's file, buffers records, commits and closes. */
#if !defined(_POSIX_C_SOURCE)
#    define _POSIX_C_SOURCE 200809L /* getpid, posix_memalign */
#endif
#include "writer.h"

#include "schema_join.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 18, PAGE = 4096 }; /* fits into L2 */

/* ---- Opening --------------------------------------------------------------------- */

static tfast_status
set_buffer(tfast_graph_writer *w, size_t room)
{
    void *data;

    room = graph_align(room, PAGE);
    if (posix_memalign(&data, PAGE, room) != 0) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a graph of %zu bytes", room);
    }
    free(w->buffer);
    w->buffer = data;
    w->room = room;
    return TFAST_OK;
}

/* Header and schema are synced before the first record is written. Recovery (adopt.c)
 * relies on this: a broken header with a commit frame behind it was damaged later. */
static tfast_status
write_header(tfast_graph_writer *w)
{
    graph_header header = {
        .major = GRAPH_MAJOR,
        .minor = GRAPH_MINOR,
        .schema_bytes = (uint32_t)w->schema->n_bytes,
        .endian = GRAPH_ENDIAN_PROBE,
    };
    const size_t bytes = (size_t)graph_first_frame(w->schema->n_bytes);
    tfast_status status;

    if (bytes > w->room) {
        TRY(set_buffer(w, bytes));
    }
    memcpy(header.magic, GRAPH_HEADER_MAGIC, sizeof header.magic);
    memcpy(header.uuid, w->uuid, sizeof header.uuid);
    header.crc = graph_header_crc(&header, w->schema->bytes);
    memset(w->buffer, 0, bytes);
    memcpy(w->buffer, &header, sizeof header);
    memcpy(w->buffer + sizeof header, w->schema->bytes, w->schema->n_bytes);
    TRY(graph_write_all(w->file, w->path, w->buffer, bytes, 0));
    if (w->durable) {
        TRY(graph_sync(w->file, w->path));
    }
    w->written = (int64_t)bytes;
fail:
    return status;
}

/* Creates and locks the segment's file. The caller holds the cache's lock, so that no
 * process adopts the file before it is locked. */
static tfast_status
make_file(tfast_graph_writer *w)
{
    tfast_status status = graph_open(w->path, O_RDWR | O_CREAT | O_EXCL, &w->file);

    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_lock_file(w->file, w->path)); /* may wait: readers test it */
    TRY(write_header(w));
    if (w->durable) {
        TRY(graph_directory_sync(w->directory));
    }
    return TFAST_OK;
fail:
    graph_io_table->unlink(w->path);
    return status;
}

/* Sets up everything but the file. */
static tfast_status
prepare(tfast_graph_writer *w, const char *directory, const void *schema,
        size_t schema_bytes)
{
    char path[GRAPH_PATH_BYTES];
    tfast_status status;

    TRY(tfast_graph_schema_parse(&w->schema, schema, schema_bytes));
    w->index.n_counts = w->schema->header.n_counts;
    TRY(graph_alloc(&w->counts, w->schema->header.n_counts, sizeof *w->counts));
    TRY(graph_alloc(&w->sizes, w->schema->header.n_counts, sizeof *w->sizes));
    TRY(graph_alloc(&w->fields, w->schema->header.n_fields, sizeof *w->fields));
    TRY(set_buffer(w, BUFFER_BYTES));
    TRY(graph_draw_uuid(w->uuid, directory));
    w->commits.seed = graph_crc(w->uuid, sizeof w->uuid);
    TRY(graph_path(path, directory, "open", w->uuid, ""));
    TRY(graph_copy_text(&w->directory, directory));
    TRY(graph_copy_text(&w->path, path));
fail:
    return status;
}

tfast_status
tfast_graph_writer_open(tfast_graph_writer **writer, const char *path,
                        const void *schema, size_t schema_bytes, bool durable)
{
    tfast_graph_writer *w;
    tfast_status status;
    int lock;

    *writer = NULL;
    TRY(graph_alloc(&w, 1, sizeof *w));
    w->file = -1;
    w->durable = durable;
    w->process = getpid();
    TRY(prepare(w, path, schema, schema_bytes));
    TRY(graph_directory_make(path, durable, &lock));
    status = graph_schema_must_agree(path, w->schema);
    if (status == TFAST_OK) {
        status = make_file(w);
    }
    graph_unlock(lock);
    TRY(status);
    *writer = w;
    return TFAST_OK;
fail:
    if (w != NULL) {
        w->dead = true; /* tfast_graph_writer_free() then only closes the file */
    }
    tfast_graph_writer_free(w);
    return status;
}

/* ---- Appending ------------------------------------------------------------------- */

/* Marks the writer as dead after an I/O error; returns `status`. */
static tfast_status
die(tfast_graph_writer *w, tfast_status status)
{
    w->dead = true;
    w->error = status == TFAST_EIO      ? graph_errno()
               : status == TFAST_ENOMEM ? ENOMEM
                                        : 0;
    w->error = w->error == 0 ? EIO : w->error; /* no errno */
    return status;
}

tfast_status
graph_writer_usable(const tfast_graph_writer *w)
{
    if (w->closed) {
        return tfast_fail(TFAST_EINVAL,
                          "writer must be open, got a closed one; open another on the "
                          "same path to append");
    }
    return w->dead ? graph_io_error("go on after an error with", w->path, w->error)
                   : TFAST_OK;
}

static tfast_status
flush(tfast_graph_writer *w)
{
    tfast_status status =
        graph_write_all(w->file, w->path, w->buffer, w->used, w->written);

    if (status != TFAST_OK) {
        return die(w, status);
    }
    w->written += (int64_t)w->used;
    w->used = 0;
    return TFAST_OK;
}

tfast_status
graph_writer_room(tfast_graph_writer *w, size_t bytes)
{
    tfast_status status;

    TRY(graph_index_reserve(&w->index));
    if (w->used + bytes > w->room && w->used > 0) {
        TRY(flush(w));
    }
    if (bytes > w->room) {
        TRY(set_buffer(w, bytes));
    }
fail:
    return status;
}

void
graph_writer_added(tfast_graph_writer *w, size_t bytes, const uint32_t *counts)
{
    graph_commits_add(&w->commits, (const graph_record *)(w->buffer + w->used));
    graph_index_add(&w->index, w->written + (int64_t)w->used, (int64_t)bytes, counts);
    w->used += bytes;
}

tfast_status
graph_writer_copy(tfast_graph_writer *w, const void *record, int64_t bytes)
{
    graph_record *head;
    tfast_status status;

    TRY(graph_writer_usable(w));
    TRY(graph_writer_room(w, (size_t)bytes));
    head = (graph_record *)(w->buffer + w->used);
    memcpy(head, record, (size_t)bytes);
    head->header_crc = graph_record_header_crc(w->schema, w->commits.seed, head);
    graph_writer_added(w, (size_t)bytes, (const uint32_t *)(head + 1));
fail:
    return status;
}

/* ---- Committing and closing ------------------------------------------------------ */

tfast_status
tfast_graph_writer_commit(tfast_graph_writer *w)
{
    const graph_commit commit = graph_commits_frame(&w->commits);
    const int64_t at = w->written + (int64_t)w->used;
    const size_t bytes = (size_t)graph_commit_bytes(at);
    tfast_status status;

    TRY(graph_writer_usable(w));
    if (w->index.records == w->committed) {
        return TFAST_OK;
    }
    TRY(graph_writer_room(w, bytes));
    memset(w->buffer + w->used, 0, bytes);
    memcpy(w->buffer + w->used, &commit, sizeof commit);
    w->used += bytes;
    TRY(flush(w));
    if (w->durable) {
        status = graph_datasync(w->file, w->path);
        if (status != TFAST_OK) {
            return die(w, status);
        }
    }
    w->committed = w->index.records;
    w->commits.previous = (uint64_t)at;
    w->commits.group_crc = 0;
fail:
    return status;
}

/* Deletes the file if it has no graphs; otherwise seals the segment and adds it to the
 * manifest. A cache with other segments must still open after a loss of power, so then
 * this syncs even for a writer that is not durable. */
static tfast_status
finish(tfast_graph_writer *w)
{
    graph_contents contents = {.order = NULL};
    graph_manifest_segment entry;
    tfast_status status;
    bool durable;
    int lock;

    if (w->committed == 0) {
        return graph_unlink(w->path);
    }
    status = graph_lock(w->directory, &lock);
    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_contents_load(&contents, w->directory));
    durable = w->durable || contents.head.n_segments > 0;
    TRY(graph_seal(w->file, w->directory, w->uuid, &w->index, w->written,
                   w->commits.previous, durable, &entry));
    TRY(graph_contents_add(&contents, &entry));
    TRY(graph_contents_store(&contents, w->directory, durable));
fail:
    graph_contents_free(&contents);
    graph_unlock(lock);
    return status;
}

tfast_status
tfast_graph_writer_close(tfast_graph_writer *w)
{
    tfast_status status = tfast_graph_writer_commit(w);

    if (status != TFAST_OK) {
        return status;
    }
    status = finish(w);
    if (status != TFAST_OK) { /* after TFAST_EINTR close() may be called again */
        return status == TFAST_EINTR ? status : die(w, status);
    }
    w->closed = true;
    graph_io_table->close(w->file);
    w->file = -1;
    return TFAST_OK;
}

int64_t
tfast_graph_writer_appended(const tfast_graph_writer *w)
{
    return w->index.records;
}

int64_t
tfast_graph_writer_committed(const tfast_graph_writer *w)
{
    return w->committed;
}

void
tfast_graph_writer_free(tfast_graph_writer *w)
{
    if (w == NULL) {
        return;
    }
    if (w->file >= 0 && w->process == getpid()) {
        if (!w->closed && !w->dead && w->committed == 0) {
            graph_io_table->unlink(w->path); /* nothing in it was committed */
        }
        graph_unlock(w->file);
    } else if (w->file >= 0) {
        graph_io_table->close(w->file); /* LOCK_UN would unlock the parent's file too */
    }
    graph_index_free(&w->index);
    tfast_graph_schema_free(w->schema);
    free(w->fields);
    free(w->counts);
    free(w->sizes);
    free(w->scratch);
    free(w->buffer);
    free(w->directory);
    free(w->path);
    free(w);
}
