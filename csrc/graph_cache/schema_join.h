/* The schemas of a cache's segments may differ in sizes, and some may have more fields
 * at their end. Here they are compared and generalised to the cache's schema. */
#ifndef GRAPH_CACHE_SCHEMA_JOIN_H
#define GRAPH_CACHE_SCHEMA_JOIN_H

#include "schema.h"

/* Generalises schemas[n >= 1] to *joined. A dimension is fixed if all schemas fix the
 * same size, a count of nodes or edges if it is that count in all of them, and
 * otherwise a size of its own. A field that some schemas lack is optional.
 *
 * (*sources)[i * n_counts + k] says what count k of *joined is in schemas[i]: >= 0 is
 * the number of a count there, < 0 is -1 - a fixed size. TFAST_EIO unless the schemas
 * agree. The caller frees both results. */
tfast_status graph_schemas_join(tfast_graph_schema **joined, int64_t **sources,
                                const tfast_graph_schema *const *schemas, int64_t n);

/* TFAST_EINVAL unless the schema agrees with those of all segments in the directory,
 * sealed or open: a segment with another schema would make the cache unreadable. The
 * caller holds the cache's lock. */
tfast_status graph_schema_must_agree(const char *directory,
                                     const tfast_graph_schema *schema);

#endif
