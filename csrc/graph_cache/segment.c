/* Opening a sealed segment. Everything but the frames is checked here, so that reading
 * a graph only has to check its own frame. */
#include "segment.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_SCHEMA_BYTES =
        sizeof(graph_schema_header) + GRAPH_MAX_COUNTS * sizeof(graph_schema_count) +
        GRAPH_MAX_FIELDS * sizeof(graph_schema_field) +
        (GRAPH_MAX_COUNTS + GRAPH_MAX_FIELDS) * GRAPH_MAX_NAME + GRAPH_UNIT,
};

uint32_t
graph_commit_crc(uint32_t seed, const graph_commit *commit)
{
    size_t skipped = offsetof(graph_commit, records);

    return graph_crc_more(seed, (const uint8_t *)commit + skipped,
                          sizeof *commit - skipped);
}

uint32_t
graph_trailer_crc(const graph_trailer *trailer)
{
    size_t skipped = offsetof(graph_trailer, index_crc);

    return graph_crc((const uint8_t *)trailer + skipped, sizeof *trailer - skipped);
}

uint32_t
graph_header_crc(const graph_header *header, const void *schema)
{
    graph_header plain = *header;

    plain.crc = 0;
    return graph_crc_more(graph_crc(&plain, sizeof plain), schema,
                          header->schema_bytes);
}

/* ---- Header ---------------------------------------------------------------------- */

static tfast_status
check_header(const graph_header *header, const char *path)
{
    if (memcmp(header->magic, GRAPH_HEADER_MAGIC, sizeof header->magic) != 0 ||
        header->endian != GRAPH_ENDIAN_PROBE) {
        return graph_damage("%s must begin as a graph cache's segment does", path);
    }
    if (header->major != GRAPH_MAJOR || header->incompatible != 0) {
        return graph_damage("%s must have version %d.x without features unknown here, "
                            "got %d.%d with %#x: a newer trainfast reads it",
                            path, GRAPH_MAJOR, header->major, header->minor,
                            header->incompatible);
    }
    if (header->schema_bytes > MAX_SCHEMA_BYTES ||
        header->schema_bytes % GRAPH_UNIT != 0 ||
        !graph_all_zero(header->reserved, sizeof header->reserved)) {
        return graph_damage("%s must have a schema of at most %d bytes, got %u", path,
                            (int)MAX_SCHEMA_BYTES, header->schema_bytes);
    }
    return TFAST_OK;
}

/* Checks and parses data[bytes]: the serialised schema and the zeros after it, up to
 * the first frame. */
static tfast_status
check_schema(const graph_header *header, const char *path, const uint8_t *data,
             int64_t bytes, tfast_graph_schema **schema)
{
    tfast_status status;

    if (graph_header_crc(header, data) != header->crc) {
        return graph_damage("%s must have a whole header, its checksum is wrong", path);
    }
    if (!graph_all_zero(data + header->schema_bytes, bytes - header->schema_bytes)) {
        return graph_damage("%s must have zeros after its schema", path);
    }
    status = tfast_graph_schema_parse(schema, data, header->schema_bytes);
    return status == TFAST_EINVAL ? graph_damage("%s: %s", path, tfast_message())
                                  : status;
}

tfast_status
graph_segment_header(int file, const char *path, int64_t file_bytes,
                     graph_header *header, tfast_graph_schema **schema, int64_t *begin)
{
    uint8_t *data = NULL;
    tfast_status status;
    int64_t bytes;

    *schema = NULL;
    if (file_bytes < (int64_t)sizeof *header) {
        return graph_damage("%s must have a header of %zu bytes, got %lld", path,
                            sizeof *header, (long long)file_bytes);
    }
    TRY(graph_read_all(file, path, header, sizeof *header, 0));
    TRY(check_header(header, path));
    *begin = graph_first_frame(header->schema_bytes);
    if (*begin > file_bytes) {
        return graph_damage("%s must have %lld bytes for its schema, got %lld", path,
                            (long long)*begin, (long long)file_bytes);
    }
    bytes = *begin - (int64_t)sizeof *header;
    TRY(graph_alloc(&data, (uint64_t)bytes, 1));
    TRY(graph_read_all(file, path, data, (size_t)bytes, sizeof *header));
    TRY(check_schema(header, path, data, bytes, schema));
fail:
    free(data);
    return status;
}

tfast_status
graph_segment_schema(const char *path, graph_header *header,
                     tfast_graph_schema **schema)
{
    int64_t bytes, begin;
    int file;
    tfast_status status = graph_open(path, O_RDONLY, &file);

    *schema = NULL;
    if (status != TFAST_OK) {
        return status;
    }
    TRY(graph_size(file, path, &bytes));
    TRY(graph_segment_header(file, path, bytes, header, schema, &begin));
fail:
    graph_io_table->close(file);
    return status;
}

/* ---- Trailer and index ----------------------------------------------------------- */

int64_t
graph_index_bytes(int64_t records, int n_counts)
{
    return graph_index_column_bytes(records, 8) +
           graph_index_column_bytes(records, 4) * (1 + (int64_t)n_counts);
}

static tfast_status
read_trailer(graph_segment *s)
{
    graph_trailer *t = &s->trailer;
    const uint64_t limit = (uint64_t)s->bytes;
    const int n_counts = s->schema->header.n_counts;
    tfast_status status;

    if (s->bytes < s->begin + (int64_t)sizeof *t) {
        return graph_damage("%s must be sealed, it ends before a trailer", s->path);
    }
    TRY(graph_read_all(s->file, s->path, t, sizeof *t, s->bytes - (int64_t)sizeof *t));
    if (memcmp(t->magic, GRAPH_TRAILER_MAGIC, sizeof t->magic) != 0 ||
        graph_trailer_crc(t) != t->crc ||
        !graph_all_zero(t->reserved, sizeof t->reserved)) {
        return graph_damage("%s must be sealed, its trailer is missing or damaged",
                            s->path);
    }
    if (t->n_counts != (uint32_t)n_counts || t->index_offset > limit ||
        t->index_bytes > limit || t->index_offset < (uint64_t)s->begin ||
        t->index_offset % GRAPH_BLOCK != 0 || t->last_commit > limit ||
        limit - t->index_offset - t->index_bytes != sizeof *t ||
        t->records > t->index_bytes / (12 + 4 * (uint64_t)n_counts) ||
        (uint64_t)graph_index_bytes((int64_t)t->records, n_counts) != t->index_bytes) {
        return graph_damage("%s must have an index of its %llu records before its "
                            "trailer",
                            s->path, (unsigned long long)t->records);
    }
    s->records = (int64_t)t->records;
fail:
    return status;
}

static tfast_status
read_index(graph_segment *s)
{
    const uint64_t bytes = s->trailer.index_bytes;
    const uint8_t *index;
    tfast_status status;

    s->index = malloc(bytes + 1); /* not graph_alloc(): saves zeroing */
    if (s->index == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the index of %s", s->path);
    }
    TRY(graph_read_all(s->file, s->path, s->index, bytes,
                       (int64_t)s->trailer.index_offset));
    index = s->index;
    if (graph_crc(index, bytes) != s->trailer.index_crc) {
        return graph_damage("%s must have a whole index, its checksum is wrong",
                            s->path);
    }
    s->count_step = graph_index_column_bytes(s->records, 4) / 4;
    s->offsets = (const uint64_t *)index;
    s->units = (const uint32_t *)(index + graph_index_column_bytes(s->records, 8));
    s->counts = s->units + s->count_step;
fail:
    return status;
}

/* Checks that the index describes frames without gaps: each record begins where the one
 * before it ends, or one commit frame later. */
static tfast_status
check_entries(const graph_segment *s)
{
    int64_t least = (int64_t)s->schema->record_bytes, end = s->begin;
    int64_t limit = (int64_t)s->trailer.index_offset;
    int64_t last = (int64_t)s->trailer.last_commit;

    if (s->records == 0
            ? last != 0 || limit != end
            : last < end || last > limit || last + graph_commit_bytes(last) != limit) {
        return graph_damage("%s must end with a commit frame, got one at byte %lld",
                            s->path, (long long)last);
    }
    for (int64_t i = 0; i < s->records; i++) {
        uint64_t at = s->offsets[i];
        int64_t bytes = (int64_t)s->units[i] * GRAPH_UNIT;

        if ((at != (uint64_t)end &&
             at != (uint64_t)end + (uint64_t)graph_commit_bytes(end)) ||
            bytes < least || at > (uint64_t)last || bytes > last - (int64_t)at) {
            return graph_damage("%s must have its records one after another, got "
                                "record %lld at byte %llu",
                                s->path, (long long)i, (unsigned long long)at);
        }
        end = (int64_t)at + bytes;
    }
    return s->records == 0 || end == last
               ? TFAST_OK
               : graph_damage("%s must have no gap before its last commit frame",
                              s->path);
}

/* Reads and checks an open file; maps it unless `pread`. */
static tfast_status
read_file(graph_segment *s, bool pread)
{
    graph_header header;
    int error = 0;
    tfast_status status;

    TRY(graph_size(s->file, s->path, &s->bytes));
    TRY(graph_segment_header(s->file, s->path, s->bytes, &header, &s->schema,
                             &s->begin));
    memcpy(s->uuid, header.uuid, sizeof s->uuid);
    s->seed = graph_crc(s->uuid, sizeof s->uuid);
    TRY(read_trailer(s));
    TRY(read_index(s));
    TRY(check_entries(s));
    if (!pread) {
        s->map = graph_io_table->map(s->file, s->bytes, &error);
        if (s->map == NULL) {
            return graph_io_error("map", s->path, error);
        }
        graph_io_table->close(s->file); /* a map needs no descriptor */
        s->file = -1;
    }
fail:
    return status;
}

tfast_status
graph_segment_open(graph_segment *segment, const char *path, bool pread)
{
    tfast_status status;

    memset(segment, 0, sizeof *segment);
    segment->file = -1;
    TRY(graph_copy_text(&segment->path, path));
    TRY(graph_open(path, O_RDONLY, &segment->file));
    TRY(read_file(segment, pread));
    return TFAST_OK;
fail:
    graph_segment_close(segment);
    return status;
}

void
graph_segment_close(graph_segment *segment)
{
    if (segment->map != NULL) {
        graph_io_table->unmap(segment->map, segment->bytes);
    }
    if (segment->file >= 0) {
        graph_io_table->close(segment->file);
    }
    tfast_graph_schema_free(segment->schema);
    free(segment->index);
    free(segment->path);
    memset(segment, 0, sizeof *segment);
    segment->file = -1;
}
