/* The public function of trajectory metrics: validates, then calls the backend. */
#include "backend.h"

static tfast_status
check_sizes(const tfast_trajectory_args *args)
{
    if (args->dim != 2 && args->dim != 3) {
        return tfast_fail(TFAST_EINVAL,
                          "pred must have 2 or 3 coordinates in its last dimension, "
                          "got %lld; pass pred[..., :2]",
                          (long long)args->dim);
    }
    if (args->n < 0 || args->modes < 1 || args->steps < 1) {
        return tfast_fail(TFAST_EINVAL,
                          "pred must have at least one mode and one step, got %lld "
                          "and %lld",
                          (long long)args->modes, (long long)args->steps);
    }
    if (args->top_k < 0 || args->top_k > args->modes) {
        return tfast_fail(TFAST_EINVAL, "top_k must be 1 to %lld (the modes), got %lld",
                          (long long)args->modes, (long long)args->top_k);
    }
    if (args->top_k > 0 && args->top_k < args->modes && args->probabilities == NULL) {
        return tfast_fail(TFAST_EINVAL,
                          "top_k needs probabilities, got none; pass probabilities or "
                          "leave top_k out");
    }
    return TFAST_OK;
}

/* Sets *backend, and *bytes to the scratch that it needs, for valid arguments. */
static tfast_status
check(const tfast_backend **backend, int64_t *bytes, const tfast_trajectory_args *args)
{
    const tfast_status status = check_sizes(args);

    *bytes = 0;
    *backend = tfast_backend_for(args->device.type);
    if (status != TFAST_OK) {
        return status;
    }
    if (!(args->miss_threshold >= 0)) {
        return tfast_fail(TFAST_EINVAL, "miss_threshold must be >= 0, got %g",
                          args->miss_threshold);
    }
    if (*backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    return (*backend)->trajectory_scratch == NULL
               ? TFAST_OK
               : (*backend)->trajectory_scratch(bytes, args);
}

tfast_status
tfast_trajectory_scratch(int64_t *bytes, const tfast_trajectory_args *args)
{
    const tfast_backend *backend;

    return check(&backend, bytes, args);
}

tfast_status
tfast_trajectory(const tfast_trajectory_args *args)
{
    const tfast_backend *backend;
    int64_t bytes;
    tfast_status status = check(&backend, &bytes, args);

    if (status == TFAST_OK) {
        status = tfast_backend_check_scratch(backend, bytes, args->scratch_bytes);
    }
    return status == TFAST_OK ? backend->trajectory(args) : status;
}
