/* Batches inside the core: arenas, which batch.c lends and takes back, and what
 * collate.c plans to write into one. */
#ifndef GRAPH_CACHE_BATCH_H
#define GRAPH_CACHE_BATCH_H

#include "cache.h"

/* One selected field of the batch: `outer` rows, each of `total` steps along the
 * dimension that graphs are put together in, each of `inner` bytes. */
typedef struct {
    int field; /* of the cache's schema */
    int bytes; /* of an element */
    int64_t outer, total, inner;
    int64_t values;   /* of a step: inner / bytes */
    int64_t steps;    /* of each graph, -1: */
    int steps_count;  /* as this count says */
    uint8_t *out;     /* in the arena */
    int n_adds;       /* 0, 1: the same to all, 2: by halves of the rows */
    uint16_t adds[2]; /* counts */
    bool lacking;     /* not all graphs can have it: none may */
    bool absent;      /* none has it */
} graph_batch_field;

enum { GRAPH_SHARES = 8 }; /* threads that copy one batch, at most */

/* A batch with what it takes to make it. All pointers but `frames` point into
 * `details`, whose size depends on the selection and the number of graphs. */
typedef struct {
    tfast_graph_batch batch; /* what the caller sees; the first member */
    tfast_graph_cache *cache;
    _Atomic(int64_t) references;
    size_t room; /* bytes at batch.arena */
    void *details;
    size_t details_room;
    graph_buffer frames[GRAPH_SHARES]; /* with `pread`, one a thread */

    int64_t *totals;
    size_t *field_at, *ptr_at, *batch_at;
    int64_t (*shapes)[GRAPH_MAX_RANK + 1];
    int *ranks;
    int64_t *sums; /* [n_counts][n_slots + 1]: the ptr arrays */
    graph_place *places;
    graph_batch_field *fields;
    uint8_t *notes;            /* [TFAST_GRAPH_NOTES] */
    size_t noted;              /* bytes of them that are taken */
    tfast_graph_array *arrays; /* [GRAPH_SHARES][schema's fields]: of one graph */
} graph_arena;

/* A waiting arena, or a new one, with one reference and room for the details of such a
 * batch. It holds the cache. */
tfast_status graph_arena_take(graph_arena **arena, tfast_graph_cache *cache,
                              const tfast_graph_selection *selection, int64_t n_graphs,
                              int64_t n_slots);

/* Makes room for `bytes` in the arena; what it held is lost. */
tfast_status graph_arena_fit(graph_arena *arena, size_t bytes);

/* The sums of count k before each graph, and of all: [n_slots + 1]. */
static inline int64_t *
graph_sums(const graph_arena *arena, int k)
{
    return arena->sums + (int64_t)k * (arena->batch.n_slots + 1);
}

/* Finds the graphs, sums up their counts, checks that their fields fit together, and
 * lays out the arena: fields, batch vectors, ptrs (plan.c). */
tfast_status graph_batch_plan(graph_arena *arena,
                              const tfast_graph_selection *selection,
                              const int64_t *indices);

/* TFAST_EINVAL: some graph has no such field, and another has. */
tfast_status graph_field_missing(const graph_arena *arena, int field);

#endif
