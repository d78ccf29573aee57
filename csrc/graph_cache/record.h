/* One record: finding its fields, and verifying it. */
#ifndef GRAPH_CACHE_RECORD_H
#define GRAPH_CACHE_RECORD_H

#include "../backend.h"
#include "../graph_kernels.h"
#include "schema.h"

/* A record, with its head copied to private memory: another process may change a mapped
 * file between a check and the next use, so values that decide about memory accesses
 * must not be read from the map. */
typedef struct {
    const void *head;       /* graph_record, counts and `stored`: schema->record_bytes,
                               in private memory */
    const uint8_t *payload; /* may be mapped: its bytes may change at any time */
    int64_t bytes;          /* readable bytes of head and payload together */
} graph_record_view;

/* Finds the fields of a record and fills arrays[n_fields]. The record is untrusted:
 * TFAST_EIO unless `units` equals record->bytes and the fields fill the payload. */
tfast_status graph_record_arrays(const tfast_graph_schema *schema,
                                 const graph_record_view *record,
                                 tfast_graph_array *arrays);

/* Whether the bytes of a record's head behind its counts and `stored` are 0. */
bool graph_record_head_ends_in_zeros(const tfast_graph_schema *schema,
                                     const void *head);

/* TFAST_EIO unless both checksums are right and all indices are in range. arrays: from
 * graph_record_arrays() of this record. seed: crc of the segment's uuid. */
tfast_status graph_record_check(const tfast_graph_schema *schema, uint32_t seed,
                                const graph_record_view *record,
                                const tfast_graph_array *arrays);

uint32_t graph_record_header_crc(const tfast_graph_schema *schema, uint32_t seed,
                                 const void *record);

/* Fills array->rank, shape and numel of a field for these counts. Returns the bytes of
 * the array, or -1 if they overflow. */
int64_t graph_field_shape(const graph_schema_field *field, const uint32_t *counts,
                          int element_bytes, tfast_graph_array *array);

/* Which values of a field are indices. Returns the number of equal parts (rows) with a
 * bound each: 0 if nothing is added to the field, 1: the whole field, 2: its two rows.
 * bound_by[row]: the count that the row's indices must be below; GRAPH_NONE: an
 * increment is added, so the row holds no indices. */
int graph_field_bounds(const tfast_graph_schema *schema, int field,
                       uint16_t bound_by[2]);

/* *low and *high: the range of n >= 1 integers of `dtype`, stored as `stored` says. */
void graph_value_range(int dtype, int stored, const void *data, int64_t n, int64_t *low,
                       int64_t *high);

/* Continues a CRC-32C with more data. */
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

#endif
