/* Commit frames, the index of a growing segment, and sealing. */
#ifndef GRAPH_CACHE_SEAL_H
#define GRAPH_CACHE_SEAL_H

#include "manifest.h"
#include "segment.h"

/* The contents of the next commit frame. Set `seed` and zero-initialise the rest. */
typedef struct {
    uint32_t seed;      /* crc of the segment's uuid */
    uint32_t group_crc; /* of the records since the last commit frame */
    uint64_t records;   /* in the segment so far */
    uint64_t previous;  /* offset of the last commit frame, 0: none */
} graph_commits;
void graph_commits_add(graph_commits *commits, const graph_record *record);
graph_commit graph_commits_frame(const graph_commits *commits);

/* Whether `frame` (graph_commit_bytes(at) bytes, at offset `at` of the file) is exactly
 * the expected commit frame with its zeros. If so, it becomes the previous frame. */
bool graph_commits_take(graph_commits *commits, const uint8_t *frame, int64_t at);

/* The index of a segment that is being written or recovered. */
typedef struct {
    int n_counts;
    int64_t records, room; /* records in the index; records that fit */
    uint64_t *offsets;
    uint32_t *units;
    uint32_t *counts; /* [records][n_counts] */
} graph_index;
tfast_status graph_index_reserve(graph_index *index); /* for one more record */
void graph_index_add(graph_index *index, int64_t offset, int64_t bytes,
                     const uint32_t *counts);
void graph_index_free(graph_index *index);

/* Writes index and trailer at `end`, where the last commit frame ends, renames
 * open-<uuid> to segment-<uuid>, and with `durable` syncs both. last_commit: offset of
 * that frame. Fills *entry for the manifest. */
tfast_status graph_seal(int file, const char *directory, const uint8_t uuid[16],
                        const graph_index *index, int64_t end, uint64_t last_commit,
                        bool durable, graph_manifest_segment *entry);

#endif
