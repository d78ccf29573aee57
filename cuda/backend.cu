/* The table that this library exports, and what its kernels' hosts share. Opened by
 * csrc/backend.c when the first CUDA array is seen, never when the module is imported.
 */
#include "common.cuh"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

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

static pid_t opened_by; /* the process that first asked the driver */

tfast_status
tfast_cuda_status(cudaError_t error, const char *call)
{
    if (error == cudaSuccess) {
        return TFAST_OK;
    }
    cudaGetLastError(); /* reported here, so the next check must not see it again */
    switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction: /* the same, asked about a kernel */
    case cudaErrorUnsupportedPtxVersion: /* and PTX that the driver cannot translate */
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
        return fail_without_code(call);
    case cudaErrorMemoryAllocation: /* in the words that torch and Lightning look for */
        return tfast_cuda_fail(TFAST_ECUDA,
                               "CUDA out of memory. %s: what torch keeps unused, "
                               "torch.cuda.empty_cache() gives back",
                               call);
    case cudaErrorInitializationError:
        if (getpid() != opened_by) {
            return tfast_cuda_fail(TFAST_ECUDA,
                                   "%s: CUDA cannot be used in a forked child of a "
                                   "process that has used it; start it by spawn",
                                   call);
        }
        break;
    default:
        break;
    }
    return tfast_cuda_fail(TFAST_ECUDA, "%s: %s", call, cudaGetErrorString(error));
}

/* ---- Can it run here ------------------------------------------------------------- */

static char reason[256]; /* empty: it can */
static pthread_once_t looked = PTHREAD_ONCE_INIT;

/* The driver's calls cuCtxGetCurrent, cuCtxSetCurrent and cuCtxGetDevice, which return
 * 0 where they succeed. What a thread has current the driver alone knows: torch brings
 * a runtime of its own beside the one in this library. */
static struct {
    int (*get_context)(void **context);
    int (*set_context)(void *context);
    int (*get_device)(int *device); /* of the current context */
} thread_calls;

static void *
find_driver_call(const char *name)
{
#ifdef __CUDACC__
    /* the runtime has opened it */
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    return library == nullptr ? nullptr : dlsym(library, name);
#else
    return simt_driver_call(name);
#endif
}

static void
find_thread_calls()
{
    *(void **)&thread_calls.get_context = find_driver_call("cuCtxGetCurrent");
    *(void **)&thread_calls.set_context = find_driver_call("cuCtxSetCurrent");
    *(void **)&thread_calls.get_device = find_driver_call("cuCtxGetDevice");
    if (thread_calls.get_context == nullptr || thread_calls.set_context == nullptr ||
        thread_calls.get_device == nullptr) {
        snprintf(reason, sizeof reason, "the CUDA driver lacks cuCtxGetCurrent");
    }
}

static void
look_for_a_gpu()
{
    int gpus = 0, driver = 0, runtime = 0;
    const cudaError_t error = cudaGetDeviceCount(&gpus);

    opened_by = getpid();
    cudaGetLastError();
    if (error == cudaSuccess && gpus > 0) {
        find_thread_calls();
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
        /* The oldest driver of a major version: its "minor version compatibility". */
        snprintf(reason, sizeof reason,
                 "driver too old: it supports CUDA %d.%d, this library was built with "
                 "%d.%d; install driver %d or newer",
                 driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10,
                 runtime >= 13000 ? 580 : 525);
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

/* ---- What a thread has current --------------------------------------------------- */

/* The way back is not by cudaSetDevice(): that would make a context on a GPU that was
 * current without one, and nobody may want it there. */
tfast_status
tfast_device_scope::enter(int device)
{
    const char *why = unusable();
    int current = -1;

    if (why != nullptr) {
        return tfast_cuda_fail(TFAST_EUNSUPPORTED, "CUDA cannot be used: %s", why);
    }
    if (thread_calls.get_context(&before_) != 0 || before_ == nullptr ||
        thread_calls.get_device(&current) != 0) {
        current = -1;
    }
    if (current != device) {
        CUDA_TRY(cudaSetDevice(device));
        moved_ = true;
    }
    CUDA_TRY(cudaThreadExchangeStreamCaptureMode(&mode_));
    relaxed_ = true;
    return TFAST_OK;
}

tfast_device_scope::~tfast_device_scope()
{
    if (relaxed_) {
        cudaThreadExchangeStreamCaptureMode(&mode_);
    }
    if (moved_) {
        thread_calls.set_context(before_);
    }
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
    tfast_cuda_adamw_prepare,
    tfast_cuda_amp_grads,
    tfast_cuda_amp_update,
    tfast_cuda_attention,
    tfast_cuda_attention_backward,
    tfast_cuda_attention_scratch,
    tfast_cuda_gemm,
    nullptr, /* neighbours_count: points on a GPU are searched on the CPU */
    nullptr, /* trajectory: on the CPU only */
};

extern "C" __attribute__((visibility("default"))) const tfast_backend *
tfast_library_open(uint32_t abi, tfast_fail_function fail)
{
    if (abi != TFAST_ABI) {
        return nullptr;
    }
    tfast_cuda_fail = fail;
    return &tfast_cuda_backend;
}
