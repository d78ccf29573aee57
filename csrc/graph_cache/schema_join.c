/* Segments of one cache may fix different sizes, and the later ones may have more
 * fields: what their schemas are together. */
#include "io.h"
#include "schema.h"

#include <stdlib.h>
#include <string.h>

/* Counts of nodes and edges come first. */
static int
n_named(const tfast_graph_schema *schema)
{
    int n = 0;

    while (n < schema->header.n_counts && schema->counts[n].role <= GRAPH_EDGES) {
        n++;
    }
    return n;
}

static bool
same_named(const tfast_graph_schema *a, const tfast_graph_schema *b)
{
    int n = n_named(a);

    if (n != n_named(b)) {
        return false;
    }
    for (int i = 0; i < n; i++) {
        if (memcmp(&a->counts[i], &b->counts[i], sizeof a->counts[i]) != 0 ||
            strcmp(a->count_names[i], b->count_names[i]) != 0) {
            return false;
        }
    }
    return true;
}

static bool
same_field(const graph_schema_field *a, const graph_schema_field *b)
{
    return a->type == b->type && a->dtype == b->dtype && a->rank == b->rank &&
           a->cat_dim == b->cat_dim && a->add_mode == b->add_mode &&
           ((a->flags ^ b->flags) & ~GRAPH_OPTIONAL) == 0;
}

bool
tfast_graph_schema_agrees(const tfast_graph_schema *a, const tfast_graph_schema *b)
{
    if (!same_named(a, b)) {
        return false;
    }
    for (int i = 0; i < a->header.n_fields && i < b->header.n_fields; i++) {
        if (strcmp(a->field_names[i], b->field_names[i]) != 0 ||
            !same_field(&a->fields[i], &b->fields[i])) {
            return false;
        }
    }
    return true;
}

const tfast_graph_schema *
graph_schema_widest(const tfast_graph_schema *const *schemas, int64_t n)
{
    const tfast_graph_schema *widest = schemas[0];

    for (int64_t i = 1; i < n; i++) {
        if (schemas[i]->header.n_fields > widest->header.n_fields) {
            widest = schemas[i];
        }
    }
    return widest;
}

/* A place in a schema that names a count or fixes a size: a dimension, or what is
 * added. codes[n]: what each schema has there, as in `sources`; 0, as a fixed size,
 * where it lacks the field. */
typedef struct {
    const int64_t *codes;
    int64_t n;
    int field;
    int slot;  /* dimension, or GRAPH_MAX_RANK + number of the addend */
    int count; /* the joined schema's, or -1: all fix the same size */
} position;

typedef struct {
    const tfast_graph_schema *const *schemas;
    int64_t n;
    const tfast_graph_schema *widest;
    int64_t *codes;
    position
        *positions; /* [n_positions], those with counts of their own sorted first */
    int64_t n_positions, n_own;
    int n_counts;
} joining;

static bool
is_addend(const position *p)
{
    return p->slot >= GRAPH_MAX_RANK;
}

static bool
lacks(const tfast_graph_schema *schema, int field)
{
    return field >= schema->header.n_fields;
}

static int64_t
code_of(const tfast_graph_schema *schema, int i, int slot)
{
    const graph_schema_field *field = schema->fields;
    int32_t size;

    if (lacks(schema, i)) {
        return -1;
    }
    field += i;

    if (slot >= GRAPH_MAX_RANK) {
        return field->add[slot - GRAPH_MAX_RANK];
    }
    size = field->dims[slot];
    return -1 - (int64_t)size; /* the encoding is its own inverse */
}

/* Whether a position needs a count of its own: not the same in all. */
static bool
needs_own(const joining *j, position *p)
{
    int64_t code = code_of(j->widest, p->field, p->slot);

    p->count = (int)(code < 0 ? -1 : code);
    if (code >= 0 && j->widest->counts[code].role > GRAPH_EDGES) {
        return true;
    }
    for (int64_t i = 0; i < j->n; i++) {
        if (p->codes[i] != code && !lacks(j->schemas[i], p->field)) {
            return true;
        }
    }
    return false;
}

static void
add_position(joining *j, int64_t *n_plain, int field, int slot)
{
    int64_t at = j->n_own + *n_plain;
    int64_t *codes = &j->codes[at * j->n];
    position p = {codes, j->n, field, slot, -1};

    for (int64_t i = 0; i < j->n; i++) {
        codes[i] = code_of(j->schemas[i], field, slot);
    }
    j->positions[at] = p;
    if (needs_own(j, &j->positions[at])) {
        p = j->positions[at];
        j->positions[at] = j->positions[j->n_own];
        j->positions[j->n_own++] = p;
    } else {
        ++*n_plain;
    }
}

static int
compare_positions(const void *a, const void *b)
{
    const position *x = a, *y = b;

    if (is_addend(x) != is_addend(y)) {
        return is_addend(x) ? 1 : -1; /* sizes come before increments */
    }
    for (int64_t i = 0; i < x->n; i++) {
        if (x->codes[i] != y->codes[i]) {
            return x->codes[i] < y->codes[i] ? -1 : 1;
        }
    }
    return 0;
}

/* Positions that are the same thing in every schema share a count. */
static tfast_status
number_counts(joining *j)
{
    position *p = j->positions;

    qsort(p, (size_t)j->n_own, sizeof *p, compare_positions);
    for (int64_t i = 0; i < j->n_own; i++) {
        if (i == 0 || compare_positions(&p[i - 1], &p[i]) != 0) {
            j->n_counts++;
        }
        p[i].count = j->n_counts - 1;
    }
    if (j->n_counts > GRAPH_MAX_COUNTS) {
        return graph_damage("the segments' schemas must need at most %d counts "
                            "together, got %d",
                            GRAPH_MAX_COUNTS, j->n_counts);
    }
    return TFAST_OK;
}

static void
find_positions(joining *j)
{
    int64_t n_plain = 0;

    for (int i = 0; i < j->widest->header.n_fields; i++) {
        const graph_schema_field *field = &j->widest->fields[i];

        for (int slot = 0; slot < field->rank; slot++) {
            add_position(j, &n_plain, i, slot);
        }
        for (int slot = 0; slot < field->add_mode; slot++) {
            add_position(j, &n_plain, i, GRAPH_MAX_RANK + slot);
        }
    }
    j->n_positions = j->n_own + n_plain;
}

static void
write_fields(const joining *j, graph_schema_field *fields)
{
    int n_fields = j->widest->header.n_fields;

    memcpy(fields, j->widest->fields, (size_t)n_fields * sizeof *fields);
    for (int64_t s = 0; s < j->n; s++) {
        const tfast_graph_schema *schema = j->schemas[s];

        for (int i = 0; i < n_fields; i++) {
            fields[i].flags |=
                lacks(schema, i) ? GRAPH_OPTIONAL : schema->fields[i].flags;
        }
    }
    for (int64_t i = 0; i < j->n_own; i++) {
        const position *p = &j->positions[i];

        if (is_addend(p)) {
            fields[p->field].add[p->slot - GRAPH_MAX_RANK] = (uint16_t)p->count;
        } else {
            fields[p->field].dims[p->slot] = -1 - p->count;
        }
    }
}

/* The joined schema's bytes, parsed. */
static tfast_status
write_schema(const joining *j, tfast_graph_schema **joined)
{
    const tfast_graph_schema *widest = j->widest;
    int named = n_named(widest), n_fields = widest->header.n_fields;
    graph_schema_header header = widest->header;
    const char *names = (const char *)(widest->fields + n_fields);
    size_t used = sizeof header + (size_t)j->n_counts * sizeof(graph_schema_count) +
                  (size_t)n_fields * sizeof(graph_schema_field) + header.names_bytes;
    size_t bytes = (size_t)graph_align(used, GRAPH_UNIT);
    uint8_t *out = calloc(1, bytes);
    graph_schema_count *counts;
    graph_schema_field *fields;
    tfast_status status;

    if (out == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a schema of %zu bytes", bytes);
    }
    header.n_counts = (uint16_t)j->n_counts;
    counts = (graph_schema_count *)(out + sizeof header);
    fields = (graph_schema_field *)(counts + j->n_counts);
    memcpy(out, &header, sizeof header);
    memcpy(counts, widest->counts, (size_t)named * sizeof *counts);
    for (int64_t i = 0; i < j->n_own; i++) {
        const position *p = &j->positions[i];

        counts[p->count].role = is_addend(p) ? GRAPH_INCREMENT : GRAPH_SIZE;
        counts[p->count].source = counts[p->count].target = GRAPH_NONE;
    }
    write_fields(j, fields);
    memcpy(fields + n_fields, names, header.names_bytes);
    status = tfast_graph_schema_parse(joined, out, bytes);
    free(out);
    return status;
}

static tfast_status
write_sources(const joining *j, int64_t **sources)
{
    int named = n_named(j->schemas[0]);
    int64_t *out = calloc((size_t)j->n * j->n_counts + 1, sizeof *out);

    if (out == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the counts of %lld segments",
                          (long long)j->n);
    }
    for (int64_t s = 0; s < j->n; s++) {
        int64_t *row = &out[s * j->n_counts];

        for (int k = 0; k < named; k++) {
            row[k] = k;
        }
        for (int64_t i = 0; i < j->n_own; i++) {
            row[j->positions[i].count] = j->positions[i].codes[s];
        }
    }
    *sources = out;
    return TFAST_OK;
}

static bool
all_equal(const tfast_graph_schema *const *schemas, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        if (schemas[i]->n_bytes != schemas[0]->n_bytes ||
            memcmp(schemas[i]->bytes, schemas[0]->bytes, schemas[0]->n_bytes) != 0) {
            return false;
        }
    }
    return true;
}

static tfast_status
take_first(tfast_graph_schema **joined, int64_t **sources,
           const tfast_graph_schema *const *schemas, int64_t n)
{
    int n_counts = schemas[0]->header.n_counts;

    *sources = malloc(((size_t)n * n_counts + 1) * sizeof **sources);
    if (*sources == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the counts of %lld segments",
                          (long long)n);
    }
    for (int64_t i = 0; i < n * n_counts; i++) {
        (*sources)[i] = i % n_counts;
    }
    return tfast_graph_schema_parse(joined, schemas[0]->bytes, schemas[0]->n_bytes);
}

tfast_status
graph_schemas_join(tfast_graph_schema **joined, int64_t **sources,
                   const tfast_graph_schema *const *schemas, int64_t n)
{
    joining j = {.schemas = schemas, .n = n, .n_counts = n_named(schemas[0])};
    size_t room = 1;
    tfast_status status;

    *joined = NULL;
    *sources = NULL;
    if (all_equal(schemas, n)) {
        return take_first(joined, sources, schemas, n);
    }
    j.widest = graph_schema_widest(schemas, n);
    for (int64_t i = 0; i < n; i++) {
        if (!tfast_graph_schema_agrees(j.widest, schemas[i])) {
            return graph_damage("the segments' schemas must agree in all but sizes and "
                                "later fields");
        }
    }
    for (int i = 0; i < j.widest->header.n_fields; i++) {
        room += j.widest->fields[i].rank + j.widest->fields[i].add_mode;
    }
    j.codes = malloc(room * (size_t)n * sizeof *j.codes);
    j.positions = malloc(room * sizeof *j.positions);
    if (j.codes == NULL || j.positions == NULL) {
        status = tfast_fail(TFAST_ENOMEM, "no memory for %lld schemas", (long long)n);
    } else {
        find_positions(&j);
        status = number_counts(&j);
    }
    status = status == TFAST_OK ? write_schema(&j, joined) : status;
    status = status == TFAST_OK ? write_sources(&j, sources) : status;
    free(j.codes);
    free(j.positions);
    return status;
}
