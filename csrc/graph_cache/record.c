/* Records: finding the fields, which values are indices, and verification. */
#include "record.h"

#include "io.h"

#include <string.h>

int64_t
graph_field_shape(const graph_schema_field *field, const uint32_t *counts,
                  int element_bytes, tfast_graph_array *array)
{
    int64_t numel = 1, bytes;

    array->rank = field->rank;
    for (int i = 0; i < field->rank; i++) {
        int32_t size = field->dims[i];

        array->shape[i] = size >= 0 ? size : (int64_t)counts[-1 - (int64_t)size];
        if (__builtin_mul_overflow(numel, array->shape[i], &numel)) {
            return -1;
        }
    }
    array->numel = numel;
    return __builtin_mul_overflow(numel, element_bytes, &bytes) ? -1 : bytes;
}

int
graph_field_bounds(const tfast_graph_schema *schema, int field, uint16_t bound_by[2])
{
    const graph_schema_field *f = &schema->fields[field];
    int rows = f->add_mode == GRAPH_ADD_ROWS ? 2 : f->add_mode == GRAPH_ADD_COUNT;

    for (int i = 0; i < rows; i++) {
        bound_by[i] = f->add[i];
        if (schema->counts[f->add[i]].role == GRAPH_INCREMENT) {
            bound_by[i] = GRAPH_NONE;
        }
    }
    return rows;
}

/* Finds one field at the next aligned offset from *at on, and advances *at behind it;
 * false if it does not fit into payload[bytes]. */
static bool
place(const graph_schema_field *field, const uint32_t *counts, int stored,
      const uint8_t *payload, uint64_t bytes, uint64_t *at, tfast_graph_array *array)
{
    int element = graph_stored_bytes(field->dtype, stored);
    int64_t size;
    uint64_t from;

    array->stored = stored;
    if (stored == GRAPH_ABSENT && (field->flags & GRAPH_OPTIONAL) != 0) {
        array->data = NULL;
        array->rank = 0;
        array->numel = 0;
        return true;
    }
    size = element == 0 ? -1 : graph_field_shape(field, counts, element, array);
    from = graph_align(*at, element > 8 ? 8 : (uint64_t)element);
    if (size < 0 || from > bytes || (uint64_t)size > bytes - from) {
        return false;
    }
    array->data = payload + from;
    *at = from + (uint64_t)size;
    return true;
}

tfast_status
graph_record_arrays(const tfast_graph_schema *schema, const graph_record_view *record,
                    tfast_graph_array *arrays)
{
    const graph_record *head = record->head;
    const uint32_t *counts = (const uint32_t *)(head + 1);
    const uint8_t *stored = (const uint8_t *)(counts + schema->header.n_counts);
    const int64_t bytes = record->bytes;
    uint64_t payload_bytes, at = 0;

    if (bytes < (int64_t)schema->record_bytes || head->magic != GRAPH_RECORD_MAGIC ||
        (int64_t)head->units * GRAPH_UNIT != bytes) {
        return graph_damage("a record must have its own %lld bytes, got %lld",
                            bytes < (int64_t)schema->record_bytes
                                ? (long long)schema->record_bytes
                                : (long long)head->units * GRAPH_UNIT,
                            (long long)bytes);
    }
    payload_bytes = (uint64_t)bytes - schema->record_bytes;
    for (int i = 0; i < schema->header.n_fields; i++) {
        if (!place(&schema->fields[i], counts, stored[i], record->payload,
                   payload_bytes, &at, &arrays[i])) {
            return graph_damage("field %s must fit into its record of %lld bytes",
                                schema->field_names[i], (long long)bytes);
        }
    }
    if (graph_align(at, GRAPH_UNIT) != payload_bytes) {
        return graph_damage("a record's payload must have %llu bytes, got %llu",
                            (unsigned long long)at, (unsigned long long)payload_bytes);
    }
    return TFAST_OK;
}

/* ---- Checking -------------------------------------------------------------------- */

bool
graph_record_head_ends_in_zeros(const tfast_graph_schema *schema, const void *head)
{
    const size_t used = sizeof(graph_record) + 4 * (size_t)schema->header.n_counts +
                        schema->header.n_fields;

    return graph_all_zero((const uint8_t *)head + used,
                          (int64_t)(schema->record_bytes - used));
}

uint32_t
graph_record_header_crc(const tfast_graph_schema *schema, uint32_t seed,
                        const void *record)
{
    size_t skipped = offsetof(graph_record, payload_crc);

    return graph_crc_more(seed, (const uint8_t *)record + skipped,
                          schema->record_bytes - skipped);
}

void
graph_value_range(int dtype, int stored, const void *data, int64_t n, int64_t *low,
                  int64_t *high)
{
    const bool is_signed =
        stored == GRAPH_AS_IS ? dtype >= GRAPH_I8 : stored >= GRAPH_AS_I8;

    tfast_graph_kernels_in_use()->range(data, graph_stored_bytes(dtype, stored),
                                        is_signed, n, low, high);
}

/* Checks that 0 <= index < its count for all indices of a field. */
static tfast_status
check_indices(const tfast_graph_schema *schema, int field,
              const tfast_graph_array *array, const uint32_t *counts)
{
    const int dtype = schema->fields[field].dtype;
    uint16_t bound_by[2];
    const int rows = graph_field_bounds(schema, field, bound_by);

    for (int row = 0; row < rows && array->numel > 0; row++) {
        const int64_t n = array->numel / rows;
        const int bytes = graph_stored_bytes(dtype, array->stored);
        int64_t low, high;

        if (bound_by[row] == GRAPH_NONE) {
            continue;
        }
        graph_value_range(dtype, array->stored,
                          (const uint8_t *)array->data + row * n * bytes, n, &low,
                          &high);
        if (low < 0 || high >= (int64_t)counts[bound_by[row]]) {
            return graph_damage("%s must be >= 0 and < %u, got %lld",
                                schema->field_names[field], counts[bound_by[row]],
                                (long long)(low < 0 ? low : high));
        }
    }
    return TFAST_OK;
}

tfast_status
graph_record_check(const tfast_graph_schema *schema, uint32_t seed,
                   const graph_record_view *record, const tfast_graph_array *arrays)
{
    const graph_record *head = record->head;
    const size_t bytes = (size_t)record->bytes - schema->record_bytes;
    tfast_status status = TFAST_OK;

    if (graph_record_header_crc(schema, seed, head) != head->header_crc ||
        graph_crc(record->payload, bytes) != head->payload_crc) {
        return graph_damage("its checksum is wrong");
    }
    for (int i = 0; i < schema->header.n_fields; i++) {
        if (schema->fields[i].add_mode != GRAPH_ADD_NOTHING &&
            arrays[i].stored != GRAPH_ABSENT) {
            TRY(check_indices(schema, i, &arrays[i], (const uint32_t *)(head + 1)));
        }
    }
fail:
    return status;
}
