/* The graph cache's contract: what its binding may call, who owns what. Nothing here is
 * for two threads at once, except where it says so. docs/graph_cache_format.md says
 * what is on disk, docs/design/graph_cache.md which file does what and why. */
#ifndef GRAPH_CACHE_H
#define GRAPH_CACHE_H

#include "../tfast.h"
#include "format.h"

/* ---- Schema (schema.c) ----------------------------------------------------------- */

typedef struct {
    graph_schema_header header;
    const graph_schema_count *counts;
    const graph_schema_field *fields;
    const char *const *count_names; /* zero-terminated */
    const char *const *field_names;
    const uint8_t *bytes; /* as in the file */
    size_t n_bytes;
    size_t record_bytes; /* of a record's header with counts and stored, aligned */
} tfast_graph_schema;

/* Checks every rule of the format; nothing of `bytes` is trusted or kept. TFAST_EINVAL
 * where a rule is broken. */
tfast_status tfast_graph_schema_parse(tfast_graph_schema **schema, const void *bytes,
                                      size_t n_bytes);
void tfast_graph_schema_free(tfast_graph_schema *schema);

/* One field of one record. */
typedef struct {
    const void *data; /* as stored; aligned to its elements, at most to 8 bytes */
    int stored;       /* GRAPH_ABSENT, GRAPH_AS_IS, ... */
    int rank;
    int64_t shape[GRAPH_MAX_RANK];
    int64_t numel;
} tfast_graph_array;

/* ---- Writing (writer.c, append.c, adopt.c, build.c) ------------------------------ */

typedef struct tfast_graph_writer tfast_graph_writer;

/* A value to append: an array of the field's dtype on the CPU. */
typedef struct {
    const void *data;
    bool present;
    int dtype;
    int rank;
    const int64_t *shape;
    const int64_t *strides; /* in elements */
} tfast_graph_value;

/* Starts a new segment in the cache at `path`; creates the directory and an empty
 * manifest where there are none. A path that is a file, or a directory with other files
 * and no manifest, is refused. With `durable` false (for scratch) nothing is synced
 * unless the cache has other segments, which must stay safe. */
tfast_status tfast_graph_writer_open(tfast_graph_writer **writer, const char *path,
                                     const void *schema, size_t schema_bytes,
                                     bool durable);

/* Appends a graph. counts[n_counts]: >= 0 is given, -1 is taken from the shapes of the
 * values; it is an error where neither gives a count. Indices (values of fields to
 * which a count is added that is not an increment) must be >= 0 and below their count.
 * key: 16 bytes, or NULL. After an error nothing has changed. TFAST_EINVAL where a
 * shape does not fit the schema; *misfit is then the field whose size differs from the
 * size that the schema fixes or shares, so that the caller can go on with a more
 * general schema. *misfit is -1 after every other error. */
tfast_status tfast_graph_writer_append(tfast_graph_writer *writer,
                                       const tfast_graph_value *values,
                                       const int64_t *counts, const uint8_t *key,
                                       int *misfit);

/* Makes all appended graphs durable. After an error the writer is dead; graphs of
 * earlier commits are safe. */
tfast_status tfast_graph_writer_commit(tfast_graph_writer *writer);

/* Commits, seals the segment and enters it into the manifest; an empty segment is
 * deleted. Only tfast_graph_writer_free() frees the writer. After TFAST_EINTR it can be
 * closed again. */
tfast_status tfast_graph_writer_close(tfast_graph_writer *writer);
int64_t tfast_graph_writer_appended(const tfast_graph_writer *writer);
int64_t tfast_graph_writer_committed(const tfast_graph_writer *writer);

/* Without close() the committed graphs are left for tfast_graph_adopt(). In a forked
 * child it only frees memory. */
void tfast_graph_writer_free(tfast_graph_writer *writer);

/* Seals the segments that dead writers have left, up to their last commits, and enters
 * them into the manifest. *graphs: that were kept; *lost: records behind the last
 * commits, at least. Segments of living writers are left alone. */
tfast_status tfast_graph_adopt(const char *path, int64_t *graphs, int64_t *lost);

/* The schema with the most fields of a cache's segments, also of those that are being
 * written; NULL: there are none. A writer's schema must agree with it. The caller frees
 * it. */
tfast_status tfast_graph_schema_find(const char *path, tfast_graph_schema **schema);

/* A build: between begin and end the cache opens only with `partial`. End sets the
 * order and deletes the segments that have none of its graphs. order[n] are numbers of
 * the graphs that `partial` shows at that time, which after an earlier order are not
 * those of the records; order NULL: it stays as it is. */
tfast_status tfast_graph_build_begin(const char *path);
tfast_status tfast_graph_build_end(const char *path, const uint64_t *order, int64_t n);

/* ---- Reading (cache.c, verify.c, repair.c) --------------------------------------- */

typedef struct tfast_graph_cache tfast_graph_cache;

enum { TFAST_GRAPH_VERIFY_NEVER, TFAST_GRAPH_VERIFY_ONCE, TFAST_GRAPH_VERIFY_ALWAYS };

/* Files are mapped, or read graph by graph. A map kills the process (SIGBUS) if its
 * file is cut short or cannot be read any more, as happens on network file systems. */
enum { TFAST_GRAPH_MMAP, TFAST_GRAPH_PREAD, TFAST_GRAPH_BY_FILE_SYSTEM };

typedef struct {
    int verify;
    int mode; /* TFAST_GRAPH_BY_FILE_SYSTEM: reads on network file systems, else maps */
    bool partial; /* open the sealed graphs although a build or writer has not ended */
} tfast_graph_open_options;

/* Any number of threads may read an open cache at once, also after a fork. */
tfast_status tfast_graph_cache_open(tfast_graph_cache **cache, const char *path,
                                    const tfast_graph_open_options *options);
int tfast_graph_cache_mode(const tfast_graph_cache *cache); /* never BY_FILE_SYSTEM */
void tfast_graph_cache_retain(tfast_graph_cache *cache);
void tfast_graph_cache_release(tfast_graph_cache *cache);

int64_t tfast_graph_cache_len(const tfast_graph_cache *cache);
/* The generalisation of all segments' schemas; NULL for a cache without graphs. */
const tfast_graph_schema *tfast_graph_cache_schema(const tfast_graph_cache *cache);
/* 16 bytes that change with the manifest: the cache's uuid and generation mixed. */
const uint8_t *tfast_graph_cache_fingerprint(const tfast_graph_cache *cache);
int64_t tfast_graph_cache_file_bytes(const tfast_graph_cache *cache);
int64_t tfast_graph_cache_segments(const tfast_graph_cache *cache);

/* out[len], from the index alone: a count of the cache's schema, or the bytes of the
 * frame, of each graph. */
void tfast_graph_cache_counts(const tfast_graph_cache *cache, int count, int64_t *out);
void tfast_graph_cache_frame_bytes(const tfast_graph_cache *cache, int64_t *out);
/* out[16 * len]: the keys, from the records. */
tfast_status tfast_graph_cache_keys(const tfast_graph_cache *cache, uint8_t *out);

/* The arrays of graph i. They lie in the map, which lives as long as the cache, and
 * *owned is NULL; where files are read they lie in *owned, which the caller frees with
 * free(). Verifies as the cache was opened. Any thread. */
tfast_status tfast_graph_cache_get(tfast_graph_cache *cache, int64_t i,
                                   tfast_graph_array *arrays, void **owned);

/* Checks graphs first .. end - 1 in full (checksums, sizes, indices, bool bytes, UTF-8;
 * with `values` also that floats are finite), and calls damaged(context, i, message)
 * for each bad one. With first = 0 and end = len it also checks the bytes between the
 * records (i is -1), with first = end only these. Returns an error only where it could
 * not go on. */
tfast_status tfast_graph_cache_verify(
    tfast_graph_cache *cache, int64_t first, int64_t end, bool values,
    void (*damaged)(void *context, int64_t i, const char *message), void *context);

/* Copies every committed graph that can still be read, from sealed and other segments,
 * into a new cache at `to`. `from` is only read. Reports line by line. */
typedef struct {
    int64_t kept;
    int64_t damaged;     /* committed, but broken */
    int64_t uncommitted; /* after the last commit of its segment: never promised */
    int64_t bytes_skipped;
} tfast_graph_repair_report;
tfast_status tfast_graph_repair(const char *from, const char *to,
                                tfast_graph_repair_report *report,
                                void (*line)(void *context, const char *text),
                                void *context);

/* ---- Collate (collate.c) --------------------------------------------------------- */

/* The contents of a batch. The caller keeps it alive and unchanged. */
typedef struct {
    const uint16_t *fields; /* of the cache's schema */
    int n_fields;
    const uint16_t *batch_of; /* counts of nodes or edges that get a batch vector: the
                                 number of its graph for each */
    int n_batch_of;
    /* Padding to static shapes: one graph with everything that is missing to the totals
     * (zeros; indices point at its first node), then empty graphs. n_slots: graphs with
     * padding, 0: no padding; totals[n_counts]: each count with padding, -1: as the
     * graphs have. */
    int64_t n_slots;
    const int64_t *totals;
} tfast_graph_selection;

/* One batch in one arena, every array aligned to 64. Read-only for callers. */
typedef struct tfast_graph_batch {
    uint8_t *arena;
    size_t bytes;
    int64_t n_graphs; /* without padding graphs */
    int64_t n_slots;  /* n_graphs, or with padding the selection's */
    int64_t *totals;  /* of each count, padding included */
    size_t *field_at; /* per selected field: its array's place in the arena */
    size_t *ptr_at;   /* per count: int64 [n_slots + 1], sums before each graph */
    size_t *batch_at; /* per batch_of: int64 [totals[batch_of]] */
    int64_t *sums;    /* [n_counts][n_slots + 1]: a copy of the ptrs outside the arena,
                         which does not change when a caller writes to its arrays */
    int64_t (*shapes)[GRAPH_MAX_RANK + 1]; /* per selected field */
    int *ranks;                            /* -1: none of the graphs has this field */
} tfast_graph_batch;

/* Collates now; a large batch also on the threads of tfast_parallel(), unless `alone`.
 * The bytes do not depend on the number of threads. The batch has one reference, and
 * holds the cache. Errors: an index outside 0 .. len - 1 (TFAST_EINVAL), a damaged
 * graph (TFAST_EIO), graphs that do not fit together or more than the padding allows
 * (TFAST_EINVAL), no memory. */
tfast_status tfast_graph_collate(tfast_graph_cache *cache,
                                 const tfast_graph_selection *selection,
                                 const int64_t *indices, int64_t n, bool alone,
                                 tfast_graph_batch **batch);
void tfast_graph_batch_retain(tfast_graph_batch *batch);
/* Memory for the caller's own use until the last release; NULL after TFAST_GRAPH_NOTES
 * bytes. One thread at a time. */
enum { TFAST_GRAPH_NOTES = 2048 };
void *tfast_graph_batch_note(tfast_graph_batch *batch, size_t bytes);
/* The last release returns the arena to the cache for reuse. Any thread. */
void tfast_graph_batch_release(tfast_graph_batch *batch);

/* ---- Prefetch (prefetch.c) ------------------------------------------------------- */

typedef struct tfast_graph_prefetch tfast_graph_prefetch;

/* `threads` native threads collate what is submitted; batches come back in the order in
 * which they were submitted. threads = 0: collated when they are asked for. The
 * selection must outlive it. */
tfast_status tfast_graph_prefetch_new(tfast_graph_prefetch **prefetch,
                                      tfast_graph_cache *cache,
                                      const tfast_graph_selection *selection,
                                      int threads);
/* `tag` comes back with the batch. */
tfast_status tfast_graph_prefetch_submit(tfast_graph_prefetch *prefetch,
                                         const int64_t *indices, int64_t n,
                                         int64_t tag);
/* Waits up to `seconds`; *batch is NULL when there is none yet. An error is the error
 * of that batch; the next call goes on with the one after it. */
tfast_status tfast_graph_prefetch_next(tfast_graph_prefetch *prefetch, double seconds,
                                       tfast_graph_batch **batch, int64_t *tag);
int64_t tfast_graph_prefetch_pending(const tfast_graph_prefetch *prefetch);
/* Stops the threads and waits for them; in a forked child only forgets them. Batches
 * that are held live on. */
void tfast_graph_prefetch_free(tfast_graph_prefetch *prefetch);

/* ---- Order (order.c) ------------------------------------------------------------- */

enum { TFAST_GRAPH_MAX_BUDGETS = 8 };

/* The order of an epoch, in O(1) memory, and O(1) to begin at any position. The caller
 * has checked that `subset` has numbers of graphs, and keeps it unchanged. */
typedef struct {
    int64_t n;             /* graphs, or entries of subset */
    const int64_t *subset; /* NULL: 0 .. n - 1 */
    uint64_t seed, epoch;
    bool shuffle;
    int64_t rank, world_size;
    int64_t batch_size; /* at most */
    bool drop_last;
    int n_budgets;               /* 0: batches by number alone */
    const int64_t *const *sizes; /* [n_budgets][cache's graphs] */
    const int64_t *budgets;      /* at most this sum of sizes in a batch */
    /* A graph beyond a budget gets a batch of its own; else it is an error. */
    bool oversize_alone;
} tfast_graph_order;

/* Writes the indices of the graphs in this rank's next batch to `indices` (room for
 * batch_size) and their number to *n; 0 is the end of the epoch.
 *
 * *position is 0 before the first call and opaque afterwards. It is the whole state to
 * save, and the same on all ranks.
 *
 * All ranks get the same number of batches. Every graph is in exactly one batch of one
 * rank; with drop_last the graphs of incomplete last batches are left out. No batch is
 * empty, or larger than batch_size or the budgets of nodes and edges.
 *
 * TFAST_EINVAL if that is impossible: there are fewer graphs than ranks, or every batch
 * holds one graph and the number of batches is not a multiple of the number of ranks.
 */
tfast_status tfast_graph_order_next(const tfast_graph_order *order, int64_t *position,
                                    int64_t *indices, int64_t *n);
/* Graph at place i of the epoch, before sharding. */
int64_t tfast_graph_order_at(const tfast_graph_order *order, int64_t i);
/* The number of batches that a rank has; with budgets it plans them all. */
tfast_status tfast_graph_order_batches(const tfast_graph_order *order, int64_t *n);

#endif
