/* An open cache inside the core: cache.c opens it; batch.c, plan.c, collate.c and
 * verify.c read it. */
#ifndef GRAPH_CACHE_CACHE_H
#define GRAPH_CACHE_CACHE_H

#include "../graph_kernels.h"
#include "segment.h"

#include <stdatomic.h>

enum { GRAPH_ARENAS = 8 }; /* most arenas that a cache keeps for reuse */

/* One count of the cache's schema in one segment: record r has data[r * step]. step 0:
 * all records of the segment have the same count. */
typedef struct {
    const uint32_t *data;
    int64_t step;
} graph_column;

/* One segment of an open cache. */
typedef struct {
    graph_segment file;
    graph_column *columns; /* [counts of the cache's schema] */
    uint32_t *fixed;       /* the values that columns with step 0 point to */
    int64_t first; /* cache-wide number of its first record: all records of all segments
                      in the manifest are numbered 0, 1, 2, ... */
} graph_part;

struct tfast_graph_cache {
    char *path;
    tfast_graph_open_options options;
    tfast_graph_schema *schema; /* NULL without graphs */
    const tfast_graph_kernels *kernels;
    graph_part *parts; /* [n_parts]: the segments that have graphs, by `first` */
    int64_t n_parts;
    int64_t n_records, n_graphs; /* n_records: also of segments that are not opened */
    uint64_t *order;         /* [n_graphs]: record numbers; NULL: graph i is record i */
    _Atomic(uint64_t) *seen; /* a bit for each record that has been verified */
    uint8_t fingerprint[16];
    int64_t file_bytes;
    _Atomic(int64_t) references; /* counted in batch.c: each batch in use has one */
    /* Arenas kept for reuse (batch.c). Slots are changed by atomic exchange and not
     * under a lock, because another thread could hold a lock when the process forks. */
    _Atomic(void *) arenas[GRAPH_ARENAS];
};

/* Closes files and frees memory, whatever `references` says. No arena may wait. */
void graph_cache_free(tfast_graph_cache *cache);

/* Where a graph's record is. graph_find(): 0 <= i < n_graphs. */
typedef struct {
    const graph_part *part;
    int64_t row; /* the record's number in its segment */
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

/* Count k of the cache's schema for one graph. */
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

/* The graph's frame in the map; NULL if files are not mapped. */
static inline const uint8_t *
graph_mapped_frame(graph_place place)
{
    const graph_segment *file = &place.part->file;

    return file->map == NULL ? NULL : file->map + file->offsets[place.row];
}

/* Memory into which one thread reads a frame, or copies the head of a mapped frame.
 * Zero-initialise it; the caller frees `data`. */
typedef struct {
    uint8_t *data;
    int64_t room; /* bytes allocated */
} graph_buffer;

/* Reads graph i, whose place is `place`, and verifies it as `verify` says
 * (TFAST_GRAPH_VERIFY_...). Fills arrays[fields of the cache's schema] by the segment's
 * own schema (part->file.schema); fields that the segment lacks are absent. The arrays
 * point into the map, or into buffer->data until the buffer is used again. *record: the
 * frame, with its head in buffer->data. On success all counts equal those of the index,
 * and all arrays are inside the frame. Any thread, with its own buffer. */
tfast_status graph_arrays(tfast_graph_cache *cache, int64_t i, graph_place place,
                          graph_buffer *buffer, int verify, tfast_graph_array *arrays,
                          graph_record_view *record);

#endif
