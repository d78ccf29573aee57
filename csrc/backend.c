/* The table of backends: which exist, which can run here, and which is in use. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* dladdr */
#endif
#include "backend.h"

#include "library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const tfast_backend tfast_backend_scalar;
const tfast_graph_kernels *tfast_graph_kernels_scalar(void);
#if defined(__x86_64__)
extern const tfast_backend tfast_backend_avx2, tfast_backend_avx512;
const tfast_graph_kernels *tfast_graph_kernels_avx2(void);
const tfast_graph_kernels *tfast_graph_kernels_avx512(void);
#endif

/* A backend in a shared library of its own, which is opened at its first use. */
typedef struct {
    const char *name;
    const char *environment; /* the environment variable with the library's path */
    const char *file;        /* default file name, in the folder of this module; NULL:
                                no default */
    pthread_once_t once;
    void (*open)(void);
    const tfast_backend *backend; /* NULL: `reason` says why */
    char reason[TFAST_MESSAGE_BYTES];
} library;

static void open_cuda(void);
static void open_wide(void);
static void open_simt(void);

static library cuda = {"cuda",
                       "TRAINFAST_CUDA_LIBRARY",
                       "libtrainfast_cuda.so",
                       PTHREAD_ONCE_INIT,
                       open_cuda,
                       NULL,
                       ""};
/* Backends for tests: used only if forced by name. */
static library wide = {
    "wide", "TRAINFAST_WIDE_LIBRARY", NULL, PTHREAD_ONCE_INIT, open_wide, NULL, ""};
static library simt = {
    "simt", "TRAINFAST_SIMT_LIBRARY", NULL, PTHREAD_ONCE_INIT, open_simt, NULL, ""};

/* The instruction sets that this module is compiled for, best first. */
static const struct {
    const tfast_backend *backend;
    const tfast_graph_kernels *(*graph_kernels)(void);
} cpu_sets[] = {
#if defined(__x86_64__)
    {&tfast_backend_avx512, tfast_graph_kernels_avx512},
    {&tfast_backend_avx2, tfast_graph_kernels_avx2},
#endif
    {&tfast_backend_scalar, tfast_graph_kernels_scalar},
};
enum { N_CPU = sizeof cpu_sets / sizeof *cpu_sets };

/* Atomic, because other threads may read them while one thread forces a backend. */
static const tfast_backend *_Atomic chosen_cpu; /* for arrays on the CPU */
static const tfast_graph_kernels *_Atomic chosen_graph_kernels;
static _Atomic bool cuda_allowed = true; /* false: a CPU backend is forced */

/* The path of the library: from its environment variable, else in the folder of this
 * module. False if there is neither or `path` is too short. */
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
    tfast_library_open_function open;
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
    *(void **)&open = dlsym(handle, TFAST_LIBRARY_OPEN);
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
open_wide(void)
{
    open_library(&wide);
}

static void
open_simt(void)
{
    open_library(&simt);
}

/* The library's backend if it can run here, with *why NULL; else NULL, with the reason
 * in *why. */
static const tfast_backend *
library_backend(library *l, const char **why)
{
    pthread_once(&l->once, l->open);
    *why = l->backend == NULL ? l->reason : l->backend->unusable();
    return *why == NULL ? l->backend : NULL;
}

/* The index in cpu_sets of the best instruction set that can run here. */
static int
best_cpu(void)
{
    int i = 0;

    while (cpu_sets[i].backend->unusable() != NULL) { /* scalar is always usable */
        i++;
    }
    return i;
}

static const tfast_backend *
cpu_by_name(const char *name)
{
    for (int i = 0; i < N_CPU; i++) {
        if (strcmp(cpu_sets[i].backend->name, name) == 0) {
            return cpu_sets[i].backend;
        }
    }
    return NULL;
}

/* Selects `backend` for arrays on the CPU, NULL: the best. The graph cache uses the
 * kernels of the same instruction set, or the best if `backend` is a library's. */
static void
choose_cpu(const tfast_backend *backend)
{
    int set = best_cpu();

    for (int i = 0; i < N_CPU; i++) {
        set = cpu_sets[i].backend == backend ? i : set;
    }
    chosen_cpu = backend != NULL ? backend : cpu_sets[set].backend;
    chosen_graph_kernels = cpu_sets[set].graph_kernels();
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
        choose_cpu(NULL);
        cuda_allowed = true;
        return TFAST_OK;
    }
    if (strcmp(name, "simt") == 0) {
        forced = library_backend(&simt, &why);
    } else if (strcmp(name, "wide") == 0) {
        forced = library_backend(&wide, &why);
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
    choose_cpu(forced);
    cuda_allowed = false;
    return TFAST_OK;
}

tfast_status
tfast_backend_init(void)
{
    static _Atomic bool done; /* by the module of another interpreter */
    const char *forced = getenv("TRAINFAST_BACKEND");
    tfast_status status = TFAST_OK;

    if (done) {
        return TFAST_OK;
    }
    choose_cpu(NULL);
    if (forced != NULL && *forced != '\0') {
        status = tfast_backend_use(forced);
    }
    done = status == TFAST_OK;
    return status;
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
    return chosen_graph_kernels;
}

bool
tfast_backend_describe(int i, const char **name, const char **unusable, bool *in_use)
{
    library *l = i == 0           ? &cuda
                 : i == N_CPU + 1 ? &wide
                 : i == N_CPU + 2 ? &simt
                                  : NULL;
    const tfast_backend *backend;

    if (i < 0 || i > N_CPU + 2) {
        return false;
    }
    if (l != NULL) {
        *name = l->name;
        backend = library_backend(l, unusable);
        *in_use =
            backend != NULL && (l == &cuda ? cuda_allowed : chosen_cpu == backend);
    } else {
        backend = cpu_sets[i - 1].backend;
        *name = backend->name;
        *unusable = backend->unusable();
        *in_use = chosen_cpu == backend;
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

tfast_status
tfast_backend_check_scratch(const tfast_backend *backend, int64_t needed, int64_t got)
{
    return got >= needed
               ? TFAST_OK
               : tfast_fail(TFAST_EUNSUPPORTED,
                            "scratch must have the %lld bytes that backend %s needs, "
                            "got %lld",
                            (long long)needed, backend->name, (long long)got);
}
