/* Internal interface between parallel.c, cpus.c (counts CPUs) and openmp.c (finds the
 * OpenMP runtime of the process). */
#ifndef TFAST_PARALLEL_H
#define TFAST_PARALLEL_H

#include <stdbool.h>

enum { TFAST_MAX_THREADS = 1024 };

/* The CPUs in this thread's affinity mask, limited by control groups; at least 1. Reads
 * files, so callers cache the result. */
int tfast_usable_cpus(void);

typedef struct tfast_openmp {
    /* GOMP_parallel, which gcc calls for `#pragma omp parallel`; LLVM's and Intel's
     * runtimes export it, too. threads 0: the default team size. */
    void (*parallel)(void (*body)(void *), void *data, unsigned threads,
                     unsigned flags);
    int (*max_threads)(void);
    int (*thread_num)(void);
    int (*team_size)(void);
    int (*in_parallel)(void);
    bool inherited;   /* loaded before the fork that created this process: its pool must
                         not be entered, only its thread count be read */
    const char *name; /* "openmp (path)" */
} tfast_openmp;

/* torch's runtime if torch is loaded, otherwise any loaded runtime, otherwise NULL. */
const tfast_openmp *tfast_openmp_find(void);

/* Call tfast_openmp_at_load() once when this library is loaded, and the other two
 * around every fork: the latter in parent and child. */
void tfast_openmp_at_load(void);
void tfast_openmp_before_fork(void);
void tfast_openmp_after_fork(bool child);

#endif
