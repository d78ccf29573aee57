/* Whether a record can be trusted. */
#include "segment.h"

#include <string.h>

/* 0 <= value < its count, for all that are indices. */
static tfast_status
check_indices(const tfast_graph_schema *schema, int field,
              const tfast_graph_array *array, const uint32_t *counts)
{
    const graph_schema_field *f = &schema->fields[field];
    uint16_t bound_by[2];
    int rows = graph_field_bounds(schema, field, bound_by);
    int bytes = graph_stored_bytes(f->dtype, array->stored);
    bool is_signed = array->stored == GRAPH_AS_IS ? f->dtype >= GRAPH_I8
                                                  : array->stored >= GRAPH_AS_I8;

    for (int row = 0; row < rows && array->numel > 0; row++) {
        int64_t n = array->numel / rows, low, high;

        if (bound_by[row] == GRAPH_NONE) {
            continue;
        }
        tfast_graph_kernels_in_use()->range((const uint8_t *)array->data +
                                                row * n * bytes,
                                            bytes, is_signed, n, &low, &high);
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
    for (int i = 0; i < schema->header.n_fields && status == TFAST_OK; i++) {
        if (schema->fields[i].add_mode != GRAPH_ADD_NOTHING &&
            arrays[i].stored != GRAPH_ABSENT) {
            status = check_indices(schema, i, &arrays[i], (const uint32_t *)(head + 1));
        }
    }
    return status;
}
