/* The graph cache's contract: what csrc/python may call, who owns what. format.h says
 * what is on disk. Nothing here is for two threads at once, except where it says so.
 *
 * Files: io.c (the operating system); schema.c (parsing), schema_join.c (segments that
 * differ in sizes), layout.c (where a record's fields lie), check.c (whether one can be
 * trusted), agree.c (whether a writer's schema is the cache's); segment.c (a sealed
 * segment), scan.c (frames, and recovery), seal.c; directory.c, manifest.c and make.c;
 * append.c (a graph becomes a record), write.c, adopt.c (what dead writers left),
 * build.c; read.c (an open cache), verify.c, salvage.c and repair.c; batch.c (arenas),
 * plan.c and collate.c (batches), prefetch.c (threads), order.c and shuffle.c
 * (shuffling, sharding, batches by size). */
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

/* Checks every rule of format.h; nothing of `bytes` is trusted or kept. */
tfast_status tfast_graph_schema_parse(tfast_graph_schema **schema, const void *bytes,
                                      size_t n_bytes);
void tfast_graph_schema_free(tfast_graph_schema *schema);

/* True where graphs of both can be in one cache: all is the same but dims (fixed in one
 * and a count in the other, or the nodes in one and a size of its own in the other),
 * the counts that nodes and edges are none of, GRAPH_OPTIONAL, and the last fields,
 * which one of them may lack. In the schema of both, a dim that differs is a size of
 * its own, and a field that is optional in one, or that one lacks, is optional. */
bool tfast_graph_schema_agrees(const tfast_graph_schema *a,
                               const tfast_graph_schema *b);

/* Bytes of an element of a dtype, and of how it is stored; 0: not a number of ours. */
extern const uint8_t graph_stored_widths[GRAPH_N_DTYPES][GRAPH_N_STORED];
int graph_dtype_bytes(int dtype);

static inline int
graph_stored_bytes(int dtype, int stored)
{
    return dtype > 0 && dtype < GRAPH_N_DTYPES && stored >= 0 && stored < GRAPH_N_STORED
               ? graph_stored_widths[dtype][stored]
               : 0;
}

const char *graph_dtype_name(int dtype);

/* One field of one record. */
typedef struct {
    const void *data; /* as stored; aligned to its elements, at most to 8 bytes */
    int stored;       /* GRAPH_ABSENT, GRAPH_AS_IS, ... */
    int rank;
    int64_t shape[GRAPH_MAX_RANK];
    int64_t numel;
} tfast_graph_array;

/* A record in two parts. A mapped file may change at any time, so that what has been
 * checked in it need not be so any more when it is used. */
typedef struct {
    const void *head;       /* graph_record, counts and `stored`, in memory that nobody
                               else writes: schema->record_bytes of it */
    const uint8_t *payload; /* may be in a map: any bytes at any time */
    int64_t bytes;          /* of both, readable */
} graph_record_view;

/* Where the fields of a record lie. Nothing in it is trusted: sizes are checked against
 * the view's bytes, and `units` against both. Fills arrays[n_fields]. */
tfast_status graph_record_arrays(const tfast_graph_schema *schema,
                                 const graph_record_view *record,
                                 tfast_graph_array *arrays);

/* ---- Writing (write.c, manifest.c) ----------------------------------------------- */

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

/* A new segment in the cache at `path`; makes the directory and an empty manifest where
 * there is none. `path` of something else (a file, a directory with other things and no
 * manifest) is refused. With `durable` false nothing is synced, for scratch, but that a
 * cache with other segments is left as safe as it was. */
tfast_status tfast_graph_writer_open(tfast_graph_writer **writer, const char *path,
                                     const void *schema, size_t schema_bytes,
                                     bool durable);

/* Appends a graph. counts[n_counts]: >= 0 given, -1 to be taken from the values'
 * shapes (a count that neither gives is an error). Values of count-adding integer
 * fields (edge indices) must be >= 0 and below their count. key: 16 bytes, or NULL.
 * TFAST_EINVAL where a shape does not fit the schema; *misfit is then the field whose
 * size differs from what the schema fixes or shares, so that the caller can go on with
 * a more general schema, and -1 for every other error. Nothing has changed then.
 * Values that add an increment are not checked: its meaning is the user's. */
tfast_status tfast_graph_writer_append(tfast_graph_writer *writer,
                                       const tfast_graph_value *values,
                                       const int64_t *counts, const uint8_t *key,
                                       int *misfit);

/* Makes everything appended so far durable. May run without the GIL while no other call
 * of this writer does. After an error the writer is dead: what was committed is safe.
 * */
tfast_status tfast_graph_writer_commit(tfast_graph_writer *writer);

/* Commits, seals the segment and enters it into the manifest; an empty segment
 * vanishes. The writer is freed by tfast_graph_writer_free() only. After TFAST_EINTR it
 * can be closed again. */
tfast_status tfast_graph_writer_close(tfast_graph_writer *writer);
int64_t tfast_graph_writer_appended(const tfast_graph_writer *writer);
int64_t tfast_graph_writer_committed(const tfast_graph_writer *writer);

/* Without close(): what was committed is left for tfast_graph_adopt(). In a forked
 * child it only frees memory. */
void tfast_graph_writer_free(tfast_graph_writer *writer);

/* Seals what dead writers have left, to their last commit; *graphs and *lost count what
 * was kept and what followed the last commit (records, at least). Segments of living
 * writers are left alone. */
tfast_status tfast_graph_adopt(const char *path, int64_t *graphs, int64_t *lost);

/* The schema of a cache's segments, also of those that are being written, to be freed;
 * NULL: there are none. A writer's must agree with it. */
tfast_status tfast_graph_schema_find(const char *path, tfast_graph_schema **schema);

/* A build: between begin and end the cache does not open (but with `partial`). End sets
 * the order, as numbers of the graphs that `partial` shows at that time (so after an
 * earlier order not of the records), and deletes segments that have none of them; order
 * NULL: it stays as it is. */
tfast_status tfast_graph_build_begin(const char *path);
tfast_status tfast_graph_build_end(const char *path, const uint64_t *order, int64_t n);

/* ---- Reading (segment.c, read.c) ------------------------------------------------- */

typedef struct tfast_graph_cache tfast_graph_cache;

enum { TFAST_GRAPH_VERIFY_NEVER, TFAST_GRAPH_VERIFY_ONCE, TFAST_GRAPH_VERIFY_ALWAYS };

/* Files are mapped, or read graph by graph. A map of a file that is cut short kills the
 * process (SIGBUS), which on network file systems others may do, and where pages are
 * lost with the connection. */
enum { TFAST_GRAPH_MMAP, TFAST_GRAPH_PREAD, TFAST_GRAPH_BY_FILE_SYSTEM };

typedef struct {
    int verify;
    int mode; /* TFAST_GRAPH_BY_FILE_SYSTEM: reads on network file systems, else maps */
    bool partial; /* open what is sealed although a build or a writer has not ended */
} tfast_graph_open_options;

/* Opened once, it may be read by any number of threads at once, and after a fork. */
tfast_status tfast_graph_cache_open(tfast_graph_cache **cache, const char *path,
                                    const tfast_graph_open_options *options);
int tfast_graph_cache_mode(const tfast_graph_cache *cache); /* the one of the two */
void tfast_graph_cache_retain(tfast_graph_cache *cache);
void tfast_graph_cache_release(tfast_graph_cache *cache);

int64_t tfast_graph_cache_len(const tfast_graph_cache *cache);
/* Of the first segment, generalised: a dimension that is a count in any segment is one
 * here. NULL for a cache without graphs. */
const tfast_graph_schema *tfast_graph_cache_schema(const tfast_graph_cache *cache);
/* 16 bytes that change with the manifest: the cache's uuid and generation mixed. */
const uint8_t *tfast_graph_cache_fingerprint(const tfast_graph_cache *cache);
int64_t tfast_graph_cache_file_bytes(const tfast_graph_cache *cache);
int64_t tfast_graph_cache_segments(const tfast_graph_cache *cache);

/* out[len]: one of the cache schema's counts, or the bytes of the frames, of all
 * graphs, from the index alone. */
void tfast_graph_cache_counts(const tfast_graph_cache *cache, int count, int64_t *out);
void tfast_graph_cache_frame_bytes(const tfast_graph_cache *cache, int64_t *out);
/* out[16 * len]: the keys, from the records. */
tfast_status tfast_graph_cache_keys(const tfast_graph_cache *cache, uint8_t *out);

/* The arrays of graph i, in the map while the cache is held. Where files are read they
 * lie in *owned, which the caller frees with free(); else *owned is NULL. Verifies as
 * the cache was opened. Threads may call it at once. */
tfast_status tfast_graph_cache_get(tfast_graph_cache *cache, int64_t i,
                                   tfast_graph_array *arrays, void **owned);

/* Checks graphs first .. end - 1 in full (checksums, sizes, indices, bool bytes, UTF-8;
 * with `values` also that floats are finite), and calls damaged(context, i, message)
 * for each bad one. With first = 0 and end = len also what lies between the records,
 * and with first = end only that; i is -1 then. Returns an error only where it could
 * not go on. */
tfast_status tfast_graph_cache_verify(
    tfast_graph_cache *cache, int64_t first, int64_t end, bool values,
    void (*damaged)(void *context, int64_t i, const char *message), void *context);

/* Copies every committed graph that can still be read, of sealed segments and others,
 * into a new cache at `to`. `from` is only read. Writes a report line by line. */
typedef struct {
    int64_t kept;
    int64_t damaged;     /* committed, but broken */
    int64_t uncommitted; /* after a last commit: never promised */
    int64_t bytes_skipped;
} tfast_graph_repair_report;
tfast_status tfast_graph_repair(const char *from, const char *to,
                                tfast_graph_repair_report *report,
                                void (*line)(void *context, const char *text),
                                void *context);

/* ---- Collate (collate.c) --------------------------------------------------------- */

/* What a batch is to hold. The caller keeps it alive and unchanged. */
typedef struct {
    const uint16_t *fields; /* of the cache's schema */
    int n_fields;
    const uint16_t *batch_of; /* counts for which the number of its graph is wanted for
                                 each thing counted */
    int n_batch_of;
    /* Static shapes: the batch is filled up with one graph that has all that is missing
     * (zeros; indices point at its first node) and then empty ones. n_slots: graphs in
     * all, 0: no padding; totals[n_counts]: of each count in all, -1: as many as the
     * graphs have. */
    int64_t n_slots;
    const int64_t *totals;
} tfast_graph_selection;

/* One batch in one arena, every array aligned to 64. */
typedef struct tfast_graph_batch {
    uint8_t *arena;
    size_t bytes;
    int64_t n_graphs;       /* real ones */
    int64_t n_slots;        /* n_graphs, or with padding the selection's */
    const int64_t *totals;  /* of each count, padding included */
    const size_t *field_at; /* per selected field: its array's place in the arena */
    const size_t *ptr_at;   /* per count: int64 [n_slots + 1], sums before each graph */
    const size_t *batch_at; /* per batch_of: int64 [totals[batch_of]] */
    const int64_t *sums;    /* [n_counts][n_slots + 1]: the ptrs again, beside the
                               arena, for who shall not see what is written there */
    const int64_t (*shapes)[GRAPH_MAX_RANK + 1]; /* per selected field */
    const int *ranks; /* -1: none of the graphs has this field */
} tfast_graph_batch;

/* Collates now; large batches on the threads of tfast_parallel() too, unless this one
 * is to do it `alone`. The same bytes with any number. It comes with one reference,
 * and holds the cache. Errors: an index outside 0 .. len - 1 (TFAST_EINVAL), a damaged
 * graph (TFAST_EIO), graphs that do not fit together or more than the padding allows
 * (TFAST_EINVAL), no memory. */
tfast_status tfast_graph_collate(tfast_graph_cache *cache,
                                 const tfast_graph_selection *selection,
                                 const int64_t *indices, int64_t n, bool alone,
                                 tfast_graph_batch **batch);
void tfast_graph_batch_retain(tfast_graph_batch *batch);
/* Memory for what the caller has to remember of the batch, until the last release. NULL
 * where there is none left: there are TFAST_GRAPH_NOTES bytes. One thread at a time. */
enum { TFAST_GRAPH_NOTES = 2048 };
void *tfast_graph_batch_note(tfast_graph_batch *batch, size_t bytes);
/* The last release gives the arena back to be used again. Any thread. */
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

/* Which graphs come when. O(1) memory and O(1) to begin anywhere. The caller has made
 * sure that what subset holds are numbers of graphs, and lets nobody change it. */
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
    /* A graph beyond a budget: a batch of its own; else an error. */
    bool oversize_alone;
} tfast_graph_order;

/* Writes the graphs of the next batch of this rank (room for batch_size) and their
 * number, 0 at the end of the epoch. *position: 0 at first, opaque, all that there is
 * to save, and the same on all ranks. Ranks get the same number of batches, every graph
 * is in exactly one batch of one rank (drop_last: but for the last incomplete ones),
 * and none is empty or beyond batch_size and the budgets. Where that cannot be (fewer
 * graphs than ranks; batches of one graph, whose number is no multiple of the ranks):
 * TFAST_EINVAL. */
tfast_status tfast_graph_order_next(const tfast_graph_order *order, int64_t *position,
                                    int64_t *indices, int64_t *n);
/* Graph at place i of the epoch, before sharding. */
int64_t tfast_graph_order_at(const tfast_graph_order *order, int64_t i);
/* The number of batches that a rank has; with budgets it plans them all. */
tfast_status tfast_graph_order_batches(const tfast_graph_order *order, int64_t *n);

#endif
