/* Arenas of batches: batch.c lends them, plan.c and collate.c fill them. */
#ifndef GRAPH_CACHE_BATCH_H
#define GRAPH_CACHE_BATCH_H

#include "cache.h"

/* One selected field of the batch: `outer` rows of `total` steps of `inner` bytes.
 * Steps lie along the dimension in which graphs are put together. */
typedef struct {
    int field; /* of the cache's schema */
    int bytes; /* of an element */
    int64_t outer, total, inner;
    int64_t values;  /* of a step: inner / bytes */
    int steps_count; /* the count that says the steps of each graph; -1: */
    int64_t steps;   /* each graph has so many */
    uint8_t *out;    /* in the arena */
    int n_adds;      /* 0; 1: the same for all rows; 2: one for each half of the rows */
    uint16_t adds[2]; /* counts whose sums are added */
    bool lacking;     /* some graph cannot have the field: then none may have it */
    bool absent;      /* no graph has it */
} graph_batch_field;

enum { GRAPH_SHARES = 8 }; /* threads that copy one batch, at most */

/* A batch, and the memory to make it. The pointers of `batch`, except `arena`, and
 * those after `frames` point into `details`, whose size depends on the selection and
 * the number of graphs. */
typedef struct {
    tfast_graph_batch batch; /* what the caller sees; the first member */
    tfast_graph_cache *cache;
    _Atomic(int64_t) references;
    size_t room; /* bytes at batch.arena */
    void *details;
    size_t details_room;
    graph_buffer frames[GRAPH_SHARES]; /* with `pread`, one a thread */

    graph_place *places;
    graph_batch_field *fields;
    uint8_t *notes;            /* [TFAST_GRAPH_NOTES] */
    size_t noted;              /* bytes of them that are in use */
    tfast_graph_array *arrays; /* [GRAPH_SHARES][schema's fields]: of one graph */
} graph_arena;

/* A waiting arena, or a new one, with one reference and details of the right size. It
 * holds the cache. */
tfast_status graph_arena_take(graph_arena **arena, tfast_graph_cache *cache,
                              const tfast_graph_selection *selection, int64_t n_graphs,
                              int64_t n_slots);

/* Makes room for `bytes` in the arena; its contents are lost. */
tfast_status graph_arena_fit(graph_arena *arena, size_t bytes);

/* [n_slots + 1]: the sum of count k over the graphs before each, and over all. */
static inline int64_t *
graph_sums(const graph_arena *arena, int k)
{
    return arena->batch.sums + (int64_t)k * (arena->batch.n_slots + 1);
}

#endif
