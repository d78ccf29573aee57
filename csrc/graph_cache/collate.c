/* Collation of graphs into a batch: plan.c lays out the arena, then one pass over the
 * records copies the values, widens narrowed integers and adds index offsets. */
#include "plan.h"

#include "../threads.h"

#include <string.h>

/* Software prefetch runs AHEAD bytes before the copy: the hardware prefetcher stops at
 * page boundaries and cannot predict small graphs in random order. PIECE bytes are
 * prefetched at once; line fill buffers limit how many misses can be outstanding. */
enum { AHEAD = 12 << 10, PIECE = 2 << 10, LINE = 64 };

/* Only the first BEGINNING bytes of a frame are prefetched if only some of its fields
 * are selected, or if every read verifies the checksum, which itself loads the whole
 * frame into the caches. */
enum { BEGINNING = 3 << 10 };

/* A batch is copied by as many threads as get at least SHARE bytes each. */
enum { SHARE = 256 << 10 };

/* Prefetch state of one thread: the frames of its graphs, seen as one stream of bytes,
 * from which the first `most` bytes of each frame are prefetched. */
typedef struct {
    const graph_arena *arena;
    const tfast_graph_array *arrays; /* of the graph that is being copied */
    int64_t most;
    int64_t next, end_graph; /* of graphs next .. end_graph - 1 nothing is prefetched */
    const uint8_t *at, *end; /* bytes of graph next - 1 that are not prefetched yet */
    int64_t left;            /* prefetched bytes of the current graph, not passed yet */
} stream;

/* How many bytes of graph g's frame are prefetched. */
static int64_t
prefetched_bytes(const stream *s, int64_t g)
{
    const int64_t bytes = graph_frame_bytes(s->arena->places[g]);

    return bytes < s->most ? bytes : s->most;
}

/* Prefetches the next bytes of the stream. */
static void
prefetch(stream *s, int64_t bytes)
{
    while (bytes > 0) {
        int64_t n = s->end - s->at;

        if (n <= 0) {
            if (s->next == s->end_graph ||
                (s->at = graph_mapped_frame(s->arena->places[s->next])) == NULL) {
                s->at = s->end = NULL; /* no graph is left, or files are not mapped */
                return;
            }
            n = prefetched_bytes(s, s->next++);
            s->end = s->at + n;
        }
        n = n < bytes ? n : bytes;
        for (int64_t i = 0; i < n; i += LINE) {
            __builtin_prefetch(s->at + i);
        }
        s->at += n;
        bytes -= n;
    }
}

/* Advances past `bytes` of the current graph, copied or skipped, and prefetches as many
 * later in the stream, so that the prefetch keeps its lead. */
static void
advance(stream *s, int64_t bytes)
{
    bytes = bytes < s->left ? bytes : s->left;
    s->left -= bytes;
    prefetch(s, bytes);
}

static tfast_status
must_be_below(const char *what, int limit, int got)
{
    return got < limit
               ? TFAST_OK
               : tfast_fail(TFAST_EINVAL, "a selected %s must be below %d, got %d",
                            what, limit, got);
}

static tfast_status
check_selection(const tfast_graph_cache *cache, const tfast_graph_selection *selection,
                int64_t n)
{
    tfast_status status = TFAST_OK;

    if (cache->schema == NULL) {
        return tfast_fail(TFAST_EINVAL, "cache must have graphs to collate, got none; "
                                        "append some first");
    }
    for (int i = 0; i < selection->n_fields; i++) {
        TRY(must_be_below("field", cache->schema->header.n_fields,
                          selection->fields[i]));
    }
    for (int i = 0; i < selection->n_batch_of; i++) {
        TRY(must_be_below("count", cache->schema->header.n_counts,
                          selection->batch_of[i]));
    }
    if (n < 0 || n > INT32_MAX) {
        TRY(tfast_fail(TFAST_EINVAL,
                       "a batch must have 0 .. 2147483647 graphs, got %lld; use a "
                       "smaller batch_size",
                       (long long)n));
    }
    if (selection->n_slots != 0 &&
        (selection->n_slots < n || selection->n_slots > INT32_MAX)) {
        TRY(tfast_fail(TFAST_EINVAL,
                       "the padding's number of graphs must be at least the batch's, "
                       "%lld, got %lld; give the padding more",
                       (long long)n, (long long)selection->n_slots));
    }
fail:
    return status;
}

/* Copies elements first .. first + n - 1 of an array, widened to `bytes` each, and adds
 * `add` to each. */
static void
copy_elements(const tfast_graph_kernels *kernels, uint8_t *out,
              const tfast_graph_array *array, int64_t first, int64_t n, int bytes,
              int64_t add)
{
    const uint8_t *in = array->data;

    if (array->stored != GRAPH_AS_IS) {
        const int stored = graph_stored_bytes(GRAPH_I64, array->stored);

        kernels->widen(out, bytes, in + first * stored, array->stored, n, add);
    } else if (add != 0) {
        kernels->add(out, in + first * bytes, bytes, n, add);
    } else {
        memcpy(out, in + first * bytes, (size_t)(n * bytes));
    }
}

/* The values that one graph writes to a field, as runs of adjacent elements that get
 * the same addend. A run is a row of the field; or, if a field with an addend per row
 * has outer == 1, so that both rows of a graph are adjacent in the batch, one of
 * them. */
typedef struct {
    int64_t n, elements, stride; /* stride: bytes from one run to the next */
    bool alternate; /* odd runs get the second addend; false: the second half does */
} runs;

/* The runs of `graphs` graphs that have `steps` steps together. */
static runs
runs_of(const graph_batch_field *f, int64_t steps, int64_t graphs)
{
    const int64_t elements = steps * f->values;

    if (f->n_adds == 2 && f->outer == 1) {
        const int64_t part = graphs == 0 ? 0 : elements / (2 * graphs);
        return (runs){2 * graphs, part, part * f->bytes, true};
    }
    /* Empty rows need no runs; `outer` may be large for them. */
    return (runs){elements == 0 ? 0 : f->outer, elements, f->total * f->inner, false};
}

/* The number that is added to run `i` of graph g. */
static int64_t
addend(const graph_arena *arena, const graph_batch_field *f, runs r, int64_t i,
       int64_t g)
{
    const int second = r.alternate ? (int)(i & 1) : f->n_adds == 2 && i >= r.n / 2;

    return f->n_adds == 0 ? 0 : graph_sums(arena, f->adds[second])[g];
}

/* The number of steps of graph g. It comes from the arena's sums, not from the mapped
 * file: another process may change the file, and a changed count must not make a copy
 * write outside the arena. */
static int64_t
steps_of(const graph_arena *arena, const graph_batch_field *f, int64_t g)
{
    const int64_t *sums;

    if (f->steps_count < 0) {
        return f->steps;
    }
    sums = graph_sums(arena, f->steps_count);
    return sums[g + 1] - sums[g];
}

/* The number of steps of all graphs before g. */
static int64_t
steps_before(const graph_arena *arena, const graph_batch_field *f, int64_t g)
{
    return f->steps_count < 0 ? f->steps * g : graph_sums(arena, f->steps_count)[g];
}

/* memcpy() in pieces, with the prefetch of later bytes between them. */
static void
copy(stream *s, uint8_t *out, const uint8_t *in, int64_t bytes)
{
    for (; bytes > PIECE && s->most != BEGINNING; bytes -= PIECE) {
        memcpy(out, in, PIECE);
        out += PIECE;
        in += PIECE;
        advance(s, PIECE);
    }
    memcpy(out, in, (size_t)bytes);
    advance(s, bytes);
}

/* Copies field `f` of graph g into the batch. */
static tfast_status
copy_field(stream *source, graph_batch_field *f, int64_t g)
{
    const graph_arena *arena = source->arena;
    const tfast_graph_array *array = &source->arrays[f->field];
    const int64_t steps = steps_of(arena, f, g);
    uint8_t *out = f->out + steps_before(arena, f, g) * f->inner;
    runs r;

    if (array->stored == GRAPH_AS_IS && f->outer == 1 && f->n_adds == 0 &&
        !f->lacking && !f->absent && array->numel == steps * f->values) {
        copy(source, out, array->data, steps * f->inner); /* the fast path */
        return TFAST_OK;
    }
    r = runs_of(f, steps, 1);
    if (g == 0) {
        f->absent = array->stored == GRAPH_ABSENT;
    }
    if (f->absent != (array->stored == GRAPH_ABSENT) || f->lacking > f->absent) {
        return graph_field_missing(arena, f->field);
    }
    if (f->absent) {
        return TFAST_OK;
    }
    if (array->numel != r.n * r.elements) {
        return graph_damage("field %s of a graph must have %lld values, got %lld",
                            arena->cache->schema->field_names[f->field],
                            (long long)(r.n * r.elements), (long long)array->numel);
    }
    for (int64_t i = 0; i < r.n; i++, out += r.stride) {
        copy_elements(arena->cache->kernels, out, array, i * r.elements, r.elements,
                      f->bytes, addend(arena, f, r, i, g));
    }
    return TFAST_OK;
}

/* Shared by the threads that copy a batch. If a thread fails, the calling thread copies
 * the whole batch again, so that the reported error is always that of the first bad
 * graph. */
typedef struct {
    graph_arena *arena;
    const int64_t *indices;
    int n_fields;
    bool failed[GRAPH_SHARES];
} copying;

/* Copies graphs first .. end - 1 with the buffers of thread `share`. Graph 0 must be
 * copied before all others: it decides which fields are absent from the batch. */
static tfast_status
copy_graphs(const copying *c, int share, int64_t first, int64_t end)
{
    graph_arena *arena = c->arena;
    const tfast_graph_cache *cache = arena->cache;
    const int all_fields = cache->schema->header.n_fields;
    const bool all =
        c->n_fields >= all_fields && cache->options.verify != TFAST_GRAPH_VERIFY_ALWAYS;
    tfast_graph_array *arrays = arena->arrays + (int64_t)share * all_fields;
    stream source = {
        .arena = arena,
        .arrays = arrays,
        .most = all ? INT64_MAX : BEGINNING,
        .next = first,
        .end_graph = end,
    };

    graph_record_view record;
    tfast_status status = TFAST_OK;

    prefetch(&source, AHEAD);
    for (int64_t g = first; g < end; g++) {
        source.left = prefetched_bytes(&source, g);
        TRY(graph_arrays(arena->cache, c->indices[g], arena->places[g],
                         &arena->frames[share], cache->options.verify, arrays,
                         &record));
        for (int i = 0; i < c->n_fields; i++) {
            TRY(copy_field(&source, &arena->fields[i], g));
        }
        advance(&source, source.left);
    }
fail:
    return status;
}

/* One thread's share of the graphs after graph 0; a body for tfast_parallel(). */
static void
copy_share(void *context, int share, int shares)
{
    copying *c = context;
    const int64_t n = c->arena->batch.n_graphs - 1;

    c->failed[share] = copy_graphs(c, share, 1 + n * share / shares,
                                   1 + n * (share + 1) / shares) != TFAST_OK;
}

/* How many threads should copy this batch. */
static int
shares_worth(const graph_arena *arena)
{
    const int64_t n = arena->batch.n_graphs - 1;
    int64_t shares = (int64_t)(arena->batch.bytes / SHARE);

    if (shares < 2) {
        return 1;
    }
    shares = shares < n ? shares : n;
    shares = shares < tfast_num_threads() ? shares : tfast_num_threads();
    return (int)(shares < GRAPH_SHARES ? shares : GRAPH_SHARES);
}

static tfast_status
copy_all(graph_arena *arena, const int64_t *indices, int n_fields, bool alone)
{
    copying c = {.arena = arena, .indices = indices, .n_fields = n_fields};
    const int shares = alone ? 1 : shares_worth(arena);
    bool failed = false;

    for (int i = 0; i < n_fields; i++) {
        arena->fields[i].out = arena->batch.arena + arena->batch.field_at[i];
    }
    if (shares > 1 && copy_graphs(&c, 0, 0, 1) == TFAST_OK) {
        tfast_parallel(shares, copy_share, &c);
        for (int i = 0; i < shares; i++) {
            failed = failed || c.failed[i];
        }
        if (!failed) {
            return TFAST_OK;
        }
    }
    return copy_graphs(&c, 0, 0, arena->batch.n_graphs);
}

/* Writes `value` to n integers of `bytes` each. */
static void
fill(const tfast_graph_kernels *kernels, uint8_t *out, int bytes, int64_t n,
     int64_t value)
{
    if (bytes == 8) {
        kernels->fill((int64_t *)out, n, value);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        memcpy(out + i * bytes, &value, (size_t)bytes); /* little-endian */
    }
}

/* Fills the padding of one field with zeros, or if a count is added to the field, with
 * that count's sum over the graphs: for indices, the padding graph's first node. */
static tfast_status
pad_field(const graph_arena *arena, graph_batch_field *f)
{
    const tfast_graph_schema *schema = arena->cache->schema;
    const int64_t n = arena->batch.n_graphs, before = steps_before(arena, f, n);
    const runs r = runs_of(f, f->total - before, arena->batch.n_slots - n);
    uint8_t *out = f->out + before * f->inner;

    if (r.n * r.elements == 0) {
        return TFAST_OK;
    }
    for (int i = 0; i < f->n_adds; i++) {
        const int k = f->adds[i];

        if (schema->counts[k].role != GRAPH_INCREMENT &&
            arena->batch.totals[k] == graph_sums(arena, k)[n]) {
            return tfast_fail(TFAST_EINVAL,
                              "the padding must have a node for the indices of its "
                              "field %s, got none; give the padding one node more",
                              schema->field_names[f->field]);
        }
    }
    for (int64_t i = 0; i < r.n; i++, out += r.stride) {
        if (f->n_adds == 0) {
            memset(out, 0, (size_t)(r.elements * f->bytes));
        } else {
            fill(arena->cache->kernels, out, f->bytes, r.elements,
                 addend(arena, f, r, i, n));
        }
    }
    return TFAST_OK;
}

/* Writes the batch vectors and the ptr arrays. */
static void
write_vectors(graph_arena *arena, const tfast_graph_selection *selection)
{
    const tfast_graph_kernels *kernels = arena->cache->kernels;
    const int64_t slots = arena->batch.n_slots;

    for (int i = 0; i < selection->n_batch_of; i++) {
        const int64_t *sums = graph_sums(arena, selection->batch_of[i]);
        int64_t *out = (int64_t *)(arena->batch.arena + arena->batch.batch_at[i]);

        for (int64_t g = 0; g < slots; g++) {
            kernels->fill(out + sums[g], sums[g + 1] - sums[g], g);
        }
    }
    for (int k = 0; k < arena->cache->schema->header.n_counts; k++) {
        memcpy(arena->batch.arena + arena->batch.ptr_at[k], graph_sums(arena, k),
               (size_t)(slots + 1) * sizeof(int64_t));
    }
}

tfast_status
tfast_graph_collate(tfast_graph_cache *cache, const tfast_graph_selection *selection,
                    const int64_t *indices, int64_t n, bool alone,
                    tfast_graph_batch **batch)
{
    graph_arena *arena = NULL;
    tfast_status status;

    *batch = NULL;
    TRY(check_selection(cache, selection, n));
    TRY(graph_arena_take(&arena, cache, selection, n,
                         selection->n_slots > 0 ? selection->n_slots : n));
    TRY(graph_batch_plan(arena, selection, indices));
    TRY(copy_all(arena, indices, selection->n_fields, alone));
    for (int i = 0; i < selection->n_fields; i++) {
        if (arena->fields[i].absent) {
            arena->batch.ranks[i] = -1;
        } else {
            TRY(pad_field(arena, &arena->fields[i]));
        }
    }
    write_vectors(arena, selection);
    *batch = &arena->batch;
    return TFAST_OK;
fail:
    if (arena != NULL) {
        tfast_graph_batch_release(&arena->batch);
    }
    return status;
}
