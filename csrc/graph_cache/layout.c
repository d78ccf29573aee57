/* Where the fields of a record lie, and which of their values are indices. */
#include "io.h"
#include "schema.h"

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

/* Places one field, from payload[*at] on; false where it does not fit. */
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
