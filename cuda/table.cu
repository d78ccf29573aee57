/* Device-resident tables: see table.cuh. */
#include "table.cuh"

#include <stdlib.h>
#include <string.h>

/* Keeps memory until the table is cleared. Both pointers may be null. */
static tfast_status
keep(tfast_table *table, void *device, void *pinned, size_t bytes)
{
    tfast_table_kept *kept = (tfast_table_kept *)malloc(sizeof *kept);

    if (kept == nullptr) {
        return tfast_cuda_fail(TFAST_ENOMEM, "out of memory");
    }
    *kept = {table->kept, device, pinned, bytes};
    table->kept = kept;
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
grow_device(tfast_table *table, size_t bytes)
{
    const size_t capacity = grown(table->capacity, bytes);
    void *fresh;

    if (bytes <= table->capacity) {
        return TFAST_OK;
    }
    if (table->device != nullptr) {
        const tfast_status status = keep(table, table->device, nullptr, 0);
        if (status != TFAST_OK) {
            return status;
        }
        table->device = nullptr;
        table->capacity = 0;
    }
    CUDA_TRY(cudaMalloc(&fresh, capacity));
    table->device = fresh;
    table->capacity = capacity;
    return TFAST_OK;
}

/* The ring's next buffer, free to be written, of at least that many bytes. */
static tfast_status
next_pinned(tfast_table *table, size_t bytes)
{
    auto &buffer = table->ring[table->next];

    if (buffer.copied == nullptr) {
        CUDA_TRY(cudaEventCreateWithFlags(&buffer.copied, cudaEventDisableTiming));
    } else if (cudaEventQuery(buffer.copied) != cudaSuccess) {
        cudaGetLastError(); /* "not ready" is no error, but would be found as one */
        CUDA_TRY(cudaEventSynchronize(buffer.copied));
    }
    if (bytes > buffer.capacity) {
        const size_t capacity = grown(buffer.capacity, bytes);
        void *fresh;
        if (buffer.pinned != nullptr) {
            const tfast_status status = keep(table, nullptr, buffer.pinned, 0);
            if (status != TFAST_OK) {
                return status;
            }
            buffer.pinned = nullptr;
            buffer.capacity = 0;
        }
        CUDA_TRY(cudaHostAlloc(&fresh, capacity, cudaHostAllocDefault));
        buffer.pinned = fresh;
        buffer.capacity = capacity;
    }
    return TFAST_OK;
}

tfast_status
tfast_table_upload(tfast_table *table, const void *data, size_t bytes, size_t scratch,
                   cudaStream_t stream)
{
    tfast_status status = grow_device(table, bytes + scratch);

    if (status == TFAST_OK) {
        status = next_pinned(table, bytes);
    }
    if (status != TFAST_OK) {
        return status;
    }
    auto &buffer = table->ring[table->next];
    memcpy(buffer.pinned, data, bytes);
    CUDA_TRY(cudaMemcpyAsync(table->device, buffer.pinned, bytes,
                             cudaMemcpyHostToDevice, stream));
    CUDA_TRY(cudaEventRecord(buffer.copied, stream));
    table->next = (table->next + 1) % TFAST_TABLE_RING;
    return TFAST_OK;
}

/* The captured table that equals `data`, so that capturing again takes no more memory.
 */
static tfast_table_kept *
find_captured(const tfast_table *table, const void *data, size_t bytes)
{
    tfast_table_kept *kept = table->kept;

    while (kept != nullptr &&
           (kept->bytes != bytes || memcmp(kept->pinned, data, bytes) != 0)) {
        kept = kept->next;
    }
    return kept;
}

tfast_status
tfast_table_keep(tfast_table_kept **out, tfast_table *table, const void *data,
                 size_t bytes, size_t scratch)
{
    tfast_table_kept *kept = find_captured(table, data, bytes);

    if (kept == nullptr) {
        const tfast_status status = keep(table, nullptr, nullptr, 0);
        if (status != TFAST_OK) {
            return status;
        }
        kept = table->kept; /* whatever fails from here on, clear() frees it */
        CUDA_TRY(cudaMalloc(&kept->device, bytes + scratch));
        CUDA_TRY(cudaHostAlloc(&kept->pinned, bytes, cudaHostAllocDefault));
        memcpy(kept->pinned, data, bytes);
        kept->bytes = bytes;
    }
    *out = kept;
    return TFAST_OK;
}

void
tfast_table_clear(tfast_table *table)
{
    /* Errors are left alone: at the process's end the driver may be gone already.
     * cudaFree waits for the device, so it comes before the pinned memory that copies
     * read. */
    cudaFree(table->device);
    for (auto &buffer : table->ring) {
        cudaFreeHost(buffer.pinned);
        if (buffer.copied != nullptr) {
            cudaEventDestroy(buffer.copied);
        }
    }
    while (table->kept != nullptr) {
        tfast_table_kept *kept = table->kept;
        table->kept = kept->next;
        cudaFree(kept->device);
        cudaFreeHost(kept->pinned);
        free(kept);
    }
    cudaGetLastError();
    *table = {};
}
