/* Reading frames one after another from a file that is not sealed, or damaged. */
#ifndef GRAPH_CACHE_SCAN_H
#define GRAPH_CACHE_SCAN_H

#include "manifest.h"
#include "segment.h"

/* A piece of a file in memory. Zero-initialise, then set file, path and bytes. */
typedef struct {
    int file;
    const char *path;
    int64_t bytes; /* of the file */
    uint32_t seed; /* crc of the segment's uuid */
    uint8_t *data;
    int64_t room, at, filled; /* data[filled] are the file's bytes from `at` on */
    /* What the disk cannot read is zeros, not an error, and the zeros of a commit frame
     * may be broken. */
    bool lenient;
} graph_window;

/* *piece: `bytes` of the file from `at` on, until the next call; NULL past its end. */
tfast_status graph_window_get(graph_window *window, int64_t at, int64_t bytes,
                              const uint8_t **piece);
void graph_window_free(graph_window *window);

typedef enum {
    GRAPH_NO_FRAME,
    GRAPH_RECORD_FRAME,
    GRAPH_COMMIT_FRAME
} graph_frame_kind;

/* What lies at `at`. A frame counts only with right checksums; *frame is in the window.
 * With `whole` false a record's payload is not looked at, nor its end. schema NULL:
 * only commit frames are looked for. */
tfast_status graph_frame_at(graph_window *window, const tfast_graph_schema *schema,
                            int64_t at, bool whole, graph_frame_kind *kind,
                            const uint8_t **frame, int64_t *bytes);

/* The next frame from `at` on, a multiple of 16, in steps of as much; *at is the file's
 * end and *kind GRAPH_NO_FRAME where there is none. A record's payload is not looked
 * at. */
tfast_status graph_frame_after(graph_window *window, const tfast_graph_schema *schema,
                               int64_t *at, graph_frame_kind *kind,
                               const uint8_t **frame, int64_t *bytes);

/* The index of a segment that is being written or scanned. */
typedef struct {
    int n_counts;
    int64_t records, room;
    uint64_t *offsets;
    uint32_t *units;
    uint32_t *counts; /* [records][n_counts] */
} graph_index;
tfast_status graph_index_reserve(graph_index *index); /* room for one more */
void graph_index_add(graph_index *index, int64_t offset, int64_t bytes,
                     const uint32_t *counts);
void graph_index_free(graph_index *index);

/* What recovery takes of a file that is not sealed. */
typedef struct {
    graph_header header;
    tfast_graph_schema *schema; /* NULL: not even the header is whole */
    int64_t begin;
    graph_index index;   /* of the committed records */
    int64_t last_commit; /* 0: none */
    int64_t end;         /* after the last commit frame, or `begin` */
    int64_t lost;        /* records after it, at least */
    bool damaged;        /* what had been made durable is broken: the rest after `end`
                            must be repaired, not cut off */
} graph_recovery;
tfast_status graph_recover(graph_recovery *recovery, int file, const char *path,
                           const uint8_t uuid[16]);
void graph_recovery_free(graph_recovery *recovery);

/* An error unless no build is under way and every segment is in the manifest; it says
 * what can be done. Reads none of the segments. */
tfast_status graph_must_be_closed(const char *directory, const graph_listing *listing,
                                  const graph_contents *contents);

#endif
