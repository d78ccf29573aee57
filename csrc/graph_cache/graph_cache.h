/* The graph cache's contract: the functions for its binding, and who owns what. One
 * thread at a time may use an object, unless a comment says otherwise. On disk:
 * docs/graph_cache_format.md; which file does what: docs/design/graph_cache.md. */
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
    const uint8_t *bytes; /* the serialised schema, as in the file */
    size_t n_bytes;
    size_t record_bytes; /* of a record's head: graph_record, its counts, one `stored`
                            byte a field, zeros to a multiple of GRAPH_UNIT */
} tfast_graph_schema;

/* Copies and checks a serialised schema; `bytes` is untrusted. TFAST_EINVAL if a rule
 * of the format is broken. The caller frees *schema. */
tfast_status tfast_graph_schema_parse(tfast_graph_schema **schema, const void *bytes,
                                      size_t n_bytes);
void tfast_graph_schema_free(tfast_graph_schema *schema);

/* One field of one record. */
typedef struct {
    const void *data; /* elements as `stored` says, not widened; aligned to their size,
                         or to 8 bytes if that is less */
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
 * manifest if there are none. A path that is a file, or a directory with other files
 * and no manifest, is refused. With `durable` false (for temporary caches) nothing is
 * synced, except that close() syncs if the cache has other segments. */
tfast_status tfast_graph_writer_open(tfast_graph_writer **writer, const char *path,
                                     const void *schema, size_t schema_bytes,
                                     bool durable);

/* Appends a graph. counts[n_counts] or NULL: >= 0 is the count, -1 (all, if NULL) takes
 * it from the values' shapes. A number of nodes or an increment that is in neither is
 * an error. A field to which collation adds a count of nodes, edges or a size holds
 * indices, which must be >= 0 and below that count. key: 16 bytes, or NULL. An error
 * leaves the writer unchanged, except that after an I/O error it is dead.
 *
 * TFAST_EINVAL if a shape does not fit the schema; *misfit is then the field with a
 * size other than the schema fixes or an earlier field has, so that the caller can go
 * on with a more general schema. *misfit is -1 in all other cases. */
tfast_status tfast_graph_writer_append(tfast_graph_writer *writer,
                                       const tfast_graph_value *values,
                                       const int64_t *counts, const uint8_t *key,
                                       int *misfit);

/* Makes all appended graphs durable. After an I/O error the writer is dead: all later
 * calls fail. Graphs of earlier commits are safe. */
tfast_status tfast_graph_writer_commit(tfast_graph_writer *writer);

/* Commits, seals the segment and adds it to the manifest; a segment without graphs is
 * deleted. tfast_graph_writer_free() must still be called. After TFAST_EINTR close()
 * can be called again. */
tfast_status tfast_graph_writer_close(tfast_graph_writer *writer);
int64_t tfast_graph_writer_appended(const tfast_graph_writer *writer);
int64_t tfast_graph_writer_committed(const tfast_graph_writer *writer);

/* Frees the writer; NULL is allowed. Without close() committed graphs are left for
 * tfast_graph_adopt(). In a forked child the segment's file is not changed. */
void tfast_graph_writer_free(tfast_graph_writer *writer);

/* Seals the segments that dead writers have left, up to their last commits, and adds
 * them to the manifest. *graphs: number of graphs in them. *lost: number of records
 * found behind the last commits, a lower bound of what was lost. Segments of living
 * writers are left alone. */
tfast_status tfast_graph_adopt(const char *path, int64_t *graphs, int64_t *lost);

/* *schema: the schema with the most fields among a cache's segments, including those
 * that are being written; NULL if there are no segments. A writer's schema must agree
 * with it. The caller frees it. */
tfast_status tfast_graph_schema_find(const char *path, tfast_graph_schema **schema);

/* A build: between begin and end the cache opens only with `partial`. End sets the
 * cache's order and deletes segments without a graph in it. order[n]: indices of graphs
 * as a cache opened with `partial` at that time numbers them (not record numbers, if
 * the cache had an order before). order NULL: the order stays as it is. */
tfast_status tfast_graph_build_begin(const char *path);
tfast_status tfast_graph_build_anew(const char *path); /* and drops all its graphs */
tfast_status tfast_graph_is_building(const char *path, bool *building);
tfast_status tfast_graph_build_end(const char *path, const uint64_t *order, int64_t n);

/* ---- Reading (cache.c, verify.c, repair.c) --------------------------------------- */

typedef struct tfast_graph_cache tfast_graph_cache;

enum { TFAST_GRAPH_VERIFY_NEVER, TFAST_GRAPH_VERIFY_ONCE, TFAST_GRAPH_VERIFY_ALWAYS };

/* Files are mapped, or read graph by graph. Access to a mapped file that has been
 * truncated or has become unreadable, as happens on network file systems, kills the
 * process (SIGBUS). */
enum { TFAST_GRAPH_MMAP, TFAST_GRAPH_PREAD, TFAST_GRAPH_BY_FILE_SYSTEM };

typedef struct {
    int verify;
    int mode;     /* BY_FILE_SYSTEM: PREAD on network file systems, otherwise MMAP */
    bool partial; /* open the sealed graphs although a build or writer has not ended */
} tfast_graph_open_options;

/* Any number of threads may read an open cache at once, also after a fork. */
tfast_status tfast_graph_cache_open(tfast_graph_cache **cache, const char *path,
                                    const tfast_graph_open_options *options);
int tfast_graph_cache_mode(const tfast_graph_cache *cache); /* never BY_FILE_SYSTEM */
void tfast_graph_cache_retain(tfast_graph_cache *cache);
void tfast_graph_cache_release(tfast_graph_cache *cache);

int64_t tfast_graph_cache_len(const tfast_graph_cache *cache);
/* The generalisation of the segments' schemas (schema_join.h); NULL for a cache without
 * graphs. */
const tfast_graph_schema *tfast_graph_cache_schema(const tfast_graph_cache *cache);
/* 16 bytes that change with every change of the manifest: a hash of the cache's uuid
 * and generation. */
const uint8_t *tfast_graph_cache_fingerprint(const tfast_graph_cache *cache);
int64_t tfast_graph_cache_file_bytes(const tfast_graph_cache *cache);
int64_t tfast_graph_cache_segments(const tfast_graph_cache *cache);

/* out[len]: for each graph, count number `count` of the cache's schema, or the bytes of
 * its frame. Both come from the index; no graph is read. */
void tfast_graph_cache_counts(const tfast_graph_cache *cache, int count, int64_t *out);
void tfast_graph_cache_frame_bytes(const tfast_graph_cache *cache, int64_t *out);
/* out[16 * len]: the keys, read from the records and not verified. */
tfast_status tfast_graph_cache_keys(const tfast_graph_cache *cache, uint8_t *out);

/* arrays[fields of the cache's schema]: the arrays of graph i. With MMAP they point
 * into the map, which lives as long as the cache, and *owned is NULL; with PREAD they
 * point into *owned, which the caller frees with free(). Verifies as options.verify
 * says. Any thread. */
tfast_status tfast_graph_cache_get(tfast_graph_cache *cache, int64_t i,
                                   tfast_graph_array *arrays, void **owned);

/* Checks graphs first .. end - 1 in full (checksums, sizes, indices, bool bytes, UTF-8;
 * with `values` also that floats are finite), and calls damaged(context, i, message)
 * for each bad one. With first = 0 and end = len it also checks the commit frames (i is
 * -1), with first = end only these. Returns an error only if it could not go on. */
tfast_status tfast_graph_cache_verify(
    tfast_graph_cache *cache, int64_t first, int64_t end, bool values,
    void (*damaged)(void *context, int64_t i, const char *message), void *context);

/* Copies every committed graph that can still be read, from sealed and open segments,
 * into a new cache at `to`. `from` is only read. Calls line(context, text) with
 * progress for people. */
typedef struct {
    int64_t kept;        /* graphs */
    int64_t damaged;     /* committed graphs that are lost */
    int64_t uncommitted; /* records behind the last commit of their segment */
    int64_t bytes_skipped;
} tfast_graph_repair_report;
tfast_status tfast_graph_repair(const char *from, const char *to,
                                tfast_graph_repair_report *report,
                                void (*line)(void *context, const char *text),
                                void *context);

/* ---- Collate (collate.c) --------------------------------------------------------- */

/* What a batch contains. The caller keeps it alive and unchanged while it is in use. */
typedef struct {
    const uint16_t *fields; /* of the cache's schema */
    int n_fields;
    const uint16_t *batch_of; /* counts of nodes or edges that get a batch vector: for
                                 each node or edge, the number of its graph */
    int n_batch_of;
    /* Padding to static shapes: after the graphs comes one padding graph, which fills
     * each count up to its total (values are zeros, indices are its first node), then
     * empty graphs. n_slots: number of graphs including padding, 0: no padding.
     * totals[n_counts]: each count's sum including padding, -1: the sum without. */
    int64_t n_slots;
    const int64_t *totals;
} tfast_graph_selection;

/* One batch in one arena, every array aligned to 64. Read-only for callers. */
typedef struct tfast_graph_batch {
    uint8_t *arena;
    size_t bytes;
    int64_t n_graphs; /* without padding graphs */
    int64_t n_slots;  /* with padding the selection's n_slots, otherwise n_graphs */
    int64_t *totals;  /* per count: its sum, padding included */
    /* Offsets in the arena: */
    size_t *field_at; /* per selected field: its array */
    size_t *ptr_at;   /* per count: int64 [n_slots + 1], its sum before each graph */
    size_t *batch_at; /* per batch_of: its batch vector, int64 [totals[batch_of]] */
    int64_t *sums;    /* [n_counts][n_slots + 1]: a copy of the ptr arrays outside the
                         arena, safe from callers that write to the arena */
    int64_t (*shapes)[GRAPH_MAX_RANK + 1]; /* per selected field */
    int *ranks; /* -1: no graph of the batch has this field */
} tfast_graph_batch;

/* Collates graphs indices[n] into a batch with one reference, which keeps the cache
 * alive. A large batch is copied by several threads (tfast_parallel()) unless `alone`;
 * the result does not depend on the number of threads. Any thread. Errors: an index
 * outside 0 .. len - 1 (TFAST_EINVAL), a damaged graph (TFAST_EIO), graphs that do not
 * fit together or more than the padding allows (TFAST_EINVAL), no memory. */
tfast_status tfast_graph_collate(tfast_graph_cache *cache,
                                 const tfast_graph_selection *selection,
                                 const int64_t *indices, int64_t n, bool alone,
                                 tfast_graph_batch **batch);
void tfast_graph_batch_retain(tfast_graph_batch *batch);
/* `bytes` of memory in the batch for the caller's own data, aligned to 16, valid until
 * the last release. NULL once TFAST_GRAPH_NOTES bytes are used up. */
enum { TFAST_GRAPH_NOTES = 2048 };
void *tfast_graph_batch_note(tfast_graph_batch *batch, size_t bytes);
/* The last release returns the arena to the cache for reuse. Any thread. */
void tfast_graph_batch_release(tfast_graph_batch *batch);

/* ---- Prefetch (prefetch.c) ------------------------------------------------------- */

typedef struct tfast_graph_prefetch tfast_graph_prefetch;

/* Up to `threads` native threads collate submitted batches, which come back in the
 * order in which they were submitted. The threads start when a batch takes longer than
 * waking a thread. threads = 0: each batch is collated when it is asked for. The
 * selection must outlive the prefetch; the cache is retained. */
tfast_status tfast_graph_prefetch_new(tfast_graph_prefetch **prefetch,
                                      tfast_graph_cache *cache,
                                      const tfast_graph_selection *selection,
                                      int threads);
/* Submits a batch; `indices` is copied, `tag` comes back with the batch. */
tfast_status tfast_graph_prefetch_submit(tfast_graph_prefetch *prefetch,
                                         const int64_t *indices, int64_t n,
                                         int64_t tag);
/* Returns the next batch, which the caller releases. Waits up to `seconds`; *batch is
 * NULL if it is not ready by then or nothing is pending. An error belongs to this
 * batch; the next call goes on with the batch after it. */
tfast_status tfast_graph_prefetch_next(tfast_graph_prefetch *prefetch, double seconds,
                                       tfast_graph_batch **batch, int64_t *tag);
/* Number of batches that were submitted and not returned yet. */
int64_t tfast_graph_prefetch_pending(const tfast_graph_prefetch *prefetch);
/* Stops and joins the threads and frees everything but the batches that were returned.
 * Does nothing in a forked child. */
void tfast_graph_prefetch_free(tfast_graph_prefetch *prefetch);

/* ---- Order (order.c) ------------------------------------------------------------- */

enum { TFAST_GRAPH_MAX_BUDGETS = 8 };

/* The order of an epoch. Needs O(1) memory, and O(1) time to begin at any position. The
 * caller has checked that `subset` contains valid graph indices, and keeps it
 * unchanged. */
typedef struct {
    int64_t n;             /* graphs, or entries of subset */
    const int64_t *subset; /* NULL: 0 .. n - 1 */
    uint64_t seed, epoch;
    bool shuffle;
    int64_t rank, world_size;
    int64_t batch_size; /* most graphs in a batch */
    bool drop_last;
    int n_budgets;               /* 0: only batch_size limits a batch */
    const int64_t *const *sizes; /* [n_budgets][graphs of the cache], >= 0 */
    const int64_t *budgets;      /* [n_budgets]: largest sum of sizes in a batch */
    /* A graph larger than a budget gets a batch of its own; false: it is an error. */
    bool oversize_alone;
} tfast_graph_order;

/* Writes the graph indices of this rank's next batch to indices[batch_size] and their
 * number to *n; *n = 0 is the end of the epoch.
 *
 * *position is 0 before the first call and opaque afterwards. It is the only state to
 * save for resuming, and equal on all ranks after the same number of calls.
 *
 * All ranks get the same number of batches. Every graph is in exactly one batch of one
 * rank; with drop_last the graphs of an incomplete last round are left out. No batch is
 * empty, and none exceeds batch_size or a budget, except with oversize_alone.
 *
 * TFAST_EINVAL if that is impossible: the graphs cannot be cut into a multiple of
 * world_size batches, e.g. because there are fewer graphs than ranks. */
tfast_status tfast_graph_order_next(const tfast_graph_order *order, int64_t *position,
                                    int64_t *indices, int64_t *n);
/* The index of the graph at place i of the epoch's order, counted over all ranks. */
int64_t tfast_graph_order_at(const tfast_graph_order *order, int64_t i);
/* *n: the number of batches of each rank. With budgets it costs O(n) time, because all
 * batches are planned. */
tfast_status tfast_graph_order_batches(const tfast_graph_order *order, int64_t *n);

#endif
