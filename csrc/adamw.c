/* The public functions of AdamW: validate scalars and steps, then call the backend. The
 * binding has validated the arrays. */
#include "adamw_half.h"
#include "backend.h"

#include <math.h>

static tfast_status
check_scalars(const tfast_adamw_args *args)
{
    if (args->lr_device == NULL && !(isfinite(args->lr) && args->lr >= 0)) {
        return tfast_fail(TFAST_EINVAL, "lr must be finite and >= 0, got %g", args->lr);
    }
    if (!(args->beta1 >= 0 && args->beta1 < 1)) {
        return tfast_fail(TFAST_EINVAL, "betas[0] must be in [0, 1), got %g",
                          args->beta1);
    }
    if (!(args->beta2 >= 0 && args->beta2 < 1)) {
        return tfast_fail(TFAST_EINVAL, "betas[1] must be in [0, 1), got %g",
                          args->beta2);
    }
    if (!(isfinite(args->eps) && args->eps >= 0)) {
        return tfast_fail(TFAST_EINVAL, "eps must be finite and >= 0, got %g",
                          args->eps);
    }
    if (!(isfinite(args->weight_decay) && args->weight_decay >= 0)) {
        return tfast_fail(TFAST_EINVAL, "weight_decay must be finite and >= 0, got %g",
                          args->weight_decay);
    }
    if (args->extras != NULL && !(args->ema_decay >= 0 && args->ema_decay < 1)) {
        return tfast_fail(TFAST_EINVAL, "ema_decay must be in [0, 1), got %g",
                          args->ema_decay);
    }
    if (args->write_back_grads && args->zero_grad) {
        return tfast_fail(TFAST_EINVAL,
                          "write_back_grads and zero_grad must not both be set");
    }
    return TFAST_OK;
}

/* Steps must fit int64_t, in which tfast_power() takes them. Steps on a GPU are not
 * checked: reading them would synchronise the stream. */
static tfast_status
check_steps(const tfast_adamw_args *args)
{
    for (int64_t i = 0; i < args->n_slots; i++) {
        const float *step = args->slots[i].step;

        if (step == NULL && args->step < 1) {
            return tfast_fail(TFAST_EINVAL, "step must be at least 1, got %lld",
                              (long long)args->step);
        }
        if (step != NULL && args->device.type == TFAST_CPU &&
            !(*step >= 0 && *step < 0x1p62f)) {
            return tfast_fail(TFAST_EINVAL, "step[%lld] must be in [0, 2^62), got %g",
                              (long long)i, (double)*step);
        }
    }
    return TFAST_OK;
}

/* 8-bit state is float32 arithmetic. */
static tfast_status
check_codes(const tfast_adamw_args *args)
{
    for (int64_t i = 0; i < args->n_slots; i++) {
        if (args->slots[i].scales == NULL) {
            continue;
        }
        if (args->slots[i].param_dtype == TFAST_F64) {
            return tfast_fail(TFAST_EINVAL,
                              "params[%lld] must not be float64 with 8-bit state",
                              (long long)i);
        }
    }
    return TFAST_OK;
}

/* Ways of rounding that keep what nearest would lose are for half parameters. */
static tfast_status
check_rounding(const tfast_adamw_args *args)
{
    for (int64_t i = 0; args->extras != NULL && i < args->n_slots; i++) {
        const tfast_adamw_extra *extra = &args->extras[i];
        const uint8_t dtype = args->slots[i].param_dtype;
        const bool half = dtype == TFAST_BF16 || dtype == TFAST_F16;
        const bool tail =
            extra->rounding == TFAST_KAHAN || extra->rounding == TFAST_SPLIT;

        if (extra->rounding == TFAST_NEAREST || args->slots[i].numel == 0) {
            continue;
        }
        if (!half || (extra->rounding == TFAST_SPLIT && dtype != TFAST_BF16)) {
            return tfast_fail(
                TFAST_EINVAL, "params[%lld] must be %s with this rounding, got %s",
                (long long)i,
                extra->rounding == TFAST_SPLIT ? "bfloat16" : "float16 or bfloat16",
                tfast_dtype_name((tfast_dtype)dtype));
        }
        if (args->slots[i].state_dtype == TFAST_F64) {
            return tfast_fail(TFAST_EINVAL,
                              "exp_avgs[%lld] must not be float64 with this rounding",
                              (long long)i);
        }
        if (extra->rounding >= TFAST_N_ROUNDINGS || tail != (extra->tail != NULL)) {
            return tfast_fail(TFAST_EINVAL, "tails[%lld] must be %s with this rounding",
                              (long long)i, tail ? "given" : "None");
        }
    }
    return TFAST_OK;
}

/* Validates the arguments and finds the backend. */
static tfast_status
check(const tfast_adamw_args *args, const tfast_backend **backend)
{
    tfast_status status;

    *backend = tfast_backend_for(args->device.type); /* NULL: the message is set */
    status = check_scalars(args);
    if (status == TFAST_OK) {
        status = check_steps(args);
    }
    if (status == TFAST_OK) {
        status = check_codes(args);
    }
    if (status == TFAST_OK) {
        status = check_rounding(args);
    }
    if (status != TFAST_OK || *backend == NULL) {
        return status != TFAST_OK ? status : TFAST_EUNSUPPORTED;
    }
    if ((*backend)->adamw == NULL) {
        return tfast_fail(TFAST_EUNSUPPORTED, "backend %s has no adamw",
                          (*backend)->name);
    }
    return TFAST_OK;
}

tfast_status
tfast_adamw_prepare(const tfast_adamw_args *args)
{
    const tfast_backend *backend;
    const tfast_status status = check(args, &backend);

    if (status != TFAST_OK || backend->adamw_prepare == NULL || args->n_slots == 0 ||
        args->workspace == NULL) {
        return status;
    }
    return backend->adamw_prepare(args);
}

tfast_status
tfast_adamw(const tfast_adamw_args *args)
{
    const tfast_backend *backend;
    const tfast_status status = check(args, &backend);

    return status != TFAST_OK || args->n_slots == 0 ? status : backend->adamw(args);
}
