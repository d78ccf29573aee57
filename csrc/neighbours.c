/* The public functions of the search for neighbours: they validate, then call the
 * backend. */
#include "backend.h"
#include "neighbour_search.h"

/* Checks that `ptr` divides n rows into n_graphs graphs. It is on the CPU. */
static tfast_status
check_ptr(const char *name, const tfast_points *points, int64_t n_graphs)
{
    const int64_t *ptr = points->ptr;

    if (ptr[0] != 0) {
        return tfast_fail(TFAST_EINVAL, "%s must begin with 0, got %lld", name,
                          (long long)ptr[0]);
    }
    for (int64_t i = 0; i < n_graphs; i++) {
        if (ptr[i + 1] < ptr[i]) {
            return tfast_fail(
                TFAST_EINVAL, "%s must not decrease, got %lld after %lld at index %lld",
                name, (long long)ptr[i + 1], (long long)ptr[i], (long long)(i + 1));
        }
        if (ptr[i + 1] - ptr[i] >= INT32_MAX) {
            return tfast_fail(TFAST_EUNSUPPORTED,
                              "%s must give each graph fewer than 2^31 - 1 points, got "
                              "%lld",
                              name, (long long)(ptr[i + 1] - ptr[i]));
        }
    }
    if (ptr[n_graphs] != points->n) {
        return tfast_fail(TFAST_EINVAL,
                          "%s must end with the number of points, %lld, got %lld", name,
                          (long long)points->n, (long long)ptr[n_graphs]);
    }
    return TFAST_OK;
}

/* Sets *backend, and *bytes to the scratch that it needs, for valid arguments. */
static tfast_status
check(const tfast_backend **backend, int64_t *bytes, const tfast_neighbours_args *args)
{
    tfast_status status;

    *bytes = 0;
    *backend = tfast_backend_for(args->device.type);
    if (*backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    if (args->dim < 1 || args->dim > TFAST_MAX_POINT_DIM) {
        return tfast_fail(TFAST_EINVAL, "points must have 1 to %d dimensions, got %lld",
                          TFAST_MAX_POINT_DIM, (long long)args->dim);
    }
    if (!(args->radius >= 0)) {
        return tfast_fail(TFAST_EINVAL, "r must be >= 0, got %g", args->radius);
    }
    status = check_ptr("ptr", &args->points, args->n_graphs);
    if (status == TFAST_OK && args->centres.data != NULL) {
        status = check_ptr("ptr of the centres", &args->centres, args->n_graphs);
    }
    return status != TFAST_OK || (*backend)->neighbours_scratch == NULL
               ? status
               : (*backend)->neighbours_scratch(bytes, args);
}

tfast_status
tfast_neighbours_scratch(int64_t *bytes, const tfast_neighbours_args *args)
{
    const tfast_backend *backend;

    return check(&backend, bytes, args);
}

tfast_status
tfast_neighbours_count(tfast_neighbours_plan **plan, tfast_neighbours_args *args)
{
    const tfast_backend *backend;
    int64_t bytes;
    tfast_status status = check(&backend, &bytes, args);

    *plan = NULL;
    if (status == TFAST_OK) {
        status = tfast_backend_check_scratch(backend, bytes, args->scratch_bytes);
    }
    return status == TFAST_OK ? backend->neighbours_count(plan, args) : status;
}

tfast_status
tfast_neighbours_fill(tfast_neighbours_plan *plan, const tfast_neighbours_args *args)
{
    return plan->fill(plan, args);
}

void
tfast_neighbours_end(tfast_neighbours_plan *plan)
{
    if (plan != NULL) {
        plan->end(plan);
    }
}
