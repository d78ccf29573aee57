/* Reading a segment's file frame by frame, whatever its state: the one reader of files
 * that are not sealed, or are damaged. adopt.c and repair.c decide what to do with the
 * frames that it finds. */
#ifndef GRAPH_CACHE_FRAMES_H
#define GRAPH_CACHE_FRAMES_H

#include "segment.h"

typedef enum {
    GRAPH_RECORD_FRAME, /* its header's checksum is right; its payload is not checked,
                           and may end behind the file */
    GRAPH_COMMIT_FRAME, /* its checksum is right; its zeros are not checked */
    GRAPH_GAP,          /* bytes that are no frame */
    GRAPH_END
} graph_frame_kind;

typedef struct {
    graph_frame_kind kind;
    int64_t at, bytes; /* in the file */
} graph_frame;

/* A file that is read in order. graph_frames_open() sets it up; `at` may be changed. */
typedef struct {
    int file; /* the caller's */
    const char *path;
    int64_t bytes;                    /* of the file */
    int64_t at;                       /* of the next frame; a multiple of GRAPH_UNIT */
    uint32_t seed;                    /* crc of the segment's uuid */
    const tfast_graph_schema *schema; /* NULL: only commit frames are found */
    bool lenient;                     /* unreadable blocks of the disk are zeros */
    uint8_t *window;                  /* `filled` bytes of the file from window_at on */
    int64_t room, window_at, filled;
} graph_frames;

tfast_status graph_frames_open(graph_frames *frames, int file, const char *path,
                               const uint8_t uuid[16], const tfast_graph_schema *schema,
                               bool lenient);
void graph_frames_close(graph_frames *frames); /* frees its memory */

/* The frame at frames->at, or the gap up to the next one, and moves behind it. */
tfast_status graph_frames_next(graph_frames *frames, graph_frame *frame);

/* *data: bytes at .. at + bytes - 1 of the file, until the next call of any of these
 * functions; NULL where the file is shorter. */
tfast_status graph_frames_data(graph_frames *frames, int64_t at, int64_t bytes,
                               const uint8_t **data);

#endif
