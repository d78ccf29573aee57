/* Arenas, the memory of batches: managed by batch.c, filled by plan.c and collate.c. */
#ifndef GRAPH_CACHE_BATCH_H
#define GRAPH_CACHE_BATCH_H

#include "cache.h"

/* One selected field of the batch: `outer` rows of `total` steps of `inner` bytes. A
 * step is one index of the concatenated dimension (cat_dim), or one graph if graphs are
 * stacked. outer: product of the dimensions before it; inner: bytes of those after. */
typedef struct {
    int field; /* of the cache's schema */
    int bytes; /* of an element in the batch */
    int64_t outer, total, inner;
    int64_t values;   /* elements of a step: inner / bytes */
    int steps_count;  /* the count that is a graph's number of steps, or -1: */
    int64_t steps;    /* every graph has this number of steps */
    uint8_t *out;     /* the field's array in the arena */
    int n_adds;       /* 0; 1: one addend for all rows; 2: one for each half */
    uint16_t adds[2]; /* counts whose sums over the graphs before are the addends */
    bool lacking;     /* sizes show that a graph lacks it: an error if another has it */
    bool absent;      /* no graph of the batch has the field */
} graph_batch_field;

enum { GRAPH_SHARES = 8 }; /* most threads that copy one batch */

/* A batch with its memory. All pointers in `batch` except batch.arena, and all pointers
 * after `frames`, point into the block `details`. */
typedef struct {
    tfast_graph_batch batch; /* what the caller sees; the first member */
    tfast_graph_cache *cache;
    _Atomic(int64_t) references;
    size_t room; /* bytes allocated at batch.arena */
    void *details;
    size_t details_room;               /* bytes allocated at details */
    graph_buffer frames[GRAPH_SHARES]; /* one for each thread, for graph_arrays() */

    graph_place *places;       /* [n_graphs] */
    graph_batch_field *fields; /* [selection's n_fields] */
    uint8_t *notes;            /* [TFAST_GRAPH_NOTES] */
    size_t noted;              /* bytes of notes that are in use */
    tfast_graph_array
        *arrays; /* [GRAPH_SHARES][cache's fields]: of each thread's graph */
} graph_arena;

/* Takes an arena kept for reuse, or a new one, and sets up its details. It has one
 * reference and retains the cache; tfast_graph_batch_release() gives it back. */
tfast_status graph_arena_take(graph_arena **arena, tfast_graph_cache *cache,
                              const tfast_graph_selection *selection, int64_t n_graphs,
                              int64_t n_slots);

/* Ensures that batch.arena has at least `bytes`. Its contents may be lost. */
tfast_status graph_arena_fit(graph_arena *arena, size_t bytes);

/* [n_slots + 1]: the sums of count k over the slots before each slot, and over all. */
static inline int64_t *
graph_sums(const graph_arena *arena, int k)
{
    return arena->batch.sums + (int64_t)k * (arena->batch.n_slots + 1);
}

#endif
