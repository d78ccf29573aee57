/* A writer inside the core: writer.c manages the file and commits, append.c encodes
 * graphs as records, repair.c copies whole records. */
#ifndef GRAPH_CACHE_WRITER_H
#define GRAPH_CACHE_WRITER_H

#include "seal.h"

#include <sys/types.h>

/* What append.c plans for one field of a graph before it writes the record. */
typedef struct {
    const uint8_t *data; /* in C order; the caller's memory or the writer's `scratch` */
    int stored;          /* GRAPH_ABSENT, GRAPH_AS_IS, ... */
    int64_t numel;
    size_t at, bytes; /* offset and length in the payload */
} graph_field_plan;

struct tfast_graph_writer {
    char *directory, *path;
    int file;
    pid_t process; /* that opened it; a forked child must not change the file */
    uint8_t uuid[16];
    bool durable, closed;
    bool dead; /* an I/O error occurred: all later calls fail */
    int error; /* its errno, if dead */
    tfast_graph_schema *schema;
    uint8_t *buffer; /* `used` bytes that belong at offset `written` of the file */
    size_t room, used;
    int64_t written;
    graph_index index;
    graph_commits commits;
    int64_t committed; /* graphs */
    /* Used by one append: */
    graph_field_plan *fields;
    int64_t *sizes;   /* [n_counts]; -1: not known yet */
    uint32_t *counts; /* [n_counts]: the final counts */
    uint8_t *scratch;
    size_t scratch_room;
};

/* An error if the writer is closed or dead. */
tfast_status graph_writer_usable(const tfast_graph_writer *writer);

/* Ensures space in the buffer for a frame of `bytes`, and for one more record in the
 * index. May write the buffer to the file. */
tfast_status graph_writer_room(tfast_graph_writer *writer, size_t bytes);

/* Appends a record of another segment with the same schema. Only its header_crc
 * changes, because it depends on the segment's uuid. */
tfast_status graph_writer_copy(tfast_graph_writer *writer, const void *record,
                               int64_t bytes);

/* Counts the complete record at buffer[used] in commits and index. graph_writer_room()
 * must have been called for it. */
void graph_writer_added(tfast_graph_writer *writer, size_t bytes,
                        const uint32_t *counts);

#endif
