/* Reads a segment's file frame by frame: the only reader of files that are not sealed
 * or are damaged. It finds frames; adopt.c and repair.c decide what to do with them. */
#ifndef GRAPH_CACHE_FRAMES_H
#define GRAPH_CACHE_FRAMES_H

#include "segment.h"

typedef enum {
    GRAPH_RECORD_FRAME, /* header checksum is right; the payload is not checked and may
                           end behind the file's end */
    GRAPH_COMMIT_FRAME, /* checksum is right; the zeros after it are not checked */
    GRAPH_GAP,          /* bytes up to the next frame or the file's end */
    GRAPH_END
} graph_frame_kind;

typedef struct {
    graph_frame_kind kind;
    int64_t at, bytes; /* offset in the file, length */
} graph_frame;

/* A file being read. graph_frames_open() sets it up; the caller may change `at`. */
typedef struct {
    int file; /* the caller's; not closed here */
    const char *path;
    int64_t bytes;                    /* of the file */
    int64_t at;                       /* where to look next; a multiple of GRAPH_UNIT */
    uint32_t seed;                    /* crc of the segment's uuid */
    const tfast_graph_schema *schema; /* NULL: only commit frames are found */
    bool lenient;                     /* disk blocks that cannot be read become zeros */
    uint8_t *window;                  /* `filled` bytes of the file from window_at on */
    int64_t room, window_at, filled;  /* room: bytes allocated at window */
} graph_frames;

tfast_status graph_frames_open(graph_frames *frames, int file, const char *path,
                               const uint8_t uuid[16], const tfast_graph_schema *schema,
                               bool lenient);
void graph_frames_close(graph_frames *frames); /* frees the window */

/* Returns the frame at frames->at, or the gap up to the next frame, and moves
 * frames->at behind it. A last unit that is incomplete is ignored. */
tfast_status graph_frames_next(graph_frames *frames, graph_frame *frame);

/* *data: bytes at .. at + bytes - 1 of the file, valid until the next call of any of
 * these functions; NULL if the file is shorter. */
tfast_status graph_frames_data(graph_frames *frames, int64_t at, int64_t bytes,
                               const uint8_t **data);

#endif
