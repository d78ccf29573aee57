/* Threads: the OpenMP runtime that the process has loaded, otherwise a pool of our own.
 *
 * In a process with torch only torch's runtime is used: its idle workers spin, and
 * waking a second pool on the same CPUs costs forty times as much as an OpenMP region.
 *
 * After a fork the parent's OpenMP pool is unusable: libgomp would wait for ever for
 * threads that do not exist in the child. The child therefore reads only the thread
 * count from an inherited runtime, and starts a pool of our own. */
#ifndef _GNU_SOURCE
#    define _GNU_SOURCE /* clock_gettime and pthreads under -std=c11 */
#endif

#include "parallel.h"
#include "tfast.h"
#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

/* How long a thread spins before it sleeps: about as long as waking it takes. */
enum { SPIN_NANOSECONDS = 50000 };

typedef void (*part_function)(void *context, int part, int parts);

/* True in the pool's workers, and in a caller while the pool runs its region. Nested
 * calls then run serially in the calling thread. */
static _Thread_local bool in_region;

/* ---- The size of our pool -------------------------------------------------------- */

static int
clamp_threads(long threads)
{
    return threads < 1                   ? 1
           : threads > TFAST_MAX_THREADS ? TFAST_MAX_THREADS
                                         : (int)threads;
}

/* The limits are read at the first use, not when the library is loaded, because a
 * launcher or data loader may set them in between. 0: not read yet. */
static atomic_int cached_cpus, cached_threads;

static int
own_cpus(void)
{
    int cpus = atomic_load(&cached_cpus);
    if (!cpus) {
        cpus = tfast_usable_cpus();
        atomic_store(&cached_cpus, cpus);
    }
    return cpus;
}

/* OMP_NUM_THREADS if it is set, else the usable CPUs. The variable may list a number
 * for each nesting level; only the first is used, because nested calls run serially. */
static int
own_threads(void)
{
    int threads = atomic_load(&cached_threads);
    if (!threads) {
        const char *asked = getenv("OMP_NUM_THREADS");
        long number = asked ? strtol(asked, NULL, 10) : 0;
        threads = number > 0 ? clamp_threads(number) : own_cpus();
        atomic_store(&cached_threads, threads);
    }
    return threads;
}

/* ---- Our pool ---------------------------------------------------------------- */

/* The gate is one atomic word, so that entering, leaving and closing a region are
 * totally ordered. Its fields, from the top bit: the region's number, whether the
 * region is open, how many more workers may enter (seats), whether the caller sleeps
 * until all workers have left, and how many workers are inside. */
enum { REGION_SHIFT = 32, SEAT_SHIFT = 16 };
#define GATE_REGION ((uint64_t)UINT32_MAX << REGION_SHIFT)
#define GATE_OPEN ((uint64_t)1 << 31)
#define GATE_SEATS ((uint64_t)0x7fff << SEAT_SHIFT)
#define GATE_SEAT ((uint64_t)1 << SEAT_SHIFT)
#define GATE_WAITED ((uint64_t)1 << 15)
#define GATE_INSIDE ((uint64_t)0x7fff)

static struct {
    _Alignas(64) _Atomic uint64_t gate;
    _Alignas(64) atomic_uint next; /* the first part that no thread has taken */
    _Alignas(64) atomic_bool busy; /* held by the caller whose region runs */
    atomic_bool spin;              /* waiting threads may spin: each has its own CPU */
    atomic_int sleepers;           /* workers that wait for `wake`, or are about to */
    /* The caller writes these four while no worker is inside the region; workers read
     * them only inside. */
    int workers;
    int parts;
    part_function body;
    void *context;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* a region has opened */
    pthread_cond_t left; /* the last worker has left */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .left = PTHREAD_COND_INITIALIZER};

static uint32_t
gate_region(uint64_t gate)
{
    return (uint32_t)(gate >> REGION_SHIFT);
}

static void
pause_processor(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Waits until (gate & mask) != value: spins for SPIN_NANOSECONDS at most, or not at all
 * unless pool.spin is set. Returns false if the two are still equal. */
static bool
spin_while(uint64_t mask, uint64_t value)
{
    struct timespec start, now;
    if (!atomic_load(&pool.spin))
        return (atomic_load(&pool.gate) & mask) != value;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        for (int i = 0; i < 32; i++) {
            if ((atomic_load(&pool.gate) & mask) != value)
                return true;
            pause_processor();
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - start.tv_sec) * 1000000000LL + now.tv_nsec - start.tv_nsec <
             SPIN_NANOSECONDS);
    return false;
}

static void
pool_take_parts(void)
{
    unsigned parts = (unsigned)pool.parts;
    for (unsigned part; (part = atomic_fetch_add(&pool.next, 1)) < parts;)
        pool.body(pool.context, (int)part, (int)parts);
}

static bool
pool_enter(uint32_t region)
{
    uint64_t gate = atomic_load(&pool.gate);
    while (gate_region(gate) == region && gate & GATE_OPEN && gate & GATE_SEATS)
        if (atomic_compare_exchange_weak(&pool.gate, &gate, gate - GATE_SEAT + 1))
            return true;
    return false;
}

static void
pool_leave(void)
{
    uint64_t before = atomic_fetch_sub(&pool.gate, 1);
    if ((before & GATE_INSIDE) == 1 && before & GATE_WAITED) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_signal(&pool.left);
        pthread_mutex_unlock(&pool.lock);
    }
}

/* Waits for a region other than `seen` and returns its number. */
static uint32_t
pool_await_region(uint32_t seen)
{
    if (!spin_while(GATE_REGION, (uint64_t)seen << REGION_SHIFT)) {
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_add(&pool.sleepers, 1);
        while (gate_region(atomic_load(&pool.gate)) == seen)
            pthread_cond_wait(&pool.wake, &pool.lock);
        atomic_fetch_sub(&pool.sleepers, 1);
        pthread_mutex_unlock(&pool.lock);
    }
    return gate_region(atomic_load(&pool.gate));
}

static void *
pool_worker(void *unused)
{
    in_region = true;
    for (uint32_t seen = 0;;) {
        seen = pool_await_region(seen);
        if (pool_enter(seen)) {
            pool_take_parts();
            pool_leave();
        }
    }
    return unused;
}

/* Starts workers until `wanted` run, or until pthread_create() fails. Workers block
 * every signal, so that Ctrl-C reaches a Python thread. They are never joined and end
 * with the process. */
static void
pool_grow(int wanted)
{
    sigset_t all, before;
    pthread_t thread;
    if (pool.workers >= wanted)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.workers < wanted &&
           pthread_create(&thread, NULL, pool_worker, NULL) == 0) {
        pthread_detach(thread);
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void
pool_open(int seats)
{
    uint64_t region = (uint64_t)gate_region(atomic_load(&pool.gate)) + 1;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.gate,
                 region << REGION_SHIFT | GATE_OPEN | (uint64_t)seats << SEAT_SHIFT);
    int sleepers = atomic_load(&pool.sleepers);
    if (sleepers == 0)
        return;
    /* A worker that has seen the old gate holds the lock until it is in
     * pthread_cond_wait(), so locking once ensures that the signal reaches it.
     * Signalling after the unlock keeps woken workers from queuing up for the lock. */
    pthread_mutex_lock(&pool.lock);
    pthread_mutex_unlock(&pool.lock);
    if (sleepers <= seats)
        pthread_cond_broadcast(&pool.wake);
    else
        for (int i = 0; i < seats; i++)
            pthread_cond_signal(&pool.wake);
}

/* Called when every part has been taken. Waits for the workers inside the region, but
 * not for workers that never entered it. */
static void
pool_close(void)
{
    uint64_t inside = atomic_fetch_and(&pool.gate, ~GATE_OPEN) & GATE_INSIDE;
    while (inside && spin_while(GATE_INSIDE, inside))
        inside = atomic_load(&pool.gate) & GATE_INSIDE;
    if (!inside)
        return;
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_or(&pool.gate, GATE_WAITED);
    while (atomic_load(&pool.gate) & GATE_INSIDE)
        pthread_cond_wait(&pool.left, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* Returns false if the pool is serving another caller. */
static bool
pool_run(int threads, int parts, part_function body, void *context)
{
    if (atomic_exchange(&pool.busy, true))
        return false;
    in_region = true;
    pool_grow(threads - 1);
    atomic_store(&pool.spin, threads <= own_cpus());
    pool.parts = parts;
    pool.body = body;
    pool.context = context;
    pool_open(threads - 1);
    pool_take_parts();
    pool_close();
    in_region = false;
    atomic_store(&pool.busy, false);
    return true;
}

/* ---- Fork ------------------------------------------------------------------------ */

static void
after_fork_in_parent(void)
{
    tfast_openmp_after_fork(false);
}

/* Resets the pool: the child has no workers, and one of the parent's threads may have
 * held the lock. */
static void
after_fork_in_child(void)
{
    tfast_openmp_after_fork(true);
    atomic_store(&pool.gate, 0);
    atomic_store(&pool.sleepers, 0);
    pool.workers = 0;
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.left, NULL);
    atomic_store(&pool.busy, false);
    atomic_store(&cached_cpus, 0);
    atomic_store(&cached_threads, 0);
}

__attribute__((constructor)) static void
at_load(void)
{
    pthread_atfork(tfast_openmp_before_fork, after_fork_in_parent, after_fork_in_child);
    tfast_openmp_at_load();
}

/* ---- Inside OpenMP --------------------------------------------------------------- */

struct region {
    const tfast_openmp *openmp;
    part_function body;
    void *context;
    int parts;
};

static void
openmp_member(void *data)
{
    const struct region *region = data;
    int team = region->openmp->team_size(); /* may be smaller than requested */
    int part = region->openmp->thread_num();
    for (; part < region->parts; part += team)
        region->body(region->context, part, region->parts);
}

/* Third argument 0 of GOMP_parallel: the default team size. For a smaller team libgomp
 * would end the surplus threads, and torch's next region would start them again. */
static void
openmp_run(const tfast_openmp *openmp, int parts, part_function body, void *context)
{
    struct region region = {openmp, body, context, parts};
    openmp->parallel(openmp_member, &region, 0, 0);
}

/* ---- Entries --------------------------------------------------------------------- */

static int
threads_beside(const tfast_openmp *openmp)
{
    if (in_region)
        return 1;
    if (!openmp)
        return own_threads();
    return openmp->in_parallel() ? 1 : clamp_threads(openmp->max_threads());
}

void
tfast_parallel(int parts, part_function body, void *context)
{
    if (parts > 1 && !in_region) {
        const tfast_openmp *openmp = tfast_openmp_find();
        int threads = threads_beside(openmp);
        if (threads > 1 && openmp && !openmp->inherited) {
            openmp_run(openmp, parts, body, context);
            return;
        }
        threads = threads < parts ? threads : parts;
        if (threads > 1 && pool_run(threads, parts, body, context))
            return;
    }
    for (int part = 0; part < parts; part++)
        body(context, part, parts);
}

int
tfast_num_threads(void)
{
    return threads_beside(tfast_openmp_find());
}

const char *
tfast_thread_runtime(void)
{
    const tfast_openmp *openmp = tfast_openmp_find();
    return openmp && !openmp->inherited ? openmp->name : "own";
}
