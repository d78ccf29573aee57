/* The table that this library exports, and what its kernels' hosts share. Opened by
 * csrc/backend.c when the first CUDA array is seen, never when the module is imported.
 */
#include "common.cuh"

#include <pthread.h>
#include <stdio.h>

tfast_fail_function tfast_cuda_fail;

/* The current GPU is of an architecture that this library holds no code for. */
static tfast_status
fail_without_code(const char *call)
{
    int device = 0, major = 0, minor = 0;

    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (major * 10 + minor < 75) {
        return tfast_cuda_fail(TFAST_ECUDA,
                               "%s: the GPU must be sm_75 or newer, got sm_%d%d", call,
                               major, minor);
    }
    return tfast_cuda_fail(
        TFAST_ECUDA,
        "%s: this library was not built for the GPU, an sm_%d%d; in "
        "trainfast's sources, TRAINFAST_CUDA_ARCHS=%d%d pip install . "
        "builds one that is",
        call, major, minor, major, minor);
}

tfast_status
tfast_cuda_status(cudaError_t error, const char *call)
{
    if (error == cudaSuccess) {
        return TFAST_OK;
    }
    cudaGetLastError(); /* reported here, so the next check must not see it again */
    if (error == cudaErrorNoKernelImageForDevice) {
        return fail_without_code(call);
    }
    return tfast_cuda_fail(TFAST_ECUDA, "%s: %s", call, cudaGetErrorString(error));
}

tfast_status
tfast_device_scope::enter(int device)
{
    int before;

    CUDA_TRY(cudaGetDevice(&before));
    if (before != device) {
        CUDA_TRY(cudaSetDevice(device));
        before_ = before;
    }
    return TFAST_OK;
}

tfast_device_scope::~tfast_device_scope()
{
    if (before_ >= 0) {
        cudaSetDevice(before_); /* it was current before, so it can be made so again */
    }
}

/* ---- Can it run here ------------------------------------------------------------- */

static char reason[256]; /* empty: it can */
static pthread_once_t looked = PTHREAD_ONCE_INIT;

static void
look_for_a_gpu()
{
    int gpus = 0, driver = 0, runtime = 0;
    const cudaError_t error = cudaGetDeviceCount(&gpus);

    cudaGetLastError();
    if (error == cudaSuccess && gpus > 0) {
        return;
    }
    if (error == cudaSuccess || error == cudaErrorNoDevice) {
        snprintf(reason, sizeof reason, "no GPU is visible");
        return;
    }
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) {
        snprintf(reason, sizeof reason, "no CUDA driver is installed");
    } else if (error == cudaErrorInsufficientDriver) {
        snprintf(
            reason, sizeof reason,
            "driver too old: it supports CUDA %d.%d, this library was built with %d.%d",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    } else {
        snprintf(reason, sizeof reason, "cudaGetDeviceCount: %s",
                 cudaGetErrorString(error));
    }
}

/* Asked once a process: a driver does not appear while it runs. */
static const char *
unusable()
{
    pthread_once(&looked, look_for_a_gpu);
    return reason[0] == '\0' ? nullptr : reason;
}

/* ---- The table ------------------------------------------------------------------- */

#ifdef __CUDACC__
static const char NAME[] = "cuda";
enum { DEVICE_TYPE = TFAST_CUDA };
#else /* the SIMT runner: the host's memory is its device memory */
static const char NAME[] = "simt";
enum { DEVICE_TYPE = TFAST_CPU };
#endif

const tfast_backend tfast_cuda_backend = {
    TFAST_ABI,
    NAME,
    DEVICE_TYPE,
    unusable,
    tfast_held_clear,
    tfast_cuda_adamw,
    tfast_cuda_amp_grads,
    tfast_cuda_amp_update,
    tfast_cuda_attention,
    tfast_cuda_attention_backward,
    tfast_cuda_attention_scratch,
    tfast_cuda_gemm,
    nullptr, /* the graph cache's loops are the CPU's */
};

extern "C" __attribute__((visibility("default"))) const tfast_backend *
tfast_cuda_open(uint32_t abi, tfast_fail_function fail)
{
    if (abi != TFAST_ABI) {
        return nullptr;
    }
    tfast_cuda_fail = fail;
    return &tfast_cuda_backend;
}
