/* Reads, checks and replaces the manifest; creates an empty one in a new directory. */
#include "manifest.h"

#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#define REPAIR "; `trainfast cache repair` keeps what can be read"

/* Lower bound for the bytes of a record and its entry in the index. Since all segments
 * together have at most INT64_MAX bytes, 8 * n_records cannot overflow. */
enum { LEAST_RECORD_BYTES = sizeof(graph_record) + 12 };

/* The crc of a serialised manifest. */
static uint32_t
contents_crc(const uint8_t *bytes, size_t n)
{
    size_t skipped = offsetof(graph_manifest, generation);

    return graph_crc(bytes + skipped, n - skipped);
}

/* ---- Reading --------------------------------------------------------------------- */

static tfast_status
read_file(const char *path, uint8_t **data, int64_t *bytes)
{
    int file;
    tfast_status status = graph_open(path, O_RDONLY, &file);

    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_size(file, path, bytes));
    TRY(graph_alloc(data, (uint64_t)*bytes, 1));
    TRY(graph_read_all(file, path, *data, (size_t)*bytes, 0));
fail:
    graph_io_table->close(file);
    return status;
}

/* Checks the list of segments and sums up contents->n_records. */
static tfast_status
check_segments(graph_contents *contents, const char *path)
{
    const uint64_t n = contents->head.n_segments;
    uint64_t bytes = 0;
    uint8_t(*uuids)[16];
    tfast_status status;

    TRY(graph_alloc(&uuids, n, 16));
    for (uint64_t i = 0; i < n; i++) {
        const graph_manifest_segment *s = &contents->segments[i];

        memcpy(uuids[i], s->uuid, 16);
        if (s->bytes > (uint64_t)INT64_MAX - bytes ||
            s->records > s->bytes / LEAST_RECORD_BYTES ||
            (s->reserved[0] | s->reserved[1] | s->reserved[2]) != 0) {
            TRY(graph_damage("%s must have possible sizes of segments" REPAIR, path));
        }
        bytes += s->bytes;
        contents->n_records += s->records;
    }
    qsort(uuids, n, 16, graph_compare_uuids);
    for (uint64_t i = 1; i < n; i++) {
        if (memcmp(uuids[i - 1], uuids[i], 16) == 0) {
            TRY(graph_damage("%s must have each segment once" REPAIR, path));
        }
    }
fail:
    free(uuids);
    return status;
}

/* Checks that the order has each record at most once and no number beyond the last. */
static tfast_status
check_order(const graph_contents *contents, const char *path)
{
    const uint64_t n = contents->head.n_graphs, limit = contents->n_records;
    const uint64_t most = (UINT64_C(16) << 20) + n * 64; /* bytes for `seen` */
    uint8_t *seen = NULL;                                /* one bit a record */
    tfast_status status = TFAST_OK;

    if (!contents->head.ordered) {
        return n == limit ? TFAST_OK
                          : graph_damage("%s must have as many graphs as its segments' "
                                         "%llu records, got %llu" REPAIR,
                                         path, (unsigned long long)limit,
                                         (unsigned long long)n);
    }
    if (limit / 8 > most) { /* the manifest alone claims so many */
        return graph_damage(
            "%s must order most of its records, got %llu of %llu" REPAIR, path,
            (unsigned long long)n, (unsigned long long)limit);
    }
    TRY(graph_alloc(&seen, limit / 8 + 1, 1));
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t record = contents->order[i];

        if (record >= limit || (seen[record / 8] >> record % 8 & 1) != 0) {
            TRY(graph_damage("%s must order each of %llu records at most once, got "
                             "%llu" REPAIR,
                             path, (unsigned long long)limit,
                             (unsigned long long)record));
        }
        seen[record / 8] |= (uint8_t)(1u << record % 8);
    }
fail:
    free(seen);
    return status;
}

/* Whether the lists of segments and graphs fill the rest of the file exactly. */
static bool
sizes_fit(const graph_manifest *head, uint64_t bytes)
{
    uint64_t left = bytes - sizeof *head;

    if (head->n_segments > left / sizeof(graph_manifest_segment)) {
        return false;
    }
    left -= head->n_segments * sizeof(graph_manifest_segment);
    return head->ordered ? head->n_graphs <= left / 8 && left == head->n_graphs * 8
                         : left == 0;
}

static tfast_status
parse(graph_contents *contents, const char *path, const uint8_t *data, uint64_t bytes)
{
    graph_manifest *head = &contents->head;
    uint64_t segment_bytes;
    tfast_status status;

    if (bytes < sizeof *head) {
        return graph_damage("%s must have at least %zu bytes, got %llu" REPAIR, path,
                            sizeof *head, (unsigned long long)bytes);
    }
    memcpy(head, data, sizeof *head);
    if (memcmp(head->magic, GRAPH_MANIFEST_MAGIC, sizeof head->magic) != 0) {
        return graph_damage("%s must begin as a graph cache's manifest does" REPAIR,
                            path);
    }
    if (head->major != GRAPH_MAJOR) {
        return graph_damage("%s must have version %d.x, got %d.%d: a newer trainfast "
                            "reads it",
                            path, GRAPH_MAJOR, head->major, head->minor);
    }
    if (contents_crc(data, bytes) != head->crc) {
        return graph_damage("%s must be whole, its checksum is wrong" REPAIR, path);
    }
    if (head->building > 1 || head->ordered > 1 || !sizes_fit(head, bytes)) {
        return graph_damage("%s must be as long as its lists, got %llu bytes" REPAIR,
                            path, (unsigned long long)bytes);
    }
    segment_bytes = head->n_segments * sizeof *contents->segments;
    TRY(graph_alloc(&contents->segments, segment_bytes, 1));
    memcpy(contents->segments, data + sizeof *head, segment_bytes);
    if (head->ordered) {
        TRY(graph_alloc(&contents->order, head->n_graphs, sizeof *contents->order));
        memcpy(contents->order, data + sizeof *head + segment_bytes,
               head->n_graphs * sizeof *contents->order);
    }
fail:
    return status;
}

tfast_status
graph_contents_load(graph_contents *contents, const char *directory)
{
    char path[GRAPH_PATH_BYTES];
    uint8_t *data = NULL;
    int64_t bytes = 0;
    tfast_status status;

    memset(contents, 0, sizeof *contents);
    TRY(graph_join(path, directory, "manifest"));
    TRY(read_file(path, &data, &bytes));
    TRY(parse(contents, path, data, (uint64_t)bytes));
    TRY(check_segments(contents, path));
    TRY(check_order(contents, path));
fail:
    free(data);
    if (status != TFAST_OK) {
        graph_contents_free(contents);
    }
    return status;
}

void
graph_contents_free(graph_contents *contents)
{
    free(contents->segments);
    free(contents->order);
    memset(contents, 0, sizeof *contents);
}

/* ---- Changing -------------------------------------------------------------------- */

bool
graph_contents_has(const graph_contents *contents, const uint8_t uuid[16])
{
    for (uint64_t i = 0; i < contents->head.n_segments; i++) {
        if (memcmp(contents->segments[i].uuid, uuid, 16) == 0) {
            return true;
        }
    }
    return false;
}

/* Reallocates an array to n elements of `bytes` each. data: the address of its pointer,
 * which is unchanged after an error. */
static tfast_status
resize(void *data, uint64_t n, size_t bytes)
{
    void *old, *new;

    memcpy(&old, data, sizeof old);
    new = realloc(old, n * bytes + 1);
    if (new == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a manifest of %llu entries",
                          (unsigned long long)n);
    }
    memcpy(data, &new, sizeof new);
    return TFAST_OK;
}

tfast_status
graph_contents_add(graph_contents *contents, const graph_manifest_segment *segment)
{
    graph_manifest *head = &contents->head;
    tfast_status status;

    if (graph_contents_has(contents, segment->uuid)) {
        return TFAST_OK;
    }
    TRY(resize(&contents->segments, head->n_segments + 1, sizeof *segment));
    if (head->ordered) {
        TRY(resize(&contents->order, head->n_graphs + segment->records, 8));
        for (uint64_t i = 0; i < segment->records; i++) {
            contents->order[head->n_graphs + i] = contents->n_records + i;
        }
    }
    contents->segments[head->n_segments++] = *segment;
    head->n_graphs += segment->records;
    contents->n_records += segment->records;
fail:
    return status;
}

static tfast_status
write_file(const char *path, const uint8_t *data, size_t bytes, bool durable)
{
    int file, error;
    tfast_status status = graph_open(path, O_WRONLY | O_CREAT | O_EXCL, &file);

    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_write_all(file, path, data, bytes, 0));
    if (durable) {
        TRY(graph_sync(file, path));
    }
fail:
    error = graph_io_table->close(file);
    if (status == TFAST_OK && error < 0) { /* NFS may report failed writes here */
        status = graph_io_error("close", path, error);
    }
    return status;
}

/* Replaces the manifest atomically: writes a temporary file, then renames it. */
static tfast_status
replace(const char *directory, const uint8_t *data, size_t bytes, bool durable)
{
    char new[GRAPH_PATH_BYTES], path[GRAPH_PATH_BYTES];
    uint8_t uuid[16];
    tfast_status status = graph_draw_uuid(uuid, directory);

    if (status != TFAST_OK ||
        (status = graph_path(new, directory, "manifest", uuid, ".tmp")) != TFAST_OK) {
        return status;
    }
    TRY(graph_join(path, directory, "manifest"));
    TRY(write_file(new, data, bytes, durable));
    TRY(graph_rename(new, path));
    return durable ? graph_directory_sync(directory) : TFAST_OK;
fail:
    graph_io_table->unlink(new);
    return status;
}

tfast_status
graph_contents_store(graph_contents *contents, const char *directory, bool durable)
{
    graph_manifest *head = &contents->head;
    const size_t segment_bytes = head->n_segments * sizeof *contents->segments;
    const size_t order_bytes = head->ordered ? head->n_graphs * 8 : 0;
    const size_t bytes = sizeof *head + segment_bytes + order_bytes;
    uint8_t *data, *at;
    tfast_status status;

    TRY(graph_alloc(&data, bytes, 1));
    memcpy(head->magic, GRAPH_MANIFEST_MAGIC, sizeof head->magic);
    head->major = GRAPH_MAJOR;
    head->minor = GRAPH_MINOR;
    head->generation++;
    memcpy(data, head, sizeof *head);
    at = data + sizeof *head;
    if (segment_bytes > 0) {
        memcpy(at, contents->segments, segment_bytes);
    }
    if (order_bytes > 0) {
        memcpy(at + segment_bytes, contents->order, order_bytes);
    }
    head->crc = contents_crc(data, bytes);
    memcpy(data, head, sizeof *head);
    TRY(replace(directory, data, bytes, durable));
fail:
    free(data);
    return status;
}

/* ---- Creating a cache ------------------------------------------------------------ */

/* Returns TFAST_EINVAL for a directory that has no manifest, but has files that are not
 * of a graph cache or, if `locked`, segments. `locked`: the caller holds the cache's
 * lock. Without it another process may create the manifest and its first segment during
 * the listing, which may then contain the segment and not the manifest. */
static tfast_status
check_owner(const char *directory, bool locked, bool *has_manifest)
{
    graph_listing listing;
    tfast_status status = graph_list(&listing, directory);
    const bool segments = listing.open.n + listing.sealed.n > 0;

    *has_manifest = listing.manifest;
    if (status == TFAST_OK && !listing.manifest &&
        (listing.strangers || (locked && segments))) {
        status =
            tfast_fail(TFAST_EINVAL,
                       "path must be a graph cache or an empty or new directory, "
                       "got %s, which has other files and no manifest; choose "
                       "another path%s",
                       directory, segments ? ", or use `trainfast cache repair`" : "");
    }
    graph_listing_free(&listing);
    return status;
}

/* Writes an empty manifest unless there is one. The caller holds the cache's lock. */
static tfast_status
make_manifest(const char *directory, bool durable)
{
    graph_contents contents = {.head = {.n_segments = 0}};
    char parent[GRAPH_PATH_BYTES];
    bool has_manifest;
    tfast_status status;

    TRY(check_owner(directory, true, &has_manifest));
    if (has_manifest) {
        return TFAST_OK;
    }
    TRY(graph_draw_uuid(contents.head.uuid, directory));
    if (durable) { /* syncs the directory's own name */
        TRY(graph_join(parent, directory, ".."));
        TRY(graph_directory_sync(parent));
    }
    TRY(graph_contents_store(&contents, directory, durable));
fail:
    return status;
}

tfast_status
graph_directory_make(const char *directory, bool durable, int *lock)
{
    const int error = graph_io_table->mkdir(directory);
    bool has_manifest;
    tfast_status status;

    if (error < 0 && error != -EEXIST) {
        return graph_io_error("make", directory, error);
    }
    TRY(check_owner(directory, false, &has_manifest));
    TRY(graph_lock(directory, lock));
    status = make_manifest(directory, durable);
    if (status != TFAST_OK) {
        graph_unlock(*lock);
    }
fail:
    return status;
}
