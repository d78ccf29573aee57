/* What workspaces hold: see workspace.cuh. */
#include "workspace.cuh"

#include <stdlib.h>

void
tfast_held_clear(void *data)
{
    tfast_held *held = (tfast_held *)data;

    while (held != nullptr) {
        tfast_held *next = held->next;
        tfast_device_scope scope;

        if (scope.enter(held->device) == TFAST_OK) {
            tfast_table_clear(&held->table);
        }
        free(held->host);
        free(held);
        held = next;
    }
}

tfast_status
tfast_held_open(tfast_held **out, tfast_workspace *workspace, tfast_held_kind kind,
                size_t bytes, int device, cudaStream_t stream)
{
    tfast_held *held = workspace == nullptr ? nullptr : (tfast_held *)workspace->data;

    while (held != nullptr &&
           (held->kind != kind || held->device != device || held->stream != stream)) {
        held = held->next;
    }
    if (held == nullptr) {
        held = (tfast_held *)calloc(1, bytes);
        if (held == nullptr) {
            return tfast_cuda_fail(TFAST_ENOMEM, "out of memory");
        }
        held->kind = kind;
        held->device = device;
        held->stream = stream;
        held->temporary = workspace == nullptr;
        if (workspace != nullptr) {
            held->next = (tfast_held *)workspace->data;
            workspace->backend = &tfast_cuda_backend;
            workspace->data = held;
        }
    }
    *out = held;
    return TFAST_OK;
}

void
tfast_held_close(tfast_held *held)
{
    if (held != nullptr && held->temporary) {
        tfast_held_clear(held); /* waits for the kernel */
    }
}

tfast_status
tfast_held_resize(tfast_held *held, size_t bytes)
{
    held->uploaded = false;
    if (bytes > held->capacity) {
        free(held->host);
        held->host = malloc(bytes);
        held->capacity = held->host == nullptr ? 0 : bytes;
        if (held->host == nullptr) {
            return tfast_cuda_fail(TFAST_ENOMEM, "out of memory for a table");
        }
    }
    return TFAST_OK;
}

/* Uploads the table, or where the stream captures, sets *captured to what its graph is
 * to upload. */
static tfast_status
prepare(tfast_table_kept **captured, tfast_held *held, size_t bytes, size_t scratch,
        cudaStream_t stream)
{
    cudaStreamCaptureStatus capture;
    tfast_status status;

    *captured = nullptr;
    CUDA_TRY(cudaStreamIsCapturing(stream, &capture));
    if (capture != cudaStreamCaptureStatusNone && held->temporary) {
        return tfast_cuda_fail(TFAST_EINVAL,
                               "workspace must be given while the stream captures: "
                               "the graph reads its memory, got none");
    }
    if (capture != cudaStreamCaptureStatusNone) {
        return tfast_table_keep(captured, &held->table, held->host, bytes, scratch);
    }
    if (held->uploaded) {
        return TFAST_OK;
    }
    status = tfast_table_upload(&held->table, held->host, bytes, scratch, stream);
    held->uploaded = status == TFAST_OK;
    return status;
}

tfast_status
tfast_held_prepare(tfast_held *held, size_t bytes, size_t scratch, cudaStream_t stream)
{
    tfast_table_kept *captured;

    return prepare(&captured, held, bytes, scratch, stream);
}

tfast_status
tfast_held_place(void **device, tfast_held *held, size_t bytes, size_t scratch,
                 cudaStream_t stream)
{
    tfast_table_kept *captured;
    const tfast_status status = prepare(&captured, held, bytes, scratch, stream);

    if (status == TFAST_OK && captured != nullptr) {
        CUDA_TRY(cudaMemcpyAsync(captured->device, captured->pinned, bytes,
                                 cudaMemcpyHostToDevice, stream));
        *device = captured->device;
    } else if (status == TFAST_OK) {
        *device = held->table.device;
    }
    return status;
}
