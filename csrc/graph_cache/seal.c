/* Commit frames, the index, and sealing a segment. */
#include "seal.h"

#include <stdlib.h>
#include <string.h>

/* ---- Commit frames --------------------------------------------------------------- */

void
graph_commits_add(graph_commits *commits, const graph_record *record)
{
    commits->group_crc = graph_crc_more(commits->group_crc, &record->header_crc, 4);
    commits->records++;
}

graph_commit
graph_commits_frame(const graph_commits *commits)
{
    graph_commit commit = {
        .magic = GRAPH_COMMIT_MAGIC,
        .records = commits->records,
        .previous = commits->previous,
        .group_crc = commits->group_crc,
    };

    commit.crc = graph_commit_crc(commits->seed, &commit);
    return commit;
}

bool
graph_commits_take(graph_commits *commits, const uint8_t *frame, int64_t at)
{
    const graph_commit commit = graph_commits_frame(commits);
    const int64_t zeros = graph_commit_bytes(at) - (int64_t)sizeof commit;

    if (memcmp(frame, &commit, sizeof commit) != 0 ||
        !graph_all_zero(frame + sizeof commit, zeros)) {
        return false;
    }
    commits->previous = (uint64_t)at;
    commits->group_crc = 0;
    return true;
}

/* ---- Index ----------------------------------------------------------------------- */

tfast_status
graph_index_reserve(graph_index *index)
{
    const int64_t n = index->records;
    tfast_status status = TFAST_OK;

    if (n < index->room) {
        return TFAST_OK;
    }
    TRY(graph_grow(&index->offsets, n, sizeof *index->offsets));
    TRY(graph_grow(&index->units, n, sizeof *index->units));
    TRY(graph_grow(&index->counts, n, (size_t)index->n_counts * 4 + 1));
    index->room = n == 0 ? 1 : 2 * n;
fail:
    return status;
}

void
graph_index_add(graph_index *index, int64_t offset, int64_t bytes,
                const uint32_t *counts)
{
    int64_t i = index->records++;

    index->offsets[i] = (uint64_t)offset;
    index->units[i] = (uint32_t)(bytes / GRAPH_UNIT);
    memcpy(index->counts + i * index->n_counts, counts, (size_t)index->n_counts * 4);
}

void
graph_index_free(graph_index *index)
{
    free(index->offsets);
    free(index->units);
    free(index->counts);
    memset(index, 0, sizeof *index);
}

/* Writes the index as it is on disk: one column after another, each aligned to 64. */
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

/* ---- Sealing --------------------------------------------------------------------- */

/* Writes index and trailer at `end`; fills *entry except for its uuid. */
static tfast_status
write_end(int file, const char *path, const graph_index *index, int64_t end,
          uint64_t last_commit, graph_manifest_segment *entry)
{
    const int64_t bytes = graph_index_bytes(index->records, index->n_counts);
    const size_t all = (size_t)bytes + sizeof(graph_trailer);
    graph_trailer trailer = {
        .index_offset = (uint64_t)end,
        .index_bytes = (uint64_t)bytes,
        .records = (uint64_t)index->records,
        .last_commit = last_commit,
        .n_counts = (uint32_t)index->n_counts,
    };
    uint8_t *data;
    tfast_status status;

    TRY(graph_alloc(&data, all, 1));
    memcpy(trailer.magic, GRAPH_TRAILER_MAGIC, sizeof trailer.magic);
    write_columns(data, index);
    trailer.index_crc = graph_crc(data, (size_t)bytes);
    trailer.crc = graph_trailer_crc(&trailer);
    memcpy(data + bytes, &trailer, sizeof trailer);
    TRY(graph_write_all(file, path, data, all, end));
    entry->records = trailer.records;
    entry->bytes = (uint64_t)end + all;
    entry->trailer_crc = trailer.crc;
fail:
    free(data);
    return status;
}

tfast_status
graph_seal(int file, const char *directory, const uint8_t uuid[16],
           const graph_index *index, int64_t end, uint64_t last_commit, bool durable,
           graph_manifest_segment *entry)
{
    char from[GRAPH_PATH_BYTES], to[GRAPH_PATH_BYTES];
    tfast_status status;

    memset(entry, 0, sizeof *entry);
    memcpy(entry->uuid, uuid, sizeof entry->uuid);
    TRY(graph_path(from, directory, "open", uuid, ""));
    TRY(graph_path(to, directory, "segment", uuid, ""));
    TRY(write_end(file, from, index, end, last_commit, entry));
    if (durable) {
        TRY(graph_sync(file, from));
    }
    TRY(graph_rename(from, to));
    if (durable) {
        TRY(graph_directory_sync(directory));
    }
fail:
    return status;
}
