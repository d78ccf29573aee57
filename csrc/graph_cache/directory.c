/* A cache's directory: names, what lies in it, and the lock. */
#if !defined(_POSIX_C_SOURCE)
#    define _POSIX_C_SOURCE 200809L /* O_DIRECTORY */
#endif
#include "directory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

tfast_status
graph_path(char path[GRAPH_PATH_BYTES], const char *directory, const char *prefix,
           const uint8_t uuid[16], const char *suffix)
{
    char name[64], hexadecimal[33];

    for (int i = 0; i < 16; i++) {
        snprintf(hexadecimal + 2 * i, 3, "%02x", uuid[i]);
    }
    snprintf(name, sizeof name, "%s-%s%s", prefix, hexadecimal, suffix);
    return graph_join(path, directory, name);
}

static int
digit_of(char digit)
{
    return digit >= '0' && digit <= '9'   ? digit - '0'
           : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                                          : -1;
}

/* Whether a name is "<prefix>-<uuid><suffix>", and which. */
static bool
parse(const char *name, const char *prefix, uint8_t uuid[16], const char *suffix)
{
    size_t n = strlen(prefix);

    if (strncmp(name, prefix, n) != 0 || name[n] != '-' ||
        strlen(name) != n + 1 + 32 + strlen(suffix) ||
        strcmp(name + n + 33, suffix) != 0) {
        return false;
    }
    for (int i = 0; i < 16; i++) {
        int high = digit_of(name[n + 1 + 2 * (size_t)i]);
        int low = digit_of(name[n + 2 + 2 * (size_t)i]);

        if (high < 0 || low < 0) {
            return false;
        }
        uuid[i] = (uint8_t)(high * 16 + low);
    }
    return true;
}

/* ---- What lies there ------------------------------------------------------------- */

static void
note(uint8_t (**uuids)[16], int64_t *n, const uint8_t uuid[16], bool *no_memory)
{
    if ((*n & (*n - 1)) == 0) { /* room for powers of two */
        void *more = realloc(*uuids, (size_t)(*n == 0 ? 1 : *n * 2) * 16);

        if (more == NULL) {
            *no_memory = true;
            return;
        }
        *uuids = more;
    }
    memcpy((*uuids)[(*n)++], uuid, 16);
}

static void
visit(void *context, const char *name)
{
    graph_listing *listing = context;
    uint8_t uuid[16];

    if (listing->no_memory) {
        return;
    }
    if (parse(name, "open", uuid, "")) {
        note(&listing->open, &listing->n_open, uuid, &listing->no_memory);
    } else if (parse(name, "segment", uuid, "")) {
        note(&listing->sealed, &listing->n_sealed, uuid, &listing->no_memory);
    } else if (parse(name, "manifest", uuid, ".tmp")) {
        note(&listing->temporary, &listing->n_temporary, uuid, &listing->no_memory);
    } else if (strcmp(name, "manifest") == 0) {
        listing->manifest = true;
    } else if (strcmp(name, "lock") != 0) {
        listing->strangers = true;
    }
}

int
graph_compare_uuids(const void *a, const void *b)
{
    return memcmp(a, b, 16);
}

tfast_status
graph_list(graph_listing *listing, const char *directory)
{
    int error;

    memset(listing, 0, sizeof *listing);
    error = graph_io_table->list(directory, visit, listing);
    if (error < 0 || listing->no_memory) {
        graph_listing_free(listing);
        return graph_io_error("list", directory, error < 0 ? error : ENOMEM);
    }
    if (listing->n_open > 0) { /* the same order everywhere */
        qsort(listing->open, (size_t)listing->n_open, 16, graph_compare_uuids);
    }
    if (listing->n_sealed > 0) {
        qsort(listing->sealed, (size_t)listing->n_sealed, 16, graph_compare_uuids);
    }
    return TFAST_OK;
}

void
graph_listing_free(graph_listing *listing)
{
    free(listing->open);
    free(listing->sealed);
    free(listing->temporary);
    memset(listing, 0, sizeof *listing);
}

/* ---- Lock ------------------------------------------------------------------------ */

tfast_status
graph_lock_file(int file, const char *path)
{
    int error;

    do {
        error = graph_io_table->lock(file, LOCK_EX);
        if (error == -EINTR && graph_interrupted != NULL && graph_interrupted()) {
            return tfast_fail(TFAST_EINTR, "a signal has ended the wait for %s", path);
        }
    } while (error == -EINTR);
    return error < 0 ? graph_io_error("lock", path, error) : TFAST_OK;
}

tfast_status
graph_lock(const char *directory, int *lock)
{
    char path[GRAPH_PATH_BYTES];
    tfast_status status = graph_join(path, directory, "lock");

    if (status != TFAST_OK) {
        return status;
    }
    *lock = graph_io_table->open(path, O_RDWR | O_CREAT);
    if (*lock < 0) {
        return graph_io_error("open", path, *lock);
    }
    status = graph_lock_file(*lock, path);
    if (status != TFAST_OK) {
        graph_io_table->close(*lock);
    }
    return status;
}

tfast_status
graph_lock_cache(const char *directory, int *lock)
{
    char path[GRAPH_PATH_BYTES];
    tfast_status status = graph_join(path, directory, "manifest");
    int file;

    if (status != TFAST_OK) {
        return status;
    }
    file = graph_io_table->open(path, O_RDONLY);
    if (file < 0) {
        return graph_io_error("open", path, file);
    }
    graph_io_table->close(file);
    return graph_lock(directory, lock);
}

void
graph_unlock(int file)
{
    graph_io_table->lock(file, LOCK_UN); /* a forked child may hold it open */
    graph_io_table->close(file);
}

/* ---- Sync ---------------------------------------------------------------------- */

tfast_status
graph_directory_sync(const char *directory)
{
    int file = graph_io_table->open(directory, O_RDONLY | O_DIRECTORY);
    int error;

    if (file < 0) {
        return graph_io_error("open", directory, file);
    }
    error = graph_io_table->sync(file);
    graph_io_table->close(file);
    /* Some file systems cannot sync a directory, and then need not. */
    return error < 0 && error != -EINVAL && error != -ENOTSUP
               ? graph_io_error("sync", directory, error)
               : TFAST_OK;
}
