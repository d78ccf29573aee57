/* What parallel.c stands on: cpus.c counts processors, openmp.c finds the OpenMP
 * runtime of the process. Nobody else includes this. */
#ifndef TFAST_PARALLEL_H
#define TFAST_PARALLEL_H

#include <stdbool.h>

enum { TFAST_MAX_THREADS = 1024 };

/* The processors of this thread's affinity mask, or fewer if a control group's quota
 * grants less. At least 1. Reads files: ask once. */
int tfast_usable_cpus(void);

typedef struct tfast_openmp {
    /* libgomp's entry for `#pragma omp parallel`; LLVM's and Intel's have it too. */
    void (*parallel)(void (*body)(void *), void *data, unsigned threads,
                     unsigned flags);
    int (*max_threads)(void);
    int (*thread_num)(void);
    int (*team_size)(void);
    int (*in_parallel)(void);
    bool inherited;   /* loaded before the fork that made this process: do not enter */
    const char *name; /* "openmp (path)" */
} tfast_openmp;

/* The runtime that is loaded now, torch's first, or NULL. */
const tfast_openmp *tfast_openmp_find(void);

/* To be called once, at load, and around every fork. */
void tfast_openmp_at_load(void);
void tfast_openmp_before_fork(void);
void tfast_openmp_after_fork(bool child);

#endif
