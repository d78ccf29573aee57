/* The calls of the CUDA runtime that cuda/ uses, on the CPU: host pointers are device
 * pointers, and work of all streams runs in the order of its calls. Synchronising
 * calls, allocations, copies and launches are counted, and asynchrony is modelled where
 * a mistake would hide: a copy reads its source only when the next launch or
 * synchronisation makes it, and while a capture is on, copies and launches are only
 * recorded, and what a capture forbids aborts. */
#ifndef TFAST_SIMT_RUNTIME_H
#define TFAST_SIMT_RUNTIME_H

#include <cstddef>
#include <cstdint>
#include <functional>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorJitCompilerNotFound = 221,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorJitCompilationDisabled = 223,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600
} cudaError_t;

typedef enum { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 } cudaMemcpyKind;
typedef enum {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1
} cudaStreamCaptureStatus;
typedef enum {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
} cudaStreamCaptureMode;
typedef enum {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
} cudaDeviceAttr;
typedef enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 } cudaFuncAttribute;

struct cudaFuncAttributes {
    int ptxVersion;
};

enum { cudaEventDisableTiming = 2, cudaHostAllocDefault = 0 };

typedef struct simt_stream *cudaStream_t;
typedef struct simt_event *cudaEvent_t;

cudaError_t cudaGetLastError();
const char *cudaGetErrorString(cudaError_t error);
/* TRAINFAST_SIMT_DRIVER, such as 12080, is the driver's version, 0 for none; by default
 * the runtime's own, 13000. */
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);

/* There are two devices. A thread has a context current or, at first, none; a call that
 * needs one then makes that of the device last set current, by default the first's.
 * Setting a device makes its context current, too. After a fork only the parent can. */
enum { SIMT_DEVICES = 2 };
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
/* cuCtxGetCurrent, cuCtxSetCurrent or cuCtxGetDevice of the driver. */
void *simt_driver_call(const char *name);

/* Two multiprocessors of what TRAINFAST_SIMT_DEVICE says, such as 75; 80 by default. */
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);

cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode);

/* At the first call about a kernel, which loads it: as unsafe as an allocation. */
void simt_load_kernel(const void *kernel);

/* Two blocks on each of two multiprocessors: small enough that tests reach a second
 * round. */
template <typename Kernel>
cudaError_t
cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel kernel, int, size_t)
{
    simt_load_kernel(reinterpret_cast<const void *>(kernel));
    *blocks = 2;
    return cudaSuccess;
}

/* Kernels are for what TRAINFAST_SIMT_PTX says, 80 by default. */
cudaError_t simt_function_attributes(cudaFuncAttributes *attributes);

template <typename Kernel>
cudaError_t
cudaFuncGetAttributes(cudaFuncAttributes *attributes, Kernel kernel)
{
    simt_load_kernel(reinterpret_cast<const void *>(kernel));
    return simt_function_attributes(attributes);
}

cudaError_t simt_set_shared(const void *kernel, int bytes);

template <typename Kernel>
cudaError_t
cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute, int bytes)
{
    return simt_set_shared(reinterpret_cast<const void *>(kernel), bytes);
}

namespace simt {

/* Runs the kernel that `body` calls for every thread, or records it during a capture.
 */
void launch(dim3 grid, dim3 block, size_t dynamic, cudaStream_t stream,
            std::function<void()> body);

/* In fibers.cpp: runs it now. */
void run_grid(dim3 grid, dim3 block, size_t dynamic, const std::function<void()> &body);

} // namespace simt

/* For tests, exported from the library. */
extern "C" {
void
tfast_simt_counts(int64_t counts[3]); /* synchronising calls, allocations, launches */
int64_t tfast_simt_copies();
void tfast_simt_reset(); /* counts from zero */
/* 8 x 8 matrices that ldmatrix read, and the wavefronts it took: never reset. */
void tfast_simt_matrices(uint64_t counts[2]);
void tfast_simt_seed(uint64_t seed);
void tfast_simt_fail_allocations(int64_t after); /* n more succeed; negative: all do */
void tfast_simt_fail_launches(int error); /* with this cudaError_t; 0: they succeed */
/* Grids have at most so many blocks, as where a kernel loops over what is past its
 * grid's limit; 0: any number. */
void tfast_simt_most_blocks(unsigned blocks);
/* The device of the calling thread's current context, -1 for none. */
int tfast_simt_current();
void tfast_simt_set_current(int device);
int tfast_simt_contexts(); /* bit d: device d has a context */
/* A stream of that device; null and what these do not name are the current one's. */
void *tfast_simt_stream(int device);
void tfast_simt_capture_begin();
void tfast_simt_capture_end();
void tfast_simt_replay(); /* what was captured last */
}

#endif
