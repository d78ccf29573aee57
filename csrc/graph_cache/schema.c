/* Schemas: parses untrusted bytes and checks every rule of the format document. */
#include "schema.h"

#include "io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NUMEL_BITS = 48 };

static const char *const dtype_names[GRAPH_N_DTYPES] = {
    [GRAPH_BOOL] = "bool",           [GRAPH_U8] = "uint8",
    [GRAPH_U16] = "uint16",          [GRAPH_U32] = "uint32",
    [GRAPH_U64] = "uint64",          [GRAPH_I8] = "int8",
    [GRAPH_I16] = "int16",           [GRAPH_I32] = "int32",
    [GRAPH_I64] = "int64",           [GRAPH_F16] = "float16",
    [GRAPH_BF16] = "bfloat16",       [GRAPH_F32] = "float32",
    [GRAPH_F64] = "float64",         [GRAPH_C64] = "complex64",
    [GRAPH_C128] = "complex128",     [GRAPH_F8_E4M3FN] = "float8_e4m3fn",
    [GRAPH_F8_E5M2] = "float8_e5m2", [GRAPH_STRING] = "str",
    [GRAPH_BYTES] = "bytes",
};

/* Columns: GRAPH_ABSENT, GRAPH_AS_IS, GRAPH_AS_U8, ... (format.h). 0: not allowed,
 * since it would not be narrower than the dtype or would store an unsigned dtype as
 * signed. */
const uint8_t graph_stored_widths[GRAPH_N_DTYPES][GRAPH_N_STORED] = {
    [GRAPH_BOOL] = {0, 1},
    [GRAPH_U8] = {0, 1},
    [GRAPH_U16] = {0, 2, 1},
    [GRAPH_U32] = {0, 4, 1, 2},
    [GRAPH_U64] = {0, 8, 1, 2, 4},
    [GRAPH_I8] = {0, 1},
    [GRAPH_I16] = {0, 2, 1, 0, 0, 1},
    [GRAPH_I32] = {0, 4, 1, 2, 0, 1, 2},
    [GRAPH_I64] = {0, 8, 1, 2, 4, 1, 2, 4},
    [GRAPH_F16] = {0, 2},
    [GRAPH_BF16] = {0, 2},
    [GRAPH_F32] = {0, 4},
    [GRAPH_F64] = {0, 8},
    [GRAPH_C64] = {0, 8},
    [GRAPH_C128] = {0, 16},
    [GRAPH_F8_E4M3FN] = {0, 1},
    [GRAPH_F8_E5M2] = {0, 1},
    [GRAPH_STRING] = {0, 1},
    [GRAPH_BYTES] = {0, 1},
};

int
graph_dtype_bytes(int dtype)
{
    return graph_stored_bytes(dtype, GRAPH_AS_IS);
}

const char *
graph_dtype_name(int dtype)
{
    return graph_dtype_bytes(dtype) == 0 ? "unknown" : dtype_names[dtype];
}

bool
graph_is_integer(int dtype)
{
    return dtype >= GRAPH_U8 && dtype <= GRAPH_I64;
}

/* Well-formed UTF-8 (RFC 3629): no surrogates and no overlong encodings. */
bool
graph_is_utf8(const void *text, int64_t bytes)
{
    const uint8_t *at = text, *end = at + bytes;

    while (at < end) {
        uint8_t first = *at++, low = 0x80, high = 0xbf;
        int more = first < 0x80 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;

        if (first < 0x80) {
            continue;
        }
        if (first < 0xc2 || first > 0xf4 || end - at < more) {
            return false;
        }
        low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : low;
        high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : high;
        for (; more > 0; more--, at++, low = 0x80, high = 0xbf) {
            if (*at < low || *at > high) {
                return false;
            }
        }
    }
    return true;
}

bool
graph_all_zero(const void *bytes, int64_t n)
{
    const uint8_t *byte = bytes;

    for (int64_t i = 0; i < n; i++) {
        if (byte[i] != 0) {
            return false;
        }
    }
    return true;
}

/* ---- Parsing --------------------------------------------------------------------- */

/* TFAST_EINVAL with a message. For a schema in a file, segment.c turns it into
 * graph_damage(). */
#define must(...) tfast_fail(TFAST_EINVAL, __VA_ARGS__)

/* Allocates one block: the struct, the pointers to names, the serialised schema, the
 * zero-terminated names. */
static tfast_status
allocate(tfast_graph_schema **schema, const uint8_t *bytes, size_t n_bytes,
         const graph_schema_header *header)
{
    const size_t n_counts = header->n_counts, n_fields = header->n_fields;
    const size_t n_names = n_counts + n_fields;
    const size_t names = header->names_bytes + n_names; /* each ends with a zero */
    tfast_graph_schema *made;
    const char **pointers;
    uint8_t *copy;
    tfast_status status;

    TRY(graph_alloc(schema, sizeof *made + n_names * sizeof(char *) + n_bytes + names,
                    1));
    made = *schema;
    pointers = (const char **)(made + 1);
    copy = (uint8_t *)(pointers + n_names);
    memcpy(copy, bytes, n_bytes);
    made->header = *header;
    made->bytes = copy;
    made->n_bytes = n_bytes;
    made->counts = (const graph_schema_count *)(copy + sizeof *header);
    made->fields = (const graph_schema_field *)(made->counts + n_counts);
    made->count_names = pointers;
    made->field_names = pointers + n_counts;
    made->record_bytes =
        (size_t)graph_align(sizeof(graph_record) + 4 * n_counts + n_fields, GRAPH_UNIT);
fail:
    return status;
}

/* Copies the names, zero-terminated, into the block from allocate() and sets the
 * pointers to them. */
static tfast_status
take_names(tfast_graph_schema *schema)
{
    int n_counts = schema->header.n_counts, n_fields = schema->header.n_fields;
    const char **pointers = (const char **)(schema + 1);
    const char *name = (const char *)(schema->fields + n_fields);
    char *out = (char *)(uintptr_t)(schema->bytes + schema->n_bytes);
    size_t left = schema->header.names_bytes;

    for (int i = 0; i < n_counts + n_fields; i++) {
        size_t bytes = i < n_counts ? schema->counts[i].name_bytes
                                    : schema->fields[i - n_counts].name_bytes;

        if (bytes > GRAPH_MAX_NAME || bytes > left) {
            return must("a schema's name must have at most %d bytes and fit, "
                        "got %zu",
                        GRAPH_MAX_NAME, bytes);
        }
        if (!graph_is_utf8(name, (int64_t)bytes) || memchr(name, 0, bytes) != NULL) {
            return must("a schema's name must be UTF-8 without zeros, got name "
                        "%d",
                        i);
        }
        memcpy(out, name, bytes);
        pointers[i] = out;
        out += bytes + 1;
        name += bytes;
        left -= bytes;
    }
    if (left != 0) {
        return must("a schema's names must end where it says, got %zu bytes "
                    "more",
                    left);
    }
    return TFAST_OK;
}

/* Whether a count is a number of nodes or edges. */
static bool
is_thing(const tfast_graph_schema *schema, int count)
{
    return count < schema->header.n_counts && schema->counts[count].role <= GRAPH_EDGES;
}

static bool
is_nodes(const tfast_graph_schema *schema, int count)
{
    return is_thing(schema, count) && schema->counts[count].role == GRAPH_NODES;
}

static tfast_status
check_count(const tfast_graph_schema *schema, int i)
{
    const graph_schema_count *count = &schema->counts[i];

    if (count->role >= GRAPH_N_ROLES || (i > 0 && count->role < count[-1].role)) {
        return must("count %d of a schema must have a known role, sorted, got "
                    "%d",
                    i, count->role);
    }
    if (count->role > GRAPH_EDGES && count->name_bytes != 0) {
        return must("count %d of a schema must have no name", i);
    }
    if (count->role == GRAPH_EDGES
            ? !is_nodes(schema, count->source) || !is_nodes(schema, count->target)
            : count->source != GRAPH_NONE || count->target != GRAPH_NONE) {
        return must("count %d of a schema must have ends only if it counts "
                    "edges, and nodes there",
                    i);
    }
    if (!graph_all_zero(count->reserved, sizeof count->reserved) ||
        !graph_all_zero(count->reserved_too, sizeof count->reserved_too)) {
        return must("count %d of a schema must have zeros in reserve", i);
    }
    return TFAST_OK;
}

/* wrong_dims() and wrong_add() are parts of wrong_field(). */
static const char *
wrong_dims(const tfast_graph_schema *schema, const graph_schema_field *field)
{
    int64_t product = 1;

    for (int i = 0; i < GRAPH_MAX_RANK; i++) {
        int32_t size = field->dims[i];

        if (i >= field->rank && size != 0) {
            return "no dims after its rank";
        }
        if (size < 0 && -1 - (int64_t)size >= schema->header.n_counts) {
            return "dims that are counts of the schema";
        }
        if (i < field->rank && size > 0 &&
            (__builtin_mul_overflow(product, size, &product) ||
             product >> MAX_NUMEL_BITS != 0)) {
            return "fixed dims of at most 2^48 elements";
        }
    }
    return NULL;
}

static const char *
wrong_add(const tfast_graph_schema *schema, const graph_schema_field *field)
{
    int n_adds = field->add_mode;

    if (field->add_mode >= GRAPH_N_ADDS) {
        return "a known add_mode";
    }
    for (int i = 0; i < 2; i++) {
        if (i < n_adds ? field->add[i] >= schema->header.n_counts
                       : field->add[i] != GRAPH_NONE) {
            return "as many counts to add as its add_mode says";
        }
    }
    if (n_adds > 0 && !graph_is_integer(field->dtype)) {
        return "an integer dtype where a count is added";
    }
    if (field->add_mode == GRAPH_ADD_ROWS && (field->rank < 1 || field->dims[0] != 2)) {
        return "two rows where counts are added by row";
    }
    return NULL;
}

/* The rule that a field breaks, as text that follows "must have"; NULL: no rule. */
static const char *
wrong_field(const tfast_graph_schema *schema, const graph_schema_field *field)
{
    bool text = field->dtype == GRAPH_STRING || field->dtype == GRAPH_BYTES;
    bool plain = field->dtype == GRAPH_BOOL || field->dtype == GRAPH_I64 ||
                 field->dtype == GRAPH_F64;
    const char *wrong;

    if (field->name_bytes == 0) {
        return "a name";
    }
    if (field->type != GRAPH_NONE && !is_thing(schema, field->type)) {
        return "a type that is a count of nodes or edges";
    }
    if (graph_dtype_bytes(field->dtype) == 0) {
        return "a known dtype";
    }
    if (field->rank > GRAPH_MAX_RANK || (text && field->rank != 1)) {
        return "a rank of at most 8, and 1 for text";
    }
    if (field->cat_dim < -1 || field->cat_dim >= (int)field->rank) {
        return "a cat_dim that is -1 or a dimension";
    }
    if ((field->flags & ~(GRAPH_OPTIONAL | GRAPH_SCALAR)) != 0 ||
        ((field->flags & GRAPH_SCALAR) != 0 && (field->rank != 0 || !plain))) {
        return "known flags, and be a bool, int64 or float64 of rank 0 for a scalar";
    }
    if (!graph_all_zero(field->reserved, sizeof field->reserved) ||
        !graph_all_zero(field->reserved_too, sizeof field->reserved_too)) {
        return "zeros in reserve";
    }
    wrong = wrong_dims(schema, field);
    return wrong != NULL ? wrong : wrong_add(schema, field);
}

/* Pairs of name and kind are unique. kind: of a count -1 - role, of a field its
 * type. */
typedef struct {
    const char *name;
    int kind;
} named;

static int
compare_named(const void *a, const void *b)
{
    const named *x = a, *y = b;

    return x->kind != y->kind ? x->kind - y->kind : strcmp(x->name, y->name);
}

static tfast_status
check_unique(const tfast_graph_schema *schema)
{
    const int n_counts = schema->header.n_counts, n_fields = schema->header.n_fields;
    named *names;
    tfast_status status;
    int n = 0;

    TRY(graph_alloc(&names, (uint64_t)n_counts + (uint64_t)n_fields, sizeof *names));
    for (int i = 0; is_thing(schema, i); i++) {
        names[n++] = (named){schema->count_names[i], -1 - schema->counts[i].role};
    }
    for (int i = 0; i < n_fields; i++) {
        names[n++] = (named){schema->field_names[i], schema->fields[i].type};
    }
    qsort(names, (size_t)n, sizeof *names, compare_named);
    for (int i = 1; i < n; i++) {
        if (compare_named(&names[i - 1], &names[i]) == 0) {
            TRY(must("a schema's names must be unique, got %s twice", names[i].name));
        }
    }
fail:
    free(names);
    return status;
}

static tfast_status
check_all(tfast_graph_schema *schema)
{
    tfast_status status = TFAST_OK;

    for (int i = 0; i < schema->header.n_counts; i++) {
        TRY(check_count(schema, i));
    }
    TRY(take_names(schema));
    for (int i = 0; i < schema->header.n_fields; i++) {
        const char *wrong = wrong_field(schema, &schema->fields[i]);

        if (wrong != NULL) {
            TRY(must("field %s of a schema must have %s", schema->field_names[i],
                     wrong));
        }
    }
    TRY(check_unique(schema));
fail:
    return status;
}

tfast_status
tfast_graph_schema_parse(tfast_graph_schema **schema, const void *bytes, size_t n_bytes)
{
    graph_schema_header header;
    size_t used;
    tfast_status status;

    *schema = NULL;
    if (n_bytes < sizeof header) {
        return must("a schema must have at least %zu bytes, got %zu", sizeof header,
                    n_bytes);
    }
    memcpy(&header, bytes, sizeof header);
    if (header.n_counts > GRAPH_MAX_COUNTS || header.n_fields > GRAPH_MAX_FIELDS ||
        header.names_bytes > n_bytes || !graph_all_zero(header.reserved, 8)) {
        return must("a schema must have at most %d counts and %d fields, got %d and %d",
                    GRAPH_MAX_COUNTS, GRAPH_MAX_FIELDS, header.n_counts,
                    header.n_fields);
    }
    used = sizeof header + header.n_counts * sizeof(graph_schema_count) +
           header.n_fields * sizeof(graph_schema_field) + header.names_bytes;
    if (graph_align(used, GRAPH_UNIT) != n_bytes ||
        !graph_all_zero((const uint8_t *)bytes + used, (int64_t)(n_bytes - used))) {
        return must("a schema must have %zu bytes and then zeros, got %zu", used,
                    n_bytes);
    }
    TRY(allocate(schema, bytes, n_bytes, &header));
    TRY(check_all(*schema));
    return TFAST_OK;
fail:
    free(*schema);
    *schema = NULL;
    return status;
}

void
tfast_graph_schema_free(tfast_graph_schema *schema)
{
    free(schema);
}
