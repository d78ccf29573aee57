/* The layout of a batch: which graphs, how large each array is, and where it lies. */
#ifndef GRAPH_CACHE_PLAN_H
#define GRAPH_CACHE_PLAN_H

#include "batch.h"

/* Finds the graphs, sums up their counts, checks that their fields fit together, and
 * lays out the arena: fields, batch vectors, ptrs. */
tfast_status graph_batch_plan(graph_arena *arena,
                              const tfast_graph_selection *selection,
                              const int64_t *indices);

/* TFAST_EINVAL: some graph has no such field, and another has. */
tfast_status graph_field_missing(const graph_arena *arena, int field);

#endif
