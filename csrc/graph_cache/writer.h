/* A writer inside the core: writer.c keeps the file and commits, append.c makes
 * records, repair.c copies them. */
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
    bool durable, closed;
    bool dead; /* after an I/O error, whose number is `error` */
    int error;
    tfast_graph_schema *schema;
    uint8_t *buffer; /* `used` bytes that belong at offset `written` of the file */
    size_t room, used;
    int64_t written;
    graph_index index;
    graph_commits commits;
    int64_t committed; /* graphs */
    /* One append's. */
    graph_field_plan *fields;
    int64_t *sizes; /* counts; -1: not known yet */
    uint32_t *counts;
    uint8_t *scratch;
    size_t scratch_room;
};

tfast_status graph_writer_usable(const tfast_graph_writer *writer);

/* Makes room in the buffer and in the index for a record of so many bytes. */
tfast_status graph_writer_room(tfast_graph_writer *writer, size_t bytes);

/* Appends an unchanged record of another segment with the same schema. */
tfast_status graph_writer_copy(tfast_graph_writer *writer, const void *record,
                               int64_t bytes);

/* The record at buffer[used] is complete; graph_writer_room() has made room for it. */
void graph_writer_added(tfast_graph_writer *writer, size_t bytes,
                        const uint32_t *counts);

#endif
