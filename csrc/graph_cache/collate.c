/* Graphs become one batch: plan.c lays out the arena, and one pass over the records
 * copies, widens and adds. */
#include "plan.h"

#include <string.h>

/* Frames are prefetched into the processor's caches AHEAD bytes before they are copied:
 * by itself the processor follows a stream to the end of its page, and small graphs in
 * random order are no stream. PIECE: bytes that are prefetched at once, few enough for
 * the processor's line fill buffers. */
enum { AHEAD = 12 << 10, PIECE = 2 << 10, LINE = 64 };

/* Bytes of a frame that are prefetched where not all of its fields are wanted, or where
 * its checksum is compared first, which brings all of it into the caches. */
enum { BEGINNING = 3 << 10 };

/* Several threads copy a batch of more bytes than this, each at least as many. */
enum { SHARE = 256 << 10 };

/* The frames of a thread's graphs as one stream of bytes, of which the first `most` of
 * each are prefetched. */
typedef struct {
    const graph_arena *arena;
    const tfast_graph_array *arrays; /* of the graph that is copied */
    int64_t most;
    int64_t next, end_graph; /* graphs of which nothing is prefetched yet */
    const uint8_t *at, *end; /* what is not prefetched of graph next - 1 */
    int64_t left;            /* of the graph that is copied, as prefetched before */
} stream;

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
                s->at = s->end = NULL; /* the last graph, or `pread` */
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

/* Advances past bytes of the graph, copied or skipped. */
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

/* Copies `n` elements, adding `add`. */
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

/* Runs of adjacent elements to which the same number is added: the rows of the field;
 * or, where the two rows of a graph lie in one row of the batch, both rows of each
 * graph. */
typedef struct {
    int64_t n, elements, stride; /* stride: bytes from one run to the next */
    bool alternate;              /* every other run has the second addend */
} runs;

static runs
runs_of(const graph_batch_field *f, int64_t steps, int64_t graphs)
{
    const int64_t elements = steps * f->values;

    if (f->n_adds == 2 && f->outer == 1) {
        const int64_t part = graphs == 0 ? 0 : elements / (2 * graphs);
        return (runs){2 * graphs, part, part * f->bytes, true};
    }
    /* No runs where rows are empty: their number may be large. */
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

/* The steps of graph g, from the arena's sums and not from the file, which another
 * process may change meanwhile: so that nothing is written outside the arena. */
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

/* The steps of all graphs before g. */
static int64_t
steps_before(const graph_arena *arena, const graph_batch_field *f, int64_t g)
{
    return f->steps_count < 0 ? f->steps * g : graph_sums(arena, f->steps_count)[g];
}

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

/* Adds graph g to one field. */
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
        copy(source, out, array->data, steps * f->inner); /* most fields take this */
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

/* Shared by the threads that copy a batch. If one of them fails, one thread copies the
 * whole batch again: the error is that of the first graph that has one. */
typedef struct {
    graph_arena *arena;
    const int64_t *indices;
    int n_fields;
    bool failed[GRAPH_SHARES];
} copying;

/* Copies the graphs first .. end - 1 with the memory of this share. Graph 0 comes
 * before all others: it decides which fields are absent. */
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

/* The graphs after the first, in shares of equally many. */
static void
copy_share(void *context, int share, int shares)
{
    copying *c = context;
    const int64_t n = c->arena->batch.n_graphs - 1;

    c->failed[share] = copy_graphs(c, share, 1 + n * share / shares,
                                   1 + n * (share + 1) / shares) != TFAST_OK;
}

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

/* n elements of `bytes` each, all `value`. */
static void
fill(const tfast_graph_kernels *kernels, uint8_t *out, int bytes, int64_t n,
     int64_t value)
{
    if (bytes == 8) {
        kernels->fill((int64_t *)out, n, value);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        memcpy(out + i * bytes, &value, (size_t)bytes); /* the low bytes */
    }
}

/* Fills the padding of one field: zeros, or indices of the first padding node. */
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
