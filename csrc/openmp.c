/* The OpenMP runtime that torch or another library has brought into the process, found
 * among the loaded libraries and never linked. */
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

/* The runtime torch is bound to, and one found before torch was. Each is filled once,
 * under `lock`, and published by `current`. */
static struct slot {
    tfast_openmp openmp;
    char name[MAX_PATH + 16];
} torchs, others;
static tfast_openmp *_Atomic current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_ullong searched; /* how many libraries had been loaded by then */

struct search {
    unsigned long long loads;
    char torch[MAX_PATH];
    char openmp[MAX_PATH]; /* the first in the order of loading */
};

static bool
is_openmp(const char *file)
{
    static const char *const stems[] = {"libgomp", "libiomp5", "libomp", "libomp5"};
    for (size_t i = 0; i < sizeof stems / sizeof *stems; i++) {
        size_t n = strlen(stems[i]);
        if (strncmp(file, stems[i], n) == 0 && (file[n] == '.' || file[n] == '-'))
            return true; /* the dash: wheels add a hash to the name */
    }
    return false;
}

/* Only copies: the loader's lock is held here, so nothing may be opened. */
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
    return 1; /* one is enough: all carry the same count */
}

/* Fills a slot from the library at `path`; false if it lacks an entry. The handle is
 * kept, so that the library stays. */
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

/* The runtime that torch calls is not always the one beside it: a preloaded one
 * (LD_PRELOAD=libiomp5.so) comes first. So this searches as the loader did: the global
 * scope, then torch's own dependencies. */
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
    /* OpenMP's count belongs to the thread, and torch sets it at a thread's first
     * parallel operation. Its own question does that first, then asks OpenMP. */
    void *count = dlsym(torch, "_ZN2at15get_num_threadsEv"); /* at::get_num_threads() */
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

/* torch may be imported after this library, so until its runtime is known every call
 * looks whether libraries have been loaded since. */
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

/* A forked child may load this library only now; what it already has may be its
 * parent's. */
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
    tfast_openmp_find(); /* what is loaded now is what the child inherits */
    pthread_mutex_lock(&lock);
}

void
tfast_openmp_after_fork(bool child)
{
    if (child)
        mark_inherited();
    pthread_mutex_unlock(&lock);
}

#else /* without dl_iterate_phdr there is only the own pool */

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
