/* What test_threads.py calls through ctypes. cpus.c is included for its statics. */
#define _GNU_SOURCE
#include "cpus.c"

#include "tfast.h"
#include "threads.h"
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

static double
seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void
count_part(void *counts, int part, int parts)
{
    (void)parts;
    atomic_fetch_add((atomic_int *)counts + part, 1);
}

void
count(int parts, void *counts)
{
    tfast_parallel(parts, count_part, counts);
}

/* A busy machine may take long to give each thread its turn. */
enum { LONGEST = 60 };

/* Each part waits until all have been begun, which only as many threads can do. */
static void
meet_part(void *arrived, int part, int parts)
{
    double end = seconds() + LONGEST;
    (void)part;
    atomic_fetch_add((atomic_int *)arrived, 1);
    while (atomic_load((atomic_int *)arrived) < parts && seconds() < end)
        sched_yield();
}

/* Whether `parts` threads were at work at the same time. */
int
meet(int parts)
{
    atomic_int arrived = 0;
    double start = seconds();
    tfast_parallel(parts, meet_part, &arrived);
    return seconds() - start < LONGEST;
}

struct nest {
    int inner;
    atomic_int *counts;
    atomic_int most_threads;
};

static void
nest_part(void *context, int part, int parts)
{
    struct nest *nest = context;
    (void)parts;
    int threads = tfast_num_threads();
    if (threads > atomic_load(&nest->most_threads))
        atomic_store(&nest->most_threads, threads);
    tfast_parallel(nest->inner, count_part, nest->counts + part * nest->inner);
}

int
nested(int outer, int inner, void *counts)
{
    struct nest nest = {inner, counts, 0};
    tfast_parallel(outer, nest_part, &nest);
    return nest.most_threads;
}

static void
slow_part(void *deadline, int part, int parts)
{
    (void)part, (void)parts;
    while (seconds() < *(double *)deadline)
        usleep(1000);
}

void
slow(double duration)
{
    double deadline = seconds() + duration;
    tfast_parallel(2, slow_part, &deadline);
}

int
quota(const char *list, const char *mount)
{
    return cgroup_cpus(list, mount);
}
