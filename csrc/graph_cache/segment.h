/* A sealed segment's file, opened for reading. frames.h reads a segment that is not
 * sealed, or is damaged. */
#ifndef GRAPH_CACHE_SEGMENT_H
#define GRAPH_CACHE_SEGMENT_H

#include "io.h"
#include "record.h"

/* A sealed segment. */
typedef struct {
    char *path;
    int file;           /* -1 once it is mapped */
    int64_t bytes;      /* of the file */
    const uint8_t *map; /* NULL with `pread` */
    tfast_graph_schema *schema;
    uint8_t uuid[16];
    uint32_t seed; /* crc of uuid: the frames' checksums begin with it */
    int64_t begin; /* offset of the first frame */
    graph_trailer trailer;
    int64_t records;
    /* The index, in private memory, so that it stays as it was checked whatever happens
     * to the file. Count k: counts[k * count_step + record]. */
    const uint64_t *offsets;
    const uint32_t *units;
    const uint32_t *counts;
    int64_t count_step;
    void *index;
} graph_segment;

/* Opens a file, reads its index and checks everything except the frames. After an error
 * the segment is as after graph_segment_close(). */
tfast_status graph_segment_open(graph_segment *segment, const char *path, bool pread);
void graph_segment_close(graph_segment *segment);

/* Header and schema of a segment, sealed or not. TFAST_EIO with graph_errno() 0 where
 * they are damaged. */
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

/* Bytes of the index, and of one of its columns. */
int64_t graph_index_bytes(int64_t records, int n_counts);

static inline int64_t
graph_index_column_bytes(int64_t records, int element)
{
    return (int64_t)graph_align((uint64_t)records * (uint64_t)element, 64);
}

/* What the structs' own checksums must be. */
uint32_t graph_header_crc(const graph_header *header, const void *schema);
uint32_t graph_commit_crc(uint32_t seed, const graph_commit *commit);
uint32_t graph_trailer_crc(const graph_trailer *trailer);

#endif
