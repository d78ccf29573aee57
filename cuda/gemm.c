/* Matrix product by cuBLAS, which is opened by the first call. Its rate is the roof
 * that benchmarks compare a card's kernels with. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* dladdr */
#endif

#include "cublas.h"
#include "host.h"
#include "library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_DEVICES = 64 };

/* Guards the two variables below, and a handle's stream until its call is enqueued. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tfast_cublas cublas; /* `gemm` is null until cuBLAS is open */
static cublas_handle handles[MAX_DEVICES];

/* ---- Opening cuBLAS -------------------------------------------------------------- */

static tfast_status
open_file(void **library, const char *path)
{
    if (!tfast_may_open(path)) {
        return tfast_cuda_fail(TFAST_ECUDA,
                               "cuBLAS cannot be opened: %.400s is truncated or not a "
                               "library; install it again",
                               path);
    }
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return *library != NULL
               ? TFAST_OK
               : tfast_cuda_fail(TFAST_ECUDA, "cuBLAS cannot be opened: %s", dlerror());
}

/* The path at which pip installs NVIDIA's package, if that package and this library
 * share a site-packages folder. */
static bool
find_package(char *path, size_t bytes, int major)
{
    Dl_info here;

    if (dladdr((const void *)&lock, &here) == 0 ||
        strrchr(here.dli_fname, '/') == NULL) {
        return false;
    }
    const int length = (int)(strrchr(here.dli_fname, '/') - here.dli_fname);
    const int written =
        snprintf(path, bytes, "%.*s/../nvidia/%s/lib/libcublas.so.%d", length,
                 here.dli_fname, major >= 13 ? "cu13" : "cublas", major);
    return written < (int)bytes && access(path, R_OK) == 0;
}

/* Opens TRAINFAST_CUBLAS if that is set; otherwise the copy that the process has
 * loaded, as torch does; otherwise the package's; otherwise the system's. */
static tfast_status
open_library(void **library)
{
    const char *forced = getenv("TRAINFAST_CUBLAS");
    char path[4096];
    int driver = 0;

    if (forced != NULL && *forced != '\0') {
        return open_file(library, forced);
    }
    for (int major = CUBLAS_NEWEST; major >= CUBLAS_OLDEST; major--) {
        snprintf(path, sizeof path, "libcublas.so.%d", major);
        *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
        if (*library != NULL) {
            return TFAST_OK;
        }
    }
    CU_TRY(cuDriverGetVersion, (&driver)); /* an older one refuses a newer cuBLAS */
    for (int major = driver / 1000 >= CUBLAS_NEWEST ? CUBLAS_NEWEST : CUBLAS_OLDEST;
         major >= CUBLAS_OLDEST; major--) {
        if (find_package(path, sizeof path, major)) {
            return open_file(library, path);
        }
        snprintf(path, sizeof path, "libcublas.so.%d", major);
        *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (*library != NULL) {
            return TFAST_OK;
        }
    }
    return tfast_cuda_fail(TFAST_ECUDA,
                           "cuBLAS was not found: %.300s; import torch first, or pip "
                           "install nvidia-cublas, or set TRAINFAST_CUBLAS to its path",
                           dlerror());
}

static tfast_status
check_status(const tfast_cublas *of, int status, const char *call)
{
    if (status == CUBLAS_STATUS_SUCCESS) {
        return TFAST_OK;
    }
    return tfast_cuda_fail(TFAST_ECUDA, "cuBLAS: %s: %.200s (status %d)", call,
                           of->status_string(status), status);
}

/* Resolves the symbols and checks the version. */
static tfast_status
resolve(tfast_cublas *found, void *library)
{
    const struct {
        const char *name;
        void *to; /* a pointer in `found` */
    } symbols[] = {
        {"cublasCreate_v2", &found->create},
        {"cublasGetVersion_v2", &found->get_version},
        {"cublasSetStream_v2", &found->set_stream},
        {"cublasGemmEx", &found->gemm},
        {"cublasGetStatusString", &found->status_string},
    };
    int version = 0;

    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = dlsym(library, symbols[i].name);
        if (address == NULL) {
            return tfast_cuda_fail(TFAST_ECUDA,
                                   "cuBLAS must have %s, got a library without it",
                                   symbols[i].name);
        }
        memcpy(symbols[i].to, &address, sizeof address);
    }
    const tfast_status status =
        check_status(found, found->get_version(NULL, &version), "cublasGetVersion");
    if (status == TFAST_OK &&
        (version / 10000 < CUBLAS_OLDEST || version / 10000 > CUBLAS_NEWEST)) {
        return tfast_cuda_fail(TFAST_ECUDA,
                               "cuBLAS must have major version %d or %d, got version "
                               "%d",
                               CUBLAS_OLDEST, CUBLAS_NEWEST, version);
    }
    return status;
}

/* A failure is tried again by the next call: torch may be imported by then. The library
 * stays open, as unloading cuBLAS is not safe. */
static tfast_status
open_cublas(void)
{
    tfast_cublas found = {0};
    void *library = NULL;
    tfast_status status;

    if (cublas.gemm != NULL) {
        return TFAST_OK;
    }
    status = open_library(&library);
    if (status == TFAST_OK) {
        status = resolve(&found, library);
    }
    if (status == TFAST_OK) {
        cublas = found;
    }
    return status;
}

/* ---- The call -------------------------------------------------------------------- */

#define CUBLAS_TRY(call, name)                                                         \
    do {                                                                               \
        const tfast_status status_ = check_status(&cublas, call, name);                \
        if (status_ != TFAST_OK) {                                                     \
            return status_;                                                            \
        }                                                                              \
    } while (0)

/* With the lock and the device. */
static tfast_status
multiply(const tfast_gemm_args *args)
{
    const int device = args->device.index;
    const float one = 1, zero = 0;
    const int type = args->dtype == TFAST_F32   ? CUDA_R_32F_
                     : args->dtype == TFAST_F16 ? CUDA_R_16F_
                                                : CUDA_R_16BF_;
    const int compute = args->dtype == TFAST_F32 && args->allow_tf32
                            ? CUBLAS_COMPUTE_32F_FAST_TF32
                            : CUBLAS_COMPUTE_32F;

    if (handles[device] == NULL) {
        CUBLAS_TRY(cublas.create(&handles[device]), "cublasCreate");
    }
    CUBLAS_TRY(cublas.set_stream(handles[device], args->stream), "cublasSetStream");
    /* cuBLAS is column-major, so it computes out^T = b^T a^T. */
    CUBLAS_TRY(cublas.gemm(handles[device], CUBLAS_OP_N, CUBLAS_OP_N, (int)args->n,
                           (int)args->m, (int)args->k, &one, args->b, type,
                           (int)args->n, args->a, type, (int)args->k, &zero, args->out,
                           type, (int)args->n, compute, CUBLAS_GEMM_DEFAULT),
               "cublasGemmEx");
    return TFAST_OK;
}

tfast_status
tfast_cuda_gemm(const tfast_gemm_args *args)
{
    tfast_device_scope scope;
    tfast_status status = tfast_enter_device(&scope, args->device.index);

    pthread_mutex_lock(&lock);
    if (status == TFAST_OK) {
        status = open_cublas();
    }
    if (status == TFAST_OK && args->device.index >= MAX_DEVICES) {
        status =
            tfast_cuda_fail(TFAST_ECUDA, "device must be below %d for gemm, got %d",
                            MAX_DEVICES, args->device.index);
    }
    if (status == TFAST_OK) {
        status = multiply(args);
    }
    pthread_mutex_unlock(&lock);
    tfast_leave_device(&scope);
    return status;
}
