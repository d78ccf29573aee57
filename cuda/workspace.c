/* What workspaces hold: see workspace.h. */
#include "workspace.h"

#include <stdlib.h>
#include <string.h>

/* ---- Memory ---------------------------------------------------------------------- */

/* Keeps memory until the end. */
static tfast_status
keep(tfast_held *held, CUdeviceptr device, void *pinned)
{
    tfast_held_kept *kept = malloc(sizeof *kept);

    if (kept == NULL) {
        return tfast_cuda_fail(TFAST_ENOMEM, "out of memory");
    }
    *kept = (tfast_held_kept){held->kept, device, pinned, 0};
    held->kept = kept;
    return TFAST_OK;
}

/* Growing by half bounds what is outgrown, but not freed, to twice what is used. */
static size_t
grown(size_t capacity, size_t bytes)
{
    const size_t more = capacity + capacity / 2;

    return more > bytes ? more : bytes;
}

/* Freeing would wait for the device, so what is too small is only put aside. */
static tfast_status
grow_device(tfast_held *held, size_t bytes)
{
    const size_t capacity = grown(held->capacity, bytes);
    tfast_status status;

    if (bytes <= held->capacity) {
        return TFAST_OK;
    }
    if (held->table != 0) {
        status = keep(held, held->table, NULL);
        if (status != TFAST_OK) {
            return status;
        }
        held->table = 0;
        held->capacity = 0;
    }
    CU_TRY(cuMemAlloc, (&held->table, capacity));
    held->capacity = capacity;
    return TFAST_OK;
}

static tfast_status
grow_pinned(tfast_held *held, struct tfast_held_pinned *buffer, size_t bytes)
{
    const size_t capacity = grown(buffer->capacity, bytes);
    tfast_status status;

    if (bytes <= buffer->capacity) {
        return TFAST_OK;
    }
    if (buffer->data != NULL) {
        status = keep(held, 0, buffer->data);
        if (status != TFAST_OK) {
            return status;
        }
        buffer->data = NULL;
        buffer->capacity = 0;
    }
    CU_TRY(cuMemAllocHost, (&buffer->data, capacity));
    buffer->capacity = capacity;
    return TFAST_OK;
}

/* ---- Uploads --------------------------------------------------------------------- */

/* Copies the host's table, with room for `scratch` bytes behind it, in the stream's
 * order, without synchronising unless TFAST_HELD_RING copies are in flight. */
static tfast_status
upload(tfast_held *held, size_t bytes, size_t scratch)
{
    struct tfast_held_pinned *buffer = &held->ring[held->next_pinned];
    tfast_status status = grow_device(held, bytes + scratch);

    if (status != TFAST_OK) {
        return status;
    }
    if (buffer->copied == NULL) {
        CU_TRY(cuEventCreate, (&buffer->copied, CU_EVENT_DISABLE_TIMING));
    } else if (tfast_cuda_driver.cuEventQuery(buffer->copied) != CUDA_SUCCESS) {
        CU_TRY(cuEventSynchronize, (buffer->copied));
    }
    status = grow_pinned(held, buffer, bytes);
    if (status != TFAST_OK) {
        return status;
    }
    memcpy(buffer->data, held->host, bytes);
    CU_TRY(cuMemcpyHtoDAsync, (held->table, buffer->data, bytes, held->stream));
    CU_TRY(cuEventRecord, (buffer->copied, held->stream));
    held->next_pinned = (held->next_pinned + 1) % TFAST_HELD_RING;
    held->uploaded = true;
    return TFAST_OK;
}

/* For a stream that captures: what a node of its graph can copy the table from, which
 * is never written again, and to, which no other call writes. A table that was captured
 * before takes no more memory. The same bytes come with the same scratch. */
static tfast_status
keep_captured(tfast_held_kept **out, tfast_held *held, size_t bytes, size_t scratch)
{
    tfast_held_kept *kept = held->kept;

    while (kept != NULL &&
           (kept->bytes != bytes || memcmp(kept->pinned, held->host, bytes) != 0)) {
        kept = kept->next;
    }
    if (kept == NULL) {
        const tfast_status status = keep(held, 0, NULL);
        if (status != TFAST_OK) {
            return status;
        }
        kept = held->kept; /* whatever fails from here on, clear() frees it */
        CU_TRY(cuMemAlloc, (&kept->device, bytes + scratch));
        CU_TRY(cuMemAllocHost, (&kept->pinned, bytes));
        memcpy(kept->pinned, held->host, bytes);
        kept->bytes = bytes;
    }
    *out = kept;
    return TFAST_OK;
}

/* Uploads the table, or where the stream captures, sets *captured to what its graph is
 * to upload. */
static tfast_status
prepare(tfast_held_kept **captured, tfast_held *held, size_t bytes, size_t scratch)
{
    int capture;

    *captured = NULL;
    CU_TRY(cuStreamIsCapturing, (held->stream, &capture));
    if (capture != CU_STREAM_CAPTURE_STATUS_NONE && held->temporary) {
        return tfast_cuda_fail(TFAST_EINVAL,
                               "workspace must be given while the stream captures: "
                               "the graph reads its memory, got none");
    }
    if (capture != CU_STREAM_CAPTURE_STATUS_NONE) {
        return keep_captured(captured, held, bytes, scratch);
    }
    return held->uploaded ? TFAST_OK : upload(held, bytes, scratch);
}

tfast_status
tfast_held_prepare(tfast_held *held, size_t bytes, size_t scratch)
{
    tfast_held_kept *captured;

    return prepare(&captured, held, bytes, scratch);
}

tfast_status
tfast_held_place(void **device, tfast_held *held, size_t bytes, size_t scratch)
{
    tfast_held_kept *captured;
    const tfast_status status = prepare(&captured, held, bytes, scratch);

    if (status != TFAST_OK) {
        return status;
    }
    if (captured != NULL) {
        CU_TRY(cuMemcpyHtoDAsync,
               (captured->device, captured->pinned, bytes, held->stream));
    }
    *device = (void *)(uintptr_t)(captured != NULL ? captured->device : held->table);
    return TFAST_OK;
}

/* ---- Life ------------------------------------------------------------------------ */

tfast_status
tfast_held_open(tfast_held **out, tfast_workspace *workspace, tfast_held_kind kind,
                size_t bytes, int device, void *stream)
{
    tfast_held *held = workspace == NULL ? NULL : workspace->data;

    while (held != NULL &&
           (held->kind != kind || held->device != device || held->stream != stream)) {
        held = held->next;
    }
    if (held == NULL) {
        held = calloc(1, bytes);
        if (held == NULL) {
            return tfast_cuda_fail(TFAST_ENOMEM, "out of memory");
        }
        held->kind = kind;
        held->device = device;
        held->stream = stream;
        held->temporary = workspace == NULL;
        if (workspace != NULL) {
            held->next = workspace->data;
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
    if (held != NULL && held->temporary) {
        tfast_held_clear(held); /* waits for the kernel */
    }
}

tfast_status
tfast_held_resize(tfast_held *held, size_t bytes)
{
    held->uploaded = false;
    if (bytes > held->host_capacity) {
        free(held->host);
        held->host = malloc(bytes);
        held->host_capacity = held->host == NULL ? 0 : bytes;
        if (held->host == NULL) {
            return tfast_cuda_fail(TFAST_ENOMEM, "out of memory for a table");
        }
    }
    return TFAST_OK;
}

static void
free_device(CUdeviceptr device)
{
    if (device != 0) {
        tfast_cuda_driver.cuMemFree(device);
    }
}

static void
free_pinned(void *pinned)
{
    if (pinned != NULL) {
        tfast_cuda_driver.cuMemFreeHost(pinned);
    }
}

/* Errors are left alone: at the process's end the driver may be gone already. cuMemFree
 * waits for the device, so it comes before the pinned memory that copies read. */
static void
clear_driver_memory(tfast_held *held)
{
    free_device(held->table);
    for (int i = 0; i < TFAST_HELD_RING; i++) {
        free_pinned(held->ring[i].data);
        if (held->ring[i].copied != NULL) {
            tfast_cuda_driver.cuEventDestroy(held->ring[i].copied);
        }
    }
    for (tfast_held_kept *kept = held->kept; kept != NULL; kept = kept->next) {
        free_device(kept->device);
        free_pinned(kept->pinned);
    }
}

void
tfast_held_clear(void *data)
{
    tfast_held *held = data;

    while (held != NULL) {
        tfast_held *next = held->next;
        tfast_device_scope scope;
        if (tfast_enter_device(&scope, held->device) == TFAST_OK) {
            clear_driver_memory(held);
        }
        tfast_leave_device(&scope);
        while (held->kept != NULL) {
            tfast_held_kept *kept = held->kept;
            held->kept = kept->next;
            free(kept);
        }
        free(held->host);
        free(held);
        held = next;
    }
}
