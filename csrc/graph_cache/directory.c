/* A cache's directory: file names, listing, locks, sync. */
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

/* Whether a name is "<prefix>-<uuid><suffix>". Sets `uuid`, also to a part of it if the
 * name does not match. */
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

/* ---- Listing --------------------------------------------------------------------- */

static void
note(graph_listing *listing, graph_uuids *uuids, const uint8_t uuid[16])
{
    if (graph_grow(&uuids->data, uuids->n, 16) != TFAST_OK) {
        listing->no_memory = true;
        return;
    }
    memcpy(uuids->data[uuids->n++], uuid, 16);
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
        note(listing, &listing->open, uuid);
    } else if (parse(name, "segment", uuid, "")) {
        note(listing, &listing->sealed, uuid);
    } else if (parse(name, "manifest", uuid, ".tmp")) {
        note(listing, &listing->temporary, uuid);
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

static void
sort(graph_uuids *uuids)
{
    if (uuids->n > 0) { /* qsort() must not get NULL */
        qsort(uuids->data, (size_t)uuids->n, 16, graph_compare_uuids);
    }
}

bool
graph_uuids_have(const graph_uuids *uuids, const uint8_t uuid[16])
{
    return uuids->n > 0 && bsearch(uuid, uuids->data, (size_t)uuids->n, 16,
                                   graph_compare_uuids) != NULL;
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
    sort(&listing->open);
    sort(&listing->sealed);
    return TFAST_OK;
}

void
graph_listing_free(graph_listing *listing)
{
    free(listing->open.data);
    free(listing->sealed.data);
    free(listing->temporary.data);
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
            return tfast_fail(TFAST_EINTR,
                              "a signal ended the wait for the lock of %s; call again "
                              "to wait on",
                              path);
        }
    } while (error == -EINTR);
    return error < 0 ? graph_io_error("lock", path, error) : TFAST_OK;
}

tfast_status
graph_lock(const char *directory, int *lock)
{
    char path[GRAPH_PATH_BYTES];
    tfast_status status;

    TRY(graph_join(path, directory, "lock"));
    TRY(graph_open(path, O_RDWR | O_CREAT, lock));
    status = graph_lock_file(*lock, path);
    if (status != TFAST_OK) {
        graph_io_table->close(*lock);
    }
fail:
    return status;
}

tfast_status
graph_lock_cache(const char *directory, int *lock)
{
    char path[GRAPH_PATH_BYTES];
    tfast_status status;
    int file;

    TRY(graph_join(path, directory, "manifest"));
    TRY(graph_open(path, O_RDONLY, &file));
    graph_io_table->close(file);
    return graph_lock(directory, lock);
fail:
    return status;
}

void
graph_unlock(int file)
{
    graph_io_table->lock(file, LOCK_UN); /* closing alone keeps the lock if a forked
                                            child has inherited the descriptor */
    graph_io_table->close(file);
}

/* ---- Sync ------------------------------------------------------------------------ */

tfast_status
graph_directory_sync(const char *directory)
{
    int file, error;
    tfast_status status = graph_open(directory, O_RDONLY | O_DIRECTORY, &file);

    if (status != TFAST_OK) {
        return status;
    }
    error = graph_io_table->sync(file);
    graph_io_table->close(file);
    /* File systems that cannot sync a directory return EINVAL or ENOTSUP: no error. */
    return error < 0 && error != -EINVAL && error != -ENOTSUP
               ? graph_io_error("sync", directory, error)
               : TFAST_OK;
}
