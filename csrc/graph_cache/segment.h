/* One segment's file: opened for reading when it is sealed, or scanned frame by frame
 * when it is not, or is damaged. */
#ifndef GRAPH_CACHE_SEGMENT_H
#define GRAPH_CACHE_SEGMENT_H

#include "../graph_kernels.h"
#include "io.h"
#include "schema.h"

/* A sealed segment. */
typedef struct {
    char *path;
    int file;
    int64_t bytes;      /* of the file */
    const uint8_t *map; /* NULL with `pread` */
    tfast_graph_schema *schema;
    uint8_t uuid[16];
    uint32_t seed; /* what the frames' checksums begin with: crc of uuid */
    int64_t begin; /* offset of the first frame */
    graph_trailer trailer;
    int64_t records;
    /* The index, in memory of our own: what has been checked of it stays so, whatever
     * becomes of the file. Count k: counts[k * count_step + record]. */
    const uint64_t *offsets;
    const uint32_t *units;
    const uint32_t *counts;
    int64_t count_step;
    void *index;
} graph_segment;

/* Opens a file, reads its index and checks all but the frames. */
tfast_status graph_segment_open(graph_segment *segment, const char *path, bool pread);
void graph_segment_close(graph_segment *segment);

/* Header and schema of a segment that may be neither sealed nor whole. */
tfast_status graph_segment_header(int file, const char *path, int64_t file_bytes,
                                  graph_header *header, tfast_graph_schema **schema,
                                  int64_t *begin);

/* The same, of the file at `path`. */
tfast_status graph_segment_schema(const char *path, graph_header *header,
                                  tfast_graph_schema **schema);

/* Where the first frame is. */
static inline int64_t
graph_first_frame(size_t schema_bytes)
{
    return (int64_t)graph_align(sizeof(graph_header) + schema_bytes, GRAPH_BLOCK);
}

/* Bytes of a commit frame at `at`, zeros included. */
static inline int64_t
graph_commit_bytes(int64_t at)
{
    return (int64_t)graph_align((uint64_t)at + sizeof(graph_commit), GRAPH_BLOCK) - at;
}

/* Bytes of the index, and where its columns lie. */
int64_t graph_index_bytes(int64_t records, int n_counts);

static inline int64_t
graph_index_column_bytes(int64_t records, int element)
{
    return (int64_t)graph_align((uint64_t)records * (uint64_t)element, 64);
}

static inline uint32_t
graph_crc_more(uint32_t crc, const void *data, size_t bytes)
{
    return tfast_graph_kernels_in_use()->crc32c(crc, data, bytes);
}

static inline uint32_t
graph_crc(const void *data, size_t bytes)
{
    return graph_crc_more(0, data, bytes);
}

/* What the structs' own checksums must be. */
uint32_t graph_header_crc(const graph_header *header, const void *schema);
uint32_t graph_record_header_crc(const tfast_graph_schema *schema, uint32_t seed,
                                 const void *record);
uint32_t graph_commit_crc(uint32_t seed, const graph_commit *commit);
uint32_t graph_trailer_crc(const graph_trailer *trailer);

/* Whether a record is as it was written: both checksums, and all indices in range.
 * `arrays` are its own, as graph_record_arrays() gave them. */
tfast_status graph_record_check(const tfast_graph_schema *schema, uint32_t seed,
                                const graph_record_view *record,
                                const tfast_graph_array *arrays);

#endif
