/* The end of a segment: its index and trailer, its final name, its manifest entry. */
#include "seal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void
write_columns(uint8_t *out, const graph_index *index)
{
    int64_t n = index->records;
    uint32_t *counts;

    memcpy(out, index->offsets, (size_t)n * 8);
    out += graph_index_column_bytes(n, 8);
    memcpy(out, index->units, (size_t)n * 4);
    for (int k = 0; k < index->n_counts; k++) {
        out += graph_index_column_bytes(n, 4);
        counts = (uint32_t *)out;
        for (int64_t i = 0; i < n; i++) {
            counts[i] = index->counts[i * index->n_counts + k];
        }
    }
}

tfast_status
graph_seal(int file, const char *path, const graph_index *index, int64_t end,
           int64_t last_commit, bool durable, graph_manifest_segment *entry)
{
    int64_t bytes = graph_index_bytes(index->records, index->n_counts);
    size_t all = (size_t)bytes + sizeof(graph_trailer);
    graph_trailer trailer = {
        .index_offset = (uint64_t)end,
        .index_bytes = (uint64_t)bytes,
        .records = (uint64_t)index->records,
        .last_commit = (uint64_t)last_commit,
        .n_counts = (uint32_t)index->n_counts,
    };
    uint8_t *data = calloc(1, all);
    tfast_status status;
    int error;

    if (data == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for an index of %zu bytes", all);
    }
    memcpy(trailer.magic, GRAPH_TRAILER_MAGIC, sizeof trailer.magic);
    write_columns(data, index);
    trailer.index_crc = graph_crc(data, (size_t)bytes);
    trailer.crc = graph_trailer_crc(&trailer);
    memcpy(data + all - sizeof trailer, &trailer, sizeof trailer);
    status = graph_write_all(file, path, data, all, end);
    free(data);
    if (status == TFAST_OK && durable && (error = graph_io_table->sync(file)) < 0) {
        status = graph_io_error("sync", path, error);
    }
    entry->records = trailer.records;
    entry->bytes = (uint64_t)end + all;
    entry->trailer_crc = trailer.crc;
    return status;
}

tfast_status
graph_seal_name(const char *directory, const uint8_t uuid[16], bool durable)
{
    char from[GRAPH_PATH_BYTES], to[GRAPH_PATH_BYTES];
    tfast_status status = graph_path(from, directory, "open", uuid, "");
    int error;

    status =
        status == TFAST_OK ? graph_path(to, directory, "segment", uuid, "") : status;
    if (status != TFAST_OK) {
        return status;
    }
    error = graph_io_table->rename(from, to);
    if (error < 0) {
        return graph_io_error("rename", from, error);
    }
    return durable ? graph_directory_sync(directory) : TFAST_OK;
}
