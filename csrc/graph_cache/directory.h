/* The directory of a cache: its lock, and the names of the files in it. */
#ifndef GRAPH_CACHE_DIRECTORY_H
#define GRAPH_CACHE_DIRECTORY_H

#include "io.h"

/* Waits for flock() on a file. TFAST_EINTR where a signal ended the wait. */
tfast_status graph_lock_file(int file, const char *path);

/* Waits for the cache's lock. graph_lock() creates the lock file where there is none;
 * graph_lock_cache() fails with ENOENT before that where there is no manifest. */
tfast_status graph_lock(const char *directory, int *lock);
tfast_status graph_lock_cache(const char *directory, int *lock);
/* Unlocks and closes a file. */
void graph_unlock(int file);

/* Makes the names in the directory durable. */
tfast_status graph_directory_sync(const char *directory);

/* "directory/<prefix>-<uuid in hexadecimal><suffix>". */
tfast_status graph_path(char path[GRAPH_PATH_BYTES], const char *directory,
                        const char *prefix, const uint8_t uuid[16], const char *suffix);

typedef struct {
    uint8_t (*data)[16];
    int64_t n;
} graph_uuids;

/* The files of a cache's directory, whatever the manifest says. */
typedef struct {
    graph_uuids open, sealed; /* sorted */
    graph_uuids temporary;    /* manifests that were not renamed */
    bool strangers;           /* there are files that are not a cache's */
    bool manifest, no_memory;
} graph_listing;
tfast_status graph_list(graph_listing *listing, const char *directory);
void graph_listing_free(graph_listing *listing);
bool graph_uuids_have(const graph_uuids *uuids, const uint8_t uuid[16]); /* sorted */
int graph_compare_uuids(const void *a, const void *b); /* for qsort() */

#endif
