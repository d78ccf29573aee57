/* AdamW's host side: keeps the table of rows in device memory as long as the slots stay
 * the same, so that a warm step is one launch, and launches the kernel for their
 * dtypes. */
#include "adamw_rows.h"
#include "workspace.h"

typedef struct {
    tfast_held held; /* first; its host table has n_slots rows */
    int64_t n_slots;
    int n_items;
    adamw_mix mix;
} adamw_data;

/* Rebuilds the host's table if these are not its slots. */
static tfast_status
refresh_rows(adamw_data *data, const tfast_adamw_args *args)
{
    const int64_t n = args->n_slots;
    tfast_status status;

    if (data->n_slots == n && adamw_same_rows(data->held.host, args)) {
        return TFAST_OK;
    }
    data->n_slots = 0;
    status = tfast_held_resize(&data->held, adamw_table_bytes(n));
    if (status != TFAST_OK) {
        return status;
    }
    data->mix = adamw_mix_of(args);
    data->n_items = adamw_fill_table(data->held.host, args, data->mix);
    data->n_slots = n;
    return TFAST_OK;
}

/* The step, or with `only_prepare` all of it that takes memory, of which loading the
 * kernel is a part. */
static tfast_status
run(adamw_data *data, const tfast_adamw_args *args, bool only_prepare)
{
    const size_t bytes = adamw_table_bytes(data->n_slots);
    const int kernel = KERNEL_adamw_ALL_F32 + (int)data->mix;
    const int wanted = (data->n_items + ADAMW_WARPS - 1) / ADAMW_WARPS;
    void *table = NULL;
    int full;
    tfast_status status = tfast_full_grid(&full, kernel);

    if (status == TFAST_OK) {
        status = only_prepare ? tfast_held_prepare(&data->held, bytes, 0)
                              : tfast_held_place(&table, &data->held, bytes, 0);
    }
    if (status != TFAST_OK || only_prepare) {
        return status;
    }
    const adamw_call call = {*args, table, data->n_items};
    return LAUNCH(kernel,
                  wanted < 1      ? 1
                  : wanted > full ? full
                                  : wanted,
                  args->stream, call);
}

static tfast_status
step(const tfast_adamw_args *args, bool only_prepare)
{
    tfast_device_scope scope;
    tfast_held *held = NULL;
    tfast_status status;

    if (args->n_slots == 0) {
        return TFAST_OK;
    }
    status = tfast_enter_device(&scope, args->device.index);
    if (status == TFAST_OK) {
        status = tfast_held_open(&held, args->workspace, TFAST_HELD_ADAMW,
                                 sizeof(adamw_data), args->device.index, args->stream);
    }
    if (status == TFAST_OK) {
        status = refresh_rows((adamw_data *)held, args);
    }
    if (status == TFAST_OK) {
        status = run((adamw_data *)held, args, only_prepare);
    }
    tfast_held_close(held);
    tfast_leave_device(&scope);
    return status;
}

tfast_status
tfast_cuda_adamw(const tfast_adamw_args *args)
{
    return step(args, false);
}

tfast_status
tfast_cuda_adamw_prepare(const tfast_adamw_args *args)
{
    return step(args, true);
}
