/* The directory of a cache: its manifest, its lock, the names in it. */
#ifndef GRAPH_CACHE_MANIFEST_H
#define GRAPH_CACHE_MANIFEST_H

#include "io.h"

#include "format.h"

/* Zero-initialised is an empty one; graph_contents_free() empties it. */
typedef struct {
    graph_manifest head;
    graph_manifest_segment *segments;
    uint64_t *order;    /* NULL: as the records lie */
    uint64_t n_records; /* of all segments */
} graph_contents;

/* Reads and checks it. TFAST_EIO, with graph_errno() ENOENT, where there is none. */
tfast_status graph_contents_load(graph_contents *contents, const char *directory);
void graph_contents_free(graph_contents *contents);

/* Replaces the manifest by this, one generation on. Under the lock. */
tfast_status graph_contents_store(graph_contents *contents, const char *directory,
                                  bool durable);

bool graph_contents_has(const graph_contents *contents, const uint8_t uuid[16]);

/* Adds a sealed segment at the end, unless it is there. Under the lock. */
tfast_status graph_contents_add(graph_contents *contents,
                                const graph_manifest_segment *segment);

/* flock(), waited for. */
tfast_status graph_lock_file(int file, const char *path);

/* The cache's lock, waited for. graph_lock_cache() makes no lock file where there is no
 * manifest. */
tfast_status graph_lock(const char *directory, int *lock);
tfast_status graph_lock_cache(const char *directory, int *lock);
/* Unlocks and closes a file. */
void graph_unlock(int file);

/* Makes the directory and an empty manifest where there are none. *lock is held when it
 * succeeds. */
tfast_status graph_directory_make(const char *directory, bool durable, int *lock);

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
