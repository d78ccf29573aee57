/* Appending graphs to a segment of one's own. */
#if !defined(_POSIX_C_SOURCE)
#    define _POSIX_C_SOURCE 200809L /* getpid, posix_memalign */
#endif
#include "writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 18, PAGE = 4096 }; /* a share of the L2 cache */

/* ---- Opening --------------------------------------------------------------------- */

static tfast_status
set_buffer(tfast_graph_writer *w, size_t room)
{
    void *data;

    if (posix_memalign(&data, PAGE, graph_align(room, PAGE)) != 0) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a graph of %zu bytes", room);
    }
    free(w->buffer);
    w->buffer = data;
    w->room = graph_align(room, PAGE);
    return TFAST_OK;
}

/* Header and schema reach the disk before the first graph, so that a broken header
 * can be told from one that was never whole. */
static tfast_status
write_header(tfast_graph_writer *w)
{
    graph_header header = {
        .major = GRAPH_MAJOR,
        .minor = GRAPH_MINOR,
        .schema_bytes = (uint32_t)w->schema->n_bytes,
        .endian = GRAPH_ENDIAN_PROBE,
    };
    size_t bytes = (size_t)graph_first_frame(w->schema->n_bytes);
    tfast_status status;
    int error;

    if (bytes > w->room) {
        status = set_buffer(w, bytes);
        if (status != TFAST_OK) {
            return status;
        }
    }
    memcpy(header.magic, GRAPH_HEADER_MAGIC, sizeof header.magic);
    memcpy(header.uuid, w->uuid, sizeof header.uuid);
    header.crc = graph_header_crc(&header, w->schema->bytes);
    memset(w->buffer, 0, bytes);
    memcpy(w->buffer, &header, sizeof header);
    memcpy(w->buffer + sizeof header, w->schema->bytes, w->schema->n_bytes);
    status = graph_write_all(w->file, w->path, w->buffer, bytes, 0);
    if (status == TFAST_OK && w->durable &&
        (error = graph_io_table->sync(w->file)) < 0) {
        status = graph_io_error("sync", w->path, error);
    }
    w->written = (int64_t)bytes;
    return status;
}

/* Under the cache's lock, so that nobody takes it for what a dead writer has left. */
static tfast_status
make_file(tfast_graph_writer *w)
{
    tfast_status status;

    w->file = graph_io_table->open(w->path, O_RDWR | O_CREAT | O_EXCL);
    if (w->file < 0) {
        return graph_io_error("create", w->path, w->file);
    }
    status = graph_lock_file(w->file, w->path); /* a reader may be trying it */
    status = status == TFAST_OK ? write_header(w) : status;
    if (status == TFAST_OK && w->durable) {
        status = graph_directory_sync(w->directory);
    }
    if (status != TFAST_OK) {
        graph_io_table->unlink(w->path);
    }
    return status;
}

static tfast_status
set_names(tfast_graph_writer *w, const char *directory)
{
    char path[GRAPH_PATH_BYTES];
    int error = graph_io_table->random(w->uuid, sizeof w->uuid);
    tfast_status status;

    if (error < 0) {
        return graph_io_error("draw a name in", directory, error);
    }
    status = graph_path(path, directory, "open", w->uuid, "");
    if (status != TFAST_OK) {
        return status;
    }
    w->seed = graph_crc(w->uuid, sizeof w->uuid);
    w->directory = malloc(strlen(directory) + 1);
    w->path = malloc(strlen(path) + 1);
    if (w->directory == NULL || w->path == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory to write %s", path);
    }
    memcpy(w->directory, directory, strlen(directory) + 1);
    memcpy(w->path, path, strlen(path) + 1);
    return TFAST_OK;
}

static tfast_status
prepare(tfast_graph_writer *w, const char *path, const void *schema,
        size_t schema_bytes)
{
    tfast_status status = tfast_graph_schema_parse(&w->schema, schema, schema_bytes);

    if (status != TFAST_OK) { /* here it is an argument, not a file */
        return status == TFAST_EIO ? TFAST_EINVAL : status;
    }
    w->index.n_counts = w->schema->header.n_counts;
    w->counts = malloc((size_t)w->index.n_counts * sizeof *w->counts + 1);
    w->sizes = malloc((size_t)w->index.n_counts * sizeof *w->sizes + 1);
    w->fields = calloc((size_t)w->schema->header.n_fields + 1, sizeof *w->fields);
    if (w->counts == NULL || w->sizes == NULL || w->fields == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory to write %s", path);
    }
    status = set_buffer(w, BUFFER_BYTES);
    return status == TFAST_OK ? set_names(w, path) : status;
}

tfast_status
tfast_graph_writer_open(tfast_graph_writer **writer, const char *path,
                        const void *schema, size_t schema_bytes, bool durable)
{
    tfast_graph_writer *w = calloc(1, sizeof *w);
    tfast_status status;
    int lock;

    *writer = NULL;
    if (w == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory to write %s", path);
    }
    w->file = -1;
    w->durable = durable;
    w->process = getpid();
    w->kernels = tfast_graph_kernels_in_use();
    status = prepare(w, path, schema, schema_bytes);
    if (status == TFAST_OK) {
        status = graph_directory_make(path, durable, &lock);
    }
    if (status == TFAST_OK) {
        status = graph_must_agree(path, w->schema);
        status = status == TFAST_OK ? make_file(w) : status;
        graph_unlock(lock);
    }
    if (status != TFAST_OK) {
        w->dead = true; /* its file, if there is one, is not touched again */
        tfast_graph_writer_free(w);
        return status;
    }
    *writer = w;
    return TFAST_OK;
}

/* ---- Committing ------------------------------------------------------------------ */

static tfast_status
die(tfast_graph_writer *w, tfast_status status)
{
    w->dead = true;
    w->error = status == TFAST_EIO      ? graph_errno()
               : status == TFAST_ENOMEM ? ENOMEM
                                        : 0;
    w->error = w->error == 0 ? EIO : w->error; /* no error of the system's */
    return status;
}

tfast_status
graph_writer_usable(const tfast_graph_writer *w)
{
    if (w->closed) {
        return tfast_fail(TFAST_EINVAL, "writer must be open, got a closed one");
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
    tfast_status status = TFAST_OK;

    if (w->used + bytes > w->room && w->used > 0) {
        status = flush(w);
    }
    return status == TFAST_OK && bytes > w->room ? set_buffer(w, bytes) : status;
}

void
graph_writer_added(tfast_graph_writer *w, size_t bytes, const uint32_t *counts)
{
    const graph_record *record = (const graph_record *)(w->buffer + w->used);

    w->group_crc = graph_crc_more(w->group_crc, &record->header_crc, 4);
    graph_index_add(&w->index, w->written + (int64_t)w->used, (int64_t)bytes, counts);
    w->used += bytes;
}

tfast_status
tfast_graph_writer_commit(tfast_graph_writer *w)
{
    graph_commit commit = {
        .magic = GRAPH_COMMIT_MAGIC,
        .records = (uint64_t)w->index.records,
        .previous = (uint64_t)w->last_commit,
        .group_crc = w->group_crc,
    };
    tfast_status status = graph_writer_usable(w);
    int64_t at = w->written + (int64_t)w->used;
    size_t bytes = (size_t)graph_commit_bytes(at);
    int error;

    if (status != TFAST_OK || w->index.records == w->committed) {
        return status;
    }
    status = graph_writer_room(w, bytes);
    if (status != TFAST_OK) {
        return status;
    }
    commit.crc = graph_commit_crc(w->seed, &commit);
    memset(w->buffer + w->used, 0, bytes);
    memcpy(w->buffer + w->used, &commit, sizeof commit);
    w->used += bytes;
    status = flush(w);
    if (status != TFAST_OK) {
        return status;
    }
    if (w->durable && (error = graph_io_table->datasync(w->file)) < 0) {
        return die(w, graph_io_error("sync", w->path, error));
    }
    w->committed = w->index.records;
    w->last_commit = at;
    w->group_crc = 0;
    return TFAST_OK;
}

/* ---- Closing --------------------------------------------------------------------- */

/* Under the cache's lock. A cache that has other segments must open after a loss of
 * power, so only where it is alone may a segment be entered that is not durable. */
static tfast_status
enter(const tfast_graph_writer *w, graph_contents *contents)
{
    const bool durable = w->durable || contents->head.n_segments > 0;
    graph_manifest_segment entry = {.records = 0};
    tfast_status status = graph_seal(w->file, w->path, &w->index, w->written,
                                     w->last_commit, durable, &entry);

    memcpy(entry.uuid, w->uuid, sizeof entry.uuid);
    if (status == TFAST_OK) {
        status = graph_seal_name(w->directory, w->uuid, durable);
    }
    if (status == TFAST_OK) {
        status = graph_contents_add(contents, &entry);
    }
    return status == TFAST_OK ? graph_contents_store(contents, w->directory, durable)
                              : status;
}

static tfast_status
finish(tfast_graph_writer *w)
{
    graph_contents contents = {0};
    tfast_status status;
    int error, lock;

    if (w->committed == 0) {
        error = graph_io_table->unlink(w->path);
        return error < 0 ? graph_io_error("delete", w->path, error) : TFAST_OK;
    }
    status = graph_lock(w->directory, &lock);
    if (status != TFAST_OK) {
        return status;
    }
    status = graph_contents_load(&contents, w->directory);
    status = status == TFAST_OK ? enter(w, &contents) : status;
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
    if (status != TFAST_OK) { /* a wait that a signal has ended may be tried again */
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
            graph_io_table->unlink(w->path); /* nothing in it was ever promised */
        }
        graph_unlock(w->file);
    } else if (w->file >= 0) {
        graph_io_table->close(w->file); /* the lock is the parent's */
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
