/* The layout of a batch: the size of each array and its offset in the arena. */
#ifndef GRAPH_CACHE_PLAN_H
#define GRAPH_CACHE_PLAN_H

#include "batch.h"

/* Finds the graphs indices[n_graphs], sums up their counts, checks that their fields
 * can be collated, and lays out the arena: fields, batch vectors, ptr arrays. */
tfast_status graph_batch_plan(graph_arena *arena,
                              const tfast_graph_selection *selection,
                              const int64_t *indices);

/* Returns TFAST_EINVAL: some graphs of the batch have the field and others lack it. */
tfast_status graph_field_missing(const graph_arena *arena, int field);

#endif
