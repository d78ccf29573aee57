/* AdamW's host side: keeps the table of rows in device memory as long as the slots stay
 * the same, so that a warm step is one launch, and launches the kernel for their
 * dtypes. */
#include "adamw_kernel.cuh"
#include "table.cuh"

#include <stdlib.h>

/* What a tfast_workspace holds. */
struct adamw_data {
    int device;
    tfast_table table;
    adamw_table *host; /* of n_slots rows; the device's is the same where `uploaded` */
    size_t capacity;   /* bytes of it */
    int64_t n_slots;
    int n_items;
    adamw_mix mix;
    bool uploaded;
    int full_grid[N_MIXES]; /* blocks that fill the device; 0: not asked yet */
};

void
tfast_cuda_adamw_clear(void *data_)
{
    adamw_data *data = (adamw_data *)data_;
    tfast_device_scope scope;

    if (scope.enter(data->device) == TFAST_OK) {
        tfast_table_clear(&data->table);
    }
    free(data->host);
    free(data);
}

/* The workspace's data for the arguments' device, made if need be. */
static tfast_status
open_workspace(adamw_data **out, const tfast_adamw_args *args,
               tfast_workspace *workspace)
{
    adamw_data *data = (adamw_data *)workspace->data;

    if (data != nullptr && data->device != args->device.index) {
        tfast_cuda_adamw_clear(data);
        *workspace = {};
        data = nullptr;
    }
    if (data == nullptr) {
        data = (adamw_data *)calloc(1, sizeof *data);
        if (data == nullptr) {
            return tfast_cuda_fail(TFAST_ENOMEM, "out of memory");
        }
        data->device = args->device.index;
        workspace->backend = &tfast_cuda_backend;
        workspace->data = data;
    }
    *out = data;
    return TFAST_OK;
}

/* Rebuilds the host's table if these are not its slots. */
static tfast_status
refresh_rows(adamw_data *data, const tfast_adamw_args *args)
{
    const int64_t n = args->n_slots;
    const size_t bytes = adamw_table_bytes(n);

    if (data->n_slots == n && adamw_same_rows(data->host, args->slots, n)) {
        return TFAST_OK;
    }
    data->uploaded = false;
    data->n_slots = 0;
    if (bytes > data->capacity) {
        free(data->host);
        data->host = (adamw_table *)malloc(bytes);
        data->capacity = data->host == nullptr ? 0 : bytes;
        if (data->host == nullptr) {
            return tfast_cuda_fail(TFAST_ENOMEM, "out of memory for %lld parameters",
                                   (long long)n);
        }
    }
    data->mix = adamw_mix_of(args->slots, n);
    data->n_items = adamw_fill_table(data->host, args->slots, n, data->mix);
    data->n_slots = n;
    return TFAST_OK;
}

/* Where the rows lie in device memory by the time a kernel launched next on the stream
 * runs. */
static tfast_status
device_table(void **device, adamw_data *data, cudaStream_t stream)
{
    const size_t bytes = adamw_table_bytes(data->n_slots);
    cudaStreamCaptureStatus capture;
    tfast_status status;

    CUDA_TRY(cudaStreamIsCapturing(stream, &capture));
    if (capture != cudaStreamCaptureStatusNone) {
        return tfast_table_capture(device, &data->table, data->host, bytes, stream);
    }
    if (data->uploaded) {
        *device = data->table.device;
        return TFAST_OK;
    }
    status = tfast_table_upload(device, &data->table, data->host, bytes, stream);
    data->uploaded = status == TFAST_OK;
    return status;
}

template <adamw_mix MIX>
static tfast_status
launch(adamw_data *data, const tfast_adamw_args *args, adamw_table *table,
       cudaStream_t stream)
{
    int &full = data->full_grid[MIX];
    int blocks = (data->n_items + WARPS - 1) / WARPS;

    if (full == 0) {
        const tfast_relaxed_scope relaxed; /* loads the kernel, if nothing has yet */
        int multiprocessors, resident;
        CUDA_TRY(cudaDeviceGetAttribute(&multiprocessors,
                                        cudaDevAttrMultiProcessorCount, data->device));
        CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &resident, adamw_kernel<MIX>, THREADS, 0));
        full = multiprocessors * resident;
    }
    blocks = blocks < 1 ? 1 : blocks > full ? full : blocks;
    LAUNCH(adamw_kernel<MIX>, (unsigned)blocks, THREADS, 0, stream, *args, table,
           data->n_items);
    return tfast_cuda_status(cudaGetLastError(), "launch of adamw_kernel");
}

static tfast_status
run(adamw_data *data, const tfast_adamw_args *args)
{
    const cudaStream_t stream = (cudaStream_t)args->stream;
    void *device = nullptr;
    tfast_status status = refresh_rows(data, args);

    if (status == TFAST_OK) {
        status = device_table(&device, data, stream);
    }
    if (status != TFAST_OK) {
        return status;
    }
    adamw_table *table = (adamw_table *)device;
    switch (data->mix) {
    case ALL_F32:
        return launch<ALL_F32>(data, args, table, stream);
    case ALL_BF16:
        return launch<ALL_BF16>(data, args, table, stream);
    case NARROW:
        return launch<NARROW>(data, args, table, stream);
    default:
        return launch<WIDE>(data, args, table, stream);
    }
}

tfast_status
tfast_cuda_adamw(const tfast_adamw_args *args)
{
    tfast_workspace temporary = {};
    tfast_workspace *workspace = args->workspace;
    tfast_device_scope scope;
    adamw_data *data = nullptr;

    if (args->n_slots == 0) {
        return TFAST_OK;
    }
    tfast_status status = scope.enter(args->device.index);

    if (status == TFAST_OK) {
        status =
            open_workspace(&data, args, workspace != nullptr ? workspace : &temporary);
    }
    if (status == TFAST_OK) {
        status = run(data, args);
    }
    if (temporary.data != nullptr) { /* freeing waits for the kernel */
        tfast_cuda_adamw_clear(temporary.data);
    }
    return status;
}
