/* The segments of a cache may differ in sizes, and later ones may have more fields:
 * whether schemas agree, and what they are together. */
#ifndef GRAPH_CACHE_SCHEMA_JOIN_H
#define GRAPH_CACHE_SCHEMA_JOIN_H

#include "schema.h"

/* Generalises schemas[n >= 1]. A dimension is fixed in *joined where all schemas have
 * the same size there, a count of nodes or edges where it is that in all, and else a
 * size of its own; a field that some schemas lack is optional. (*sources)[i * n_counts
 * + k] says what count k of *joined is in schemas[i]: >= 0 its count of that number,
 * else -1 - a size that is fixed there. TFAST_EIO unless the schemas agree. The caller
 * frees both. */
tfast_status graph_schemas_join(tfast_graph_schema **joined, int64_t **sources,
                                const tfast_graph_schema *const *schemas, int64_t n);

/* TFAST_EINVAL unless the schema agrees with those of the segments in the directory,
 * also of those that are being written: a writer with another schema would make the
 * whole cache unreadable when it closed. Under the cache's lock. */
tfast_status graph_schema_must_agree(const char *directory,
                                     const tfast_graph_schema *schema);

#endif
