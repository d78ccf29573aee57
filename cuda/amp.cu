/* AMP's host side: keeps the table of rows in device memory as long as the tensors stay
 * the same, so that a warm call is one launch. */
#include "amp_kernel.cuh"
#include "workspace.cuh"

#include <string.h>

struct amp_data {
    tfast_held held; /* first; its host table has n_tensors rows */
    int64_t n_tensors;
    int n_items;
    bool wide;        /* there are float64 tensors */
    int full_grid[2]; /* blocks that fill the device, narrow and wide; 0: not asked */
};

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
    amp_table *table = (amp_table *)data->held.host;
    int items = 0;

    data->wide = false;
    memset((void *)table, 0, table_bytes(args->n_tensors));
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

    if (data->held.host != nullptr && data->n_tensors == n &&
        same_rows((amp_table *)data->held.host, args)) {
        return TFAST_OK;
    }
    const tfast_status status = tfast_held_resize(&data->held, table_bytes(n));
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

    if (args->total_norm == nullptr && args->total_norm_f64 == nullptr &&
        args->clip_coef == nullptr) {
        return args->found_inf == nullptr ? AMP_NOTHING : AMP_FINITE;
    }
    if (isinf(p)) {
        return p > 0 ? AMP_LARGEST : AMP_SMALLEST;
    }
    return p == 2 ? AMP_SQUARES : p == 1 ? AMP_ABS : AMP_POWERS;
}

template <bool WIDE>
static tfast_status
launch(amp_data *data, const tfast_amp_grads_args *args, void *device)
{
    int blocks = (data->n_items + AMP_WARPS - 1) / AMP_WARPS;
    int *full = &data->full_grid[WIDE];
    amp_table *table = (amp_table *)device;
    double *totals = (double *)((char *)device + table_bytes(data->n_tensors));
    const tfast_status status =
        tfast_full_grid(full, amp_kernel<WIDE>, AMP_THREADS, data->held.device);

    if (status != TFAST_OK) {
        return status;
    }
    blocks = blocks < 1 ? 1 : blocks > *full ? *full : blocks;
    LAUNCH(amp_kernel<WIDE>, (unsigned)blocks, AMP_THREADS, 0,
           (cudaStream_t)args->stream, *args, table, totals, data->n_items,
           kind_of(args));
    return tfast_cuda_status(cudaGetLastError(), "launch of amp_kernel");
}

static tfast_status
run(amp_data *data, const tfast_amp_grads_args *args)
{
    void *device = nullptr;
    tfast_status status = refresh_rows(data, args);

    if (status == TFAST_OK) {
        const size_t scratch = sizeof(double) * (size_t)data->n_items;
        status = tfast_held_place(&device, &data->held, table_bytes(data->n_tensors),
                                  scratch, (cudaStream_t)args->stream);
    }
    if (status != TFAST_OK) {
        return status;
    }
    return data->wide ? launch<true>(data, args, device)
                      : launch<false>(data, args, device);
}

tfast_status
tfast_cuda_amp_grads(const tfast_amp_grads_args *args)
{
    tfast_device_scope scope;
    tfast_held *held = nullptr;

    if (kind_of(args) == AMP_NOTHING &&
        (args->rewrite == TFAST_AMP_READ || args->n_tensors == 0)) {
        return TFAST_OK;
    }
    tfast_status status = scope.enter(args->device.index);

    if (status == TFAST_OK) {
        status =
            tfast_held_open(&held, args->workspace, TFAST_HELD_AMP, sizeof(amp_data),
                            args->device.index, (cudaStream_t)args->stream);
    }
    if (status == TFAST_OK) {
        status = run((amp_data *)held, args);
    }
    tfast_held_close(held);
    return status;
}

/* ---- The loss scale -------------------------------------------------------------- */

tfast_status
tfast_cuda_amp_update(const tfast_amp_update_args *args)
{
    tfast_device_scope scope;
    const tfast_status status = scope.enter(args->device.index);

    if (status != TFAST_OK) {
        return status;
    }
    LAUNCH(amp_update_kernel, 1, 32, 0, (cudaStream_t)args->stream, *args);
    return tfast_cuda_status(cudaGetLastError(), "launch of amp_update_kernel");
}
