/* Updates the loss scale at the end of an iteration, by the rule that is documented at
 * tfast_amp_update() in tfast.h. Shared by the CPU kernels and cuda/device/. */
#ifndef TFAST_AMP_SCALE_H
#define TFAST_AMP_SCALE_H

#include "amp_sum.h"

/* `scale` after an overflow. It never increases, even if it is below min_scale. */
TFAST_AMP_BOTH static inline float
tfast_amp_backed_off(float scale, double backoff_factor, double min_scale)
{
    float next = (float)((double)scale * backoff_factor);

    if (next < (float)min_scale) {
        next = (float)min_scale;
    }
    return isfinite(next) && next < scale ? next : scale;
}

/* `scale` after growth_interval steps without overflow. It never decreases. */
TFAST_AMP_BOTH static inline float
tfast_amp_grown(float scale, double growth_factor, double max_scale)
{
    float next = (float)((double)scale * growth_factor);

    if (!isfinite(next)) {
        return scale;
    }
    if (next > (float)max_scale) {
        next = (float)max_scale;
    }
    return next > scale ? next : scale;
}

/* Not thread-safe: one thread runs it. If growth_tracker has already passed a reduced
 * growth_interval, the scale grows at this step. */
TFAST_AMP_BOTH static inline void
tfast_amp_update_scale(const tfast_amp_update_args *args)
{
    int32_t overflows_left = 0;
    bool overflow = false;

    for (int32_t i = 0; i < args->n_found_infs; i++) {
        overflow = overflow || *args->found_infs[i] != 0; /* NaN counts as overflow */
    }
    if (!overflow) {
        const int32_t steps = *args->growth_tracker;

        if (steps >= args->growth_interval - 1) {
            *args->scale =
                tfast_amp_grown(*args->scale, args->growth_factor, args->max_scale);
        }
        *args->growth_tracker = steps >= args->growth_interval - 1 ? 0 : steps + 1;
        if (args->hysteresis_tracker != NULL) {
            *args->hysteresis_tracker = args->hysteresis;
        }
        return;
    }
    *args->growth_tracker = 0;
    if (args->hysteresis_tracker != NULL && *args->hysteresis_tracker > 0) {
        overflows_left = *args->hysteresis_tracker -= 1;
    }
    if (overflows_left == 0) {
        *args->scale =
            tfast_amp_backed_off(*args->scale, args->backoff_factor, args->min_scale);
    }
}

#endif
