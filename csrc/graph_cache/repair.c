/* Repair: copies every committed graph that can still be read to a new cache, and keeps
 * the order of the old cache where its manifest can be read. */
#include "frames.h"
#include "writer.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One entry of a cache's order: the record with the cache-wide number `record` (counted
 * over all segments as the manifest lists them) is graph `place`. */
typedef struct {
    uint64_t record, place;
} entry;

enum { UNKNOWN = -1 }; /* in place of a record's number or a number of records */

/* One segment file of the damaged cache. */
typedef struct {
    uint8_t uuid[16];
    char path[GRAPH_PATH_BYTES];
    bool closed; /* named segment-<uuid>: sealed, so all its records are committed */
    bool listed; /* in the manifest */
    uint64_t first, records; /* if listed, as the manifest says: cache-wide number of
                                its first record, and number of its records */
    bool own_schema;         /* the file's own header and schema are intact */
    tfast_graph_schema *schema;
} source;

/* A record frame, or a gap: bytes that are no intact frame and may have held any number
 * of records and commit frames. */
typedef struct {
    int64_t at, bytes;
    bool gap;
} item;

typedef struct {
    const char *to;
    tfast_graph_repair_report *report;
    void (*line)(void *context, const char *text);
    void *context;
    graph_contents contents; /* empty where the manifest cannot be read */
    entry *wanted; /* [n_graphs], sorted by record; NULL: the old cache has no order */
    source *sources;
    int64_t n_sources;
    tfast_graph_writer *writer; /* of the current source's segment */
    uint64_t written;           /* records in the new cache */
    entry *placed;              /* [written]: new record number, old place */
    /* State of the current source. */
    const source *source;
    graph_frames frames;
    tfast_graph_array *arrays; /* [its fields] */
    item *items;               /* found since the last commit frame */
    int64_t n_items;
    int64_t confirmed; /* records up to the last commit frame, as that frame says */
    int64_t whole, damaged, uncommitted, bytes_skipped;
} repair;

TFAST_PRINTF(2, 3) static void say(const repair *r, const char *format, ...)
{
    char text[TFAST_MESSAGE_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    r->line(r->context, text);
}

/* ---- Copying one record ---------------------------------------------------------- */

static int
compare_records(const void *a, const void *b)
{
    const uint64_t x = ((const entry *)a)->record, y = ((const entry *)b)->record;

    return (x > y) - (x < y);
}

static int
compare_places(const void *a, const void *b)
{
    const entry *x = a, *y = b;

    return x->place != y->place ? (x->place > y->place) - (x->place < y->place)
                                : compare_records(a, b);
}

/* *place: the place in the old order of record `number` of the current source, or
 * UINT64_MAX (after all others) if it is not known or there is no order. False: the old
 * order left the record out, so it is not a graph of the cache. */
static bool
place_of(const repair *r, int64_t number, uint64_t *place)
{
    const source *s = r->source;
    const entry key = {s->first + (uint64_t)number, 0}, *found;

    *place = UINT64_MAX;
    if (r->wanted == NULL || !s->listed || number == UNKNOWN ||
        (uint64_t)number >= s->records) {
        return true;
    }
    found = bsearch(&key, r->wanted, r->contents.head.n_graphs, sizeof key,
                    compare_records);
    if (found != NULL) {
        *place = found->place;
    }
    return found != NULL;
}

/* Reads and verifies a record. *frame: its bytes, valid until the next read through
 * r->frames. TFAST_EIO: the record is damaged. */
static tfast_status
read_record(repair *r, const item *it, const uint8_t **frame)
{
    const tfast_graph_schema *schema = r->source->schema;
    graph_record_view record = {.bytes = it->bytes};
    tfast_status status;

    TRY(graph_frames_data(&r->frames, it->at, it->bytes, frame));
    if (*frame == NULL) {
        return graph_damage("its record ends after the file");
    }
    record.head = *frame;
    record.payload = *frame + schema->record_bytes;
    TRY(graph_record_arrays(schema, &record, r->arrays));
    TRY(graph_record_check(schema, r->frames.seed, &record, r->arrays));
fail:
    return status;
}

/* Copies record `number` (or UNKNOWN) of the current source to the new cache. A damaged
 * record is counted and skipped, without an error. */
static tfast_status
copy_record(repair *r, int64_t number, const item *it)
{
    const tfast_graph_schema *schema = r->source->schema;
    const uint8_t *frame;
    uint64_t place;
    tfast_status status = read_record(r, it, &frame);

    if (status == TFAST_EIO) {
        r->damaged++;
        r->bytes_skipped += it->bytes;
        return TFAST_OK;
    }
    TRY(status);
    r->whole++;
    if (!place_of(r, number, &place)) {
        return TFAST_OK;
    }
    if (r->writer == NULL) {
        TRY(tfast_graph_writer_open(&r->writer, r->to, schema->bytes, schema->n_bytes,
                                    true));
    }
    TRY(graph_grow(&r->placed, (int64_t)r->written, sizeof *r->placed));
    TRY(graph_writer_copy(r->writer, frame, it->bytes));
    r->placed[r->written] = (entry){r->written, place};
    r->written++;
fail:
    return status;
}

/* ---- One file -------------------------------------------------------------------- */

/* Copies the records in r->items, which are committed: they are followed by a commit
 * frame that counts `total` records so far, or (total UNKNOWN) by the end of a closed
 * file. If the gaps hold no records, all records are numbered forwards from
 * r->confirmed. Otherwise those before the first gap are; those behind the last gap are
 * numbered backwards from a known `total`; all others stay UNKNOWN. */
static tfast_status
accept(repair *r, int64_t total)
{
    int64_t n_gaps = 0, gaps = 0, records = 0, n_records, missing;
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < r->n_items; i++) {
        n_gaps += r->items[i].gap;
    }
    n_records = r->n_items - n_gaps;
    missing = total == UNKNOWN ? n_gaps : total - r->confirmed - n_records;
    for (int64_t i = 0; i < r->n_items; i++) {
        int64_t number = UNKNOWN;

        if (r->items[i].gap) {
            r->bytes_skipped += r->items[i].bytes;
            gaps++;
            continue;
        }
        if (missing == 0 || (missing > 0 && gaps == 0)) {
            number = r->confirmed + records;
        } else if (missing > 0 && gaps == n_gaps && total != UNKNOWN) {
            number = total - n_records + records;
        }
        records++;
        TRY(copy_record(r, number, &r->items[i]));
    }
    r->damaged += total != UNKNOWN && missing > 0 ? missing : 0;
    r->confirmed = total;
    r->n_items = 0;
fail:
    return status;
}

/* Copies the records of a file without a usable index. A record is committed if a
 * commit frame follows it or the file was closed. */
static tfast_status
copy_frames(repair *r)
{
    graph_frame frame;
    const uint8_t *data;
    tfast_status status;

    r->frames.at = graph_first_frame(r->source->schema->n_bytes);
    for (;;) {
        TRY(graph_frames_next(&r->frames, &frame));
        if (frame.kind == GRAPH_END) {
            break;
        }
        if (frame.kind == GRAPH_COMMIT_FRAME) {
            TRY(graph_frames_data(&r->frames, frame.at, sizeof(graph_commit), &data));
            TRY(accept(r, (int64_t)((const graph_commit *)data)->records));
        } else {
            TRY(graph_grow(&r->items, r->n_items, sizeof *r->items));
            r->items[r->n_items++] =
                (item){frame.at, frame.bytes, frame.kind == GRAPH_GAP};
        }
    }
    if (r->source->closed) {
        TRY(accept(r, UNKNOWN));
    }
    for (int64_t i = 0; i < r->n_items; i++) {
        r->uncommitted += !r->items[i].gap;
    }
fail:
    return status;
}

static tfast_status
copy_indexed(repair *r, const graph_segment *segment)
{
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < segment->records; i++) {
        const item it = {(int64_t)segment->offsets[i],
                         (int64_t)segment->units[i] * GRAPH_UNIT, false};

        TRY(copy_record(r, i, &it));
    }
fail:
    return status;
}

/* Copies the records of the current source. */
static tfast_status
copy_file(repair *r)
{
    const source *s = r->source;
    graph_segment segment;
    int file = -1;
    const bool indexed = graph_segment_open(&segment, s->path, true) == TFAST_OK;
    tfast_status status;

    r->n_items = r->confirmed = 0;
    r->whole = r->damaged = r->uncommitted = r->bytes_skipped = 0;
    TRY(graph_open(s->path, O_RDONLY, &file));
    TRY(graph_frames_open(&r->frames, file, s->path, s->uuid, s->schema, true));
    TRY(graph_alloc(&r->arrays, s->schema->header.n_fields, sizeof *r->arrays));
    TRY(indexed ? copy_indexed(r, &segment) : copy_frames(r));
    if (r->writer != NULL) {
        TRY(tfast_graph_writer_close(r->writer));
    }
fail:
    tfast_graph_writer_free(r->writer);
    r->writer = NULL;
    free(r->arrays);
    r->arrays = NULL;
    graph_frames_close(&r->frames);
    if (file >= 0) {
        graph_io_table->close(file);
    }
    graph_segment_close(&segment);
    return status;
}

/* Whether a record's head, whose checksum is right, is one of this schema. */
static bool
fits(const tfast_graph_schema *schema, const uint8_t *data, int64_t bytes,
     tfast_graph_array *arrays)
{
    const graph_record_view record = {data, data + schema->record_bytes, bytes};

    return graph_record_arrays(schema, &record, arrays) == TFAST_OK &&
           graph_record_head_ends_in_zeros(schema, data);
}

/* *match: the file has records, and all of them fit this schema. The checksum of their
 * heads depends on the schema's size alone. */
static tfast_status
matches(const source *s, const tfast_graph_schema *schema, bool *match)
{
    graph_frames frames = {.file = -1};
    tfast_graph_array *arrays = NULL;
    graph_frame frame = {.kind = GRAPH_GAP};
    const uint8_t *data;
    bool misfit = false;
    int file;
    tfast_status status = graph_open(s->path, O_RDONLY, &file);

    *match = false;
    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_frames_open(&frames, file, s->path, s->uuid, schema, true));
    TRY(graph_alloc(&arrays, schema->header.n_fields, sizeof *arrays));
    frames.at = sizeof(graph_header);
    while (frame.kind != GRAPH_END && !misfit) {
        TRY(graph_frames_next(&frames, &frame));
        if (frame.kind == GRAPH_RECORD_FRAME) {
            TRY(graph_frames_data(&frames, frame.at, frame.bytes, &data));
            *match = true;
            misfit = data != NULL && !fits(schema, data, frame.bytes, arrays);
        }
    }
fail:
    *match = *match && !misfit && status == TFAST_OK;
    free(arrays);
    graph_frames_close(&frames);
    graph_io_table->close(file);
    return status;
}

/* A file whose header is damaged gets the schema of another file of the cache if a
 * record frame proves that it fits; otherwise s->schema stays NULL. */
static tfast_status
borrow_schema(const repair *r, source *s)
{
    bool match = false;
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < r->n_sources && !match; i++) {
        const source *other = &r->sources[i];

        if (!other->own_schema) {
            continue;
        }
        status = matches(s, other->schema, &match);
        if (status != TFAST_EIO) { /* unreadable: s->schema stays NULL */
            TRY(status);
        }
        if (match) {
            TRY(tfast_graph_schema_parse(&s->schema, other->schema->bytes,
                                         other->schema->n_bytes));
        }
    }
    status = TFAST_OK;
fail:
    return status;
}

static tfast_status
repair_source(repair *r, source *s)
{
    const uint64_t before = r->written;
    tfast_status status;

    if (!s->own_schema) {
        TRY(borrow_schema(r, s));
    }
    if (s->schema == NULL) {
        say(r, "%s: its header is damaged, nothing can be read", s->path);
        if (r->wanted == NULL || !s->listed) { /* otherwise set_order() counts */
            r->report->damaged += s->listed ? (int64_t)s->records : (int64_t)s->closed;
        }
        return TFAST_OK;
    }
    r->source = s;
    status = copy_file(r);
    if (s->listed && r->whole + r->damaged < (int64_t)s->records) {
        r->damaged = (int64_t)s->records - r->whole; /* also records without a trace */
    }
    say(r,
        "%s: %llu graphs kept, %lld damaged, %lld never committed, %lld bytes "
        "skipped",
        s->path, (unsigned long long)(r->written - before), (long long)r->damaged,
        (long long)r->uncommitted, (long long)r->bytes_skipped);
    if (r->wanted == NULL || !s->listed) { /* otherwise set_order() counts */
        r->report->damaged += r->damaged;
    }
    r->report->uncommitted += r->uncommitted;
    r->report->bytes_skipped += r->bytes_skipped;
fail:
    return status;
}

/* ---- Which files ----------------------------------------------------------------- */

/* Loads the old manifest and its order into r->contents and r->wanted. An unreadable
 * manifest is reported and treated as empty: all segment files are copied. */
static tfast_status
load_manifest(repair *r, const char *from)
{
    const uint64_t *order;
    tfast_status status;

    if (graph_contents_load(&r->contents, from) != TFAST_OK) {
        say(r, "the manifest cannot be used (%s): the order of the graphs is lost",
            tfast_message());
        return TFAST_OK;
    }
    order = r->contents.order;
    if (order == NULL) {
        return TFAST_OK;
    }
    TRY(graph_alloc(&r->wanted, r->contents.head.n_graphs, sizeof *r->wanted));
    for (uint64_t i = 0; i < r->contents.head.n_graphs; i++) {
        r->wanted[i] = (entry){order[i], i};
    }
    qsort(r->wanted, r->contents.head.n_graphs, sizeof *r->wanted, compare_records);
fail:
    return status;
}

/* Adds a segment file to r->sources, with its schema if that can be read. */
static tfast_status
add_source(repair *r, const char *from, const char *prefix, const uint8_t uuid[16])
{
    source *s = &r->sources[r->n_sources];
    graph_header header;
    tfast_status status;

    memcpy(s->uuid, uuid, sizeof s->uuid);
    s->closed = strcmp(prefix, "segment") == 0;
    TRY(graph_path(s->path, from, prefix, uuid, ""));
    r->n_sources++;
    status = graph_segment_schema(s->path, &header, &s->schema);
    s->own_schema = status == TFAST_OK;
    if (s->own_schema) { /* frames depend on this uuid, not on the name */
        memcpy(s->uuid, header.uuid, sizeof s->uuid);
    }
    status = status == TFAST_ENOMEM ? status : TFAST_OK;
fail:
    return status;
}

/* Fills r->sources: segments that the manifest lists, in its order, then other sealed
 * segments, then open ones. */
static tfast_status
find_sources(repair *r, const char *from, const graph_listing *listing)
{
    const graph_uuids *sealed = &listing->sealed, *open = &listing->open;
    uint64_t first = 0;
    tfast_status status;

    TRY(graph_alloc(&r->sources, (uint64_t)(open->n + sealed->n), sizeof *r->sources));
    for (uint64_t i = 0; i < r->contents.head.n_segments; i++) {
        const graph_manifest_segment *s = &r->contents.segments[i];

        if (graph_uuids_have(sealed, s->uuid)) {
            source *found = &r->sources[r->n_sources];

            found->listed = true;
            found->first = first;
            found->records = s->records;
            TRY(add_source(r, from, "segment", s->uuid));
        } else if (r->contents.order == NULL) {
            r->report->damaged += (int64_t)s->records;
            say(r, "a segment of %llu graphs is missing",
                (unsigned long long)s->records);
        }
        first += s->records;
    }
    for (int64_t i = 0; i < sealed->n; i++) {
        if (!graph_contents_has(&r->contents, sealed->data[i])) {
            TRY(add_source(r, from, "segment", sealed->data[i]));
        }
    }
    for (int64_t i = 0; i < open->n; i++) {
        if (!graph_uuids_have(sealed, open->data[i])) {
            TRY(add_source(r, from, "open", open->data[i]));
        }
    }
fail:
    return status;
}

/* ---- The new cache --------------------------------------------------------------- */

/* Creates the target cache. A target that has segments already is refused, so that the
 * new cache holds nothing but repaired graphs. */
static tfast_status
make_target(const char *to)
{
    graph_listing listing = {.manifest = false};
    int lock;
    tfast_status status = graph_directory_make(to, true, &lock);

    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_list(&listing, to));
    if (listing.sealed.n + listing.open.n > 0) {
        status = tfast_fail(
            TFAST_EINVAL,
            "target must be a new cache, got %s, which has %lld segments; choose "
            "another path",
            to, (long long)(listing.sealed.n + listing.open.n));
    }
fail:
    graph_listing_free(&listing);
    graph_unlock(lock);
    return status;
}

/* Completes the new cache: gives it the order of the old one, and counts as damaged
 * every graph of the old order that is not in the new cache. */
static tfast_status
set_order(repair *r)
{
    const int64_t n = (int64_t)r->written;
    uint64_t *order;
    tfast_status status;

    if (r->wanted == NULL) {
        return tfast_graph_build_end(r->to, NULL, 0);
    }
    TRY(graph_alloc(&order, r->written, sizeof *order));
    if (n > 0) {
        qsort(r->placed, r->written, sizeof *r->placed, compare_places);
    }
    r->report->damaged += (int64_t)r->contents.head.n_graphs;
    for (int64_t i = 0; i < n; i++) {
        order[i] = r->placed[i].record;
        r->report->damaged -= r->placed[i].place != UINT64_MAX;
    }
    TRY(tfast_graph_build_end(r->to, order, n));
fail:
    free(order);
    return status;
}

tfast_status
tfast_graph_repair(const char *from, const char *to, tfast_graph_repair_report *report,
                   void (*line)(void *context, const char *text), void *context)
{
    repair r = {.to = to, .report = report, .line = line, .context = context};
    graph_listing listing;
    tfast_status status;

    memset(report, 0, sizeof *report);
    TRY(graph_list(&listing, from));
    if (listing.strangers && !listing.manifest &&
        listing.sealed.n + listing.open.n == 0) {
        TRY(tfast_fail(TFAST_EINVAL,
                       "path must be a graph cache, got %s, which has other files "
                       "but neither a manifest nor segments; name the cache's folder",
                       from));
    }
    TRY(load_manifest(&r, from));
    TRY(find_sources(&r, from, &listing));
    TRY(make_target(to));
    TRY(tfast_graph_build_begin(to)); /* it opens once everything is in it */
    for (int64_t i = 0; i < r.n_sources; i++) {
        TRY(repair_source(&r, &r.sources[i]));
    }
    TRY(set_order(&r));
fail:
    report->kept = (int64_t)r.written;
    for (int64_t i = 0; i < r.n_sources; i++) {
        tfast_graph_schema_free(r.sources[i].schema);
    }
    graph_contents_free(&r.contents);
    graph_listing_free(&listing);
    free(r.wanted);
    free(r.sources);
    free(r.placed);
    free(r.items);
    return status;
}
