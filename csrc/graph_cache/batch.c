/* Arenas are reused by one batch after another, so that a warm loader allocates nothing
 * and writes to memory that is still in the processor's caches. */
#include "batch.h"

#include "../scratch.h"

#include <stdlib.h>

/* Arenas of at least a page are aligned to pages, smaller ones to cache lines. */
enum { ALIGNMENT = 64, PAGE = 4096 };

enum { LARGE = 64 << 20 }; /* bytes; of larger arenas at most two are kept for reuse */

static void
arena_free(graph_arena *arena)
{
    free(arena->batch.arena);
    free(arena->details);
    for (int i = 0; i < GRAPH_SHARES; i++) {
        free(arena->frames[i].data);
    }
    free(arena);
}

void
tfast_graph_cache_retain(tfast_graph_cache *cache)
{
    atomic_fetch_add_explicit(&cache->references, 1, memory_order_relaxed);
}

void
tfast_graph_cache_release(tfast_graph_cache *cache)
{
    if (atomic_fetch_sub_explicit(&cache->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    for (int i = 0; i < GRAPH_ARENAS; i++) {
        graph_arena *arena = atomic_exchange(&cache->arenas[i], NULL);

        if (arena != NULL) {
            arena_free(arena);
        }
    }
    graph_cache_free(cache);
}

/* Takes an arena that waits for reuse, or allocates an empty one; NULL: no memory.
 * Usually the one that was put back last, because both searches begin at slot 0. */
static graph_arena *
waiting_arena(tfast_graph_cache *cache)
{
    for (int i = 0; i < GRAPH_ARENAS; i++) {
        graph_arena *arena = NULL;

        if (atomic_load_explicit(&cache->arenas[i], memory_order_relaxed) != NULL) {
            arena = atomic_exchange(&cache->arenas[i], NULL);
        }
        if (arena != NULL) {
            return arena;
        }
    }
    return calloc(1, sizeof(graph_arena));
}

/* Keeps an arena for reuse if a slot is free, otherwise frees it. */
static void
arena_put(graph_arena *arena)
{
    tfast_graph_cache *cache = arena->cache;
    const int slots = arena->room > LARGE ? 2 : GRAPH_ARENAS;
    bool kept = false;

    for (int i = 0; i < slots && !kept; i++) {
        void *none = NULL;

        kept = atomic_compare_exchange_strong(&cache->arenas[i], &none, arena);
    }
    if (!kept) {
        arena_free(arena);
    }
    tfast_graph_cache_release(cache); /* may free the arena too */
}

/* The address of the next `n` elements of `bytes` each. *at advances behind them,
 * clamped to SIZE_MAX / 64 bytes a block so that the sum of all blocks fits size_t. */
static void *
carve(uint8_t *base, size_t *at, int64_t n, size_t bytes)
{
    void *here = base == NULL ? NULL : base + *at;
    size_t all;

    if (__builtin_mul_overflow((size_t)n, bytes, &all) || all > SIZE_MAX / 64) {
        all = SIZE_MAX / 64;
    }
    *at += (all + 15) & ~(size_t)15;
    return here;
}

/* Points all details into `base` and returns their bytes; base NULL: only counts. */
static size_t
lay_out(graph_arena *arena, uint8_t *base, const tfast_graph_selection *selection,
        const graph_schema_header *header, int64_t n_graphs, int64_t n_slots)
{
    const int64_t n_fields = selection->n_fields, n_counts = header->n_counts;
    size_t at = 0, sums;

    arena->batch.totals = carve(base, &at, n_counts, sizeof *arena->batch.totals);
    arena->batch.field_at = carve(base, &at, n_fields, sizeof *arena->batch.field_at);
    arena->batch.ptr_at = carve(base, &at, n_counts, sizeof *arena->batch.ptr_at);
    arena->batch.batch_at =
        carve(base, &at, selection->n_batch_of, sizeof *arena->batch.batch_at);
    arena->batch.shapes = carve(base, &at, n_fields, sizeof *arena->batch.shapes);
    arena->batch.ranks = carve(base, &at, n_fields, sizeof *arena->batch.ranks);
    arena->fields = carve(base, &at, n_fields, sizeof *arena->fields);
    arena->arrays = carve(base, &at, (int64_t)header->n_fields * GRAPH_SHARES,
                          sizeof *arena->arrays);
    arena->places = carve(base, &at, n_graphs, sizeof *arena->places);
    if (__builtin_mul_overflow((size_t)n_slots + 1, sizeof *arena->batch.sums, &sums)) {
        sums = SIZE_MAX;
    }
    arena->batch.sums = carve(base, &at, n_counts, sums);
    arena->notes = carve(base, &at, TFAST_GRAPH_NOTES, 1);
    return at;
}

tfast_status
graph_arena_take(graph_arena **out, tfast_graph_cache *cache,
                 const tfast_graph_selection *selection, int64_t n_graphs,
                 int64_t n_slots)
{
    const graph_schema_header *header = &cache->schema->header;
    graph_arena *arena = waiting_arena(cache);
    size_t bytes;

    if (arena == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a batch");
    }
    bytes = lay_out(arena, NULL, selection, header, n_graphs, n_slots);
    if (bytes > arena->details_room) {
        free(arena->details);
        arena->details = malloc(bytes + bytes / 4);
        arena->details_room = arena->details == NULL ? 0 : bytes + bytes / 4;
    }
    if (arena->details == NULL) {
        arena_free(arena);
        return tfast_fail(TFAST_ENOMEM, "no memory for a batch of %lld graphs",
                          (long long)n_graphs);
    }
    lay_out(arena, arena->details, selection, header, n_graphs, n_slots);
    arena->batch.n_graphs = n_graphs;
    arena->batch.n_slots = n_slots;
    arena->cache = cache;
    arena->noted = 0;
    atomic_store_explicit(&arena->references, 1, memory_order_relaxed);
    tfast_graph_cache_retain(cache);
    *out = arena;
    return TFAST_OK;
}

tfast_status
graph_arena_fit(graph_arena *arena, size_t bytes)
{
    const size_t alignment = bytes < PAGE ? ALIGNMENT : PAGE;
    size_t room = bytes + bytes / 4;

    arena->batch.bytes = bytes;
    if (bytes <= arena->room && arena->batch.arena != NULL) {
        return TFAST_OK;
    }
    free(arena->batch.arena);
    arena->batch.arena = NULL;
    arena->room = 0;
    if (bytes > SIZE_MAX / 4) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a batch of %zu bytes", bytes);
    }
    room = (room + alignment) / alignment * alignment;
    arena->batch.arena = aligned_alloc(alignment, room);
    if (arena->batch.arena == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a batch of %zu bytes", bytes);
    }
    arena->room = room;
    tfast_hint_large_pages(arena->batch.arena, room);
    return TFAST_OK;
}

void
tfast_graph_batch_retain(tfast_graph_batch *batch)
{
    graph_arena *arena = (graph_arena *)batch;

    atomic_fetch_add_explicit(&arena->references, 1, memory_order_relaxed);
}

void *
tfast_graph_batch_note(tfast_graph_batch *batch, size_t bytes)
{
    graph_arena *arena = (graph_arena *)batch;
    void *note = arena->notes + arena->noted;

    if (bytes > TFAST_GRAPH_NOTES - arena->noted) {
        return NULL;
    }
    arena->noted += (bytes + 15) & ~(size_t)15; /* cannot exceed TFAST_GRAPH_NOTES */
    return note;
}

void
tfast_graph_batch_release(tfast_graph_batch *batch)
{
    graph_arena *arena = (graph_arena *)batch;

    if (batch != NULL &&
        atomic_fetch_sub_explicit(&arena->references, 1, memory_order_acq_rel) == 1) {
        arena_put(arena);
    }
}
