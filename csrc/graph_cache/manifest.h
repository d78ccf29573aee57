/* The manifest of a cache, and how a directory becomes a cache. */
#ifndef GRAPH_CACHE_MANIFEST_H
#define GRAPH_CACHE_MANIFEST_H

#include "directory.h"
#include "format.h"

/* Zero-initialised is an empty manifest; graph_contents_free() empties one. */
typedef struct {
    graph_manifest head;
    graph_manifest_segment *segments;
    uint64_t *order;    /* NULL: graph i is record i */
    uint64_t n_records; /* of all segments */
} graph_contents;

/* Reads and checks the manifest. TFAST_EIO, with graph_errno() ENOENT, where there is
 * none. */
tfast_status graph_contents_load(graph_contents *contents, const char *directory);
void graph_contents_free(graph_contents *contents);

/* Replaces the manifest by this one, one generation on. Under the cache's lock. */
tfast_status graph_contents_store(graph_contents *contents, const char *directory,
                                  bool durable);

bool graph_contents_has(const graph_contents *contents, const uint8_t uuid[16]);

/* Adds a sealed segment at the end, unless it is listed already. */
tfast_status graph_contents_add(graph_contents *contents,
                                const graph_manifest_segment *segment);

/* Creates the directory and an empty manifest where there are none. *lock is the
 * cache's lock, held after success. */
tfast_status graph_directory_make(const char *directory, bool durable, int *lock);

#endif
