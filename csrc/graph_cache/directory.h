/* The directory of a cache: its lock, and the names of its files. */
#ifndef GRAPH_CACHE_DIRECTORY_H
#define GRAPH_CACHE_DIRECTORY_H

#include "io.h"

/* Waits for an exclusive flock() on a file. TFAST_EINTR: a signal ended the wait. */
tfast_status graph_lock_file(int file, const char *path);

/* Wait for the cache's lock and create the lock file if there is none. *lock:
 * descriptor for graph_unlock(). graph_lock_cache() creates nothing and fails with
 * ENOENT if there is no manifest. */
tfast_status graph_lock(const char *directory, int *lock);
tfast_status graph_lock_cache(const char *directory, int *lock);
/* Unlocks and closes a file. */
void graph_unlock(int file);

/* Makes the names in the directory durable. */
tfast_status graph_directory_sync(const char *directory);

/* Writes "directory/<prefix>-<uuid in hexadecimal><suffix>" to path. */
tfast_status graph_path(char path[GRAPH_PATH_BYTES], const char *directory,
                        const char *prefix, const uint8_t uuid[16], const char *suffix);

typedef struct {
    uint8_t (*data)[16];
    int64_t n;
} graph_uuids;

/* The files in a cache's directory. The manifest is not read. */
typedef struct {
    graph_uuids open, sealed; /* sorted */
    graph_uuids temporary;    /* temporary manifests that were never renamed */
    bool strangers;           /* there are files with other names */
    bool manifest, no_memory; /* there is a manifest; memory ran out while listing */
} graph_listing;
tfast_status graph_list(graph_listing *listing, const char *directory);
void graph_listing_free(graph_listing *listing);
bool graph_uuids_have(const graph_uuids *uuids, const uint8_t uuid[16]); /* sorted */
int graph_compare_uuids(const void *a, const void *b); /* for qsort() */

#endif
