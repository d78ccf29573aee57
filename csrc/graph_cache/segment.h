/* A sealed segment's file, opened for reading. See frames.h for segments that are not
 * sealed or are damaged. */
#ifndef GRAPH_CACHE_SEGMENT_H
#define GRAPH_CACHE_SEGMENT_H

#include "io.h"
#include "record.h"

/* A sealed segment whose file is open or mapped. */
typedef struct {
    char *path;
    int file;           /* -1 once it is mapped */
    int64_t bytes;      /* of the file */
    const uint8_t *map; /* NULL with `pread` */
    tfast_graph_schema *schema;
    uint8_t uuid[16];
    uint32_t seed; /* crc of uuid; the crc of every frame continues it */
    int64_t begin; /* offset of the first frame */
    graph_trailer trailer;
    int64_t records;
    /* The index, copied to private memory, so that a later change of the file cannot
     * invalidate the checks. Count k of a record: counts[k * count_step + record]. */
    const uint64_t *offsets;
    const uint32_t *units;
    const uint32_t *counts;
    int64_t count_step;
    void *index; /* the block that these point into */
} graph_segment;

/* Opens a file, reads its index and checks everything except the frames. `pread`: the
 * file stays open instead of being mapped. After an error the segment is as after
 * graph_segment_close(). */
tfast_status graph_segment_open(graph_segment *segment, const char *path, bool pread);
void graph_segment_close(graph_segment *segment);

/* Reads and checks header and schema of a segment, sealed or not. *begin: offset of the
 * first frame. TFAST_EIO with graph_errno() 0 if they are damaged. The caller frees
 * *schema. */
tfast_status graph_segment_header(int file, const char *path, int64_t file_bytes,
                                  graph_header *header, tfast_graph_schema **schema,
                                  int64_t *begin);

/* The same, for the file at `path`. */
tfast_status graph_segment_schema(const char *path, graph_header *header,
                                  tfast_graph_schema **schema);

/* Offset of the first frame. */
static inline int64_t
graph_first_frame(size_t schema_bytes)
{
    return (int64_t)graph_align(sizeof(graph_header) + schema_bytes, GRAPH_BLOCK);
}

/* Bytes of a commit frame at offset `at`, including zeros to the end of its block. */
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

/* The checksums that these structs must contain. */
uint32_t graph_header_crc(const graph_header *header, const void *schema);
uint32_t graph_commit_crc(uint32_t seed, const graph_commit *commit);
uint32_t graph_trailer_crc(const graph_trailer *trailer);

#endif
