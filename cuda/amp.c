/* AMP's host side: keeps the table of rows in device memory as long as the tensors stay
 * the same, so that a warm call is one launch. */
#include "amp_sum.h"
#include "workspace.h"

#include <string.h>

typedef struct {
    tfast_held held; /* first; its host table has n_tensors rows */
    int64_t n_tensors;
    int n_items;
    bool wide; /* there are float64 tensors */
} amp_data;

/* ---- The table ------------------------------------------------------------------- */

static size_t
table_bytes(int64_t n)
{
    return offsetof(amp_table, rows) + sizeof(amp_row) * (size_t)n;
}

static bool
same_rows(const amp_table *table, const tfast_amp_grads_args *args)
{
    for (int64_t i = 0; i < args->n_tensors; i++) {
        const tfast_amp_tensor *a = &args->tensors[i];
        const amp_row *b = &table->rows[i];
        if (a->data != b->data || a->numel != b->numel || a->dtype != b->dtype) {
            return false;
        }
    }
    return true;
}

/* Every byte of it, since captured tables are found by their bytes. */
static void
fill_table(amp_data *data, const tfast_amp_grads_args *args)
{
    amp_table *table = data->held.host;
    int items = 0;

    data->wide = false;
    memset(table, 0, table_bytes(args->n_tensors));
    for (int64_t i = 0; i < args->n_tensors; i++) {
        const tfast_amp_tensor *tensor = &args->tensors[i];
        const size_t size = tfast_dtype_size((tfast_dtype)tensor->dtype);
        const size_t vector = size * QUAD < 16 ? size * QUAD : 16;
        amp_row *row = &table->rows[i];
        row->data = tensor->data;
        row->numel = tensor->numel;
        row->dtype = tensor->dtype;
        row->vectors = (uintptr_t)tensor->data % vector == 0;
        row->first_item = items;
        items += (int)((tensor->numel + TFAST_AMP_CHUNK - 1) / TFAST_AMP_CHUNK);
        row->end_item = items;
        data->wide = data->wide || tensor->dtype == TFAST_F64;
    }
    data->n_tensors = args->n_tensors;
    data->n_items = items;
}

/* Rebuilds the host's table if these are not its tensors. */
static tfast_status
refresh_rows(amp_data *data, const tfast_amp_grads_args *args)
{
    const int64_t n = args->n_tensors;
    tfast_status status;

    if (data->held.host != NULL && data->n_tensors == n &&
        same_rows(data->held.host, args)) {
        return TFAST_OK;
    }
    status = tfast_held_resize(&data->held, table_bytes(n));
    if (status == TFAST_OK) {
        fill_table(data, args);
    }
    return status;
}

/* ---- The pass -------------------------------------------------------------------- */

static amp_kind
kind_of(const tfast_amp_grads_args *args)
{
    const double p = args->norm_type;

    if (args->total_norm == NULL && args->total_norm_f64 == NULL &&
        args->clip_coef == NULL) {
        return args->found_inf == NULL ? AMP_NOTHING : AMP_FINITE;
    }
    if (isinf(p)) {
        return p > 0 ? AMP_LARGEST : AMP_SMALLEST;
    }
    return p == 2 ? AMP_SQUARES : p == 1 ? AMP_ABS : AMP_POWERS;
}

static tfast_status
run(amp_data *data, const tfast_amp_grads_args *args)
{
    const size_t bytes = table_bytes(data->n_tensors);
    const size_t scratch = sizeof(double) * (size_t)data->n_items;
    const int kernel = data->wide ? KERNEL_amp_wide : KERNEL_amp;
    const int wanted = (data->n_items + AMP_WARPS - 1) / AMP_WARPS;
    void *device;
    int full;
    tfast_status status = tfast_full_grid(&full, kernel);

    if (status == TFAST_OK) {
        status = tfast_held_place(&device, &data->held, bytes, scratch);
    }
    if (status != TFAST_OK) {
        return status;
    }
    const amp_call call = {*args, device, (double *)((char *)device + bytes),
                           data->n_items, kind_of(args)};
    return LAUNCH(kernel,
                  wanted < 1      ? 1
                  : wanted > full ? full
                                  : wanted,
                  args->stream, call);
}

tfast_status
tfast_cuda_amp_grads(const tfast_amp_grads_args *args)
{
    tfast_device_scope scope;
    tfast_held *held = NULL;
    tfast_status status;

    if (kind_of(args) == AMP_NOTHING &&
        (args->rewrite == TFAST_AMP_READ || args->n_tensors == 0)) {
        return TFAST_OK;
    }
    status = tfast_enter_device(&scope, args->device.index);
    if (status == TFAST_OK) {
        status = tfast_held_open(&held, args->workspace, TFAST_HELD_AMP,
                                 sizeof(amp_data), args->device.index, args->stream);
    }
    if (status == TFAST_OK) {
        status = refresh_rows((amp_data *)held, args);
    }
    if (status == TFAST_OK) {
        status = run((amp_data *)held, args);
    }
    tfast_held_close(held);
    tfast_leave_device(&scope);
    return status;
}

/* ---- The loss scale -------------------------------------------------------------- */

tfast_status
tfast_cuda_amp_update(const tfast_amp_update_args *args)
{
    tfast_device_scope scope;
    tfast_status status = tfast_enter_device(&scope, args->device.index);

    if (status == TFAST_OK) {
        status = LAUNCH(KERNEL_amp_update, 1, args->stream, *args);
    }
    tfast_leave_device(&scope);
    return status;
}
