/* Reading and replacing the manifest. */
#include "manifest.h"

#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

/* What a record takes at least, with its entry in the index: files of all sizes that
 * there are have so few that 8 bytes for each of them cannot overflow. */
enum { LEAST_RECORD_BYTES = sizeof(graph_record) + 12 };

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
    int file = graph_io_table->open(path, O_RDONLY);
    tfast_status status;

    *data = NULL;
    if (file < 0) {
        return graph_io_error("open", path, file);
    }
    *bytes = graph_io_table->size(file);
    if (*bytes < 0) {
        status = graph_io_error("read", path, (int)*bytes);
    } else if ((*data = malloc((size_t)*bytes + 1)) == NULL) {
        status = tfast_fail(TFAST_ENOMEM, "no memory for %lld bytes of %s",
                            (long long)*bytes, path);
    } else {
        status = graph_read_all(file, path, *data, (size_t)*bytes, 0);
    }
    graph_io_table->close(file);
    return status;
}

static tfast_status
check_segments(graph_contents *contents, const char *path)
{
    uint64_t n = contents->head.n_segments, total = 0, bytes = 0;
    uint8_t(*uuids)[16] = malloc(n * 16 + 1);
    tfast_status status = TFAST_OK;

    if (uuids == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the segments of %s", path);
    }
    for (uint64_t i = 0; i < n; i++) {
        const graph_manifest_segment *s = &contents->segments[i];

        memcpy(uuids[i], s->uuid, 16);
        if (s->bytes > (uint64_t)INT64_MAX - bytes ||
            s->records > s->bytes / LEAST_RECORD_BYTES ||
            (s->reserved[0] | s->reserved[1] | s->reserved[2]) != 0) {
            status = graph_damage("%s must have possible sizes of segments", path);
            break;
        }
        bytes += s->bytes;
        total += s->records;
    }
    if (status == TFAST_OK) {
        qsort(uuids, n, 16, graph_compare_uuids);
    }
    for (uint64_t i = 1; i < n && status == TFAST_OK; i++) {
        if (memcmp(uuids[i - 1], uuids[i], 16) == 0) {
            status = graph_damage("%s must have each segment once", path);
        }
    }
    free(uuids);
    contents->n_records = total;
    return status;
}

static tfast_status
check_order(const graph_contents *contents, const char *path)
{
    uint64_t n = contents->head.n_graphs, limit = contents->n_records;
    uint64_t most = (UINT64_C(16) << 20) + n * 64; /* bytes for a bit per record */
    tfast_status status = TFAST_OK;
    uint8_t *seen;

    if (!contents->head.ordered) {
        return n == limit ? TFAST_OK
                          : graph_damage("%s must have as many graphs as its segments' "
                                         "%llu records, got %llu",
                                         path, (unsigned long long)limit,
                                         (unsigned long long)n);
    }
    if (limit / 8 > most) { /* what it says of records is not proven yet */
        return graph_damage("%s must order most of its records, got %llu of %llu", path,
                            (unsigned long long)n, (unsigned long long)limit);
    }
    seen = calloc(1, limit / 8 + 1);
    if (seen == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the order of %s", path);
    }
    for (uint64_t i = 0; i < n && status == TFAST_OK; i++) {
        uint64_t record = contents->order[i];

        if (record >= limit || (seen[record / 8] >> record % 8 & 1) != 0) {
            status = graph_damage("%s must order each of %llu records at most once, "
                                  "got %llu",
                                  path, (unsigned long long)limit,
                                  (unsigned long long)record);
        } else {
            seen[record / 8] |= (uint8_t)(1u << record % 8);
        }
    }
    free(seen);
    return status;
}

/* Sizes of what follows the head must be those of the file. */
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

    if (bytes < sizeof *head) {
        return graph_damage("%s must have at least %zu bytes, got %llu", path,
                            sizeof *head, (unsigned long long)bytes);
    }
    memcpy(head, data, sizeof *head);
    if (memcmp(head->magic, GRAPH_MANIFEST_MAGIC, sizeof head->magic) != 0) {
        return graph_damage("%s must begin as a graph cache's manifest does", path);
    }
    if (head->major != GRAPH_MAJOR) {
        return graph_damage("%s must have version %d.x, got %d.%d: a newer trainfast "
                            "reads it",
                            path, GRAPH_MAJOR, head->major, head->minor);
    }
    if (contents_crc(data, bytes) != head->crc) {
        return graph_damage("%s must be whole, its checksum is wrong", path);
    }
    if (head->building > 1 || head->ordered > 1 || !sizes_fit(head, bytes)) {
        return graph_damage("%s must be as long as its lists, got %llu bytes", path,
                            (unsigned long long)bytes);
    }
    segment_bytes = head->n_segments * sizeof *contents->segments;
    contents->segments = malloc(segment_bytes + 1);
    contents->order = head->ordered ? malloc(head->n_graphs * 8 + 1) : NULL;
    if (contents->segments == NULL || (head->ordered && contents->order == NULL)) {
        return tfast_fail(TFAST_ENOMEM, "no memory for %s", path);
    }
    memcpy(contents->segments, data + sizeof *head, segment_bytes);
    if (head->ordered) {
        memcpy(contents->order, data + sizeof *head + segment_bytes,
               head->n_graphs * 8);
    }
    return TFAST_OK;
}

tfast_status
graph_contents_load(graph_contents *contents, const char *directory)
{
    char path[GRAPH_PATH_BYTES];
    tfast_status status = graph_join(path, directory, "manifest");
    uint8_t *data = NULL;
    int64_t bytes = 0;

    memset(contents, 0, sizeof *contents);
    if (status == TFAST_OK) {
        status = read_file(path, &data, &bytes);
    }
    if (status == TFAST_OK) {
        status = parse(contents, path, data, (uint64_t)bytes);
    }
    if (status == TFAST_OK) {
        status = check_segments(contents, path);
    }
    if (status == TFAST_OK) {
        status = check_order(contents, path);
    }
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

tfast_status
graph_contents_add(graph_contents *contents, const graph_manifest_segment *segment)
{
    graph_manifest *head = &contents->head;
    uint64_t n = head->n_segments;
    graph_manifest_segment *segments;
    uint64_t *order;

    if (graph_contents_has(contents, segment->uuid)) {
        return TFAST_OK;
    }
    segments = realloc(contents->segments, (n + 1) * sizeof *segments);
    if (segments == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for %llu segments",
                          (unsigned long long)n + 1);
    }
    contents->segments = segments;
    if (head->ordered) {
        order = realloc(contents->order, (head->n_graphs + segment->records) * 8 + 1);
        if (order == NULL) {
            return tfast_fail(TFAST_ENOMEM, "no memory for the order of %llu graphs",
                              (unsigned long long)head->n_graphs);
        }
        contents->order = order;
        for (uint64_t i = 0; i < segment->records; i++) {
            order[head->n_graphs + i] = contents->n_records + i;
        }
    }
    segments[n] = *segment;
    head->n_segments = n + 1;
    head->n_graphs += segment->records;
    contents->n_records += segment->records;
    return TFAST_OK;
}

static tfast_status
write_file(const char *path, const uint8_t *data, size_t bytes, bool durable)
{
    int file = graph_io_table->open(path, O_WRONLY | O_CREAT | O_EXCL);
    tfast_status status;
    int error;

    if (file < 0) {
        return graph_io_error("create", path, file);
    }
    status = graph_write_all(file, path, data, bytes, 0);
    if (status == TFAST_OK && durable && (error = graph_io_table->sync(file)) < 0) {
        status = graph_io_error("sync", path, error);
    }
    error = graph_io_table->close(file);
    if (status == TFAST_OK && error < 0) { /* network file systems write here */
        status = graph_io_error("close", path, error);
    }
    return status;
}

/* Writes it beside the manifest and renames. */
static tfast_status
replace(const char *directory, const uint8_t *data, size_t bytes, bool durable)
{
    char new[GRAPH_PATH_BYTES], path[GRAPH_PATH_BYTES];
    uint8_t uuid[16];
    tfast_status status;
    int error = graph_io_table->random(uuid, sizeof uuid);

    if (error < 0) {
        return graph_io_error("draw a name in", directory, error);
    }
    status = graph_path(new, directory, "manifest", uuid, ".tmp");
    status = status == TFAST_OK ? graph_join(path, directory, "manifest") : status;
    if (status != TFAST_OK) {
        return status;
    }
    status = write_file(new, data, bytes, durable);
    if (status == TFAST_OK && (error = graph_io_table->rename(new, path)) < 0) {
        status = graph_io_error("rename to", path, error);
    }
    if (status != TFAST_OK) {
        graph_io_table->unlink(new);
        return status;
    }
    return durable ? graph_directory_sync(directory) : TFAST_OK;
}

tfast_status
graph_contents_store(graph_contents *contents, const char *directory, bool durable)
{
    graph_manifest *head = &contents->head;
    size_t segment_bytes = head->n_segments * sizeof *contents->segments;
    size_t order_bytes = head->ordered ? head->n_graphs * 8 : 0;
    size_t bytes = sizeof *head + segment_bytes + order_bytes;
    uint8_t *data = malloc(bytes);
    tfast_status status;

    if (data == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a manifest of %zu bytes", bytes);
    }
    memcpy(head->magic, GRAPH_MANIFEST_MAGIC, sizeof head->magic);
    head->major = GRAPH_MAJOR;
    head->minor = GRAPH_MINOR;
    head->generation++;
    memcpy(data, head, sizeof *head);
    if (segment_bytes > 0) {
        memcpy(data + sizeof *head, contents->segments, segment_bytes);
    }
    if (order_bytes > 0) {
        memcpy(data + sizeof *head + segment_bytes, contents->order, order_bytes);
    }
    head->crc = contents_crc(data, bytes);
    memcpy(data, head, sizeof *head);
    status = replace(directory, data, bytes, durable);
    free(data);
    return status;
}
