/* An open cache: opening its segments, joining their schemas, reading a graph. */
#include "cache.h"

#include "manifest.h"
#include "schema_join.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

/* ---- Is the cache complete? ------------------------------------------------------ */

/* Adds 1 to *pending if the file of a segment that is not in the manifest still exists.
 * `open`: it is an open segment, or was when the directory was listed; *alive is set if
 * a living writer holds its exclusive lock. Does not read the file, which may be large.
 */
static void
look_at(const char *path, bool open, int64_t *pending, bool *alive)
{
    const int file = graph_io_table->open(path, O_RDONLY);

    /* -ENOENT: since the directory was listed, a writer has closed the open segment,
     * or the end of a build has deleted the sealed one. A segment that cannot be opened
     * for another reason (-EACCES) may hold graphs. */
    *pending += file != -ENOENT;
    if (open && file >= 0) {
        const int error = graph_io_table->lock(file, LOCK_SH | LOCK_NB);

        *alive = *alive || error == -EWOULDBLOCK;
        graph_io_table->lock(file, LOCK_UN); /* an adopting process may wait for it */
    }
    if (file >= 0) {
        graph_io_table->close(file);
    }
}

/* TFAST_EIO if a build has not ended or a segment is not in the manifest. */
static tfast_status
must_be_complete(const char *directory, const graph_listing *listing,
                 const graph_contents *contents)
{
    char path[GRAPH_PATH_BYTES];
    const char *what, *remedy;
    int64_t pending = 0;
    bool alive = false;
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < listing->open.n; i++) {
        TRY(graph_path(path, directory, "open", listing->open.data[i], ""));
        look_at(path, true, &pending, &alive);
        if (!graph_contents_has(contents, listing->open.data[i])) { /* sealed since? */
            TRY(graph_path(path, directory, "segment", listing->open.data[i], ""));
            look_at(path, true, &pending, &alive);
        }
    }
    for (int64_t i = 0; i < listing->sealed.n; i++) {
        if (!graph_contents_has(contents, listing->sealed.data[i])) {
            TRY(graph_path(path, directory, "segment", listing->sealed.data[i], ""));
            look_at(path, false, &pending, &alive);
        }
    }
    if (pending == 0 && !contents->head.building) {
        return TFAST_OK;
    }
    what = alive                     ? "which is being written"
           : contents->head.building ? "whose build has not ended"
                                     : "which a writer has left without closing it";
    remedy = alive ? "wait until it is closed, or open those with partial"
                   : "what was committed is safe: build it again to go on, "
                     "or keep it with `trainfast cache repair`";
    status = graph_damage(
        "path must be a complete cache, got %s, %s: %lld graphs are sealed; %s",
        directory, what, (long long)contents->head.n_graphs, remedy);
fail:
    return status;
}

/* ---- Opening --------------------------------------------------------------------- */

/* Hashes the cache's uuid and generation, so that consecutive generations have
 * fingerprints that differ in many bits. */
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

/* *used: [n_segments], the caller frees it. used[s]: some graph's record is in segment
 * s. The other segments are not opened, since a build may have deleted their files. */
static tfast_status
find_used(const graph_contents *contents, bool **used)
{
    const uint64_t n = contents->head.n_segments;
    uint64_t *ends; /* ends[s]: number of records in segments 0 .. s */
    uint64_t at = 0, left = n;
    tfast_status status;

    *used = NULL;
    TRY(graph_alloc(&ends, n, sizeof *ends));
    TRY(graph_alloc(used, n, sizeof **used));
    for (uint64_t i = 0, end = 0; i < n; i++) {
        ends[i] = end += contents->segments[i].records;
        (*used)[i] = contents->order == NULL && contents->segments[i].records > 0;
    }
    for (uint64_t i = 0;
         contents->order != NULL && left > 0 && i < contents->head.n_graphs; i++) {
        const uint64_t record = contents->order[i];

        /* Most graphs are in the same segment as the graph before them; search only for
         * the others. */
        if (i == 0 || record >= ends[at] || (at > 0 && record < ends[at - 1])) {
            at = 0;
            for (uint64_t step = n; step > 0; step /= 2) { /* ends[at - 1] <= record */
                while (at + step <= n && ends[at + step - 1] <= record) {
                    at += step;
                }
            }
        }
        left -= !(*used)[at];
        (*used)[at] = true;
    }
fail:
    free(ends);
    return status;
}

/* Opens the segment `wanted` as the cache's next part and compares it with its entry in
 * the manifest. first: cache-wide number of its first record. */
static tfast_status
open_part(tfast_graph_cache *cache, const graph_manifest_segment *wanted, int64_t first)
{
    graph_part *part = &cache->parts[cache->n_parts];
    const graph_segment *file = &part->file;
    char path[GRAPH_PATH_BYTES];
    tfast_status status;

    TRY(graph_path(path, cache->path, "segment", wanted->uuid, ""));
    status =
        graph_segment_open(&part->file, path, cache->options.mode == TFAST_GRAPH_PREAD);
    if (status == TFAST_EIO && graph_errno() == 0) {
        return graph_damage("%s: `trainfast cache repair` keeps what can be read",
                            tfast_message());
    }
    TRY(status);
    cache->n_parts++;
    cache->file_bytes += file->bytes;
    part->first = first;
    if (memcmp(file->uuid, wanted->uuid, 16) != 0 ||
        (uint64_t)file->records != wanted->records ||
        (uint64_t)file->bytes != wanted->bytes ||
        file->trailer.crc != wanted->trailer_crc) {
        return graph_damage(
            "%s must be the file that the manifest names: %llu records "
            "in %llu bytes, got %lld in %lld: restore it, or `trainfast "
            "cache repair` keeps what can be read",
            path, (unsigned long long)wanted->records,
            (unsigned long long)wanted->bytes, (long long)file->records,
            (long long)file->bytes);
    }
fail:
    return status;
}

static tfast_status
open_parts(tfast_graph_cache *cache, const graph_contents *contents)
{
    const uint64_t n = contents->head.n_segments;
    int64_t first = 0;
    bool *used;
    tfast_status status;

    TRY(find_used(contents, &used));
    TRY(graph_alloc(&cache->parts, n, sizeof *cache->parts));
    for (uint64_t i = 0; i < n; i++) {
        if (used[i]) {
            TRY(open_part(cache, &contents->segments[i], first));
        }
        first += (int64_t)contents->segments[i].records;
    }
fail:
    free(used);
    return status;
}

/* Sets the columns of one part, one for each count of the cache's schema. sources: this
 * segment's row from graph_schemas_join(). */
static tfast_status
set_columns(graph_part *part, int n_counts, const int64_t *sources)
{
    const graph_segment *file = &part->file;
    tfast_status status;

    TRY(graph_alloc(&part->columns, (uint64_t)n_counts, sizeof *part->columns));
    TRY(graph_alloc(&part->fixed, (uint64_t)n_counts, sizeof *part->fixed));
    for (int k = 0; k < n_counts; k++) {
        if (sources[k] >= 0) {
            part->columns[k] =
                (graph_column){file->counts + sources[k] * file->count_step, 1};
        } else {
            part->fixed[k] = (uint32_t)(-1 - sources[k]);
            part->columns[k] = (graph_column){&part->fixed[k], 0};
        }
    }
fail:
    return status;
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
    TRY(graph_alloc(&schemas, (uint64_t)cache->n_parts, sizeof *schemas));
    for (int64_t i = 0; i < cache->n_parts; i++) {
        schemas[i] = cache->parts[i].file.schema;
    }
    TRY(graph_schemas_join(&cache->schema, &sources, schemas, cache->n_parts));
    for (int64_t i = 0; i < cache->n_parts; i++) {
        const int n_counts = cache->schema->header.n_counts;

        TRY(set_columns(&cache->parts[i], n_counts, sources + i * n_counts));
    }
fail:
    free(schemas);
    free(sources);
    return status;
}

/* Frees what try_open() has set, so that it can be called again. */
static void
empty(tfast_graph_cache *cache)
{
    for (int64_t i = 0; i < cache->n_parts; i++) {
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

/* One attempt to open. *generation: of the manifest that was read; unchanged if none
 * could be read. */
static tfast_status
try_open(tfast_graph_cache *cache, uint64_t *generation)
{
    graph_listing listing;
    graph_contents contents = {.order = NULL};
    tfast_status status;

    TRY(graph_list(&listing, cache->path));
    TRY(graph_contents_load(&contents, cache->path));
    *generation = contents.head.generation;
    if (!cache->options.partial) {
        TRY(must_be_complete(cache->path, &listing, &contents));
    }
    TRY(open_parts(cache, &contents));
    TRY(join_schemas(cache));
    cache->n_records = (int64_t)contents.n_records;
    cache->n_graphs = (int64_t)contents.head.n_graphs;
    cache->order = contents.order;
    contents.order = NULL;
    set_fingerprint(cache, &contents.head);
    /* n_records is safe to allocate for: the opened files prove their own records, and
     * graph_contents_load() bounds the records of segments that were not opened. */
    TRY(graph_alloc((void *)&cache->seen, (uint64_t)cache->n_records / 64 + 1,
                    sizeof *cache->seen));
fail:
    graph_contents_free(&contents);
    graph_listing_free(&listing);
    return status;
}

void
graph_cache_free(tfast_graph_cache *cache)
{
    empty(cache);
    free(cache->path);
    free(cache);
}

tfast_status
tfast_graph_cache_open(tfast_graph_cache **cache, const char *path,
                       const tfast_graph_open_options *options)
{
    uint64_t generation = 0, before;
    tfast_graph_cache *made;
    tfast_status status;

    *cache = NULL;
    TRY(graph_alloc(&made, 1, sizeof *made));
    atomic_init(&made->references, 1);
    made->options = *options;
    if (options->mode == TFAST_GRAPH_BY_FILE_SYSTEM) {
        made->options.mode =
            graph_is_remote(path) ? TFAST_GRAPH_PREAD : TFAST_GRAPH_MMAP;
    }
    made->kernels = tfast_graph_kernels_in_use();
    TRY(graph_copy_text(&made->path, path));
    /* A missing file may have been deleted by the end of a build since the manifest was
     * read. The manifest's generation has changed then: try again. */
    for (int i = 0; i < 9; i++) {
        before = generation;
        empty(made);
        status = try_open(made, &generation);
        if (status != TFAST_EIO || graph_errno() != ENOENT || generation == before) {
            break;
        }
    }
    TRY(status);
    *cache = made;
    return TFAST_OK;
fail:
    if (made != NULL) {
        graph_cache_free(made);
    }
    return status;
}

int
tfast_graph_cache_mode(const tfast_graph_cache *cache)
{
    return cache->options.mode;
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
    const size_t at = offsetof(graph_record, key);
    tfast_status status = TFAST_OK;

    for (int64_t i = 0; i < cache->n_graphs; i++) {
        const graph_place place = graph_find(cache, i);
        const graph_segment *file = &place.part->file;
        const uint8_t *frame = graph_mapped_frame(place);

        if (frame != NULL) {
            memcpy(out + 16 * i, frame + at, 16);
        } else {
            TRY(graph_read_all(file->file, file->path, out + 16 * i, 16,
                               (int64_t)(file->offsets[place.row] + at)));
        }
    }
fail:
    return status;
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

/* Fills *record. Reads the whole frame into buffer->data, or copies only its head there
 * if the file is mapped. */
static tfast_status
fetch(graph_place place, graph_buffer *buffer, graph_record_view *record)
{
    const graph_segment *file = &place.part->file;
    const uint8_t *mapped = graph_mapped_frame(place);
    const size_t head = file->schema->record_bytes;
    const int64_t bytes = graph_frame_bytes(place); /* at least the head's */
    tfast_status status;

    TRY(reserve(buffer, mapped != NULL ? (int64_t)head : bytes));
    if (mapped != NULL) {
        memcpy(buffer->data, mapped, head);
    } else {
        TRY(graph_read_all(file->file, file->path, buffer->data, (size_t)bytes,
                           (int64_t)file->offsets[place.row]));
    }
    record->head = buffer->data;
    record->payload = (mapped != NULL ? mapped : buffer->data) + head;
    record->bytes = bytes;
fail:
    return status;
}

/* Fills `arrays` from the record. Sizes are always checked, so that nothing outside the
 * record is read; checksums and indices as `verify` (TFAST_GRAPH_VERIFY_...) says. */
static tfast_status
check(tfast_graph_cache *cache, graph_place place, const graph_record_view *record,
      int verify, tfast_graph_array *arrays)
{
    const graph_segment *file = &place.part->file;
    const tfast_graph_schema *schema = file->schema;
    const uint32_t *counts = (const uint32_t *)((const graph_record *)record->head + 1);
    const int64_t number = place.part->first + place.row;
    const uint64_t bit = UINT64_C(1) << number % 64;
    _Atomic(uint64_t) *seen = &cache->seen[number / 64];
    tfast_status status;

    TRY(graph_record_arrays(schema, record, arrays));
    for (int i = schema->header.n_fields; i < cache->schema->header.n_fields; i++) {
        arrays[i] = (tfast_graph_array){.stored = GRAPH_ABSENT};
    }
    for (int k = 0; k < schema->header.n_counts; k++) {
        if (counts[k] != file->counts[k * file->count_step + place.row]) {
            return graph_damage("its count %d must be that of the index", k);
        }
    }
    if (verify == TFAST_GRAPH_VERIFY_NEVER ||
        (verify == TFAST_GRAPH_VERIFY_ONCE &&
         (atomic_load_explicit(seen, memory_order_relaxed) & bit) != 0)) {
        return TFAST_OK;
    }
    TRY(graph_record_check(schema, file->seed, record, arrays));
    if (verify == TFAST_GRAPH_VERIFY_ONCE) {
        atomic_fetch_or_explicit(seen, bit, memory_order_relaxed);
    }
fail:
    return status;
}

tfast_status
graph_arrays(tfast_graph_cache *cache, int64_t i, graph_place place,
             graph_buffer *buffer, int verify, tfast_graph_array *arrays,
             graph_record_view *record)
{
    tfast_status status = fetch(place, buffer, record);

    if (status != TFAST_OK) {
        return status;
    }
    status = check(cache, place, record, verify, arrays);
    return status == TFAST_EIO
               ? graph_damage("graph %lld in %s must be whole: %s; `trainfast cache "
                              "repair` keeps the other graphs",
                              (long long)i, place.part->file.path, tfast_message())
               : status;
}

tfast_status
tfast_graph_cache_get(tfast_graph_cache *cache, int64_t i, tfast_graph_array *arrays,
                      void **owned)
{
    graph_buffer buffer = {NULL, 0};
    graph_record_view record;
    tfast_status status;

    *owned = NULL;
    if (i < 0 || i >= cache->n_graphs) {
        return tfast_fail(TFAST_EINVAL, "index must be >= 0 and < %lld, got %lld",
                          (long long)cache->n_graphs, (long long)i);
    }
    status = graph_arrays(cache, i, graph_find(cache, i), &buffer,
                          cache->options.verify, arrays, &record);
    if (status == TFAST_OK && cache->options.mode == TFAST_GRAPH_PREAD) {
        *owned = buffer.data;
    } else { /* the arrays point into the map */
        free(buffer.data);
    }
    return status;
}
