/* One record: where its fields lie, and whether it is as it was written. */
#ifndef GRAPH_CACHE_RECORD_H
#define GRAPH_CACHE_RECORD_H

#include "../graph_kernels.h"
#include "schema.h"

/* A record in two parts: other processes may change a mapped file at any time, so that
 * a check of mapped bytes proves nothing about their next use. */
typedef struct {
    const void *head;       /* graph_record, counts and `stored`: schema->record_bytes,
                               in private memory */
    const uint8_t *payload; /* may be in a map: any bytes at any time */
    int64_t bytes;          /* of both, readable */
} graph_record_view;

/* Finds the fields of a record. Nothing in it is trusted: sizes are checked against the
 * view's bytes, and `units` against both. Fills arrays[n_fields]. */
tfast_status graph_record_arrays(const tfast_graph_schema *schema,
                                 const graph_record_view *record,
                                 tfast_graph_array *arrays);

/* TFAST_EIO unless both checksums are right and all indices are in range. `arrays` are
 * the record's, from graph_record_arrays(). seed: crc of the segment's uuid. */
tfast_status graph_record_check(const tfast_graph_schema *schema, uint32_t seed,
                                const graph_record_view *record,
                                const tfast_graph_array *arrays);

uint32_t graph_record_header_crc(const tfast_graph_schema *schema, uint32_t seed,
                                 const void *record);

/* Bytes of an array of the field for these counts, or -1 where they overflow. Fills
 * array->rank, shape and numel. */
int64_t graph_field_shape(const graph_schema_field *field, const uint32_t *counts,
                          int element_bytes, tfast_graph_array *array);

/* The indices in a field: the return value is the number of rows that it is divided
 * into (0: no indices, 1: the whole field), bound_by[row] the count that they must be
 * below; GRAPH_NONE: that row holds no indices. */
int graph_field_bounds(const tfast_graph_schema *schema, int field,
                       uint16_t bound_by[2]);

/* The smallest and largest of n >= 1 integers of `dtype`, as stored. */
void graph_value_range(int dtype, int stored, const void *data, int64_t n, int64_t *low,
                       int64_t *high);

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
