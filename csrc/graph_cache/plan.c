/* Plans the layout of a batch. Needs only the index; no record is read. */
#include "plan.h"

enum { MOST_BARE = 1 << 27 }; /* see plan_vector() */

tfast_status
graph_field_missing(const graph_arena *arena, int field)
{
    return tfast_fail(TFAST_EINVAL,
                      "graphs of a batch must all have field %s or all lack it, got "
                      "some with and some without, or with sizes that do not fit "
                      "together; a loader can leave it out (exclude)",
                      arena->cache->schema->field_names[field]);
}

/* Fills arena->places. */
static tfast_status
find_graphs(graph_arena *arena, const int64_t *indices)
{
    const tfast_graph_cache *cache = arena->cache;
    const int64_t n = arena->batch.n_graphs;

    for (int64_t g = 0; g < n; g++) {
        graph_place place;

        if (indices[g] < 0 || indices[g] >= cache->n_graphs) {
            return tfast_fail(TFAST_EINVAL,
                              "a graph's index must be in 0 .. %lld, got %lld; the "
                              "sampler is for another cache",
                              (long long)cache->n_graphs - 1, (long long)indices[g]);
        }
        place = graph_find(cache, indices[g]);
        arena->places[g] = place;
        /* The copy reads these offsets; prefetched here, their cache misses overlap. */
        __builtin_prefetch(&place.part->file.offsets[place.row]);
    }
    return TFAST_OK;
}

static tfast_status
wrong_total(const graph_arena *arena, int k, int64_t sum, int64_t total)
{
    static const char *const what[GRAPH_N_ROLES] = {"nodes", "edges", "sizes",
                                                    "increments"};
    const tfast_graph_schema *schema = arena->cache->schema;
    const char *name = schema->count_names[k];

    return tfast_fail(TFAST_EINVAL,
                      "the padded batch must have %s%lld %s%s%s, got %lld; give the "
                      "padding more, or batches fewer graphs",
                      total < sum ? "at least " : "without a padding graph ",
                      (long long)sum, what[schema->counts[k].role],
                      *name == '\0' ? "" : " of type ", name, (long long)total);
}

/* Fills the prefix sums and totals of all counts. With padding the first slot behind
 * the graphs gets the difference between total and sum, later slots get nothing. */
static tfast_status
sum_counts(graph_arena *arena, const tfast_graph_selection *selection)
{
    const int64_t n = arena->batch.n_graphs, slots = arena->batch.n_slots;

    for (int k = 0; k < arena->cache->schema->header.n_counts; k++) {
        int64_t *sums = graph_sums(arena, k), sum = 0;
        int64_t total = selection->n_slots > 0 ? selection->totals[k] : -1;

        for (int64_t g = 0; g < n; g++) {
            sums[g] = sum;
            sum += graph_count(arena->places[g], k);
        }
        sums[n] = sum;
        total = total < 0 ? sum : total;
        if (total < sum || (total > sum && slots == n)) {
            return wrong_total(arena, k, sum, total);
        }
        for (int64_t g = n + 1; g <= slots; g++) {
            sums[g] = total;
        }
        arena->batch.totals[k] = total;
    }
    return TFAST_OK;
}

/* *size: the size of dimension `d`, which all graphs of the batch must share. */
static tfast_status
common_size(const graph_arena *arena, int field, int d, int64_t *size)
{
    const tfast_graph_schema *schema = arena->cache->schema;
    const int32_t dim = schema->fields[field].dims[d];
    const int64_t n = arena->batch.n_graphs;

    *size = dim;
    if (dim >= 0) {
        return TFAST_OK;
    }
    *size = n > 0 ? graph_count(arena->places[0], -1 - dim) : 0;
    for (int64_t g = 1; g < n; g++) {
        const int64_t other = graph_count(arena->places[g], -1 - dim);

        if (other != *size) {
            return tfast_fail(
                TFAST_EINVAL,
                "field %s must have the same size in dimension %d in all "
                "graphs of a batch, got %lld and %lld; a loader can leave "
                "it out (exclude)",
                schema->field_names[field], d, (long long)*size, (long long)other);
        }
    }
    return TFAST_OK;
}

static tfast_status
too_many_bytes(const graph_arena *arena, int field)
{
    return tfast_fail(TFAST_EINVAL,
                      "field %s must have at most 2^62 bytes in a batch of %lld "
                      "graphs; use a smaller "
                      "batch_size",
                      arena->cache->schema->field_names[field],
                      (long long)arena->batch.n_slots);
}

/* *product *= factor; false if the result exceeds INT64_MAX / 2. */
static bool
multiply(int64_t *product, int64_t factor)
{
    return !__builtin_mul_overflow(*product, factor, product) &&
           *product <= INT64_MAX / 2;
}

/* Whether the graphs' frames are long enough for the field in its smallest form, with
 * each integer narrowed to one byte. If not, graphs lack the field (if it is optional)
 * or the counts in the index are wrong. plan_field() then gives the field no memory,
 * because a wrong count could ask for any amount. */
static bool
frames_hold(const graph_arena *arena, const graph_batch_field *f, int64_t frame_bytes)
{
    const int dtype = arena->cache->schema->fields[f->field].dtype;
    const int64_t n = arena->batch.n_graphs;
    int64_t steps =
        f->steps_count < 0 ? f->steps * n : graph_sums(arena, f->steps_count)[n];

    return multiply(&steps, f->outer) && multiply(&steps, f->inner) &&
           steps / (graph_is_integer(dtype) ? f->bytes : 1) <= frame_bytes;
}

/* The largest index of the batch, total - 1, must fit into the field's dtype. */
static tfast_status
check_adds(const graph_arena *arena, const graph_batch_field *f)
{
    const tfast_graph_schema *schema = arena->cache->schema;
    const bool is_signed = schema->fields[f->field].dtype >= GRAPH_I8;
    const int bits = 8 * f->bytes - is_signed;

    for (int i = 0; i < f->n_adds; i++) {
        const int64_t total = arena->batch.totals[f->adds[i]];

        if (bits < 63 && total > (int64_t)1 << bits) {
            return tfast_fail(TFAST_EINVAL,
                              "field %s must be wide enough for indices up to %lld, "
                              "got %s; cache it with a wider dtype",
                              schema->field_names[f->field], (long long)total - 1,
                              graph_dtype_name(schema->fields[f->field].dtype));
        }
    }
    return TFAST_OK;
}

/* Plans selected field i: its shape and steps, and *bytes, its size in the arena. */
static tfast_status
plan_field(graph_arena *arena, int i, int field, int64_t frame_bytes, int64_t *bytes)
{
    const graph_schema_field *schema = &arena->cache->schema->fields[field];
    graph_batch_field *f = &arena->fields[i];
    int64_t *shape = arena->batch.shapes[i];
    const int cat = schema->cat_dim, stacked = cat < 0;

    *f = (graph_batch_field){
        .field = field,
        .bytes = graph_dtype_bytes(schema->dtype),
        .outer = 1,
        .inner = graph_dtype_bytes(schema->dtype),
        .total = arena->batch.n_slots,
        .steps = 1,
        .steps_count = -1,
        .n_adds = schema->add_mode,
        .adds = {schema->add[0], schema->add[1]},
    };
    arena->batch.ranks[i] = schema->rank + stacked;
    for (int d = 0; d < schema->rank; d++) {
        tfast_status status;

        if (d == cat && schema->dims[d] < 0) {
            f->steps_count = -1 - schema->dims[d];
            f->total = arena->batch.totals[f->steps_count];
            continue;
        }
        status = common_size(arena, field, d, &shape[d + stacked]);
        if (status != TFAST_OK && (schema->flags & GRAPH_OPTIONAL) == 0) {
            return status;
        }
        f->lacking = f->lacking || status != TFAST_OK;
        if (d == cat) {
            f->steps = shape[d];
            f->total = f->steps * arena->batch.n_slots;
        } else if (!multiply(d < cat ? &f->outer : &f->inner, shape[d + stacked])) {
            return too_many_bytes(arena, field);
        }
    }
    shape[stacked ? 0 : cat] = f->total;
    f->values = f->inner / f->bytes;
    *bytes = f->outer;
    if (!multiply(bytes, f->total) || !multiply(bytes, f->inner)) {
        return too_many_bytes(arena, field);
    }
    if (f->lacking || !frames_hold(arena, f, frame_bytes)) {
        f->lacking = true;
        *bytes = 0;
        return schema->flags & GRAPH_OPTIONAL
                   ? TFAST_OK
                   : graph_damage(
                         "graphs are damaged: their records cannot hold field %s; "
                         "`trainfast cache repair` keeps what can be read",
                         arena->cache->schema->field_names[field]);
    }
    return check_adds(arena, f);
}

/* Places an array of `bytes` at offset *at, behind the others; *end is the offset
 * behind it, a multiple of 64. */
static tfast_status
reserve(size_t *at, size_t *end, int64_t bytes)
{
    const uint64_t most = UINT64_C(1) << 61; /* a multiple of 64 */

    *at = *end;
    if ((uint64_t)bytes > most - *end) {
        return tfast_fail(
            TFAST_EINVAL,
            "a batch must have at most 2^61 bytes; use a smaller batch_size");
    }
    *end = (*end + (size_t)bytes + 63) & ~(size_t)63;
    return TFAST_OK;
}

/* Places the batch vector of count k. Nodes may have no fields, so their number cannot
 * be checked against the frames; MOST_BARE limits what a damaged count can
 * allocate. */
static tfast_status
plan_vector(graph_arena *arena, int i, int k, int64_t frame_bytes, size_t *end)
{
    const int64_t real = graph_sums(arena, k)[arena->batch.n_graphs];
    const int64_t total = arena->batch.totals[k];

    if (real > MOST_BARE && real > frame_bytes) {
        return tfast_fail(TFAST_EINVAL,
                          "the graphs of a batch must have at most %d nodes where "
                          "these have no fields, got %lld; use a smaller batch_size",
                          MOST_BARE, (long long)real);
    }
    return reserve(&arena->batch.batch_at[i], end,
                   total > INT64_MAX / 16 ? INT64_MAX : total * 8);
}

tfast_status
graph_batch_plan(graph_arena *arena, const tfast_graph_selection *selection,
                 const int64_t *indices)
{
    const int64_t n = arena->batch.n_graphs, slots = arena->batch.n_slots;
    int64_t frame_bytes = 0, bytes = 0;
    size_t end = 0;
    tfast_status status;

    TRY(find_graphs(arena, indices));
    TRY(sum_counts(arena, selection));
    for (int64_t g = 0; g < n; g++) {
        if (__builtin_add_overflow(frame_bytes, graph_frame_bytes(arena->places[g]),
                                   &frame_bytes)) {
            frame_bytes = INT64_MAX;
        }
    }
    for (int i = 0; i < selection->n_fields; i++) {
        TRY(plan_field(arena, i, selection->fields[i], frame_bytes, &bytes));
        TRY(reserve(&arena->batch.field_at[i], &end, bytes));
    }
    for (int i = 0; i < selection->n_batch_of; i++) {
        TRY(plan_vector(arena, i, selection->batch_of[i], frame_bytes, &end));
    }
    for (int k = 0; k < arena->cache->schema->header.n_counts; k++) {
        TRY(reserve(&arena->batch.ptr_at[k], &end, (slots + 1) * 8));
    }
    TRY(graph_arena_fit(arena, end));
fail:
    return status;
}
