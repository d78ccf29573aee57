/* The directory of a cache: its lock, the names in it. */
#ifndef GRAPH_CACHE_DIRECTORY_H
#define GRAPH_CACHE_DIRECTORY_H

#include "io.h"

/* flock(), waited for. TFAST_EINTR where a signal has ended the wait. */
tfast_status graph_lock_file(int file, const char *path);

/* The cache's lock, waited for. graph_lock_cache() makes no lock file where there is no
 * manifest. */
tfast_status graph_lock(const char *directory, int *lock);
tfast_status graph_lock_cache(const char *directory, int *lock);
/* Unlocks and closes a file. */
void graph_unlock(int file);

/* Flushes names; missing directories are errors. */
tfast_status graph_directory_sync(const char *directory);

/* "directory/<prefix>-<uuid in hexadecimal><suffix>". */
tfast_status graph_path(char path[GRAPH_PATH_BYTES], const char *directory,
                        const char *prefix, const uint8_t uuid[16], const char *suffix);

/* The segments that lie in a directory, whatever the manifest says. */
typedef struct {
    uint8_t (*open)[16];
    uint8_t (*sealed)[16];
    uint8_t (*temporary)[16]; /* manifests that were not renamed */
    int64_t n_open, n_sealed, n_temporary;
    bool strangers; /* files that are not ours */
    bool manifest;
    bool no_memory;
} graph_listing;
int graph_compare_uuids(const void *a, const void *b); /* for qsort() */
tfast_status graph_list(graph_listing *listing, const char *directory);
void graph_listing_free(graph_listing *listing);

#endif
