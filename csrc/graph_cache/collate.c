/* Graphs become one batch: plan.c lays out the arena, and one pass over the records
 * copies, widens and adds. */
#include "batch.h"
#include "io.h"

#include <string.h>

/* Graphs are fetched into the processor's caches so many bytes before they are copied:
 * by itself it follows a stream to the end of a page and no further, and small graphs
 * are no stream. With it 32 of 185,000 graphs of 2.8 KB in random order take a quarter
 * less time, and 32 of 1,024 of 55 KB a fifth. */
enum { AHEAD = 12 << 10, LARGE = 4 << 10, PIECE = 2 << 10, LINE = 64 };

/* Of each frame, where not all of its fields are wanted, or its checksum is compared
 * first, which leaves all of it in the caches. */
enum { BEGINNING = 3 << 10 };

/* Threads share a batch of more bytes than this, each taking as much at least. */
enum { SHARE = 256 << 10 };

/* The frames of a thread's graphs, one stream of bytes; of each no more than `most`. */
typedef struct {
    const graph_arena *arena;
    const tfast_graph_array *arrays; /* of the graph that is copied */
    int64_t most;
    int64_t end_graph;
    int64_t next;            /* the first graph of which nothing is fetched yet */
    const uint8_t *at, *end; /* what is not, of the one before it */
    int64_t ahead;           /* bytes that are fetched and not copied */
    int64_t left;            /* bytes that are not copied, of the graph that is */
} stream;

static int64_t
lines_of(int64_t bytes)
{
    return (int64_t)((uint64_t)bytes / LINE);
}

static int64_t
fetched_of(const stream *s, int64_t g)
{
    const int64_t bytes = graph_frame_bytes(s->arena->places[g]);

    return bytes < s->most ? bytes : s->most;
}

/* The next frame, where there is one in a map. */
static bool
fetch_next(stream *s)
{
    s->ahead -= s->at - s->end; /* which is nobody's */
    s->at = s->end;
    if (s->next == s->end_graph) {
        return false;
    }
    s->at = s->end = graph_frame(s->arena->places[s->next]);
    if (s->at == NULL) { /* with `pread` */
        return false;
    }
    s->end += fetched_of(s, s->next++);
    return true;
}

static void
fetch(stream *s)
{
    while (s->ahead < AHEAD && (s->at < s->end || fetch_next(s))) {
        const int64_t wanted = AHEAD - s->ahead, there = s->end - s->at;
        const int64_t n = lines_of((wanted < there ? wanted : there) + LINE - 1);

        for (int64_t i = 0; i < n; i++) {
            __builtin_prefetch(s->at + i * LINE);
        }
        s->at += n * LINE;
        s->ahead += n * LINE;
    }
}

/* So many bytes of the graph are copied, or will not be. */
static void
go_on(stream *s, int64_t bytes)
{
    bytes = bytes < s->left ? bytes : s->left;
    s->left -= bytes;
    s->ahead -= bytes;
    fetch(s);
}

static tfast_status
check_selection(const tfast_graph_cache *cache, const tfast_graph_selection *selection,
                int64_t n)
{
    if (cache->schema == NULL) {
        return tfast_fail(TFAST_EINVAL, "cache must have graphs to collate, got none");
    }
    for (int i = 0; i < selection->n_fields; i++) {
        if (selection->fields[i] >= cache->schema->header.n_fields) {
            return tfast_fail(TFAST_EINVAL, "a selected field must be below %d, got %d",
                              cache->schema->header.n_fields, selection->fields[i]);
        }
    }
    for (int i = 0; i < selection->n_batch_of; i++) {
        if (selection->batch_of[i] >= cache->schema->header.n_counts) {
            return tfast_fail(TFAST_EINVAL, "a selected count must be below %d, got %d",
                              cache->schema->header.n_counts, selection->batch_of[i]);
        }
    }
    if (n < 0 || n > INT32_MAX) {
        return tfast_fail(TFAST_EINVAL,
                          "a batch must have 0 .. 2147483647 graphs, got %lld",
                          (long long)n);
    }
    if (selection->n_slots != 0 &&
        (selection->n_slots < n || selection->n_slots > INT32_MAX)) {
        return tfast_fail(TFAST_EINVAL,
                          "the padding's number of graphs must be at least the "
                          "batch's, %lld, got %lld",
                          (long long)n, (long long)selection->n_slots);
    }
    return TFAST_OK;
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

/* The runs of elements that lie side by side and get the same added: the field's rows,
 * or, where two rows lie inside what is one row of the batch, both of each graph. */
typedef struct {
    int64_t n, elements, stride; /* stride: bytes from one to the next */
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
    /* Any number of empty rows is no work. */
    return (runs){elements == 0 ? 0 : f->outer, elements, f->total * f->inner, false};
}

/* What run `i` adds for graph g. */
static int64_t
addend(const graph_arena *arena, const graph_batch_field *f, runs r, int64_t i,
       int64_t g)
{
    const int second = r.alternate ? (int)(i & 1) : f->n_adds == 2 && i >= r.n / 2;

    return f->n_adds == 0 ? 0 : graph_sums(arena, f->adds[second])[g];
}

/* From the sums, which are the arena's own, and not again from the file: what is
 * written stays in the arena even if somebody changes the file meanwhile. */
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

/* A line is fetched with each that is copied: in one go there would be more than the
 * processor can wait for. */
static void
copy_lines(stream *s, uint8_t *out, const uint8_t *in, int64_t bytes)
{
    int64_t lines = lines_of(bytes < s->left ? bytes : s->left);

    while (lines > 0 && (s->at < s->end || fetch_next(s))) {
        const int64_t there = lines_of(s->end - s->at + LINE - 1);
        const int64_t n = lines < there ? lines : there;

        s->arena->cache->kernels->copy(out, in, n, s->at);
        s->at += n * LINE;
        s->left -= n * LINE;
        out += n * LINE;
        in += n * LINE;
        bytes -= n * LINE;
        lines -= n;
    }
    if (bytes > 0) { /* mostly none */
        memcpy(out, in, (size_t)bytes);
    }
}

/* Large arrays that have to be fetched in pieces of a fixed size, which gcc copies by
 * `rep movs`: a batch of 2.4 MB takes less time than by lines. What is in the caches
 * the system's copies faster. */
static void
copy(stream *s, uint8_t *out, const uint8_t *in, int64_t bytes)
{
    if (bytes > LARGE && s->most == BEGINNING) {
        memcpy(out, in, (size_t)bytes);
        return;
    }
    for (; bytes > LARGE; bytes -= PIECE) {
        memcpy(out, in, PIECE);
        out += PIECE;
        in += PIECE;
        go_on(s, PIECE);
    }
    copy_lines(s, out, in, bytes);
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
        copy(source, out, array->data, steps * f->inner); /* most fields */
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

/* What threads share. Where one of them fails, all is copied again by one: the error is
 * that of the first graph that has one. */
typedef struct {
    graph_arena *arena;
    const int64_t *indices;
    int n_fields;
    bool failed[GRAPH_SHARES];
} copying;

/* Copies the graphs first .. end - 1 with the memory of this share. Graph 0 says which
 * fields are absent, and comes before all others. */
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

    fetch(&source);
    for (int64_t g = first; g < end; g++) {
        tfast_status status;

        source.left = fetched_of(&source, g);
        status = graph_arrays(arena->cache, c->indices[g], arena->places[g],
                              &arena->frames[share], arrays);
        for (int i = 0; status == TFAST_OK && i < c->n_fields; i++) {
            status = copy_field(&source, &arena->fields[i], g);
        }
        if (status != TFAST_OK) {
            return status;
        }
        go_on(&source, source.left);
    }
    return TFAST_OK;
}

/* The graphs after the first, in shares of as many frames each. */
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
        arena->fields[i].out = arena->batch.arena + arena->field_at[i];
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

/* What is left of one field: zeros, or indices of the first padding graph's first. */
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
            arena->totals[k] == graph_sums(arena, k)[n]) {
            return tfast_fail(TFAST_EINVAL,
                              "the padding must have a node for the indices of its "
                              "field %s, got none",
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
        int64_t *out = (int64_t *)(arena->batch.arena + arena->batch_at[i]);

        for (int64_t g = 0; g < slots; g++) {
            kernels->fill(out + sums[g], sums[g + 1] - sums[g], g);
        }
    }
    for (int k = 0; k < arena->cache->schema->header.n_counts; k++) {
        memcpy(arena->batch.arena + arena->ptr_at[k], graph_sums(arena, k),
               (size_t)(slots + 1) * sizeof(int64_t));
    }
}

tfast_status
tfast_graph_collate(tfast_graph_cache *cache, const tfast_graph_selection *selection,
                    const int64_t *indices, int64_t n, bool alone,
                    tfast_graph_batch **batch)
{
    tfast_status status = check_selection(cache, selection, n);
    graph_arena *arena;

    *batch = NULL;
    if (status == TFAST_OK) {
        status = graph_arena_take(&arena, cache, selection, n,
                                  selection->n_slots > 0 ? selection->n_slots : n);
    }
    if (status != TFAST_OK) {
        return status;
    }
    status = graph_batch_plan(arena, selection, indices);
    if (status == TFAST_OK) {
        status = copy_all(arena, indices, selection->n_fields, alone);
    }
    for (int i = 0; status == TFAST_OK && i < selection->n_fields; i++) {
        if (arena->fields[i].absent) {
            arena->ranks[i] = -1;
        } else {
            status = pad_field(arena, &arena->fields[i]);
        }
    }
    if (status != TFAST_OK) {
        tfast_graph_batch_release(&arena->batch);
        return status;
    }
    write_vectors(arena, selection);
    *batch = &arena->batch;
    return TFAST_OK;
}
