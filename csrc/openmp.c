/* Finds the OpenMP runtime that torch or another library has loaded into the process.
 * It is never linked. */
#ifndef _GNU_SOURCE
#    define _GNU_SOURCE /* dl_iterate_phdr, dladdr, RTLD_DEFAULT */
#endif

#include "parallel.h"

#if defined(__linux__)

#    include <dlfcn.h>
#    include <link.h>
#    include <pthread.h>
#    include <stdatomic.h>
#    include <stdio.h>
#    include <string.h>

enum { MAX_PATH = 4096 };

/* `torchs`: the runtime that torch calls. `others`: the runtime found before torch was
 * loaded. Each is filled once, under `lock`, and then published through `current`. */
static struct slot {
    tfast_openmp openmp;
    char name[MAX_PATH + 16];
} torchs, others;
static tfast_openmp *_Atomic current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_ullong searched; /* the loader's count of loaded libraries (dlpi_adds) at
                                  the last search */

struct search {
    unsigned long long loads; /* dlpi_adds */
    char torch[MAX_PATH];     /* path of libtorch_cpu; empty: not loaded */
    char openmp[MAX_PATH];    /* the runtime that was loaded first */
};

static bool
is_openmp(const char *file)
{
    static const char *const stems[] = {"libgomp", "libiomp5", "libomp", "libomp5"};
    for (size_t i = 0; i < sizeof stems / sizeof *stems; i++) {
        size_t n = strlen(stems[i]);
        if (strncmp(file, stems[i], n) == 0 && (file[n] == '.' || file[n] == '-'))
            return true; /* wheels add "-<hash>" to the name */
    }
    return false;
}

/* A dl_iterate_phdr() callback, which runs under the loader's lock: it only copies
 * paths and opens nothing. */
static int
visit_library(struct dl_phdr_info *info, size_t size, void *data)
{
    struct search *search = data;
    const char *path = info->dlpi_name;
    const char *slash = strrchr(path, '/');
    const char *file = slash ? slash + 1 : path;
    (void)size;
    search->loads = info->dlpi_adds;
    if (strlen(path) >= MAX_PATH)
        return 0;
    if (strncmp(file, "libtorch_cpu.", strlen("libtorch_cpu.")) == 0)
        strcpy(search->torch, path);
    else if (!search->openmp[0] && is_openmp(file))
        strcpy(search->openmp, path);
    return 0;
}

static int
visit_count(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    *(unsigned long long *)data = info->dlpi_adds;
    return 1; /* stop: every entry has the same count */
}

/* Resolves a slot's functions in the loaded library at `path`; false if one is missing.
 * The handle is never closed, so that the library stays loaded. */
static bool
fill(struct slot *slot, const char *path)
{
    tfast_openmp *openmp = &slot->openmp;
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
    if (!library)
        return false;
    *(void **)&openmp->parallel = dlsym(library, "GOMP_parallel");
    *(void **)&openmp->max_threads = dlsym(library, "omp_get_max_threads");
    *(void **)&openmp->thread_num = dlsym(library, "omp_get_thread_num");
    *(void **)&openmp->team_size = dlsym(library, "omp_get_num_threads");
    *(void **)&openmp->in_parallel = dlsym(library, "omp_in_parallel");
    snprintf(slot->name, sizeof slot->name, "openmp (%s)", path);
    openmp->name = slot->name;
    return openmp->parallel && openmp->max_threads && openmp->thread_num &&
           openmp->team_size && openmp->in_parallel;
}

/* Fills `torchs` with the OpenMP runtime that torch calls; false if there is none. This
 * need not be the runtime in torch's folder: a library in LD_PRELOAD takes precedence.
 * Therefore GOMP_parallel is resolved as the loader resolved it for torch: first in the
 * global scope, then in torch's dependencies. */
static bool
fill_as_torch(const char *torch_path)
{
    void *torch = dlopen(torch_path, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
    if (!torch)
        return false;
    Dl_info from;
    void *entry = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (!entry)
        entry = dlsym(torch, "GOMP_parallel");
    if (!entry || !dladdr(entry, &from) || !fill(&torchs, from.dli_fname))
        return false;
    /* OpenMP has a thread count for each calling thread, which torch sets only in that
     * thread's first parallel operation. at::get_num_threads() sets, then returns it.
     */
    void *count = dlsym(torch, "_ZN2at15get_num_threadsEv");
    if (count)
        *(void **)&torchs.openmp.max_threads = count;
    torchs.openmp.inherited =
        others.openmp.inherited && others.openmp.parallel == torchs.openmp.parallel;
    return true;
}

static void
search_libraries(void)
{
    struct search search = {0};
    dl_iterate_phdr(visit_library, &search);
    if (search.torch[0] && fill_as_torch(search.torch))
        atomic_store(&current, &torchs.openmp);
    else if (!atomic_load(&current) && search.openmp[0] && fill(&others, search.openmp))
        atomic_store(&current, &others.openmp);
    atomic_store(&searched, search.loads);
}

/* torch may be imported after this library. Until torch's runtime is found, every call
 * checks whether libraries have been loaded since the last search. */
const tfast_openmp *
tfast_openmp_find(void)
{
    const tfast_openmp *found = atomic_load(&current);
    unsigned long long loads = 0;
    if (found == &torchs.openmp)
        return found;
    dl_iterate_phdr(visit_count, &loads);
    if (loads != atomic_load(&searched)) {
        pthread_mutex_lock(&lock);
        if (loads != atomic_load(&searched) && atomic_load(&current) != &torchs.openmp)
            search_libraries();
        pthread_mutex_unlock(&lock);
    }
    return atomic_load(&current);
}

static void
mark_inherited(void)
{
    torchs.openmp.inherited |= torchs.openmp.parallel != NULL;
    others.openmp.inherited |= others.openmp.parallel != NULL;
}

/* Whether this process came from a fork without exec (PF_FORKNOEXEC in the flags of
 * proc_pid_stat(5)). */
static bool
is_forked(void)
{
    char line[512] = "";
    unsigned flags = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file)
        return false;
    const char *end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return end && sscanf(end, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 &&
           flags & 0x40;
}

/* A forked child may load this library for the first time; the OpenMP runtime that it
 * finds may be its parent's, which it must not enter. */
void
tfast_openmp_at_load(void)
{
    if (is_forked()) {
        tfast_openmp_find();
        mark_inherited();
    }
}

void
tfast_openmp_before_fork(void)
{
    tfast_openmp_find(); /* the child inherits the runtime that is loaded now */
    pthread_mutex_lock(&lock);
}

void
tfast_openmp_after_fork(bool child)
{
    if (child)
        mark_inherited();
    pthread_mutex_unlock(&lock);
}

#else /* no dl_iterate_phdr: parallel.c always uses its own pool */

#    include <stddef.h>

const tfast_openmp *
tfast_openmp_find(void)
{
    return NULL;
}

void
tfast_openmp_at_load(void)
{
}

void
tfast_openmp_before_fork(void)
{
}

void
tfast_openmp_after_fork(bool child)
{
    (void)child;
}

#endif
