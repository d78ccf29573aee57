/* The manifest of a cache, and the creation of a cache's directory. */
#ifndef GRAPH_CACHE_MANIFEST_H
#define GRAPH_CACHE_MANIFEST_H

#include "directory.h"
#include "format.h"

/* A manifest in memory. Empty if zero-initialised or after graph_contents_free(). */
typedef struct {
    graph_manifest head;
    graph_manifest_segment *segments;
    uint64_t *order;    /* [n_graphs]: record numbers; NULL: graph i is record i */
    uint64_t n_records; /* sum over all segments */
} graph_contents;

/* Reads and checks the manifest. TFAST_EIO with graph_errno() ENOENT: there is none. */
tfast_status graph_contents_load(graph_contents *contents, const char *directory);
void graph_contents_free(graph_contents *contents);

/* Replaces the manifest on disk by this one, with the generation increased by 1. The
 * caller holds the cache's lock. */
tfast_status graph_contents_store(graph_contents *contents, const char *directory,
                                  bool durable);

bool graph_contents_has(const graph_contents *contents, const uint8_t uuid[16]);

/* Adds a sealed segment and its records at the end, unless it is listed already. */
tfast_status graph_contents_add(graph_contents *contents,
                                const graph_manifest_segment *segment);

/* Creates the directory and an empty manifest if there are none. After success the
 * caller holds the cache's lock, *lock. */
tfast_status graph_directory_make(const char *directory, bool durable, int *lock);

#endif
