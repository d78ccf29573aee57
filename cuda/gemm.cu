/* Products of matrices by cuBLAS, opened at the first of them: see cublas.h. */
#include "common.cuh"

#include "cublas.h"
#include "library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST_DEVICES = 64 };

/* Guards what follows, and each handle's stream and workspace until its call is
 * enqueued. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tfast_cublas cublas; /* no `gemm`: not opened yet */
static cublas_handle handles[MOST_DEVICES];

class lock_scope {
  public:
    lock_scope() { pthread_mutex_lock(&lock); }
    ~lock_scope() { pthread_mutex_unlock(&lock); }
};

/* ---- Opening it ------------------------------------------------------------------ */

/* The copy of that major version that the process has loaded, or null. */
static void *
loaded(int major)
{
    char name[32];

    snprintf(name, sizeof name, "libcublas.so.%d", major);
    return dlopen(name, RTLD_NOW | RTLD_NOLOAD);
}

static tfast_status
open_file(void **library, const char *path)
{
    if (!tfast_may_open(path)) {
        return tfast_cuda_fail(TFAST_ECUDA,
                               "cuBLAS cannot be opened: %.400s is truncated or no "
                               "library",
                               path);
    }
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return *library != nullptr
               ? TFAST_OK
               : tfast_cuda_fail(TFAST_ECUDA, "cuBLAS cannot be opened: %s", dlerror());
}

/* Where NVIDIA's package for pip puts it, if that and this library lie in the same
 * folder of packages. */
static bool
installed_beside(char *path, size_t bytes, int major)
{
    Dl_info here;

    if (dladdr((const void *)&lock, &here) == 0 ||
        strrchr(here.dli_fname, '/') == nullptr) {
        return false;
    }
    const int length = (int)(strrchr(here.dli_fname, '/') - here.dli_fname);
    const int written =
        snprintf(path, bytes, "%.*s/../nvidia/%s/lib/libcublas.so.%d", length,
                 here.dli_fname, major >= 13 ? "cu13" : "cublas", major);
    return written < (int)bytes && access(path, R_OK) == 0;
}

/* The major version that goes with the CUDA runtime in this library. */
static tfast_status
open_own_major(void **library)
{
    int runtime;
    char path[4096];

    CUDA_TRY(cudaRuntimeGetVersion(&runtime));
    const int major = runtime / 1000;
    if (installed_beside(path, sizeof path, major)) {
        return open_file(library, path);
    }
    snprintf(path, sizeof path, "libcublas.so.%d", major);
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (*library == nullptr) {
        return tfast_cuda_fail(
            TFAST_ECUDA,
            "cuBLAS must be loaded (import torch), installed (pip install %s) or named "
            "by TRAINFAST_CUBLAS: %.300s",
            major >= 13 ? "nvidia-cublas" : "nvidia-cublas-cu12", dlerror());
    }
    return TFAST_OK;
}

/* Never a second major version beside one that is loaded. */
static tfast_status
open_any(void **library)
{
    const char *forced = getenv("TRAINFAST_CUBLAS");

    *library = nullptr;
    if (forced != nullptr && *forced != '\0') {
        return open_file(library, forced);
    }
    for (int major = CUBLAS_NEWEST; major >= CUBLAS_OLDEST; major--) {
        *library = loaded(major);
        if (*library != nullptr) {
            return TFAST_OK;
        }
    }
    return open_own_major(library);
}

static tfast_status
find_symbols(tfast_cublas *found, void *library)
{
    const struct {
        const char *name;
        void *to; /* a pointer of `found` */
        bool needed;
    } symbols[] = {
        {"cublasCreate_v2", &found->create, true},
        {"cublasDestroy_v2", &found->destroy, true},
        {"cublasGetVersion_v2", &found->get_version, true},
        {"cublasSetStream_v2", &found->set_stream, true},
        {"cublasSetWorkspace_v2", &found->set_workspace, true},
        {"cublasSetMathMode", &found->set_math_mode, true},
        {"cublasGemmStridedBatchedEx", &found->gemm, true},
        {"cublasGetStatusString", &found->status_string, false},
    };

    for (const auto &symbol : symbols) {
        void *address = dlsym(library, symbol.name);
        if (address == nullptr && symbol.needed) {
            return tfast_cuda_fail(TFAST_ECUDA,
                                   "cuBLAS must have %s, got a library "
                                   "without it",
                                   symbol.name);
        }
        memcpy(symbol.to, &address, sizeof address);
    }
    return TFAST_OK;
}

static tfast_status
check_status(const tfast_cublas &of, int status, const char *call)
{
    const char *text = "failed";

    if (status == CUBLAS_STATUS_SUCCESS) {
        return TFAST_OK;
    }
    if (of.status_string != nullptr) {
        text = of.status_string(status);
    }
    return tfast_cuda_fail(TFAST_ECUDA, "cuBLAS: %s: %.200s (status %d)", call, text,
                           status);
}

static tfast_status
check_major(const tfast_cublas &of)
{
    int version = 0;
    const tfast_status status =
        check_status(of, of.get_version(nullptr, &version), "cublasGetVersion");
    const int major = version / 10000;

    if (status != TFAST_OK) {
        return status;
    }
    if (major < CUBLAS_OLDEST || major > CUBLAS_NEWEST) {
        return tfast_cuda_fail(TFAST_ECUDA,
                               "cuBLAS must be of version %d or %d, got version %d",
                               CUBLAS_OLDEST, CUBLAS_NEWEST, version);
    }
    for (int other = CUBLAS_OLDEST; other <= CUBLAS_NEWEST; other++) {
        if (other != major && loaded(major) == nullptr && loaded(other) != nullptr) {
            return tfast_cuda_fail(TFAST_ECUDA,
                                   "cuBLAS must be the %d that is loaded already, got "
                                   "version %d in TRAINFAST_CUBLAS",
                                   other, version);
        }
    }
    return TFAST_OK;
}

/* Tried again by the next call where it failed: torch may be imported by then. A
 * library once opened stays, as unloading cuBLAS is not safe. */
static tfast_status
open_cublas()
{
    tfast_cublas found = {};
    void *library;
    tfast_status status;

    if (cublas.gemm != nullptr) {
        return TFAST_OK;
    }
    status = open_any(&library);
    if (status == TFAST_OK) {
        status = find_symbols(&found, library);
    }
    if (status == TFAST_OK) {
        status = check_major(found);
    }
    if (status == TFAST_OK) {
        cublas = found;
    }
    return status;
}

/* ---- Calling it ------------------------------------------------------------------ */

/* Returns from the function when the call fails. */
#define CUBLAS_TRY(call, name)                                                         \
    do {                                                                               \
        const tfast_status status_ = check_status(cublas, call, name);                 \
        if (status_ != TFAST_OK) {                                                     \
            return status_;                                                            \
        }                                                                              \
    } while (0)

/* The current device's handle, made at its first call. */
static tfast_status
open_handle(cublas_handle *handle, int device, cudaStream_t stream)
{
    cudaStreamCaptureStatus capture;

    if (device >= MOST_DEVICES) {
        return tfast_cuda_fail(TFAST_ECUDA, "device must be below %d for gemm, got %d",
                               MOST_DEVICES, device);
    }
    if (handles[device] == nullptr) {
        cublas_handle fresh = nullptr;
        CUDA_TRY(cudaStreamIsCapturing(stream, &capture));
        if (capture != cudaStreamCaptureStatusNone) {
            return tfast_cuda_fail(TFAST_ECUDA,
                                   "gemm must have been called once on the device "
                                   "before a capture: cuBLAS allocates");
        }
        CUBLAS_TRY(cublas.create(&fresh), "cublasCreate");
        const tfast_status status =
            check_status(cublas,
                         cublas.set_math_mode(
                             fresh, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
                         "cublasSetMathMode");
        if (status != TFAST_OK) {
            cublas.destroy(fresh);
            return status;
        }
        handles[device] = fresh;
    }
    *handle = handles[device];
    return TFAST_OK;
}

static int
data_type(uint8_t dtype)
{
    return dtype == TFAST_F32   ? CUBLAS_R_32F
           : dtype == TFAST_F16 ? CUBLAS_R_16F
                                : CUBLAS_R_16BF;
}

/* cuBLAS takes rows for columns, so what it computes is out^T = op(b)^T op(a)^T. */
static tfast_status
multiply(const tfast_gemm_args *args, cublas_handle handle)
{
    const tfast_gemm_matrix &out = args->out, &a = args->a, &b = args->b;
    const float alpha = (float)args->alpha, beta = (float)args->beta;
    const int type = data_type(args->dtype);
    const bool tf32 = args->dtype == TFAST_F32 && args->allow_tf32;

    CUBLAS_TRY(cublas.gemm(handle, args->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                           args->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, (int)args->n,
                           (int)args->m, (int)args->k, &alpha, b.data, type, (int)b.row,
                           b.batch, a.data, type, (int)a.row, a.batch, &beta, out.data,
                           type, (int)out.row, out.batch, (int)args->batch,
                           tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                           CUBLAS_GEMM_DEFAULT),
               "cublasGemmStridedBatchedEx");
    return TFAST_OK;
}

tfast_status
tfast_cuda_gemm(const tfast_gemm_args *args)
{
    const lock_scope locked;
    tfast_device_scope scope;
    cublas_handle handle = nullptr;
    tfast_status status = open_cublas();

    if (status == TFAST_OK) {
        status = scope.enter(args->device.index);
    }
    if (status == TFAST_OK) {
        status = open_handle(&handle, args->device.index, (cudaStream_t)args->stream);
    }
    if (status != TFAST_OK) {
        return status;
    }
    /* The stream first: setting it puts the workspace back to cuBLAS's own. */
    CUBLAS_TRY(cublas.set_stream(handle, args->stream), "cublasSetStream");
    CUBLAS_TRY(cublas.set_workspace(handle, args->scratch, TFAST_GEMM_SCRATCH),
               "cublasSetWorkspace");
    return multiply(args, handle);
}
