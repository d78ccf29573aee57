/* Salvaging one file. A sealed segment's index says where its records are. Without one,
 * frames are looked for: a record counts when a commit frame comes after it, or the
 * file was closed once, and where bytes are broken the next frame is found by its magic
 * and checksum. */
#include "salvage.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

/* What was found since the last commit frame. */
typedef enum { WHOLE, BROKEN, GAP } state;

typedef struct {
    int64_t at, bytes;
    state state; /* a gap: anything or nothing may have been there */
} item;

typedef struct {
    graph_salvage *to;
    graph_window window;
    tfast_graph_array *arrays;
    item *items;
    int64_t n_items, room;
    int64_t confirmed; /* records, by the last commit frame */
} salvaging;

/* ---- One record ------------------------------------------------------------------ */

static tfast_status
check_record(salvaging *s, int64_t at, int64_t bytes, const uint8_t **frame)
{
    const tfast_graph_schema *schema = s->to->schema;
    tfast_status status = graph_window_get(&s->window, at, bytes, frame);
    graph_record_view record = {*frame, NULL, bytes};

    if (status == TFAST_OK && *frame == NULL) {
        return graph_damage("it ends after the file");
    }
    if (status == TFAST_OK) {
        record.payload = *frame + schema->record_bytes;
        status = graph_record_arrays(schema, &record, s->arrays);
    }
    return status == TFAST_OK
               ? graph_record_check(schema, s->window.seed, &record, s->arrays)
               : status;
}

static tfast_status
hand_over(salvaging *s, int64_t number, int64_t at, int64_t bytes)
{
    const uint8_t *frame;
    tfast_status status = check_record(s, at, bytes, &frame);

    if (status == TFAST_EIO) {
        s->to->damaged++;
        s->to->bytes_skipped += bytes;
        return TFAST_OK;
    }
    if (status == TFAST_OK) {
        s->to->whole++;
        status = s->to->record(s->to->context, number, frame, bytes);
    }
    return status;
}

static tfast_status
salvage_indexed(salvaging *s, const graph_segment *segment)
{
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < segment->records && status == TFAST_OK; i++) {
        status = hand_over(s, i, (int64_t)segment->offsets[i],
                           (int64_t)segment->units[i] * GRAPH_UNIT);
    }
    return status;
}

/* ---- Frames ---------------------------------------------------------------------- */

static tfast_status
add_item(salvaging *s, int64_t at, int64_t bytes, state state)
{
    if (s->n_items == s->room) {
        int64_t room = s->room * 2 + 64;
        item *more = realloc(s->items, (size_t)room * sizeof *more);

        if (more == NULL) {
            return tfast_fail(TFAST_ENOMEM, "no memory for %lld frames",
                              (long long)room);
        }
        s->items = more;
        s->room = room;
    }
    s->items[s->n_items++] = (item){at, bytes, state};
    return TFAST_OK;
}

/* A commit frame has come: the records since the one before count. Their numbers are
 * counted from that one, or, behind all gaps, backwards from this one. */
static tfast_status
accept_group(salvaging *s, int64_t total)
{
    int64_t n_gaps = 0, n_records = 0, gaps = 0, records = 0, missing;
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < s->n_items; i++) {
        n_gaps += s->items[i].state == GAP;
        n_records += s->items[i].state != GAP;
    }
    missing = total - s->confirmed - n_records;
    for (int64_t i = 0; i < s->n_items && status == TFAST_OK; i++) {
        const item *it = &s->items[i];
        int64_t number = GRAPH_UNKNOWN;

        if (missing == 0 || (missing > 0 && gaps == 0)) {
            number = s->confirmed + records;
        } else if (missing > 0 && gaps == n_gaps) {
            number = total - n_records + records;
        }
        if (it->state == WHOLE) {
            status = hand_over(s, number, it->at, it->bytes);
        } else {
            s->to->damaged += it->state == BROKEN;
            s->to->bytes_skipped += it->bytes;
        }
        gaps += it->state == GAP;
        records += it->state != GAP;
    }
    s->to->damaged += missing > 0 ? missing : 0;
    s->confirmed = total;
    s->n_items = 0;
    return status;
}

/* Of a closed file, what follows the last commit frame that is left. Numbers are known
 * up to the first gap. */
static tfast_status
accept_rest(salvaging *s)
{
    bool known = true;
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < s->n_items && status == TFAST_OK; i++) {
        const item *it = &s->items[i];

        known = known && it->state != GAP;
        if (it->state == WHOLE) {
            status = hand_over(s, known ? s->confirmed + i : GRAPH_UNKNOWN, it->at,
                               it->bytes);
        } else {
            s->to->damaged += it->state == BROKEN;
            s->to->bytes_skipped += it->bytes;
        }
    }
    return status;
}

/* Takes what lies at *at, and moves on behind it. */
static tfast_status
take_frame(salvaging *s, int64_t *at)
{
    graph_frame_kind kind;
    const uint8_t *frame;
    int64_t bytes, from = *at;
    tfast_status status =
        graph_frame_at(&s->window, s->to->schema, from, true, &kind, &frame, &bytes);

    if (status == TFAST_OK && kind == GRAPH_NO_FRAME) { /* a header may be whole */
        status = graph_frame_at(&s->window, s->to->schema, from, false, &kind, &frame,
                                &bytes);
        if (status == TFAST_OK && kind == GRAPH_RECORD_FRAME &&
            bytes <= s->window.bytes - from) {
            *at = from + bytes;
            return add_item(s, from, bytes, BROKEN);
        }
        kind = GRAPH_NO_FRAME;
    }
    if (status != TFAST_OK) {
        return status;
    }
    if (kind == GRAPH_COMMIT_FRAME) {
        graph_commit commit;

        memcpy(&commit, frame, sizeof commit);
        *at = from + bytes;
        return accept_group(s, (int64_t)commit.records);
    }
    if (kind == GRAPH_RECORD_FRAME) {
        *at = from + bytes;
        return add_item(s, from, bytes, WHOLE);
    }
    *at = from + GRAPH_UNIT;
    status = graph_frame_after(&s->window, s->to->schema, at, &kind, &frame, &bytes);
    return status == TFAST_OK ? add_item(s, from, *at - from, GAP) : status;
}

static tfast_status
salvage_frames(salvaging *s, int64_t begin)
{
    int64_t at = begin;
    tfast_status status = TFAST_OK;

    while (status == TFAST_OK && at + GRAPH_UNIT <= s->window.bytes) {
        status = take_frame(s, &at);
    }
    if (s->to->closed && status == TFAST_OK) {
        return accept_rest(s);
    }
    for (int64_t i = 0; i < s->n_items; i++) {
        s->to->uncommitted += s->items[i].state != GAP;
    }
    return status;
}

/* ---- Files ----------------------------------------------------------------------- */

static tfast_status
open_window(graph_window *window, const char *path, const uint8_t uuid[16])
{
    memset(window, 0, sizeof *window);
    window->path = path;
    window->lenient = true;
    window->seed = graph_crc(uuid, 16);
    window->file = graph_io_table->open(path, O_RDONLY);
    if (window->file < 0) {
        return graph_io_error("open", path, window->file);
    }
    window->bytes = graph_io_table->size(window->file);
    if (window->bytes < 0) {
        int error = (int)window->bytes;

        graph_io_table->close(window->file);
        return graph_io_error("read", path, error);
    }
    return TFAST_OK;
}

static void
close_window(graph_window *window)
{
    graph_window_free(window);
    graph_io_table->close(window->file);
}

tfast_status
graph_salvage_file(graph_salvage *salvage)
{
    salvaging s = {.to = salvage};
    graph_segment segment;
    size_t n_fields = salvage->schema->header.n_fields;
    bool sealed = graph_segment_open(&segment, salvage->path, true) == TFAST_OK;
    tfast_status status = open_window(&s.window, salvage->path, salvage->uuid);

    if (status != TFAST_OK) {
        if (sealed) {
            graph_segment_close(&segment);
        }
        return status;
    }
    s.arrays = malloc(n_fields * sizeof *s.arrays + 1);
    if (s.arrays == NULL) {
        status = tfast_fail(TFAST_ENOMEM, "no memory for %zu fields", n_fields);
    } else if (sealed) {
        status = salvage_indexed(&s, &segment);
    } else {
        status = salvage_frames(&s, graph_first_frame(salvage->schema->n_bytes));
    }
    if (sealed) {
        graph_segment_close(&segment);
    }
    close_window(&s.window);
    free(s.items);
    free(s.arrays);
    return status;
}

tfast_status
graph_salvage_matches(const char *path, const uint8_t uuid[16],
                      const tfast_graph_schema *schema, bool *matches)
{
    graph_window window;
    graph_frame_kind kind = GRAPH_NO_FRAME;
    const uint8_t *frame;
    int64_t at = sizeof(graph_header), bytes = 0;
    tfast_status status = open_window(&window, path, uuid);

    *matches = false;
    if (status != TFAST_OK) {
        return status;
    }
    do {
        status = graph_frame_after(&window, schema, &at, &kind, &frame, &bytes);
        *matches = kind == GRAPH_RECORD_FRAME;
        at += bytes;
    } while (status == TFAST_OK && kind == GRAPH_COMMIT_FRAME);
    close_window(&window);
    return status;
}
