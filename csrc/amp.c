/* The public functions of AMP: validate scalars, then call the backend. The binding has
 * validated the arrays. */
#include "backend.h"

#include <math.h>

tfast_status
tfast_amp_grads(const tfast_amp_grads_args *args)
{
    const tfast_backend *backend = tfast_backend_for(args->device.type);
    const bool norm_wanted = args->total_norm != NULL || args->total_norm_f64 != NULL ||
                             args->clip_coef != NULL;

    if (norm_wanted && (args->norm_type == 0 || isnan(args->norm_type))) {
        return tfast_fail(TFAST_EINVAL, "norm_type must not be 0 or NaN, got %g",
                          args->norm_type);
    }
    if (backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    if (backend->amp_grads == NULL) {
        return tfast_fail(TFAST_EUNSUPPORTED, "backend %s has no amp_grads",
                          backend->name);
    }
    return backend->amp_grads(args);
}

static tfast_status
check_factors(const tfast_amp_update_args *args)
{
    if (!(args->growth_factor > 1)) {
        return tfast_fail(TFAST_EINVAL, "growth_factor must be > 1, got %g",
                          args->growth_factor);
    }
    if (!(args->backoff_factor > 0 && args->backoff_factor < 1)) {
        return tfast_fail(TFAST_EINVAL, "backoff_factor must be in (0, 1), got %g",
                          args->backoff_factor);
    }
    if (!(isfinite(args->min_scale) && args->min_scale >= 0)) {
        return tfast_fail(TFAST_EINVAL, "min_scale must be finite and >= 0, got %g",
                          args->min_scale);
    }
    if (!(args->max_scale > 0 && args->max_scale >= args->min_scale)) {
        return tfast_fail(TFAST_EINVAL,
                          "max_scale must be > 0 and >= min_scale (%g), got %g",
                          args->min_scale, args->max_scale);
    }
    return TFAST_OK;
}

static tfast_status
check_counts(const tfast_amp_update_args *args)
{
    if (args->n_found_infs < 1 || args->n_found_infs > TFAST_AMP_MAX_FOUND) {
        return tfast_fail(TFAST_EINVAL, "found_infs must be 1 to %d flags, got %d",
                          TFAST_AMP_MAX_FOUND, (int)args->n_found_infs);
    }
    if (args->growth_interval < 1) {
        return tfast_fail(TFAST_EINVAL, "growth_interval must be at least 1, got %d",
                          (int)args->growth_interval);
    }
    if (args->hysteresis < 1) {
        return tfast_fail(TFAST_EINVAL, "hysteresis must be at least 1, got %d",
                          (int)args->hysteresis);
    }
    return TFAST_OK;
}

tfast_status
tfast_amp_update(const tfast_amp_update_args *args)
{
    const tfast_backend *backend = tfast_backend_for(args->device.type);
    tfast_status status = check_factors(args);

    if (status == TFAST_OK) {
        status = check_counts(args);
    }
    if (status != TFAST_OK) {
        return status;
    }
    if (backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    if (backend->amp_update == NULL) {
        return tfast_fail(TFAST_EUNSUPPORTED, "backend %s has no amp_update",
                          backend->name);
    }
    return backend->amp_update(args);
}
