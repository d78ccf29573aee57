/* An open cache inside the core: cache.c makes it; batches and verify.c read it. */
#ifndef GRAPH_CACHE_CACHE_H
#define GRAPH_CACHE_CACHE_H

#include "../graph_kernels.h"
#include "segment.h"

#include <stdatomic.h>

enum { GRAPH_ARENAS = 8 };

/* One of the cache's counts in one segment: data[r * step] is record r's. step 0: all
 * records of the segment have the same. */
typedef struct {
    const uint32_t *data;
    int64_t step;
} graph_column;

typedef struct {
    graph_segment file; /* as it is on the disk */
    graph_column *columns;
    uint32_t *fixed; /* what columns with step 0 point at */
    int64_t first;   /* number of its first record, of those of all segments */
} graph_part;

struct tfast_graph_cache {
    char *path;
    tfast_graph_open_options options;
    tfast_graph_schema *schema; /* NULL without graphs */
    const tfast_graph_kernels *kernels;
    graph_part *parts;
    int64_t n_parts;
    int64_t n_records, n_graphs;
    uint64_t *order;         /* NULL: graph i is record i */
    _Atomic(uint64_t) *seen; /* a bit for each record that has been verified */
    uint8_t fingerprint[16];
    int64_t file_bytes;
    _Atomic(int64_t) references; /* counted in batch.c: each batch in use has one */
    /* Arenas that wait to be used again (batch.c). They are taken and put by atomic
     * exchange: another thread could hold a lock when the process forks. */
    _Atomic(void *) arenas[GRAPH_ARENAS];
};

/* Closes files and frees memory, whatever `references` says. No arena may wait. */
void graph_cache_free(tfast_graph_cache *cache);

/* Where graph i is; 0 <= i < n_graphs. */
typedef struct {
    const graph_part *part;
    int64_t row; /* of its record in the segment */
} graph_place;

static inline graph_place
graph_find(const tfast_graph_cache *cache, int64_t i)
{
    int64_t record = cache->order == NULL ? i : (int64_t)cache->order[i];
    int64_t low = 0, high = cache->n_parts - 1;

    while (low < high) {
        int64_t middle = (low + high + 1) / 2;

        if (cache->parts[middle].first <= record) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return (graph_place){&cache->parts[low], record - cache->parts[low].first};
}

/* Count k of the cache's schema. */
static inline uint32_t
graph_count(graph_place place, int k)
{
    graph_column column = place.part->columns[k];

    return column.data[place.row * column.step];
}

static inline int64_t
graph_frame_bytes(graph_place place)
{
    return (int64_t)place.part->file.units[place.row] * GRAPH_UNIT;
}

/* The frame in the map; NULL with `pread`. */
static inline const uint8_t *
graph_mapped_frame(graph_place place)
{
    const graph_segment *file = &place.part->file;

    return file->map == NULL ? NULL : file->map + file->offsets[place.row];
}

/* Memory into which one thread reads frames, or of mapped frames the heads;
 * zero-initialised. The caller frees `data`. */
typedef struct {
    uint8_t *data;
    int64_t room;
} graph_buffer;

/* Reads graph i and verifies it as `verify` says (TFAST_GRAPH_VERIFY_...). Fills
 * arrays[n_fields] by the segment's own schema (part->file.schema): shapes may have
 * sizes where the cache's schema has a count, and fields that it lacks are absent. The
 * arrays lie in the map, or in buffer->data until that is used again; *record is the
 * frame, whose head is in buffer->data. Sizes always agree with graph_count(), and with
 * the bytes that are there. Any thread. */
tfast_status graph_arrays(tfast_graph_cache *cache, int64_t i, graph_place place,
                          graph_buffer *buffer, int verify, tfast_graph_array *arrays,
                          graph_record_view *record);

#endif
