/* Appending a graph: its values are checked and the record's layout is planned first,
 * then the record is written into the writer's buffer in one pass. */
#include "writer.h"

#include <stdlib.h>
#include <string.h>

/* ---- Sizes ----------------------------------------------------------------------- */

static const char *
name_of(const tfast_graph_writer *w, int field)
{
    return w->schema->field_names[field];
}

/* Matches the size of a dimension with the schema: `dim` is a fixed size or names a
 * count, which `size` sets if it is not known yet. False: the sizes differ. */
static bool
take_size(int64_t *sizes, int32_t dim, int64_t size)
{
    if (dim >= 0) {
        return size == dim;
    }
    if (sizes[-1 - dim] < 0) {
        sizes[-1 - dim] = size;
    }
    return sizes[-1 - dim] == size;
}

static tfast_status
check_value(const tfast_graph_writer *w, int i, const tfast_graph_value *value,
            int *misfit)
{
    const graph_schema_field *field = &w->schema->fields[i];

    if (value->dtype != field->dtype) {
        return tfast_fail(TFAST_EINVAL, "%s must have dtype %s, got %s", name_of(w, i),
                          graph_dtype_name(field->dtype),
                          graph_dtype_name(value->dtype));
    }
    if (value->rank != field->rank) {
        return tfast_fail(TFAST_EINVAL, "%s must have %d dimensions, got %d",
                          name_of(w, i), field->rank, value->rank);
    }
    for (int d = 0; d < field->rank; d++) {
        int32_t dim = field->dims[d];

        if (!take_size(w->sizes, dim, value->shape[d])) {
            *misfit = i;
            return tfast_fail(TFAST_EINVAL,
                              "%s must have size %lld in dimension %d, "
                              "got %lld",
                              name_of(w, i),
                              (long long)(dim >= 0 ? dim : w->sizes[-1 - dim]), d,
                              (long long)value->shape[d]);
        }
    }
    return TFAST_OK;
}

/* Sets w->counts. A size or number of edges that is still unknown becomes 0: only
 * absent fields have it as a dimension. Unknown numbers of nodes and increments are
 * errors. */
static tfast_status
set_counts(tfast_graph_writer *w)
{
    for (int k = 0; k < w->schema->header.n_counts; k++) {
        int role = w->schema->counts[k].role;

        if (w->sizes[k] < 0 && (role == GRAPH_NODES || role == GRAPH_INCREMENT)) {
            const char *name = w->schema->count_names[k];

            return tfast_fail(TFAST_EINVAL,
                              "counts must give the %s%s%s, which no "
                              "field shows",
                              role == GRAPH_NODES ? "number of nodes" : "increment",
                              *name == '\0' ? "" : " of type ", name);
        }
        if (w->sizes[k] > UINT32_MAX) {
            return tfast_fail(TFAST_EINVAL, "counts must be < 2^32, got %lld",
                              (long long)w->sizes[k]);
        }
        w->counts[k] = w->sizes[k] < 0 ? 0 : (uint32_t)w->sizes[k];
    }
    return TFAST_OK;
}

static tfast_status
take_sizes(tfast_graph_writer *w, const tfast_graph_value *values,
           const int64_t *counts, int *misfit)
{
    tfast_status status;

    for (int k = 0; k < w->schema->header.n_counts; k++) {
        w->sizes[k] = counts == NULL ? -1 : counts[k];
    }
    for (int i = 0; i < w->schema->header.n_fields; i++) {
        if (values[i].present) {
            TRY(check_value(w, i, &values[i], misfit));
        } else if ((w->schema->fields[i].flags & GRAPH_OPTIONAL) == 0) {
            TRY(tfast_fail(TFAST_EINVAL, "graph must have %s", name_of(w, i)));
        }
    }
    TRY(set_counts(w));
fail:
    return status;
}

/* ---- Dense data ------------------------------------------------------------------ */

/* Bytes of one field before narrowing. A frame has at most 2^36 bytes, in which an
 * int64 may take one byte. */
static const int64_t MOST_BYTES = INT64_C(1) << 39;

/* Whether a value can be read in place: in C order and aligned. */
static bool
is_dense(const tfast_graph_value *value, int bytes)
{
    int64_t step = 1;

    if ((uintptr_t)value->data % (uintptr_t)(bytes > 8 ? 8 : bytes) != 0) {
        return false;
    }
    for (int d = value->rank - 1; d >= 0 && value->strides != NULL; d--) {
        if (value->shape[d] != 1 && value->strides[d] != step) {
            return false;
        }
        step *= value->shape[d];
    }
    return true;
}

static void
copy_row(uint8_t *out, const uint8_t *in, int64_t n, int64_t stride, int bytes)
{
#define COPY_ROW(size)                                                                 \
    case size:                                                                         \
        for (int64_t i = 0; i < n; i++) {                                              \
            memcpy(out + i * size, in + i * stride * size, size);                      \
        }                                                                              \
        break
    switch (bytes) {
        COPY_ROW(1);
        COPY_ROW(2);
        COPY_ROW(4);
        COPY_ROW(8);
        COPY_ROW(16);
    }
#undef COPY_ROW
}

/* Copies a strided value to `out` in C order. strides NULL: the value is in C order
 * already, but not aligned. */
static void
gather(uint8_t *out, const tfast_graph_value *value, int64_t numel, int bytes)
{
    int64_t at[GRAPH_MAX_RANK] = {0};
    int last = value->rank - 1;
    int64_t row = last < 0 ? 1 : value->shape[last];
    const uint8_t *in = value->data;

    if (value->strides == NULL || last < 0) {
        memcpy(out, in, (size_t)(numel * bytes));
        return;
    }
    for (int64_t done = 0; done < numel; done += row) {
        int d = last - 1;

        copy_row(out + done * bytes, in, row, value->strides[last], bytes);
        for (; d >= 0; d--) {
            in += value->strides[d] * bytes;
            if (++at[d] < value->shape[d]) {
                break;
            }
            in -= value->strides[d] * bytes * at[d];
            at[d] = 0;
        }
    }
}

/* Points every plan at data in C order; other data is copied into w->scratch first. An
 * expanded view (stride 0) may have more elements than memory could hold, hence the
 * limit on its bytes. */
static tfast_status
take_data(tfast_graph_writer *w, const tfast_graph_value *values)
{
    const int n_fields = w->schema->header.n_fields;
    size_t wanted = 0;
    uint8_t *out;
    tfast_status status = TFAST_OK;

    for (int i = 0; i < n_fields; i++) {
        graph_field_plan *plan = &w->fields[i];
        const int bytes = graph_dtype_bytes(w->schema->fields[i].dtype);
        tfast_graph_array array;
        int64_t all;

        *plan = (graph_field_plan){.stored = GRAPH_ABSENT};
        if (!values[i].present) {
            continue;
        }
        all = graph_field_shape(&w->schema->fields[i], w->counts, bytes, &array);
        if (all < 0 || all > MOST_BYTES) {
            return tfast_fail(TFAST_EINVAL,
                              "%s must have at most %lld bytes; split the graph",
                              name_of(w, i), (long long)MOST_BYTES);
        }
        plan->stored = GRAPH_AS_IS;
        plan->numel = array.numel;
        if (plan->numel == 0 || is_dense(&values[i], bytes)) {
            plan->data = values[i].data;
        } else {
            wanted += graph_align((uint64_t)all, 16);
        }
    }
    if (wanted > w->scratch_room) {
        w->scratch_room = 0;
        free(w->scratch);
        TRY(graph_alloc(&w->scratch, wanted, 1));
        w->scratch_room = wanted;
    }
    out = w->scratch;
    for (int i = 0; i < n_fields && wanted > 0; i++) {
        graph_field_plan *plan = &w->fields[i];
        const int bytes = graph_dtype_bytes(w->schema->fields[i].dtype);

        if (plan->data == NULL && plan->numel > 0) {
            gather(out, &values[i], plan->numel, bytes);
            plan->data = out;
            out += graph_align((uint64_t)(plan->numel * bytes), 16);
        }
    }
fail:
    return status;
}

/* ---- Values ---------------------------------------------------------------------- */

/* The narrowest GRAPH_AS_... for low .. high; unsigned ones are preferred. */
static int
smallest(int dtype, int64_t low, int64_t high)
{
    for (int size = 0; size < 3; size++) {
        int bits = 8 << size;

        if (low >= 0 && high < INT64_C(1) << bits &&
            graph_stored_bytes(dtype, GRAPH_AS_U8 + size) != 0) {
            return GRAPH_AS_U8 + size;
        }
        if (low >= -(INT64_C(1) << (bits - 1)) && high < INT64_C(1) << (bits - 1) &&
            graph_stored_bytes(dtype, GRAPH_AS_I8 + size) != 0) {
            return GRAPH_AS_I8 + size;
        }
    }
    return GRAPH_AS_IS;
}

/* Plans an integer field: checks the range of indices, picks the narrowest storage. */
static tfast_status
plan_integers(tfast_graph_writer *w, int i)
{
    graph_field_plan *plan = &w->fields[i];
    int dtype = w->schema->fields[i].dtype, bytes = graph_dtype_bytes(dtype);
    uint16_t bound_by[2] = {GRAPH_NONE, GRAPH_NONE};
    int bounds = graph_field_bounds(w->schema, i, bound_by);
    int rows = bounds == 2 ? 2 : 1;
    int64_t least = 0, most = 0, n = plan->numel / rows;

    if (bytes == 1 && bounds == 0) {
        return TFAST_OK;
    }
    for (int row = 0; row < rows && n > 0; row++) {
        int64_t low, high;

        graph_value_range(dtype, GRAPH_AS_IS, plan->data + row * n * bytes, n, &low,
                          &high);
        if (bound_by[row] != GRAPH_NONE &&
            (low < 0 || high >= (int64_t)w->counts[bound_by[row]])) {
            return tfast_fail(TFAST_EINVAL, "%s must be >= 0 and < %u, got %lld",
                              name_of(w, i), w->counts[bound_by[row]],
                              (long long)(low < 0 ? low : high));
        }
        least = row == 0 || low < least ? low : least;
        most = row == 0 || high > most ? high : most;
    }
    plan->stored = smallest(dtype, least, most);
    return TFAST_OK;
}

static tfast_status
plan_values(tfast_graph_writer *w, int i)
{
    const graph_field_plan *plan = &w->fields[i];
    int dtype = w->schema->fields[i].dtype;
    int64_t low, high;

    if (graph_is_integer(dtype)) {
        return plan_integers(w, i);
    }
    if (dtype == GRAPH_BOOL && plan->numel > 0) {
        graph_value_range(dtype, GRAPH_AS_IS, plan->data, plan->numel, &low, &high);
        if (high > 1) {
            return tfast_fail(TFAST_EINVAL, "%s must be bytes 0 or 1, got %lld",
                              name_of(w, i), (long long)high);
        }
    }
    if (dtype == GRAPH_STRING && !graph_is_utf8(plan->data, plan->numel)) {
        return tfast_fail(TFAST_EINVAL, "%s must be UTF-8, got other bytes",
                          name_of(w, i));
    }
    return TFAST_OK;
}

/* Plans how and where in the payload each field is stored. *bytes: of the frame. */
static tfast_status
plan_fields(tfast_graph_writer *w, size_t *bytes)
{
    size_t at = 0;

    for (int i = 0; i < w->schema->header.n_fields; i++) {
        graph_field_plan *plan = &w->fields[i];
        size_t element;

        if (plan->stored == GRAPH_ABSENT) {
            continue;
        }
        if (plan_values(w, i) != TFAST_OK) {
            return TFAST_EINVAL;
        }
        element = (size_t)graph_stored_bytes(w->schema->fields[i].dtype, plan->stored);
        plan->at = graph_align(at, element > 8 ? 8 : element);
        plan->bytes = (size_t)plan->numel * element;
        at = plan->at + plan->bytes;
    }
    *bytes = w->schema->record_bytes + graph_align(at, GRAPH_UNIT);
    if (*bytes / GRAPH_UNIT > UINT32_MAX) {
        return tfast_fail(TFAST_EINVAL, "graph must have at most 2^36 bytes, got %zu",
                          *bytes);
    }
    return TFAST_OK;
}

/* ---- The record ------------------------------------------------------------------ */

static void
write_payload(const tfast_graph_writer *w, uint8_t *payload, size_t bytes)
{
    size_t at = 0;

    for (int i = 0; i < w->schema->header.n_fields; i++) {
        const graph_field_plan *plan = &w->fields[i];

        if (plan->stored == GRAPH_ABSENT) {
            continue;
        }
        memset(payload + at, 0, plan->at - at);
        if (plan->stored != GRAPH_AS_IS) {
            tfast_graph_kernels_in_use()->narrow(
                payload + plan->at, plan->stored, plan->data,
                graph_dtype_bytes(w->schema->fields[i].dtype), plan->numel);
        } else if (plan->bytes > 0) {
            memcpy(payload + plan->at, plan->data, plan->bytes);
        }
        at = plan->at + plan->bytes;
    }
    memset(payload + at, 0, bytes - at);
}

static void
write_record(tfast_graph_writer *w, size_t bytes, const uint8_t *key)
{
    const tfast_graph_schema *schema = w->schema;
    uint8_t *frame = w->buffer + w->used;
    size_t n_counts = schema->header.n_counts;
    graph_record head = {
        .magic = GRAPH_RECORD_MAGIC,
        .units = (uint32_t)(bytes / GRAPH_UNIT),
    };
    uint8_t *stored = frame + sizeof head + 4 * n_counts;

    memset(frame + schema->record_bytes - GRAPH_UNIT, 0, GRAPH_UNIT);
    memcpy(frame + sizeof head, w->counts, 4 * n_counts);
    for (int i = 0; i < schema->header.n_fields; i++) {
        stored[i] = (uint8_t)w->fields[i].stored;
    }
    write_payload(w, frame + schema->record_bytes, bytes - schema->record_bytes);
    if (key != NULL) {
        memcpy(head.key, key, sizeof head.key);
    }
    head.payload_crc =
        graph_crc(frame + schema->record_bytes, bytes - schema->record_bytes);
    memcpy(frame, &head, sizeof head);
    head.header_crc = graph_record_header_crc(schema, w->commits.seed, frame);
    memcpy(frame, &head, sizeof head);
}

tfast_status
tfast_graph_writer_append(tfast_graph_writer *w, const tfast_graph_value *values,
                          const int64_t *counts, const uint8_t *key, int *misfit)
{
    size_t bytes;
    tfast_status status;

    *misfit = -1;
    TRY(graph_writer_usable(w));
    TRY(take_sizes(w, values, counts, misfit));
    TRY(take_data(w, values));
    TRY(plan_fields(w, &bytes));
    TRY(graph_writer_room(w, bytes));
    write_record(w, bytes, key);
    graph_writer_added(w, bytes, w->counts);
fail:
    return status;
}
