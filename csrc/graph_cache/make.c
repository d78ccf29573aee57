/* A directory becomes a cache: a lock file, and an empty manifest. */
#include "manifest.h"

#include <errno.h>

static tfast_status
sync_parent(const char *directory)
{
    char parent[GRAPH_PATH_BYTES];
    tfast_status status = graph_join(parent, directory, "..");

    return status == TFAST_OK ? graph_directory_sync(parent) : status;
}

/* An empty manifest, unless there is one. Under the lock. */
static tfast_status
make_manifest(const char *directory, bool durable)
{
    graph_contents contents = {0};
    graph_listing listing;
    tfast_status status = graph_list(&listing, directory);
    bool there, ours;
    int error;

    if (status != TFAST_OK) {
        return status;
    }
    there = listing.manifest;
    ours = !listing.strangers && listing.n_open == 0 && listing.n_sealed == 0;
    graph_listing_free(&listing);
    if (there) {
        return TFAST_OK;
    }
    if (!ours) {
        return tfast_fail(TFAST_EINVAL,
                          "path must be a graph cache or an empty or new directory, "
                          "got %s, which has other files and no manifest",
                          directory);
    }
    error = graph_io_table->random(contents.head.uuid, sizeof contents.head.uuid);
    if (error < 0) {
        return graph_io_error("draw a name in", directory, error);
    }
    status = durable ? sync_parent(directory) : TFAST_OK;
    if (status != TFAST_OK) {
        return status;
    }
    return graph_contents_store(&contents, directory, durable);
}

/* Before a lock file is made in it, a directory must be a cache's, or empty. */
static tfast_status
check_owner(const char *directory)
{
    graph_listing listing;
    tfast_status status = graph_list(&listing, directory);

    if (status == TFAST_OK && listing.strangers && !listing.manifest) {
        status = tfast_fail(TFAST_EINVAL,
                            "path must be a graph cache or an empty or new directory, "
                            "got %s, which has other files and no manifest",
                            directory);
    }
    graph_listing_free(&listing);
    return status;
}

tfast_status
graph_directory_make(const char *directory, bool durable, int *lock)
{
    int error = graph_io_table->mkdir(directory);
    tfast_status status;

    if (error < 0 && error != -EEXIST) {
        return graph_io_error("make", directory, error);
    }
    status = check_owner(directory);
    status = status == TFAST_OK ? graph_lock(directory, lock) : status;
    if (status != TFAST_OK) {
        return status;
    }
    status = make_manifest(directory, durable);
    if (status != TFAST_OK) {
        graph_unlock(*lock);
    }
    return status;
}
