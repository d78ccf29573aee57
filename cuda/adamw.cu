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

/* The step, or with `only_prepare` all of it that takes memory, of which loading the
 * kernel is a part. */
template <adamw_mix MIX>
static tfast_status
run(adamw_data *data, const tfast_adamw_args *args, bool only_prepare)
{
    const size_t bytes = adamw_table_bytes(data->n_slots);
    const cudaStream_t stream = (cudaStream_t)args->stream;
    int blocks = (data->n_items + WARPS - 1) / WARPS;
    int *full = &data->full_grid[MIX];
    void *table = nullptr;
    tfast_status status =
        tfast_full_grid(full, adamw_kernel<MIX>, THREADS, data->held.device);

    if (status == TFAST_OK) {
        status = only_prepare ? tfast_held_prepare(&data->held, bytes, 0, stream)
                              : tfast_held_place(&table, &data->held, bytes, 0, stream);
    }
    if (status != TFAST_OK || only_prepare) {
        return status;
    }
    blocks = blocks < 1 ? 1 : blocks > *full ? *full : blocks;
    LAUNCH(adamw_kernel<MIX>, (unsigned)blocks, THREADS, 0, stream, *args,
           (adamw_table *)table, data->n_items);
    return tfast_cuda_status(cudaGetLastError(), "launch of adamw_kernel");
}

static tfast_status
run_mix(adamw_data *data, const tfast_adamw_args *args, bool only_prepare)
{
    switch (data->mix) {
    case ALL_F32:
        return run<ALL_F32>(data, args, only_prepare);
    case ALL_BF16:
        return run<ALL_BF16>(data, args, only_prepare);
    case NARROW:
        return run<NARROW>(data, args, only_prepare);
    default:
        return run<WIDE>(data, args, only_prepare);
    }
}

static tfast_status
step(const tfast_adamw_args *args, bool only_prepare)
{
    tfast_device_scope scope;
    tfast_held *held = nullptr;

    if (args->n_slots == 0) {
        return TFAST_OK;
    }
    tfast_status status = scope.enter(args->device.index);

    if (status == TFAST_OK) {
        status = tfast_held_open(&held, args->workspace, TFAST_HELD_ADAMW,
                                 sizeof(adamw_data), args->device.index,
                                 (cudaStream_t)args->stream);
    }
    if (status == TFAST_OK) {
        status = refresh_rows((adamw_data *)held, args);
    }
    if (status == TFAST_OK) {
        status = run_mix((adamw_data *)held, args, only_prepare);
    }
    tfast_held_close(held);
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
