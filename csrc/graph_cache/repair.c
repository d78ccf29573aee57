/* Repair: what can be salvaged from a cache's files becomes a new cache. */
#include "manifest.h"
#include "salvage.h"
#include "writer.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Record `from` of the old cache's segments is graph `place`. */
typedef struct {
    uint64_t from, place;
} entry;

typedef struct {
    uint8_t uuid[16];
    char path[GRAPH_PATH_BYTES];
    bool closed;             /* by its name */
    bool listed;             /* in the manifest, */
    uint64_t first, records; /* with these of all records there */
    bool has_schema;         /* its header is whole */
    tfast_graph_schema *schema;
} source;

typedef struct {
    const char *to;
    tfast_graph_repair_report *report;
    void (*line)(void *context, const char *text);
    void *context;
    graph_contents contents; /* empty where the manifest cannot be read */
    bool has_contents;
    entry *wanted; /* [n_graphs], by `from`: where the manifest has an order */
    source *sources;
    int64_t n_sources;
    tfast_graph_writer *writer;
    const source *current;
    uint64_t written; /* records of all closed and current writers */
    entry *placed;    /* new record `from` is to be in place `place` */
    int64_t n_placed, room;
} repairing;

TFAST_PRINTF(2, 3) static void say(const repairing *r, const char *format, ...)
{
    char text[TFAST_MESSAGE_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    r->line(r->context, text);
}

/* ---- Which files ----------------------------------------------------------------- */

static int
compare_entries(const void *a, const void *b)
{
    uint64_t x = ((const entry *)a)->from, y = ((const entry *)b)->from;

    return (x > y) - (x < y);
}

static int
compare_places(const void *a, const void *b)
{
    const entry *x = a, *y = b;

    return x->place != y->place ? (x->place > y->place) - (x->place < y->place)
                                : compare_entries(a, b);
}

static tfast_status
load_manifest(repairing *r, const char *from)
{
    uint64_t n;

    if (graph_contents_load(&r->contents, from) != TFAST_OK) {
        say(r, "the manifest cannot be used (%s): the order of the graphs is lost",
            tfast_message());
        return TFAST_OK;
    }
    r->has_contents = true;
    n = r->contents.head.n_graphs;
    if (r->contents.order == NULL) {
        return TFAST_OK;
    }
    r->wanted = malloc(n * sizeof *r->wanted + 1);
    if (r->wanted == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the order of %llu graphs",
                          (unsigned long long)n);
    }
    for (uint64_t i = 0; i < n; i++) {
        r->wanted[i] = (entry){r->contents.order[i], i};
    }
    qsort(r->wanted, n, sizeof *r->wanted, compare_entries);
    return TFAST_OK;
}

static tfast_status
add_source(repairing *r, const char *from, const char *prefix, const uint8_t uuid[16])
{
    source *s = &r->sources[r->n_sources];
    tfast_status status = graph_path(s->path, from, prefix, uuid, "");

    memcpy(s->uuid, uuid, sizeof s->uuid);
    s->closed = strcmp(prefix, "segment") == 0;
    r->n_sources++;
    return status;
}

static bool
is_source(const repairing *r, const uint8_t uuid[16])
{
    for (int64_t i = 0; i < r->n_sources; i++) {
        if (memcmp(r->sources[i].uuid, uuid, 16) == 0) {
            return true;
        }
    }
    return false;
}

static bool
has(uint8_t (*uuids)[16], int64_t n, const uint8_t uuid[16])
{
    for (int64_t i = 0; i < n; i++) {
        if (memcmp(uuids[i], uuid, 16) == 0) {
            return true;
        }
    }
    return false;
}

/* The manifest's segments in its order, then the others. */
static tfast_status
find_sources(repairing *r, const char *from, const graph_listing *listing)
{
    size_t room = (size_t)(listing->n_open + listing->n_sealed);
    uint64_t first = 0;
    tfast_status status = TFAST_OK;

    r->sources = calloc(room + 1, sizeof *r->sources);
    if (r->sources == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for %zu files", room);
    }
    for (uint64_t i = 0; i < r->contents.head.n_segments && status == TFAST_OK; i++) {
        const graph_manifest_segment *s = &r->contents.segments[i];

        if (has(listing->sealed, listing->n_sealed, s->uuid)) {
            r->sources[r->n_sources].listed = true;
            r->sources[r->n_sources].first = first;
            r->sources[r->n_sources].records = s->records;
            status = add_source(r, from, "segment", s->uuid);
        } else if (r->contents.order == NULL) {
            r->report->damaged += (int64_t)s->records;
            say(r, "a segment of %llu graphs is missing",
                (unsigned long long)s->records);
        }
        first += s->records;
    }
    for (int64_t i = 0; i < listing->n_sealed && status == TFAST_OK; i++) {
        if (!is_source(r, listing->sealed[i])) {
            status = add_source(r, from, "segment", listing->sealed[i]);
        }
    }
    for (int64_t i = 0; i < listing->n_open && status == TFAST_OK; i++) {
        if (!is_source(r, listing->open[i])) {
            status = add_source(r, from, "open", listing->open[i]);
        }
    }
    return status;
}

/* ---- Schemas --------------------------------------------------------------------- */

static tfast_status
read_schema(source *s)
{
    graph_header header;
    tfast_status status = graph_segment_schema(s->path, &header, &s->schema);

    s->has_schema = status == TFAST_OK;
    if (s->has_schema) { /* the name may have been changed */
        memcpy(s->uuid, header.uuid, sizeof s->uuid);
    }
    return status == TFAST_ENOMEM ? status : TFAST_OK;
}

/* A file that has lost its header may have the schema of another. */
static tfast_status
borrow_schema(repairing *r, source *s)
{
    bool matches = false;

    for (int64_t i = 0; i < r->n_sources; i++) {
        const source *other = &r->sources[i];
        tfast_status status;

        if (!other->has_schema) {
            continue;
        }
        status = graph_salvage_matches(s->path, s->uuid, other->schema, &matches);
        if (status != TFAST_OK && status != TFAST_EIO) {
            return status;
        }
        if (matches) {
            return tfast_graph_schema_parse(&s->schema, other->schema->bytes,
                                            other->schema->n_bytes);
        }
    }
    return TFAST_OK;
}

/* ---- Copying --------------------------------------------------------------------- */

/* Where a record is to be; false: the old cache did not have it. */
static bool
place_of(const repairing *r, int64_t number, uint64_t *place)
{
    entry key = {0, 0};
    const entry *found;

    if (r->wanted == NULL || !r->current->listed || number == GRAPH_UNKNOWN ||
        (uint64_t)number >= r->current->records) {
        *place = UINT64_MAX; /* after all others */
        return true;
    }
    key.from = r->current->first + (uint64_t)number;
    found = bsearch(&key, r->wanted, r->contents.head.n_graphs, sizeof key,
                    compare_entries);
    *place = found == NULL ? 0 : found->place;
    return found != NULL;
}

static tfast_status
note_place(repairing *r, uint64_t place)
{
    if (r->n_placed == r->room) {
        int64_t room = r->room * 2 + 256;
        entry *more = realloc(r->placed, (size_t)room * sizeof *more);

        if (more == NULL) {
            return tfast_fail(TFAST_ENOMEM, "no memory for the order of %lld graphs",
                              (long long)room);
        }
        r->placed = more;
        r->room = room;
    }
    r->placed[r->n_placed++] = (entry){r->written, place};
    return TFAST_OK;
}

static tfast_status
copy_record(void *context, int64_t number, const void *frame, int64_t bytes)
{
    repairing *r = context;
    uint64_t place;
    tfast_status status = TFAST_OK;

    if (!place_of(r, number, &place)) {
        return TFAST_OK;
    }
    if (r->writer == NULL) {
        status = tfast_graph_writer_open(&r->writer, r->to, r->current->schema->bytes,
                                         r->current->schema->n_bytes, true);
    }
    if (status == TFAST_OK) {
        status = graph_writer_copy(r->writer, frame, bytes);
    }
    if (status == TFAST_OK) {
        status = note_place(r, place);
    }
    r->written++;
    return status;
}

static tfast_status
repair_source(repairing *r, source *s)
{
    graph_salvage salvage = {.path = s->path, .record = copy_record, .context = r};
    uint64_t before = r->written;
    tfast_status status = s->has_schema ? TFAST_OK : borrow_schema(r, s);

    if (status != TFAST_OK) {
        return status;
    }
    if (s->schema == NULL) {
        say(r, "%s: its header is damaged, nothing can be read", s->path);
        return TFAST_OK;
    }
    memcpy(salvage.uuid, s->uuid, sizeof salvage.uuid);
    salvage.closed = s->closed;
    salvage.schema = s->schema;
    r->current = s;
    status = graph_salvage_file(&salvage);
    if (s->listed && salvage.whole + salvage.damaged < (int64_t)s->records) {
        salvage.damaged =
            (int64_t)s->records - salvage.whole; /* what is not even there */
    }
    if (status == TFAST_OK && r->writer != NULL) {
        status = tfast_graph_writer_close(r->writer);
    }
    tfast_graph_writer_free(r->writer);
    r->writer = NULL;
    say(r,
        "%s: %llu graphs kept, %lld damaged, %lld never committed, %lld bytes "
        "skipped",
        s->path, (unsigned long long)(r->written - before), (long long)salvage.damaged,
        (long long)salvage.uncommitted, (long long)salvage.bytes_skipped);
    if (r->wanted == NULL || !s->listed) { /* else set_order() knows better */
        r->report->damaged += salvage.damaged;
    }
    r->report->uncommitted += salvage.uncommitted;
    r->report->bytes_skipped += salvage.bytes_skipped;
    return status;
}

/* ---- The new cache --------------------------------------------------------------- */

static tfast_status
set_order(repairing *r)
{
    uint64_t *order;
    tfast_status status;

    if (r->wanted == NULL) {
        return TFAST_OK;
    }
    order = malloc((size_t)r->n_placed * sizeof *order + 1);
    if (order == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the order of %lld graphs",
                          (long long)r->n_placed);
    }
    if (r->n_placed > 0) {
        qsort(r->placed, (size_t)r->n_placed, sizeof *r->placed, compare_places);
    }
    r->report->damaged += (int64_t)r->contents.head.n_graphs;
    for (int64_t i = 0; i < r->n_placed; i++) {
        order[i] = r->placed[i].from;
        r->report->damaged -= r->placed[i].place != UINT64_MAX;
    }
    status = tfast_graph_build_end(r->to, order, r->n_placed);
    free(order);
    return status;
}

/* The target must be new: nothing is ever mixed with what is salvaged. */
static tfast_status
make_target(const char *to)
{
    graph_listing listing;
    int lock;
    tfast_status status = graph_directory_make(to, true, &lock);

    if (status != TFAST_OK) {
        return status;
    }
    status = graph_list(&listing, to);
    if (status == TFAST_OK && listing.n_sealed + listing.n_open > 0) {
        status = tfast_fail(
            TFAST_EINVAL, "target must be a new cache, got %s, which has %lld segments",
            to, (long long)(listing.n_sealed + listing.n_open));
    }
    graph_listing_free(&listing);
    graph_unlock(lock);
    return status;
}

static tfast_status
repair_all(repairing *r, const char *from, const graph_listing *listing)
{
    tfast_status status = load_manifest(r, from);

    if (status == TFAST_OK) {
        status = find_sources(r, from, listing);
    }
    for (int64_t i = 0; i < r->n_sources && status == TFAST_OK; i++) {
        status = read_schema(&r->sources[i]);
    }
    if (status == TFAST_OK) {
        status = make_target(r->to);
    }
    for (int64_t i = 0; i < r->n_sources && status == TFAST_OK; i++) {
        status = repair_source(r, &r->sources[i]);
    }
    return status == TFAST_OK ? set_order(r) : status;
}

tfast_status
tfast_graph_repair(const char *from, const char *to, tfast_graph_repair_report *report,
                   void (*line)(void *context, const char *text), void *context)
{
    repairing r = {.to = to, .report = report, .line = line, .context = context};
    graph_listing listing;
    tfast_status status = graph_list(&listing, from);

    memset(report, 0, sizeof *report);
    if (status == TFAST_OK && listing.strangers && !listing.manifest &&
        listing.n_sealed + listing.n_open == 0) {
        status = tfast_fail(TFAST_EINVAL,
                            "path must be a graph cache, got %s, which has other files "
                            "but neither a manifest nor segments",
                            from);
    }
    if (status == TFAST_OK) {
        status = repair_all(&r, from, &listing);
    }
    report->kept = (int64_t)r.written;
    for (int64_t i = 0; i < r.n_sources; i++) {
        tfast_graph_schema_free(r.sources[i].schema);
    }
    tfast_graph_writer_free(r.writer);
    graph_contents_free(&r.contents);
    graph_listing_free(&listing);
    free(r.wanted);
    free(r.sources);
    free(r.placed);
    return status;
}
