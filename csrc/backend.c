/* The table of backends: which exist, which can run here, which is in use. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* dladdr */
#endif
#include "library.h"
#include "tfast.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const tfast_backend tfast_backend_scalar, tfast_backend_wide;
#if defined(__x86_64__)
extern const tfast_backend tfast_backend_avx2, tfast_backend_avx512;
#endif

/* A backend that lives in a library of its own, opened when it is first asked for. */
typedef struct {
    const char *name;
    const char *environment; /* the variable that names the file */
    const char *file;        /* beside this module; NULL: only by the variable */
    pthread_once_t once;
    void (*open)(void);
    const tfast_backend *backend; /* NULL: `reason` says why */
    char reason[TFAST_MESSAGE_BYTES];
} library;

static void open_cuda(void);
static void open_simt(void);

static library cuda = {"cuda",
                       "TRAINFAST_CUDA_LIBRARY",
                       "libtrainfast_cuda.so",
                       PTHREAD_ONCE_INIT,
                       open_cuda,
                       NULL,
                       ""};
static library simt = {
    "simt", "TRAINFAST_SIMT_LIBRARY", NULL, PTHREAD_ONCE_INIT, open_simt, NULL, ""};

/* Best first. `wide` is for tests: never chosen, only named. */
static const tfast_backend *const cpu_backends[] = {
#if defined(__x86_64__)
    &tfast_backend_avx512,
    &tfast_backend_avx2,
#endif
    &tfast_backend_scalar,
    &tfast_backend_wide,
};
enum { N_CPU = sizeof cpu_backends / sizeof *cpu_backends };

/* Other threads' calls read these while one forces a backend. */
static const tfast_backend *_Atomic chosen_cpu; /* for arrays on the CPU */
static _Atomic bool cuda_allowed = true;        /* false: a CPU backend is forced */

/* The path of the library's file: the environment's, or beside this module. */
static bool
library_path(const library *l, char *path, size_t bytes)
{
    const char *forced = getenv(l->environment);
    const char *slash;
    Dl_info here;

    if (forced != NULL && *forced != '\0') {
        return (size_t)snprintf(path, bytes, "%s", forced) < bytes;
    }
    if (l->file == NULL || dladdr(&cuda, &here) == 0) {
        return false;
    }
    slash = strrchr(here.dli_fname, '/');
    return (size_t)snprintf(path, bytes, "%.*s%s",
                            slash == NULL ? 0 : (int)(slash + 1 - here.dli_fname),
                            here.dli_fname, l->file) < bytes;
}

static void
open_library(library *l)
{
    char path[4096];
    tfast_cuda_open_function open;
    void *handle;

    if (!library_path(l, path, sizeof path)) {
        snprintf(l->reason, sizeof l->reason, "%s is not set", l->environment);
        return;
    }
    if (!tfast_may_open(path)) {
        snprintf(l->reason, sizeof l->reason,
                 "cannot open the %s library: %.400s is truncated or no library",
                 l->name, path);
        return;
    }
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(l->reason, sizeof l->reason, "cannot open the %s library: %s", l->name,
                 dlerror());
        return;
    }
    *(void **)&open = dlsym(handle, TFAST_CUDA_OPEN);
    l->backend = open == NULL ? NULL : open(TFAST_ABI, tfast_fail);
    if (l->backend == NULL || l->backend->abi != TFAST_ABI) {
        l->backend = NULL;
        snprintf(l->reason, sizeof l->reason,
                 "%.400s is not a %s library of this version of trainfast", path,
                 l->name);
    }
}

static void
open_cuda(void)
{
    open_library(&cuda);
}

static void
open_simt(void)
{
    open_library(&simt);
}

/* The library's backend if it can run here; otherwise NULL and why. */
static const tfast_backend *
library_backend(library *l, const char **why)
{
    pthread_once(&l->once, l->open);
    *why = l->backend == NULL ? l->reason : l->backend->unusable();
    return *why == NULL ? l->backend : NULL;
}

static const tfast_backend *
best_cpu(void)
{
    int i = 0;

    while (cpu_backends[i]->unusable() != NULL) { /* scalar always ends this */
        i++;
    }
    return cpu_backends[i];
}

static const tfast_backend *
cpu_by_name(const char *name)
{
    for (int i = 0; i < N_CPU; i++) {
        if (strcmp(cpu_backends[i]->name, name) == 0) {
            return cpu_backends[i];
        }
    }
    return NULL;
}

tfast_status
tfast_backend_use(const char *name)
{
    const tfast_backend *forced = NULL;
    const char *why = NULL;

    if (name == NULL || strcmp(name, "cuda") == 0) {
        if (name != NULL && library_backend(&cuda, &why) == NULL) {
            return tfast_fail(TFAST_EINVAL, "backend cuda cannot run here: %s", why);
        }
        chosen_cpu = best_cpu();
        cuda_allowed = true;
        return TFAST_OK;
    }
    if (strcmp(name, "simt") == 0) {
        forced = library_backend(&simt, &why);
    } else {
        forced = cpu_by_name(name);
        why = forced == NULL ? NULL : forced->unusable();
        if (forced == NULL) {
            return tfast_fail(
                TFAST_EINVAL,
                "backend must be one of cuda, avx512, avx2, scalar, wide, "
                "simt, got '%.100s'",
                name);
        }
    }
    if (why != NULL) {
        return tfast_fail(TFAST_EINVAL, "backend %s cannot run here: %s", name, why);
    }
    chosen_cpu = forced;
    cuda_allowed = false;
    return TFAST_OK;
}

tfast_status
tfast_backend_init(void)
{
    const char *forced = getenv("TRAINFAST_BACKEND");

    chosen_cpu = best_cpu();
    if (forced == NULL || *forced == '\0') {
        return TFAST_OK;
    }
    return tfast_backend_use(forced);
}

const tfast_backend *
tfast_backend_for(int32_t device_type)
{
    const tfast_backend *backend;
    const char *why;

    if (device_type == TFAST_CPU) {
        return chosen_cpu;
    }
    if (device_type != TFAST_CUDA) {
        tfast_fail(TFAST_EUNSUPPORTED, "arrays must be on the CPU or a CUDA device");
        return NULL;
    }
    if (!cuda_allowed) {
        tfast_fail(TFAST_EUNSUPPORTED,
                   "arrays on a CUDA device, but backend %s is forced",
                   chosen_cpu->name);
        return NULL;
    }
    backend = library_backend(&cuda, &why);
    if (backend == NULL) {
        tfast_fail(TFAST_EUNSUPPORTED, "CUDA arrays cannot be used: %s", why);
    }
    return backend;
}

const tfast_graph_kernels *
tfast_graph_kernels_in_use(void)
{
    const tfast_graph_kernels *kernels = chosen_cpu->graph_cache;

    return kernels != NULL ? kernels : best_cpu()->graph_cache;
}

bool
tfast_backend_describe(int i, const char **name, const char **unusable, bool *in_use)
{
    library *l = i == 0 ? &cuda : i == N_CPU + 1 ? &simt : NULL;
    const tfast_backend *backend;

    if (i < 0 || i > N_CPU + 1) {
        return false;
    }
    if (l != NULL) {
        *name = l->name;
        backend = library_backend(l, unusable);
        *in_use =
            backend != NULL && (l == &cuda ? cuda_allowed : chosen_cpu == backend);
    } else {
        *name = cpu_backends[i - 1]->name;
        *unusable = cpu_backends[i - 1]->unusable();
        *in_use = chosen_cpu == cpu_backends[i - 1];
    }
    return true;
}

void
tfast_workspace_clear(tfast_workspace *workspace)
{
    if (workspace->backend != NULL && workspace->backend->workspace_clear != NULL) {
        workspace->backend->workspace_clear(workspace->data);
    }
    *workspace = (tfast_workspace){0};
}
