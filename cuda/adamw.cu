/* AdamW's host side: keeps the table of rows in device memory as long as the slots stay
 * the same, so that a warm step is one launch, and launches the kernel for their
 * dtypes. */
#include "adamw_kernel.cuh"
#include "workspace.cuh"

struct adamw_data {
    tfast_held held; /* first; its host table has n_slots rows */
    int64_t n_slots;
    int n_items;
    adamw_mix mix;
    int full_grid[N_MIXES]; /* blocks that fill the device; 0: not asked yet */
};

/* Rebuilds the host's table if these are not its slots. */
static tfast_status
refresh_rows(adamw_data *data, const tfast_adamw_args *args)
{
    const int64_t n = args->n_slots;

    if (data->n_slots == n && adamw_same_rows((adamw_table *)data->held.host, args)) {
        return TFAST_OK;
    }
    data->n_slots = 0;
    const tfast_status status = tfast_held_resize(&data->held, adamw_table_bytes(n));
    if (status != TFAST_OK) {
        return status;
    }
    data->mix = adamw_mix_of(args);
    data->n_items = adamw_fill_table((adamw_table *)data->held.host, args, data->mix);
    data->n_slots = n;
    return TFAST_OK;
}

template <adamw_mix MIX>
static tfast_status
launch(adamw_data *data, const tfast_adamw_args *args, adamw_table *table)
{
    int blocks = (data->n_items + WARPS - 1) / WARPS;
    int *full = &data->full_grid[MIX];
    const tfast_status status =
        tfast_full_grid(full, adamw_kernel<MIX>, THREADS, data->held.device);

    if (status != TFAST_OK) {
        return status;
    }
    blocks = blocks < 1 ? 1 : blocks > *full ? *full : blocks;
    LAUNCH(adamw_kernel<MIX>, (unsigned)blocks, THREADS, 0, (cudaStream_t)args->stream,
           *args, table, data->n_items);
    return tfast_cuda_status(cudaGetLastError(), "launch of adamw_kernel");
}

static tfast_status
run(adamw_data *data, const tfast_adamw_args *args)
{
    void *device = nullptr;
    tfast_status status = refresh_rows(data, args);

    if (status == TFAST_OK) {
        status =
            tfast_held_place(&device, &data->held, adamw_table_bytes(data->n_slots), 0,
                             (cudaStream_t)args->stream);
    }
    if (status != TFAST_OK) {
        return status;
    }
    adamw_table *table = (adamw_table *)device;
    switch (data->mix) {
    case ALL_F32:
        return launch<ALL_F32>(data, args, table);
    case ALL_BF16:
        return launch<ALL_BF16>(data, args, table);
    case NARROW:
        return launch<NARROW>(data, args, table);
    default:
        return launch<WIDE>(data, args, table);
    }
}

tfast_status
tfast_cuda_adamw(const tfast_adamw_args *args)
{
    tfast_device_scope scope;
    tfast_held *held = nullptr;

    if (args->n_slots == 0) {
        return TFAST_OK;
    }
    tfast_status status = scope.enter(args->device.index);

    if (status == TFAST_OK) {
        status = tfast_held_open(&held, args->workspace, TFAST_HELD_ADAMW,
                                 sizeof(adamw_data), args->device.index);
    }
    if (status == TFAST_OK) {
        status = run((adamw_data *)held, args);
    }
    tfast_held_close(held);
    return status;
}
