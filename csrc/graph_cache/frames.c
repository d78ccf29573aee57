/* Reading a file through a window in memory, and the search for frames. */
#include "frames.h"

#include <stdlib.h>
#include <string.h>

/* Bytes: PIECE is the least that is read at once. DISK_BLOCK: read_leniently() replaces
 * unreadable bytes by zeros in blocks of this size. */
enum { PIECE = 1 << 20, DISK_BLOCK = 512 };

tfast_status
graph_frames_open(graph_frames *frames, int file, const char *path,
                  const uint8_t uuid[16], const tfast_graph_schema *schema,
                  bool lenient)
{
    *frames = (graph_frames){
        .file = file,
        .path = path,
        .seed = graph_crc(uuid, 16),
        .schema = schema,
        .lenient = lenient,
    };
    return graph_size(file, path, &frames->bytes);
}

void
graph_frames_close(graph_frames *frames)
{
    free(frames->window);
    frames->window = NULL;
    frames->room = frames->filled = 0;
}

/* ---- Window ---------------------------------------------------------------------- */

/* Fills the window block by block, with zeros for blocks that cannot be read. */
static void
read_leniently(const graph_frames *frames, int64_t at, int64_t bytes)
{
    for (int64_t done = 0; done < bytes;) {
        int64_t n = DISK_BLOCK - (at + done) % DISK_BLOCK;

        n = n < bytes - done ? n : bytes - done;
        if (graph_read_all(frames->file, frames->path, frames->window + done, (size_t)n,
                           at + done) != TFAST_OK) {
            memset(frames->window + done, 0, (size_t)n);
        }
        done += n;
    }
}

tfast_status
graph_frames_data(graph_frames *frames, int64_t at, int64_t bytes, const uint8_t **data)
{
    const int64_t left = frames->bytes - at;
    int64_t wanted = bytes < PIECE ? PIECE : bytes;
    tfast_status status;

    *data = NULL;
    if (bytes > left) {
        return TFAST_OK;
    }
    if (at >= frames->window_at && at + bytes <= frames->window_at + frames->filled) {
        *data = frames->window + (at - frames->window_at);
        return TFAST_OK;
    }
    wanted = wanted < left ? wanted : left;
    if (frames->room < wanted) {
        graph_frames_close(frames);
        TRY(graph_alloc(&frames->window, (uint64_t)wanted, 1));
        frames->room = wanted;
    }
    frames->filled = 0;
    status =
        graph_read_all(frames->file, frames->path, frames->window, (size_t)wanted, at);
    if (status == TFAST_EIO && frames->lenient) {
        read_leniently(frames, at, wanted);
        status = TFAST_OK;
    }
    if (status == TFAST_OK) {
        frames->window_at = at;
        frames->filled = wanted;
        *data = frames->window;
    }
fail:
    return status;
}

/* ---- Frames ---------------------------------------------------------------------- */

/* The frame at frames->at; a GRAPH_GAP of GRAPH_UNIT bytes if there is none. */
static tfast_status
look(graph_frames *frames, graph_frame *frame)
{
    const tfast_graph_schema *schema = frames->schema;
    const uint8_t *data;
    tfast_status status;
    uint32_t magic;

    *frame = (graph_frame){.kind = GRAPH_GAP, .at = frames->at, .bytes = GRAPH_UNIT};
    TRY(graph_frames_data(frames, frames->at, GRAPH_UNIT, &data));
    memcpy(&magic, data, sizeof magic);
    if (magic == GRAPH_COMMIT_MAGIC) {
        graph_commit commit;

        TRY(graph_frames_data(frames, frames->at, sizeof commit, &data));
        if (data != NULL) {
            memcpy(&commit, data, sizeof commit);
            if (commit.crc == graph_commit_crc(frames->seed, &commit) &&
                commit.records <= (uint64_t)frames->at / sizeof(graph_record)) {
                frame->kind = GRAPH_COMMIT_FRAME;
                frame->bytes = graph_commit_bytes(frames->at);
            }
        }
    } else if (magic == GRAPH_RECORD_MAGIC && schema != NULL) {
        graph_record record;

        TRY(graph_frames_data(frames, frames->at, (int64_t)schema->record_bytes,
                              &data));
        if (data != NULL) {
            memcpy(&record, data, sizeof record);
            if (graph_record_header_crc(schema, frames->seed, data) ==
                    record.header_crc &&
                (int64_t)record.units * GRAPH_UNIT >= (int64_t)schema->record_bytes) {
                frame->kind = GRAPH_RECORD_FRAME;
                frame->bytes = (int64_t)record.units * GRAPH_UNIT;
            }
        }
    }
fail:
    return status;
}

tfast_status
graph_frames_next(graph_frames *frames, graph_frame *frame)
{
    const int64_t begin = frames->at;
    tfast_status status = TFAST_OK;

    frame->kind = GRAPH_GAP;
    while (frames->at + GRAPH_UNIT <= frames->bytes) {
        TRY(look(frames, frame));
        if (frame->kind != GRAPH_GAP) {
            break;
        }
        frames->at += GRAPH_UNIT;
    }
    if (frames->at == begin && frame->kind != GRAPH_GAP) {
        frames->at += frame->bytes; /* may be behind the file's end */
    } else {
        *frame = (graph_frame){.kind = frames->at == begin ? GRAPH_END : GRAPH_GAP,
                               .at = begin,
                               .bytes = frames->at - begin};
    }
fail:
    return status;
}
