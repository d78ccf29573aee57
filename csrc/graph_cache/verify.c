/* Full verification of an open cache: checksums, values, padding, commit frames. */
#include "../threads.h"
#include "cache.h"
#include "frames.h"
#include "seal.h"

#include <stdlib.h>
#include <string.h>

/* One thread's share: graphs first .. end - 1, and the damage found in them. */
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
    graph_error error;
} checking;

enum { MOST_PARTS = 16, LEAST_GRAPHS = 1024 };

/* Adds the current message of graph_damage() to c->found; i is the graph, or -1. */
static tfast_status
note(checking *c, int64_t i)
{
    char *message;
    tfast_status status;

    TRY(graph_copy_text(&message, tfast_message()));
    status = graph_grow(&c->found, c->n_found, sizeof *c->found);
    if (status != TFAST_OK) {
        free(message);
        return status;
    }
    c->found[c->n_found++] = (struct found){i, message};
fail:
    return status;
}

/* ---- Values ---------------------------------------------------------------------- */

/* Mask of the bits that are all set in infinities and NaNs only: the exponent; in
 * E4M3FN, which has no infinities and one NaN, all but the sign. 0: not a float. */
static uint64_t
exponent_of(int dtype)
{
    switch (dtype) {
    case GRAPH_F16:
        return 0x7c00;
    case GRAPH_BF16:
        return 0x7f80;
    case GRAPH_F32:
    case GRAPH_C64:
        return 0x7f800000;
    case GRAPH_F64:
    case GRAPH_C128:
        return UINT64_C(0x7ff0000000000000);
    case GRAPH_F8_E4M3FN:
        return 0x7f;
    case GRAPH_F8_E5M2:
        return 0x7c;
    default:
        return 0;
    }
}

static bool
is_finite(int dtype, const void *data, int64_t n)
{
    const uint64_t mask = exponent_of(dtype);
    const bool is_complex = dtype == GRAPH_C64 || dtype == GRAPH_C128;
    const int bytes = graph_dtype_bytes(dtype) >> is_complex;
    const int64_t all = n << is_complex;
    int bad = 0;

    if (mask == 0) {
        return true;
    }
#define CHECK(type)                                                                    \
    for (int64_t i = 0; i < all; i++) {                                                \
        bad |= (((const type *)data)[i] & (type)mask) == (type)mask;                   \
    }                                                                                  \
    break
    switch (bytes) {
    case 1:
        CHECK(uint8_t);
    case 2:
        CHECK(uint16_t);
    case 4:
        CHECK(uint32_t);
    case 8:
        CHECK(uint64_t);
    }
#undef CHECK
    return bad == 0;
}

/* The rule that a field's values break, as text that follows "must have" or NULL. */
static const char *
wrong_values(const checking *c, int dtype, const tfast_graph_array *array)
{
    int64_t low, high = 0;

    if (array->stored == GRAPH_ABSENT || array->numel == 0) {
        return NULL;
    }
    if (dtype == GRAPH_BOOL) {
        graph_value_range(dtype, GRAPH_AS_IS, array->data, array->numel, &low, &high);
        return high > 1 ? "bytes 0 or 1" : NULL;
    }
    if (dtype == GRAPH_STRING && !graph_is_utf8(array->data, array->numel)) {
        return "UTF-8";
    }
    return c->values && !is_finite(dtype, array->data, array->numel) ? "finite values"
                                                                     : NULL;
}

/* Whether the padding bytes of a record are zeros: after the head's `stored` bytes,
 * between fields and after the last field. */
static bool
gaps_are_zero(const tfast_graph_schema *schema, const graph_record_view *record,
              const tfast_graph_array *arrays)
{
    const uint8_t *at = record->payload;
    const uint8_t *end = at + record->bytes - schema->record_bytes;

    if (!graph_record_head_ends_in_zeros(schema, record->head)) {
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

/* Checks one graph. Damage is noted and is no error. */
static tfast_status
verify_graph(checking *c, int64_t i)
{
    const graph_place place = graph_find(c->cache, i);
    const tfast_graph_schema *schema = place.part->file.schema;
    const char *path = place.part->file.path;
    graph_record_view record;
    tfast_status status = graph_arrays(c->cache, i, place, &c->buffer,
                                       TFAST_GRAPH_VERIFY_ALWAYS, c->arrays, &record);

    if (status != TFAST_OK) {
        return status == TFAST_EIO ? note(c, i) : status;
    }
    if (!gaps_are_zero(schema, &record, c->arrays)) {
        graph_damage("graph %lld in %s must have zeros between its fields; `trainfast "
                     "cache repair` keeps the graphs",
                     (long long)i, path);
        return note(c, i);
    }
    for (int f = 0; f < schema->header.n_fields; f++) {
        const char *wrong = wrong_values(c, schema->fields[f].dtype, &c->arrays[f]);

        if (wrong != NULL) {
            graph_damage("graph %lld in %s: %s must have %s; write the graph again",
                         (long long)i, path, schema->field_names[f], wrong);
            return note(c, i);
        }
    }
    return TFAST_OK;
}

/* ---- Between the records --------------------------------------------------------- */

/* *data: bytes of a segment, in its map or, without one, in the window of `frames`. */
static tfast_status
read_bytes(const graph_segment *file, graph_frames *frames, int64_t at, int64_t bytes,
           const uint8_t **data)
{
    if (file->map == NULL) {
        return graph_frames_data(frames, at, bytes, data);
    }
    *data = file->map + at;
    return TFAST_OK;
}

/* Checks that each commit frame of a segment is what graph_commits_take() expects. */
static tfast_status
verify_commits(const graph_segment *file)
{
    graph_frames frames = {
        .file = file->file, .path = file->path, .bytes = file->bytes};
    graph_commits commits = {.seed = file->seed};
    int64_t at = file->begin;
    const uint8_t *data;
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i <= file->records && file->records > 0; i++) {
        if (i == file->records || at != (int64_t)file->offsets[i]) {
            TRY(read_bytes(file, &frames, at, graph_commit_bytes(at), &data));
            if (!graph_commits_take(&commits, data, at)) {
                TRY(graph_damage("%s must have a commit frame of %lld records at byte "
                                 "%lld; `trainfast cache repair` keeps the graphs",
                                 file->path, (long long)i, (long long)at));
            }
            at += graph_commit_bytes(at);
        }
        if (i < file->records) {
            TRY(read_bytes(file, &frames, at, sizeof(graph_record), &data));
            graph_commits_add(&commits, (const graph_record *)data);
            at += (int64_t)file->units[i] * GRAPH_UNIT;
        }
    }
fail:
    graph_frames_close(&frames);
    return status;
}

/* ---- Parts ----------------------------------------------------------------------- */

static void
verify_part(void *context, int part, int parts)
{
    checking *c = (checking *)context + part;
    const tfast_graph_schema *schema = c->cache->schema;
    tfast_status status;

    (void)parts;
    TRY(graph_alloc(&c->arrays, schema == NULL ? 0 : schema->header.n_fields,
                    sizeof *c->arrays));
    for (int64_t i = c->first; i < c->end; i++) {
        TRY(verify_graph(c, i));
    }
fail:
    graph_keep_error(&c->error, status); /* messages are thread-local */
    free(c->arrays);
    free(c->buffer.data);
}

/* Reports the damage in one share, unless `status` is an error already, and frees it.
 * Returns `status`, or the share's error. */
static tfast_status
report(checking *c, tfast_status status,
       void (*damaged)(void *context, int64_t i, const char *message), void *context)
{
    for (int64_t i = 0; i < c->n_found; i++) {
        if (status == TFAST_OK) {
            damaged(context, c->found[i].i, c->found[i].message);
        }
        free(c->found[i].message);
    }
    free(c->found);
    return status != TFAST_OK ? status : graph_return_error(&c->error);
}

tfast_status
tfast_graph_cache_verify(tfast_graph_cache *cache, int64_t first, int64_t end,
                         bool values,
                         void (*damaged)(void *context, int64_t i, const char *message),
                         void *context)
{
    checking shares[MOST_PARTS] = {{.cache = cache}}, between = {.cache = cache};
    int64_t n = end - first, parts = n / LEAST_GRAPHS + 1;
    tfast_status status = TFAST_OK;

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
    tfast_parallel((int)parts, verify_part, shares);
    for (int64_t p = 0; p < parts; p++) {
        status = report(&shares[p], status, damaged, context);
    }
    if (status != TFAST_OK || (n != 0 && n != cache->n_graphs)) {
        return status;
    }
    for (int64_t i = 0; i < cache->n_parts && status == TFAST_OK; i++) {
        status = verify_commits(&cache->parts[i].file);
        status = status == TFAST_EIO ? note(&between, -1) : status;
    }
    graph_keep_error(&between.error, status);
    return report(&between, TFAST_OK, damaged, context);
}
