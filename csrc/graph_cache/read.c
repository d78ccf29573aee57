/* An open cache: its segments put together, and a graph of it. */
#include "cache.h"
#include "manifest.h"
#include "scan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Opening --------------------------------------------------------------------- */

/* uuid and generation, mixed so that every bit of the latter changes many. */
static void
set_fingerprint(tfast_graph_cache *cache, const graph_manifest *head)
{
    uint64_t mixed = head->generation, words[2];

    memcpy(words, head->uuid, sizeof words);
    for (int i = 0; i < 2; i++) { /* the finaliser of MurmurHash3 */
        mixed ^= words[i];
        mixed = (mixed ^ mixed >> 33) * UINT64_C(0xff51afd7ed558ccd);
        mixed = (mixed ^ mixed >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
        words[i] = mixed ^ mixed >> 33;
    }
    memcpy(cache->fingerprint, words, sizeof words);
}

/* Which segments have records in the order: the others need not even be there. */
static tfast_status
find_used(const graph_contents *contents, bool **used)
{
    uint64_t n = contents->head.n_segments, first = 0, high = 0;
    uint64_t at = n; /* the segment that holds records first .. high - 1 */
    uint64_t left;   /* segments that may still turn out to be used */
    uint64_t *ends = malloc(n * sizeof *ends + 1);

    *used = calloc(1, n + 1);
    if (*used == NULL || ends == NULL) {
        free(ends);
        return tfast_fail(TFAST_ENOMEM, "no memory for %llu segments",
                          (unsigned long long)n);
    }
    for (uint64_t i = 0, end = 0; i < n; i++) {
        ends[i] = end += contents->segments[i].records;
        (*used)[i] = contents->order == NULL && contents->segments[i].records > 0;
    }
    left = contents->order == NULL ? 0 : n;
    for (uint64_t i = 0; left > 0 && i < contents->head.n_graphs; i++) {
        uint64_t record = contents->order[i];

        if (record >= first && record < high) {
            continue; /* neighbours mostly are in one segment */
        }
        at = 0;
        for (uint64_t step = n; step > 0; step /= 2) { /* ends[at - 1] <= record */
            while (at + step <= n && ends[at + step - 1] <= record) {
                at += step;
            }
        }
        first = at == 0 ? 0 : ends[at - 1];
        high = ends[at];
        left -= !(*used)[at];
        (*used)[at] = true;
    }
    free(ends);
    return TFAST_OK;
}

static tfast_status
open_part(tfast_graph_cache *cache, const graph_manifest_segment *wanted, int64_t first)
{
    graph_part *part = &cache->parts[cache->n_parts];
    char path[GRAPH_PATH_BYTES];
    tfast_status status = graph_path(path, cache->path, "segment", wanted->uuid, "");

    if (status == TFAST_OK) {
        status = graph_segment_open(&part->file, path,
                                    cache->options.mode == TFAST_GRAPH_PREAD);
    }
    if (status == TFAST_EIO && graph_errno() == 0) {
        return graph_damage("%s: `trainfast cache repair` keeps what can be read",
                            tfast_message());
    }
    if (status != TFAST_OK) {
        return status;
    }
    cache->n_parts++;
    cache->file_bytes += part->file.bytes;
    part->first = first;
    if (memcmp(part->file.uuid, wanted->uuid, 16) != 0 ||
        (uint64_t)part->file.records != wanted->records ||
        (uint64_t)part->file.bytes != wanted->bytes ||
        part->file.trailer.crc != wanted->trailer_crc) {
        return graph_damage("%s must be the file that the manifest names: %llu records "
                            "in %llu bytes, got %lld in %lld",
                            path, (unsigned long long)wanted->records,
                            (unsigned long long)wanted->bytes,
                            (long long)part->file.records, (long long)part->file.bytes);
    }
    return TFAST_OK;
}

static tfast_status
open_parts(tfast_graph_cache *cache, const graph_contents *contents)
{
    uint64_t n = contents->head.n_segments;
    int64_t first = 0;
    bool *used = NULL;
    tfast_status status = find_used(contents, &used);

    cache->parts = calloc(n + 1, sizeof *cache->parts);
    if (status == TFAST_OK && cache->parts == NULL) {
        status = tfast_fail(TFAST_ENOMEM, "no memory for %llu segments",
                            (unsigned long long)n);
    }
    for (uint64_t i = 0; i < n && status == TFAST_OK; i++) {
        if (used[i]) {
            status = open_part(cache, &contents->segments[i], first);
        }
        first += (int64_t)contents->segments[i].records;
    }
    free(used);
    return status;
}

/* The columns of the cache's counts in one part. */
static tfast_status
set_columns(graph_part *part, int n_counts, const int64_t *sources)
{
    const graph_segment *file = &part->file;

    part->columns = malloc((size_t)n_counts * sizeof *part->columns + 1);
    part->fixed = malloc((size_t)n_counts * sizeof *part->fixed + 1);
    if (part->columns == NULL || part->fixed == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for %d counts", n_counts);
    }
    for (int k = 0; k < n_counts; k++) {
        if (sources[k] >= 0) {
            part->columns[k] =
                (graph_column){file->counts + sources[k] * file->count_step, 1};
        } else {
            part->fixed[k] = (uint32_t)(-1 - sources[k]);
            part->columns[k] = (graph_column){&part->fixed[k], 0};
        }
    }
    return TFAST_OK;
}

static tfast_status
join_schemas(tfast_graph_cache *cache)
{
    const tfast_graph_schema **schemas;
    int64_t *sources = NULL;
    tfast_status status;

    if (cache->n_parts == 0) {
        return TFAST_OK;
    }
    schemas = malloc((size_t)cache->n_parts * sizeof *schemas);
    if (schemas == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for %lld schemas",
                          (long long)cache->n_parts);
    }
    for (int64_t i = 0; i < cache->n_parts; i++) {
        schemas[i] = cache->parts[i].file.schema;
    }
    status = graph_schemas_join(&cache->schema, &sources, schemas, cache->n_parts);
    for (int64_t i = 0; i < cache->n_parts && status == TFAST_OK; i++) {
        int n_counts = cache->schema->header.n_counts;

        status = set_columns(&cache->parts[i], n_counts, sources + i * n_counts);
    }
    free(schemas);
    free(sources);
    return status;
}

static tfast_status
open_contents(tfast_graph_cache *cache, graph_contents *contents)
{
    tfast_status status = open_parts(cache, contents);

    if (status == TFAST_OK) {
        status = join_schemas(cache);
    }
    if (status != TFAST_OK) {
        return status;
    }
    cache->n_records = (int64_t)contents->n_records;
    cache->n_graphs = (int64_t)contents->head.n_graphs;
    cache->order = contents->order;
    contents->order = NULL;
    set_fingerprint(cache, &contents->head);
    /* Files prove the records of parts; of others the order has bounded the bitmap. */
    cache->seen = calloc((size_t)cache->n_records / 64 + 1, sizeof *cache->seen);
    return cache->seen == NULL
               ? tfast_fail(TFAST_ENOMEM,
                            "no memory for a bit for each of %lld records",
                            (long long)cache->n_records)
               : TFAST_OK;
}

/* Forgets what one attempt has opened. */
static void
empty(tfast_graph_cache *cache)
{
    for (int64_t i = 0; cache->parts != NULL && i < cache->n_parts; i++) {
        graph_segment_close(&cache->parts[i].file);
        free(cache->parts[i].columns);
        free(cache->parts[i].fixed);
    }
    free(cache->parts);
    free(cache->order);
    free((void *)cache->seen);
    tfast_graph_schema_free(cache->schema);
    cache->parts = NULL;
    cache->order = NULL;
    cache->seen = NULL;
    cache->schema = NULL;
    cache->n_parts = cache->file_bytes = 0;
}

/* One attempt. *generation is that of the manifest that was read. */
static tfast_status
try_open(tfast_graph_cache *cache, uint64_t *generation)
{
    graph_listing listing;
    graph_contents contents = {0};
    tfast_status status = graph_list(&listing, cache->path);

    if (status == TFAST_OK) {
        status = graph_contents_load(&contents, cache->path);
    }
    if (status == TFAST_OK) {
        *generation = contents.head.generation;
        if (!cache->options.partial) {
            status = graph_must_be_closed(cache->path, &listing, &contents);
        }
    }
    if (status == TFAST_OK) {
        status = open_contents(cache, &contents);
    }
    graph_contents_free(&contents);
    graph_listing_free(&listing);
    return status;
}

/* A build that ends meanwhile deletes segments: then the manifest has changed. */
static tfast_status
open_whole(tfast_graph_cache *cache)
{
    uint64_t generation = 0, before = 0;
    tfast_status status = try_open(cache, &generation);

    for (int i = 0; i < 8 && status == TFAST_EIO && graph_errno() == ENOENT &&
                    generation != before;
         i++) {
        before = generation;
        empty(cache);
        status = try_open(cache, &generation);
    }
    return status;
}

tfast_status
tfast_graph_cache_open(tfast_graph_cache **cache, const char *path,
                       const tfast_graph_open_options *options)
{
    tfast_graph_cache *made = calloc(1, sizeof *made);
    tfast_status status;

    *cache = NULL;
    if (made == NULL || (made->path = malloc(strlen(path) + 1)) == NULL) {
        free(made);
        return tfast_fail(TFAST_ENOMEM, "no memory to open %s", path);
    }
    memcpy(made->path, path, strlen(path) + 1);
    made->options = *options;
    if (options->mode == TFAST_GRAPH_BY_FILE_SYSTEM) {
        made->options.mode =
            graph_is_remote(path) ? TFAST_GRAPH_PREAD : TFAST_GRAPH_MMAP;
    }
    made->kernels = tfast_graph_kernels_in_use();
    atomic_init(&made->references, 1);
    status = open_whole(made);
    if (status != TFAST_OK) {
        tfast_graph_cache_release(made);
        return status;
    }
    *cache = made;
    return TFAST_OK;
}

int
tfast_graph_cache_mode(const tfast_graph_cache *cache)
{
    return cache->options.mode;
}

void
tfast_graph_cache_retain(tfast_graph_cache *cache)
{
    atomic_fetch_add_explicit(&cache->references, 1, memory_order_relaxed);
}

void
tfast_graph_cache_release(tfast_graph_cache *cache)
{
    if (atomic_fetch_sub_explicit(&cache->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    graph_arenas_free(cache);
    empty(cache);
    free(cache->path);
    free(cache);
}

/* ---- What the index says --------------------------------------------------------- */

int64_t
tfast_graph_cache_len(const tfast_graph_cache *cache)
{
    return cache->n_graphs;
}

const tfast_graph_schema *
tfast_graph_cache_schema(const tfast_graph_cache *cache)
{
    return cache->schema;
}

const uint8_t *
tfast_graph_cache_fingerprint(const tfast_graph_cache *cache)
{
    return cache->fingerprint;
}

int64_t
tfast_graph_cache_file_bytes(const tfast_graph_cache *cache)
{
    return cache->file_bytes;
}

int64_t
tfast_graph_cache_segments(const tfast_graph_cache *cache)
{
    return cache->n_parts;
}

void
tfast_graph_cache_counts(const tfast_graph_cache *cache, int count, int64_t *out)
{
    for (int64_t i = 0; i < cache->n_graphs; i++) {
        out[i] = graph_count(graph_find(cache, i), count);
    }
}

void
tfast_graph_cache_frame_bytes(const tfast_graph_cache *cache, int64_t *out)
{
    for (int64_t i = 0; i < cache->n_graphs; i++) {
        out[i] = graph_frame_bytes(graph_find(cache, i));
    }
}

tfast_status
tfast_graph_cache_keys(const tfast_graph_cache *cache, uint8_t *out)
{
    for (int64_t i = 0; i < cache->n_graphs; i++) {
        graph_place place = graph_find(cache, i);
        const graph_segment *file = &place.part->file;
        const uint8_t *frame = graph_frame(place);
        size_t at = offsetof(graph_record, key);
        tfast_status status = TFAST_OK;

        if (frame != NULL) {
            memcpy(out + 16 * i, frame + at, 16);
        } else {
            status = graph_read_all(file->file, file->path, out + 16 * i, 16,
                                    (int64_t)(file->offsets[place.row] + at));
        }
        if (status != TFAST_OK) {
            return status;
        }
    }
    return TFAST_OK;
}

/* ---- One graph ------------------------------------------------------------------- */

static tfast_status
reserve(graph_buffer *buffer, int64_t bytes)
{
    if (buffer->room < bytes) {
        free(buffer->data);
        buffer->data = malloc((size_t)bytes);
        buffer->room = buffer->data == NULL ? 0 : bytes;
    }
    return buffer->data != NULL
               ? TFAST_OK
               : tfast_fail(TFAST_ENOMEM, "no memory for a graph of %lld bytes",
                            (long long)bytes);
}

/* The frame, or where it is mapped its head alone, in buffer->data. */
static tfast_status
fetch(graph_place place, graph_buffer *buffer, graph_record_view *record)
{
    const graph_segment *file = &place.part->file;
    const uint8_t *mapped = graph_frame(place);
    const size_t head = file->schema->record_bytes;
    const int64_t bytes = graph_frame_bytes(place); /* not less than the head */
    tfast_status status = reserve(buffer, mapped != NULL ? (int64_t)head : bytes);

    if (status == TFAST_OK && mapped != NULL) {
        memcpy(buffer->data, mapped, head);
    } else if (status == TFAST_OK) {
        status = graph_read_all(file->file, file->path, buffer->data, (size_t)bytes,
                                (int64_t)file->offsets[place.row]);
    }
    if (status == TFAST_OK) {
        record->head = buffer->data;
        record->payload = (mapped != NULL ? mapped : buffer->data) + head;
        record->bytes = bytes;
    }
    return status;
}

/* Sizes first: whatever `verify` is, nothing outside the frame may be read. */
static tfast_status
check(tfast_graph_cache *cache, graph_place place, const graph_record_view *record,
      int verify, tfast_graph_array *arrays)
{
    const graph_segment *file = &place.part->file;
    const uint32_t *counts =
        (const uint32_t *)((const uint8_t *)record->head + sizeof(graph_record));
    int64_t number = place.part->first + place.row;
    uint64_t bit = UINT64_C(1) << number % 64;
    tfast_status status = graph_record_arrays(file->schema, record, arrays);

    for (int i = file->schema->header.n_fields; i < cache->schema->header.n_fields;
         i++) {
        arrays[i] = (tfast_graph_array){.stored = GRAPH_ABSENT};
    }
    for (int k = 0; k < file->schema->header.n_counts && status == TFAST_OK; k++) {
        if (counts[k] != file->counts[k * file->count_step + place.row]) {
            status = graph_damage("its count %d must be that of the index", k);
        }
    }
    if (status != TFAST_OK || verify == TFAST_GRAPH_VERIFY_NEVER ||
        (verify == TFAST_GRAPH_VERIFY_ONCE &&
         (atomic_load_explicit(&cache->seen[number / 64], memory_order_relaxed) &
          bit) != 0)) {
        return status;
    }
    status = graph_record_check(file->schema, file->seed, record, arrays);
    if (status == TFAST_OK && verify == TFAST_GRAPH_VERIFY_ONCE) {
        atomic_fetch_or_explicit(&cache->seen[number / 64], bit, memory_order_relaxed);
    }
    return status;
}

tfast_status
graph_arrays_as(tfast_graph_cache *cache, int64_t i, graph_place place,
                graph_buffer *buffer, int verify, tfast_graph_array *arrays,
                graph_record_view *record)
{
    tfast_status status = fetch(place, buffer, record);

    if (status != TFAST_OK) {
        return status;
    }
    status = check(cache, place, record, verify, arrays);
    return status == TFAST_EIO
               ? graph_damage("graph %lld in %s must be whole: %s", (long long)i,
                              place.part->file.path, tfast_message())
               : status;
}

tfast_status
graph_arrays(tfast_graph_cache *cache, int64_t i, graph_place place,
             graph_buffer *buffer, tfast_graph_array *arrays)
{
    graph_record_view record;

    return graph_arrays_as(cache, i, place, buffer, cache->options.verify, arrays,
                           &record);
}

tfast_status
tfast_graph_cache_get(tfast_graph_cache *cache, int64_t i, tfast_graph_array *arrays,
                      void **owned)
{
    graph_buffer buffer = {NULL, 0};
    tfast_status status;

    *owned = NULL;
    if (i < 0 || i >= cache->n_graphs) {
        return tfast_fail(TFAST_EINVAL, "index must be >= 0 and < %lld, got %lld",
                          (long long)cache->n_graphs, (long long)i);
    }
    status = graph_arrays(cache, i, graph_find(cache, i), &buffer, arrays);
    if (status == TFAST_OK && cache->options.mode == TFAST_GRAPH_PREAD) {
        *owned = buffer.data;
    } else { /* what they point at is in the map */
        free(buffer.data);
    }
    return status;
}
