/* One cache has one schema, but for sizes and for fields that came later: a writer that
 * came with another would make the whole cache unreadable when it closed. */
#include "manifest.h"
#include "segment.h"

/* NULL where the file is gone, or cannot be read: that is found out by who reads it. */
static tfast_status
schema_of(const char *directory, const char *prefix, const uint8_t uuid[16],
          tfast_graph_schema **schema)
{
    char path[GRAPH_PATH_BYTES];
    graph_header header;
    tfast_status status = graph_path(path, directory, prefix, uuid, "");

    *schema = NULL;
    if (status == TFAST_OK) {
        status = graph_segment_schema(path, &header, schema);
    }
    return status == TFAST_ENOMEM ? status : TFAST_OK;
}

/* Keeps the one with more fields; takes both. */
static void
keep_wider(tfast_graph_schema **schema, tfast_graph_schema *other)
{
    tfast_graph_schema *before = *schema;

    if (before != NULL && other != NULL &&
        other->header.n_fields > before->header.n_fields) {
        *schema = other;
        other = before;
    } else if (before == NULL) {
        *schema = other;
        other = NULL;
    }
    tfast_graph_schema_free(other);
}

/* That of the segment with the most fields: it agrees with a schema only if all do.
 * Under the cache's lock, so that none is half made. */
static tfast_status
find_schema(const char *directory, tfast_graph_schema **schema)
{
    graph_listing listing;
    tfast_graph_schema *other;
    tfast_status status = graph_list(&listing, directory);

    *schema = NULL;
    for (int64_t i = 0; status == TFAST_OK && i < listing.n_sealed; i++) {
        status = schema_of(directory, "segment", listing.sealed[i], &other);
        keep_wider(schema, other);
    }
    for (int64_t i = 0; status == TFAST_OK && i < listing.n_open; i++) {
        status = schema_of(directory, "open", listing.open[i], &other);
        keep_wider(schema, other);
    }
    graph_listing_free(&listing);
    return status;
}

tfast_status
graph_must_agree(const char *directory, const tfast_graph_schema *schema)
{
    tfast_graph_schema *other;
    tfast_status status = find_schema(directory, &other);

    if (status == TFAST_OK && other != NULL &&
        !tfast_graph_schema_agrees(schema, other)) {
        status = tfast_fail(TFAST_EINVAL,
                            "schema must agree in all but sizes and later fields "
                            "with that of the graphs in %s, got another",
                            directory);
    }
    tfast_graph_schema_free(other);
    return status;
}

tfast_status
tfast_graph_schema_find(const char *path, tfast_graph_schema **schema)
{
    tfast_status status;
    int lock;

    *schema = NULL;
    status = graph_lock_cache(path, &lock);
    if (status != TFAST_OK) {
        return status;
    }
    status = find_schema(path, schema);
    graph_unlock(lock);
    return status;
}
