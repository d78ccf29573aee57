/* Schemas inside the core: what schema.c and schema_join.c offer to the other files. */
#ifndef GRAPH_CACHE_SCHEMA_H
#define GRAPH_CACHE_SCHEMA_H

#include "graph_cache.h"

/* Of a field's array as stored, from the beginning of the payload. */
static inline uint64_t
graph_align(uint64_t at, uint64_t to)
{
    return (at + to - 1) & ~(to - 1);
}

/* Bytes of an array of the field that these counts give, or -1 where they overflow.
 * Fills array->rank, shape and numel. */
int64_t graph_field_shape(const graph_schema_field *field, const uint32_t *counts,
                          int element_bytes, tfast_graph_array *array);

/* How many rows of a field (1: all of it) hold indices into counts, and into which;
 * GRAPH_NONE: that row holds none. */
int graph_field_bounds(const tfast_graph_schema *schema, int field,
                       uint16_t bound_by[2]);

bool graph_is_integer(int dtype);
bool graph_all_zero(const void *bytes, int64_t n);
bool graph_is_utf8(const void *text, int64_t bytes);

/* The one of schemas[n >= 1] with the most fields. */
const tfast_graph_schema *graph_schema_widest(const tfast_graph_schema *const *schemas,
                                              int64_t n);

/* Generalises schemas[n >= 1], which must agree: a dimension is fixed in *joined where
 * all have the same size, a count of nodes or edges where it is that in all, and else a
 * size of its own; a field that some lack is optional. (*sources)[i * n_counts + k]
 * says what count k of *joined is in schemas[i]: >= 0 its count of that number, else -1
 * - a size that is fixed there. The caller frees both. */
tfast_status graph_schemas_join(tfast_graph_schema **joined, int64_t **sources,
                                const tfast_graph_schema *const *schemas, int64_t n);

/* TFAST_EINVAL unless the schema agrees with those of the segments in the directory,
 * also of those that are being written. Under the cache's lock. */
tfast_status graph_must_agree(const char *directory, const tfast_graph_schema *schema);

#endif
