/* Whether the schemas of a cache's segments agree, and their generalisation. */
#include "schema_join.h"

#include "directory.h"
#include "segment.h"

#include <stdlib.h>
#include <string.h>

/* ---- Agreement ------------------------------------------------------------------- */

/* The number of counts of nodes and edges; these come first in a schema. */
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
same_bytes(const tfast_graph_schema *a, const tfast_graph_schema *b)
{
    return a->n_bytes == b->n_bytes && memcmp(a->bytes, b->bytes, a->n_bytes) == 0;
}

static bool
same_field(const graph_schema_field *a, const graph_schema_field *b)
{
    return a->type == b->type && a->dtype == b->dtype && a->rank == b->rank &&
           a->cat_dim == b->cat_dim && a->add_mode == b->add_mode &&
           ((a->flags ^ b->flags) & ~GRAPH_OPTIONAL) == 0;
}

/* Two schemas agree if they have the same counts of nodes and edges and differ only in:
 * sizes and increments; which fields are optional; further fields at the end of one. */
static bool
agree(const tfast_graph_schema *a, const tfast_graph_schema *b)
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

/* Reads a segment's schema and replaces *schema with it if it has more fields; frees
 * the other one. Unreadable segments are skipped: opening the cache reports them. */
static tfast_status
keep_wider(tfast_graph_schema **schema, const char *directory, const char *prefix,
           const uint8_t uuid[16])
{
    char path[GRAPH_PATH_BYTES];
    graph_header header;
    tfast_graph_schema *other = NULL;
    tfast_status status = graph_path(path, directory, prefix, uuid, "");

    if (status == TFAST_OK) {
        status = graph_segment_schema(path, &header, &other);
    }
    if (other != NULL &&
        (*schema == NULL || other->header.n_fields > (*schema)->header.n_fields)) {
        tfast_graph_schema *before = *schema;

        *schema = other;
        other = before;
    }
    tfast_graph_schema_free(other);
    return status == TFAST_ENOMEM ? status : TFAST_OK;
}

/* *schema: the schema with the most fields among all segments; NULL: there are none.
 * Since the segments agree with each other, a schema that agrees with this one agrees
 * with all. The caller frees it and holds the cache's lock. */
static tfast_status
find_widest(const char *directory, tfast_graph_schema **schema)
{
    graph_listing listing;
    tfast_status status;

    *schema = NULL;
    TRY(graph_list(&listing, directory));
    for (int64_t i = 0; i < listing.sealed.n; i++) {
        TRY(keep_wider(schema, directory, "segment", listing.sealed.data[i]));
    }
    for (int64_t i = 0; i < listing.open.n; i++) {
        TRY(keep_wider(schema, directory, "open", listing.open.data[i]));
    }
fail:
    graph_listing_free(&listing);
    return status;
}

tfast_status
graph_schema_must_agree(const char *directory, const tfast_graph_schema *schema)
{
    tfast_graph_schema *other;
    tfast_status status;

    TRY(find_widest(directory, &other));
    if (other != NULL && !agree(schema, other)) {
        status = tfast_fail(TFAST_EINVAL,
                            "schema must agree in all but sizes and later fields "
                            "with that of the graphs in %s, got another; write these "
                            "graphs to another path",
                            directory);
    }
fail:
    tfast_graph_schema_free(other);
    return status;
}

tfast_status
tfast_graph_schema_find(const char *path, tfast_graph_schema **schema)
{
    tfast_status status;
    int lock;

    *schema = NULL;
    TRY(graph_lock_cache(path, &lock));
    status = find_widest(path, schema);
    graph_unlock(lock);
fail:
    return status;
}

/* ---- Joining --------------------------------------------------------------------- */

/* A slot is a place in a field that names a count or fixes a size: slot d is dimension
 * d, slot GRAPH_MAX_RANK + k is add[k]. Its code in one schema: >= 0 is a count's
 * number, otherwise -1 - fixed size. Schemas that lack the field have fixed size 0. */
typedef struct {
    const int64_t *codes; /* [n]: the slot's code in each schema */
    int64_t n;
    int field, slot;
} position;

typedef struct {
    const tfast_graph_schema *const *schemas;
    int64_t n;
    const tfast_graph_schema *widest;
    int64_t *codes;
    position *own; /* [n_own]: slots that get a count of their own: they differ between
                      the schemas, or name a size or an increment */
    int64_t n_own;
    int *count_of; /* [n_own]: number of that count in *joined */
    int n_counts;  /* of *joined */
} joining;

static bool
is_addend(const position *p)
{
    return p->slot >= GRAPH_MAX_RANK;
}

static int64_t
code_of(const tfast_graph_schema *schema, int i, int slot)
{
    const graph_schema_field *field = &schema->fields[i];

    if (i >= schema->header.n_fields) {
        return -1;
    }
    return slot >= GRAPH_MAX_RANK
               ? field->add[slot - GRAPH_MAX_RANK]
               : -1 - (int64_t)field->dims[slot]; /* dims < 0 is a count */
}

/* Adds a slot to j->own, unless all schemas with this field have the same fixed size or
 * the same count of nodes or edges in the slot. */
static void
add_slot(joining *j, int field, int slot)
{
    const int64_t code = code_of(j->widest, field, slot);
    int64_t *codes = &j->codes[j->n_own * j->n];
    bool own = code >= 0 && j->widest->counts[code].role > GRAPH_EDGES;

    for (int64_t i = 0; i < j->n; i++) {
        codes[i] = code_of(j->schemas[i], field, slot);
        own = own || (codes[i] != code && field < j->schemas[i]->header.n_fields);
    }
    if (own) {
        j->own[j->n_own++] = (position){codes, j->n, field, slot};
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

/* Fills j->own and j->count_of. Slots with the same codes in all schemas share a count;
 * sorting brings them together. */
static tfast_status
find_counts(joining *j)
{
    size_t slots = 0;
    tfast_status status;

    for (int i = 0; i < j->widest->header.n_fields; i++) {
        slots += j->widest->fields[i].rank + j->widest->fields[i].add_mode;
    }
    TRY(graph_alloc(&j->codes, slots * (uint64_t)j->n, sizeof *j->codes));
    TRY(graph_alloc(&j->own, slots, sizeof *j->own));
    TRY(graph_alloc(&j->count_of, slots, sizeof *j->count_of));
    for (int i = 0; i < j->widest->header.n_fields; i++) {
        for (int slot = 0; slot < j->widest->fields[i].rank; slot++) {
            add_slot(j, i, slot);
        }
        for (int k = 0; k < j->widest->fields[i].add_mode; k++) {
            add_slot(j, i, GRAPH_MAX_RANK + k);
        }
    }
    qsort(j->own, (size_t)j->n_own, sizeof *j->own, compare_positions);
    for (int64_t i = 0; i < j->n_own; i++) {
        if (i == 0 || compare_positions(&j->own[i - 1], &j->own[i]) != 0) {
            j->n_counts++;
        }
        j->count_of[i] = j->n_counts - 1;
    }
    if (j->n_counts > GRAPH_MAX_COUNTS) {
        TRY(graph_damage("the segments' schemas must need at most %d counts together, "
                         "got %d; write the graphs to several caches",
                         GRAPH_MAX_COUNTS, j->n_counts));
    }
fail:
    return status;
}

/* Writes the fields of *joined. */
static void
write_fields(const joining *j, graph_schema_field *fields)
{
    const int n_fields = j->widest->header.n_fields;

    memcpy(fields, j->widest->fields, (size_t)n_fields * sizeof *fields);
    for (int64_t s = 0; s < j->n; s++) {
        for (int i = 0; i < n_fields; i++) {
            const tfast_graph_schema *schema = j->schemas[s];

            fields[i].flags |=
                i < schema->header.n_fields ? schema->fields[i].flags : GRAPH_OPTIONAL;
        }
    }
    for (int64_t i = 0; i < j->n_own; i++) {
        const position *p = &j->own[i];
        const int count = j->count_of[i];

        if (is_addend(p)) {
            fields[p->field].add[p->slot - GRAPH_MAX_RANK] = (uint16_t)count;
        } else {
            fields[p->field].dims[p->slot] = -1 - count;
        }
    }
}

/* Builds the serialised schema of *joined and parses it. */
static tfast_status
write_schema(const joining *j, tfast_graph_schema **joined)
{
    const tfast_graph_schema *widest = j->widest;
    const int n_fields = widest->header.n_fields;
    graph_schema_header header = widest->header;
    const size_t bytes = (size_t)graph_align(
        sizeof header + (size_t)j->n_counts * sizeof(graph_schema_count) +
            (size_t)n_fields * sizeof(graph_schema_field) + header.names_bytes,
        GRAPH_UNIT);
    uint8_t *out;
    graph_schema_count *counts;
    graph_schema_field *fields;
    tfast_status status;

    TRY(graph_alloc(&out, bytes, 1));
    header.n_counts = (uint16_t)j->n_counts;
    memcpy(out, &header, sizeof header);
    counts = (graph_schema_count *)(out + sizeof header);
    memcpy(counts, widest->counts, (size_t)n_named(widest) * sizeof *counts);
    for (int64_t i = 0; i < j->n_own; i++) {
        counts[j->count_of[i]] = (graph_schema_count){
            .role = is_addend(&j->own[i]) ? GRAPH_INCREMENT : GRAPH_SIZE,
            .source = GRAPH_NONE,
            .target = GRAPH_NONE,
        };
    }
    fields = (graph_schema_field *)(counts + j->n_counts);
    write_fields(j, fields);
    memcpy(fields + n_fields, widest->fields + n_fields, header.names_bytes);
    TRY(tfast_graph_schema_parse(joined, out, bytes));
fail:
    free(out);
    return status;
}

static tfast_status
write_sources(const joining *j, int64_t **sources)
{
    tfast_status status =
        graph_alloc(sources, (uint64_t)j->n * (uint64_t)j->n_counts, sizeof **sources);

    for (int64_t s = 0; status == TFAST_OK && s < j->n; s++) {
        int64_t *row = &(*sources)[s * j->n_counts];

        for (int k = 0; k < n_named(j->widest); k++) {
            row[k] = k;
        }
        for (int64_t i = 0; i < j->n_own; i++) {
            row[j->count_of[i]] = j->own[i].codes[s];
        }
    }
    return status;
}

/* Joins identical schemas: *joined is a copy, and every count is its own source. */
static tfast_status
copy_first(const joining *j, tfast_graph_schema **joined, int64_t **sources)
{
    const tfast_graph_schema *first = j->schemas[0];
    const int64_t n_counts = first->header.n_counts, all = j->n * n_counts;
    tfast_status status;

    TRY(tfast_graph_schema_parse(joined, first->bytes, first->n_bytes));
    TRY(graph_alloc(sources, (uint64_t)all, sizeof **sources));
    for (int64_t i = 0; i < all; i++) {
        (*sources)[i] = i % n_counts;
    }
fail:
    return status;
}

tfast_status
graph_schemas_join(tfast_graph_schema **joined, int64_t **sources,
                   const tfast_graph_schema *const *schemas, int64_t n)
{
    joining j = {.schemas = schemas, .n = n, .widest = schemas[0]};
    bool equal = true;
    tfast_status status = TFAST_OK;

    *joined = NULL;
    *sources = NULL;
    for (int64_t i = 1; i < n; i++) {
        equal = equal && same_bytes(schemas[0], schemas[i]);
        if (schemas[i]->header.n_fields > j.widest->header.n_fields) {
            j.widest = schemas[i];
        }
    }
    if (equal) {
        return copy_first(&j, joined, sources);
    }
    for (int64_t i = 0; i < n; i++) {
        if (!agree(j.widest, schemas[i])) {
            return graph_damage("the segments' schemas must agree in all but sizes and "
                                "later fields");
        }
    }
    j.n_counts = n_named(j.widest);
    TRY(find_counts(&j));
    TRY(write_schema(&j, joined));
    TRY(write_sources(&j, sources));
fail:
    free(j.codes);
    free(j.own);
    free(j.count_of);
    return status;
}
