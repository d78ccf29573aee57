/* A writer inside the core: write.c's file and commits, append.c's records. */
#ifndef GRAPH_CACHE_WRITER_H
#define GRAPH_CACHE_WRITER_H

#include "seal.h"

#include <sys/types.h>

/* What append.c decides about one field before it writes the first byte. */
typedef struct {
    const uint8_t *data; /* dense; the caller's, or in `scratch` */
    int stored;
    int64_t numel;
    size_t at, bytes; /* in the payload */
} graph_field_plan;

struct tfast_graph_writer {
    char *directory, *path;
    int file;
    pid_t process; /* a forked child must leave the file alone */
    uint8_t uuid[16];
    uint32_t seed; /* crc of uuid */
    bool durable, closed;
    bool dead; /* after an I/O error, with its number in `error` */
    int error;
    tfast_graph_schema *schema;
    const tfast_graph_kernels *kernels;
    uint8_t *buffer; /* what comes next in the file, at `written` */
    size_t room, used;
    int64_t written;
    graph_index index;
    int64_t committed;
    int64_t last_commit; /* offset of its frame, 0: none */
    uint32_t group_crc;
    /* One append's. */
    graph_field_plan *fields;
    int64_t *sizes; /* counts as far as they are known; -1: not yet */
    uint32_t *counts;
    uint8_t *scratch;
    size_t scratch_room;
};

tfast_status graph_writer_usable(const tfast_graph_writer *writer);

/* Makes room for so many bytes at buffer[used]; on an I/O error the writer is dead. */
tfast_status graph_writer_room(tfast_graph_writer *writer, size_t bytes);

/* Appends a valid record of another segment with the same schema as it is. */
tfast_status graph_writer_copy(tfast_graph_writer *writer, const void *record,
                               int64_t bytes);

/* The record at buffer[used] is complete; the index has room for it. */
void graph_writer_added(tfast_graph_writer *writer, size_t bytes,
                        const uint32_t *counts);

#endif
