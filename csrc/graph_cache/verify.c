/* Everything that can be known about a cache without knowing what it is of. */
#include "cache.h"
#include "scan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One thread's share: graphs first .. end - 1, and what it has found. */
typedef struct {
    tfast_graph_cache *cache;
    bool values;
    int64_t first, end;
    tfast_graph_array *arrays;
    graph_buffer buffer;
    struct found {
        int64_t i;
        char *message;
    } * found;
    int64_t n_found;
    tfast_status status;
    char message[TFAST_MESSAGE_BYTES]; /* of status */
} checking;

enum { MOST_PARTS = 16, LEAST_SHARE = 1024 };

/* Notes the message of the damage that was just told. */
static tfast_status
note(checking *c, int64_t i)
{
    const char *message = tfast_message();
    char *copy = malloc(strlen(message) + 1);
    void *more = c->found;

    if ((c->n_found & (c->n_found - 1)) == 0) { /* room for powers of two */
        size_t room = c->n_found == 0 ? 1 : (size_t)c->n_found * 2;

        more = realloc(c->found, room * sizeof *c->found);
        c->found = more == NULL ? c->found : more;
    }
    if (copy == NULL || more == NULL) {
        free(copy);
        return tfast_fail(TFAST_ENOMEM, "no memory for %lld damaged graphs",
                          (long long)c->n_found + 1);
    }
    strcpy(copy, message);
    c->found[c->n_found++] = (struct found){i, copy};
    return TFAST_OK;
}

/* ---- Values ---------------------------------------------------------------------- */

/* Whether every number's exponent is below the one of infinities and NaNs. `mask` are
 * the bits of the exponent. */
#define FINITE(name, type)                                                             \
    static bool name(const void *data, int64_t n, type mask)                           \
    {                                                                                  \
        const type *bits = data;                                                       \
        int bad = 0;                                                                   \
                                                                                       \
        for (int64_t i = 0; i < n; i++) {                                              \
            bad |= (bits[i] & mask) == mask;                                           \
        }                                                                              \
        return bad == 0;                                                               \
    }

FINITE(finite_8, uint8_t)
FINITE(finite_16, uint16_t)
FINITE(finite_32, uint32_t)
FINITE(finite_64, uint64_t)

static bool
is_finite(int dtype, const void *data, int64_t n)
{
    switch (dtype) {
    case GRAPH_F16:
        return finite_16(data, n, 0x7c00);
    case GRAPH_BF16:
        return finite_16(data, n, 0x7f80);
    case GRAPH_F32:
        return finite_32(data, n, 0x7f800000);
    case GRAPH_F64:
        return finite_64(data, n, UINT64_C(0x7ff0000000000000));
    case GRAPH_C64:
        return finite_32(data, 2 * n, 0x7f800000);
    case GRAPH_C128:
        return finite_64(data, 2 * n, UINT64_C(0x7ff0000000000000));
    case GRAPH_F8_E4M3FN: /* has no infinities, and one NaN */
        return finite_8(data, n, 0x7f);
    case GRAPH_F8_E5M2:
        return finite_8(data, n, 0x7c);
    default:
        return true;
    }
}

static const char *
wrong_values(const checking *c, int dtype, const tfast_graph_array *array)
{
    int64_t low, high = 0;

    if (array->stored == GRAPH_ABSENT || array->numel == 0) {
        return NULL;
    }
    if (dtype == GRAPH_BOOL) {
        c->cache->kernels->range(array->data, 1, 0, array->numel, &low, &high);
        return high > 1 ? "bytes 0 or 1" : NULL;
    }
    if (dtype == GRAPH_STRING && !graph_is_utf8(array->data, array->numel)) {
        return "UTF-8";
    }
    return c->values && !is_finite(dtype, array->data, array->numel) ? "finite values"
                                                                     : NULL;
}

/* Zeros between the fields and around them. */
static bool
gaps_are_zero(const tfast_graph_schema *schema, const graph_record_view *record,
              const tfast_graph_array *arrays)
{
    const uint8_t *head = record->head, *at = record->payload;
    const uint8_t *end = at + record->bytes - schema->record_bytes;
    const size_t used = sizeof(graph_record) + 4 * (size_t)schema->header.n_counts +
                        schema->header.n_fields;

    if (!graph_all_zero(head + used, (int64_t)(schema->record_bytes - used))) {
        return false;
    }
    for (int i = 0; i < schema->header.n_fields; i++) {
        const tfast_graph_array *a = &arrays[i];
        const uint8_t *data = a->data;

        if (a->stored != GRAPH_ABSENT) {
            if (!graph_all_zero(at, data - at)) {
                return false;
            }
            at = data +
                 a->numel * graph_stored_bytes(schema->fields[i].dtype, a->stored);
        }
    }
    return graph_all_zero(at, end - at);
}

static tfast_status
verify_graph(checking *c, int64_t i)
{
    graph_place place = graph_find(c->cache, i);
    const tfast_graph_schema *schema = place.part->file.schema;
    const char *path = place.part->file.path;
    graph_record_view record;
    tfast_status status = graph_arrays_as(
        c->cache, i, place, &c->buffer, TFAST_GRAPH_VERIFY_ALWAYS, c->arrays, &record);

    if (status != TFAST_OK) {
        return status == TFAST_EIO ? note(c, i) : status;
    }
    if (!gaps_are_zero(schema, &record, c->arrays)) {
        graph_damage("graph %lld in %s must have zeros between its fields",
                     (long long)i, path);
        return note(c, i);
    }
    for (int f = 0; f < schema->header.n_fields; f++) {
        const char *wrong = wrong_values(c, schema->fields[f].dtype, &c->arrays[f]);

        if (wrong != NULL) {
            graph_damage("graph %lld in %s: %s must have %s", (long long)i, path,
                         schema->field_names[f], wrong);
            return note(c, i);
        }
    }
    return TFAST_OK;
}

/* ---- Between the records --------------------------------------------------------- */

typedef struct {
    const graph_segment *file;
    graph_window window; /* with `pread` */
    int64_t at;
    int64_t records; /* before `at` */
    uint64_t previous;
    uint32_t group_crc;
} frames;

static tfast_status
peek(frames *f, int64_t at, int64_t bytes, const uint8_t **piece)
{
    if (f->file->map == NULL) {
        return graph_window_get(&f->window, at, bytes, piece);
    }
    *piece = f->file->map + at;
    return TFAST_OK;
}

/* Whether the commit frame that must be here is. */
static tfast_status
check_commit(frames *f)
{
    int64_t bytes = graph_commit_bytes(f->at);
    const uint8_t *piece;
    graph_commit commit;
    tfast_status status = peek(f, f->at, bytes, &piece);

    if (status != TFAST_OK) {
        return status;
    }
    memcpy(&commit, piece, sizeof commit);
    if (commit.magic != GRAPH_COMMIT_MAGIC ||
        commit.crc != graph_commit_crc(f->file->seed, &commit) ||
        commit.records != (uint64_t)f->records || commit.previous != f->previous ||
        commit.group_crc != f->group_crc || commit.reserved != 0 ||
        !graph_all_zero(piece + sizeof commit, bytes - (int64_t)sizeof commit)) {
        return graph_damage("%s must have a commit frame of %lld records at byte %lld",
                            f->file->path, (long long)f->records, (long long)f->at);
    }
    f->previous = (uint64_t)f->at;
    f->group_crc = 0;
    f->at += bytes;
    return TFAST_OK;
}

static tfast_status
check_frames(frames *f)
{
    const graph_segment *file = f->file;
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < file->records && status == TFAST_OK; i++) {
        const uint8_t *piece;
        graph_record record;

        if (f->at != (int64_t)file->offsets[i]) {
            status = check_commit(f);
        }
        if (status == TFAST_OK) {
            status = peek(f, f->at, sizeof record, &piece);
        }
        if (status == TFAST_OK) {
            memcpy(&record, piece, sizeof record);
            f->group_crc = graph_crc_more(f->group_crc, &record.header_crc, 4);
            f->at += (int64_t)file->units[i] * GRAPH_UNIT;
            f->records++;
        }
    }
    return status == TFAST_OK && file->records > 0 ? check_commit(f) : status;
}

static tfast_status
verify_between(checking *c)
{
    for (int64_t i = 0; i < c->cache->n_parts; i++) {
        const graph_segment *file = &c->cache->parts[i].file;
        frames f = {.file = file, .at = file->begin};
        tfast_status status;

        f.window = (graph_window){
            .file = file->file, .path = file->path, .bytes = file->bytes};
        status = check_frames(&f);
        graph_window_free(&f.window);
        status = status == TFAST_EIO ? note(c, -1) : status;
        if (status != TFAST_OK) {
            return status;
        }
    }
    return TFAST_OK;
}

/* ---- Shares ---------------------------------------------------------------------- */

static void
verify_share(void *context, int part, int parts)
{
    checking *c = (checking *)context + part;
    int n_fields = c->cache->schema == NULL ? 0 : c->cache->schema->header.n_fields;

    (void)parts;
    c->arrays = malloc((size_t)n_fields * sizeof *c->arrays + 1);
    if (c->arrays == NULL) {
        c->status = tfast_fail(TFAST_ENOMEM, "no memory for %d fields", n_fields);
    }
    for (int64_t i = c->first; i < c->end && c->status == TFAST_OK; i++) {
        c->status = verify_graph(c, i);
    }
    if (c->status != TFAST_OK) { /* messages are the thread's own */
        snprintf(c->message, sizeof c->message, "%s", tfast_message());
    }
    free(c->arrays);
    free(c->buffer.data);
}

/* Tells what the shares have found, in order, and the first error; empties them. */
static tfast_status
gather(checking *shares, int parts,
       void (*damaged)(void *context, int64_t i, const char *message), void *context)
{
    tfast_status status = TFAST_OK;

    for (int p = 0; p < parts; p++) {
        checking *c = &shares[p];

        for (int64_t i = 0; i < c->n_found; i++) {
            if (status == TFAST_OK) {
                damaged(context, c->found[i].i, c->found[i].message);
            }
            free(c->found[i].message);
        }
        free(c->found);
        if (status == TFAST_OK && c->status != TFAST_OK) {
            status = tfast_fail(c->status, "%s", c->message);
        }
    }
    return status;
}

tfast_status
tfast_graph_cache_verify(tfast_graph_cache *cache, int64_t first, int64_t end,
                         bool values,
                         void (*damaged)(void *context, int64_t i, const char *message),
                         void *context)
{
    checking shares[MOST_PARTS] = {{.cache = cache}};
    int64_t n = end - first, parts = n / LEAST_SHARE + 1;
    tfast_status status;

    if (first < 0 || end < first || end > cache->n_graphs) {
        return tfast_fail(TFAST_EINVAL,
                          "first and end must be in 0 .. %lld, got %lld and %lld",
                          (long long)cache->n_graphs, (long long)first, (long long)end);
    }
    parts = parts < tfast_num_threads() ? parts : tfast_num_threads();
    parts = parts < MOST_PARTS ? parts : MOST_PARTS;
    for (int64_t p = 0; p < parts; p++) {
        shares[p].cache = cache;
        shares[p].values = values;
        shares[p].first = first + n * p / parts;
        shares[p].end = first + n * (p + 1) / parts;
    }
    tfast_parallel((int)parts, verify_share, shares);
    status = gather(shares, (int)parts, damaged, context);
    if (status == TFAST_OK && (n == 0 || n == cache->n_graphs)) {
        checking between = {.cache = cache};

        between.status = verify_between(&between);
        snprintf(between.message, sizeof between.message, "%s", tfast_message());
        status = gather(&between, 1, damaged, context);
    }
    return status;
}
