/* The CUDA driver: opened when the first CUDA array is seen, asked whether it can run
 * here, and made to use a device. What a thread has current the driver alone knows:
 * torch brings the CUDA runtime with it, this library does without. */
#include "host.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

/* Any driver of CUDA 12 loads code that was compiled for its major version: NVIDIA's
 * "minor version compatibility". */
enum { OLDEST_VERSION = 12000, OLDEST_DRIVER = 525 };

enum { MAX_DEVICES = 64 };

tfast_fail_function tfast_cuda_fail;
tfast_driver tfast_cuda_driver;

static pid_t opened_by; /* the process that first asked the driver */

/* ---- Can it run here ------------------------------------------------------------- */

static char reason[256]; /* empty: it can */

#ifdef TFAST_SIMT /* tests/simt: the runner has twins of the driver's calls */
void *simt_driver_call(const char *symbol);

static bool
open_library(void **library)
{
    *library = NULL;
    return simt_driver_call("cuInit") != NULL;
}

static void *
find_symbol(void *library, const char *symbol)
{
    (void)library;
    return simt_driver_call(symbol);
}
#else
static bool
open_library(void **library)
{
    *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return *library != NULL;
}

static void *
find_symbol(void *library, const char *symbol)
{
    return dlsym(library, symbol);
}
#endif

/* The first symbol that the driver lacks, or NULL. */
static const char *
find_calls(void *library)
{
#define FIND(name, symbol, parameters)                                                 \
    *(void **)&tfast_cuda_driver.name = find_symbol(library, #symbol);                 \
    if (tfast_cuda_driver.name == NULL) {                                              \
        return #symbol;                                                                \
    }
    TFAST_DRIVER_CALLS(FIND)
#undef FIND
    return NULL;
}

static const char *
text_of(CUresult error)
{
    const char *text = NULL;

    tfast_cuda_driver.cuGetErrorString(error, &text);
    return text != NULL ? text : "unknown error";
}

static void
look_for_a_gpu(void)
{
    void *library;
    const char *missing;
    int version = 0, devices = 0;
    CUresult error;

    opened_by = getpid();
    if (!open_library(&library)) {
        snprintf(reason, sizeof reason, "no CUDA driver is installed");
        return;
    }
    missing = find_calls(library);
    if (missing != NULL) {
        snprintf(reason, sizeof reason,
                 "driver too old: it lacks %s; install driver %d or newer", missing,
                 OLDEST_DRIVER);
        return;
    }
    error = tfast_cuda_driver.cuInit(0);
    if (error == CUDA_SUCCESS) {
        error = tfast_cuda_driver.cuDeviceGetCount(&devices);
    }
    if (error == CUDA_ERROR_NO_DEVICE || (error == CUDA_SUCCESS && devices == 0)) {
        snprintf(reason, sizeof reason, "no GPU is visible");
        return;
    }
    if (error != CUDA_SUCCESS) {
        snprintf(reason, sizeof reason, "cuInit: %.200s", text_of(error));
        return;
    }
    tfast_cuda_driver.cuDriverGetVersion(&version);
    if (version < OLDEST_VERSION) {
        snprintf(reason, sizeof reason,
                 "driver too old: it supports CUDA %d.%d, this library needs %d.%d; "
                 "install driver %d or newer",
                 version / 1000, version % 1000 / 10, OLDEST_VERSION / 1000,
                 OLDEST_VERSION % 1000 / 10, OLDEST_DRIVER);
    }
}

/* Asked once a process: a driver does not appear while it runs. */
const char *
tfast_cuda_unusable(void)
{
    static pthread_once_t looked = PTHREAD_ONCE_INIT;

    pthread_once(&looked, look_for_a_gpu);
    return reason[0] == '\0' ? NULL : reason;
}

/* ---- Errors ---------------------------------------------------------------------- */

tfast_status
tfast_cuda_status(CUresult error, const char *call)
{
    if (error == CUDA_SUCCESS) {
        return TFAST_OK;
    }
    if (error == CUDA_ERROR_OUT_OF_MEMORY) {
        /* in the words that torch and Lightning look for */
        return tfast_cuda_fail(TFAST_ECUDA,
                               "CUDA out of memory. %s: what torch keeps unused, "
                               "torch.cuda.empty_cache() gives back",
                               call);
    }
    if (error == CUDA_ERROR_NOT_INITIALIZED && getpid() != opened_by) {
        return tfast_cuda_fail(TFAST_ECUDA,
                               "%s: CUDA cannot be used in a forked child of a process "
                               "that has used it; start it by spawn",
                               call);
    }
    return tfast_cuda_fail(TFAST_ECUDA, "%s: %s", call, text_of(error));
}

/* ---- What a thread has current --------------------------------------------------- */

/* The device's primary context, which torch uses, too. It is retained once and never
 * released, as the CUDA runtime does. */
static tfast_status
find_primary(CUcontext *context, int device)
{
    static CUcontext retained[MAX_DEVICES];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    tfast_status status = TFAST_OK;
    CUdevice handle;

    CU_TRY(cuDeviceGet, (&handle, device));
    if (device >= MAX_DEVICES) {
        return tfast_cuda_fail(TFAST_ECUDA, "device must be below %d, got %d",
                               MAX_DEVICES, device);
    }
    pthread_mutex_lock(&lock);
    if (retained[device] == NULL) {
        status = tfast_cuda_status(
            tfast_cuda_driver.cuDevicePrimaryCtxRetain(&retained[device], handle),
            "cuDevicePrimaryCtxRetain");
    }
    *context = retained[device];
    pthread_mutex_unlock(&lock);
    return status;
}

tfast_status
tfast_enter_device(tfast_device_scope *scope, int device)
{
    const char *why = tfast_cuda_unusable();
    int current = -1;

    *scope = (tfast_device_scope){.mode = CU_STREAM_CAPTURE_MODE_RELAXED};
    if (why != NULL) {
        return tfast_cuda_fail(TFAST_EUNSUPPORTED, "CUDA cannot be used: %s", why);
    }
    CU_TRY(cuCtxGetCurrent, (&scope->before));
    if (scope->before != NULL) {
        CU_TRY(cuCtxGetDevice, (&current));
    }
    if (current != device) {
        CUcontext context = NULL;
        const tfast_status status = find_primary(&context, device);
        if (status != TFAST_OK) {
            return status;
        }
        CU_TRY(cuCtxSetCurrent, (context));
        scope->moved = true;
    }
    CU_TRY(cuThreadExchangeStreamCaptureMode, (&scope->mode));
    scope->relaxed = true;
    return TFAST_OK;
}

void
tfast_leave_device(tfast_device_scope *scope)
{
    if (scope->relaxed) {
        tfast_cuda_driver.cuThreadExchangeStreamCaptureMode(&scope->mode);
    }
    if (scope->moved) {
        tfast_cuda_driver.cuCtxSetCurrent(scope->before);
    }
    scope->relaxed = scope->moved = false;
}
