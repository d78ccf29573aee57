/* The calls of the CUDA driver that trainfast makes, from its documentation
 * (https://docs.nvidia.com/cuda/cuda-driver-api/): libcuda.so.1 is opened at run time,
 * so neither its header nor a toolkit is needed to build. All are there since CUDA
 * 11.0. */
#ifndef TFAST_DRIVER_H
#define TFAST_DRIVER_H

#include <stddef.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3, /* in a forked child, too */
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_INVALID_PTX = 218,
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600
};

enum { /* CUdevice_attribute */
       CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
       CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
       CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
};
enum { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum { CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_STREAM_CAPTURE_STATUS_NONE = 0, CU_STREAM_CAPTURE_STATUS_ACTIVE = 1 };
enum { /* CUstreamCaptureMode */
       CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
       CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
       CU_STREAM_CAPTURE_MODE_RELAXED = 2
};

/* CALL(name, symbol in the library, parameters) */
#define TFAST_DRIVER_CALLS(CALL)                                                       \
    CALL(cuInit, cuInit, (unsigned flags))                                             \
    CALL(cuDriverGetVersion, cuDriverGetVersion, (int *version))                       \
    CALL(cuGetErrorString, cuGetErrorString, (CUresult error, const char **text))      \
    CALL(cuDeviceGetCount, cuDeviceGetCount, (int *count))                             \
    CALL(cuDeviceGet, cuDeviceGet, (CUdevice * device, int ordinal))                   \
    CALL(cuDeviceGetAttribute, cuDeviceGetAttribute,                                   \
         (int *value, int attribute, CUdevice device))                                 \
    CALL(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain,                           \
         (CUcontext * context, CUdevice device))                                       \
    CALL(cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext * context))                      \
    CALL(cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext context))                        \
    CALL(cuCtxGetDevice, cuCtxGetDevice, (CUdevice * device))                          \
    CALL(cuModuleLoadData, cuModuleLoadData, (CUmodule * module, const void *image))   \
    CALL(cuModuleGetFunction, cuModuleGetFunction,                                     \
         (CUfunction * function, CUmodule module, const char *name))                   \
    CALL(cuFuncSetAttribute, cuFuncSetAttribute,                                       \
         (CUfunction function, int attribute, int value))                              \
    CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                  \
         cuOccupancyMaxActiveBlocksPerMultiprocessor,                                  \
         (int *blocks, CUfunction function, int threads, size_t shared))               \
    CALL(cuLaunchKernel, cuLaunchKernel,                                               \
         (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,      \
          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,       \
          CUstream stream, void **parameters, void **extra))                           \
    CALL(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr * pointer, size_t bytes))             \
    CALL(cuMemFree, cuMemFree_v2, (CUdeviceptr pointer))                               \
    CALL(cuMemAllocHost, cuMemAllocHost_v2, (void **pointer, size_t bytes))            \
    CALL(cuMemFreeHost, cuMemFreeHost, (void *pointer))                                \
    CALL(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                      \
         (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))            \
    CALL(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                      \
         (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                  \
    CALL(cuEventCreate, cuEventCreate, (CUevent * event, unsigned flags))              \
    CALL(cuEventDestroy, cuEventDestroy_v2, (CUevent event))                           \
    CALL(cuEventRecord, cuEventRecord, (CUevent event, CUstream stream))               \
    CALL(cuEventQuery, cuEventQuery, (CUevent event))                                  \
    CALL(cuEventSynchronize, cuEventSynchronize, (CUevent event))                      \
    CALL(cuStreamSynchronize, cuStreamSynchronize, (CUstream stream))                  \
    CALL(cuStreamIsCapturing, cuStreamIsCapturing, (CUstream stream, int *status))     \
    CALL(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode,         \
         (int *mode))

#define TFAST_DRIVER_POINTER(name, symbol, parameters) CUresult(*name) parameters;
typedef struct {
    TFAST_DRIVER_CALLS(TFAST_DRIVER_POINTER)
} tfast_driver;

#endif
