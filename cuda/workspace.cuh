/* What a tfast_workspace holds for one kind of call: the call's table, on the host and
 * in device memory, kept as long as the arrays stay the same, so that a warm call is
 * one launch. */
#ifndef TFAST_WORKSPACE_CUH
#define TFAST_WORKSPACE_CUH

#include "table.cuh"

enum tfast_held_kind { TFAST_HELD_ADAMW, TFAST_HELD_AMP };

/* How the data of every kind begins, and all of it that needs to be freed. A workspace
 * has a list of them, one for each kind, device and stream: a table that two streams
 * shared could be read before its upload has ended, or overwritten while it is read. */
struct tfast_held {
    tfast_held *next;
    tfast_held_kind kind;
    int device;
    cudaStream_t stream;
    tfast_table table;
    void *host;      /* what the next call's table must be */
    size_t capacity; /* bytes of it */
    bool uploaded;   /* the device's is the same */
    bool temporary;  /* of a call without a workspace */
};

/* The workspace's data of this kind, device and stream, otherwise that many fresh bytes
 * of zeros behind a tfast_held. Without a workspace (null) they last until
 * tfast_held_close(). */
tfast_status tfast_held_open(tfast_held **held, tfast_workspace *workspace,
                             tfast_held_kind kind, size_t bytes, int device,
                             cudaStream_t stream);

/* Ends the call. Null where nothing was opened. */
void tfast_held_close(tfast_held *held);

/* Makes `host` that large, for a table that is about to change. */
tfast_status tfast_held_resize(tfast_held *held, size_t bytes);

/* Where the table lies in device memory by the time a kernel launched next on the
 * stream runs, with `scratch` bytes behind it. */
tfast_status tfast_held_place(void **device, tfast_held *held, size_t bytes,
                              size_t scratch, cudaStream_t stream);

/* Takes the memory that the same tfast_held_place() will need. */
tfast_status tfast_held_prepare(tfast_held *held, size_t bytes, size_t scratch,
                                cudaStream_t stream);

/* Asks once how many blocks of a kernel fill the device: `*blocks` is 0 before. */
template <typename KERNEL>
static inline tfast_status
tfast_full_grid(int *blocks, KERNEL kernel, int threads, int device)
{
    if (*blocks == 0) {
        int multiprocessors, resident;
        CUDA_TRY(cudaDeviceGetAttribute(&multiprocessors,
                                        cudaDevAttrMultiProcessorCount, device));
        CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel,
                                                               threads, 0));
        *blocks = multiprocessors * resident;
    }
    return TFAST_OK;
}

#endif
