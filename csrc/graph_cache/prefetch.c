/* Native threads that collate ahead. Jobs are started and delivered in the order in
 * which they were submitted. Where no thread has begun the next job, the caller makes
 * its batch itself: that costs less than to wake a thread and wait, and does not depend
 * on the system giving that thread a processor. While a thread makes the next batch,
 * the caller makes the first one that no thread has begun. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE
#endif
#include "cache.h"
#include "io.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_THREADS = 64 };

enum { QUEUED, RUNNING, DONE };

typedef struct job {
    struct job *next; /* submitted after this one */
    int state;
    int64_t *indices;
    int64_t n, room;
    int64_t tag;       /* the caller's */
    graph_error error; /* of the thread that made it */
    tfast_graph_batch *batch;
} job;

/* Only the caller's thread changes first, last, spare and pending; first and last under
 * the lock. */
struct tfast_graph_prefetch {
    tfast_graph_cache *cache;
    const tfast_graph_selection *selection;
    int64_t forks; /* in the process that made it: a forked child has no threads */
    int64_t pending;
    job *spare; /* delivered, to be used again */
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    job *first, *last; /* the next to be delivered; the last that was submitted */
    job *unstarted;    /* the first that is QUEUED */
    bool waiting, stopping;
    int n_threads;
    pthread_t threads[MAX_THREADS];
};

/* The number of forks between the process that loaded the core and this one. Counted,
 * because getpid() is a system call, and every batch asks twice. */
static int64_t forks;

static void
count_fork(void)
{
    forks++;
}

__attribute__((constructor)) static void
at_load(void)
{
    pthread_atfork(NULL, NULL, count_fork); /* runs in the child, its only thread */
}

/* Without threads there is nobody to lock out. */
static void
lock(tfast_graph_prefetch *p)
{
    if (p->n_threads > 0) {
        pthread_mutex_lock(&p->lock);
    }
}

static void
unlock(tfast_graph_prefetch *p)
{
    if (p->n_threads > 0) {
        pthread_mutex_unlock(&p->lock);
    }
}

/* Takes the first job that is QUEUED. The lock is held. */
static job *
start(tfast_graph_prefetch *p)
{
    job *j = p->unstarted;

    j->state = RUNNING;
    p->unstarted = j->next;
    return j;
}

/* Makes a job's batch. The job is RUNNING, so no other thread touches it. */
static void
run(const tfast_graph_prefetch *p, job *j)
{
    const tfast_status status = tfast_graph_collate(p->cache, p->selection, j->indices,
                                                    j->n, p->n_threads > 0, &j->batch);

    j->error.status = status;
    if (status != TFAST_OK) {
        graph_keep_error(&j->error, status);
    }
}

static void *
thread_main(void *context)
{
    tfast_graph_prefetch *p = context;

    pthread_mutex_lock(&p->lock);
    while (!p->stopping) {
        job *j;

        if (p->unstarted == NULL) {
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        j = start(p);
        pthread_mutex_unlock(&p->lock);
        run(p, j);
        pthread_mutex_lock(&p->lock);
        j->state = DONE;
        if (p->waiting && j == p->first) {
            pthread_cond_signal(&p->done);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* Starts as many threads as the system grants; without any the caller does the work. */
static void
start_threads(tfast_graph_prefetch *p, int threads)
{
    sigset_t all, before;

    sigfillset(&all); /* signals are the interpreter's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p->n_threads < threads &&
           pthread_create(&p->threads[p->n_threads], NULL, thread_main, p) == 0) {
        p->n_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

tfast_status
tfast_graph_prefetch_new(tfast_graph_prefetch **prefetch, tfast_graph_cache *cache,
                         const tfast_graph_selection *selection, int threads)
{
    tfast_graph_prefetch *p;
    pthread_condattr_t monotonic;

    *prefetch = NULL;
    if (threads < 0 || threads > MAX_THREADS) {
        return tfast_fail(TFAST_EINVAL, "threads must be in 0 .. %d, got %d",
                          MAX_THREADS, threads);
    }
    p = calloc(1, sizeof *p);
    if (p == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for a prefetch");
    }
    p->cache = cache;
    p->selection = selection;
    p->forks = forks;
    tfast_graph_cache_retain(cache);
    pthread_mutex_init(&p->lock, NULL); /* these cannot fail on Linux */
    pthread_cond_init(&p->work, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->done, &monotonic);
    pthread_condattr_destroy(&monotonic);
    start_threads(p, threads);
    *prefetch = p;
    return TFAST_OK;
}

/* A forked child has no threads, and the lock may be held for ever. */
static tfast_status
check_owner(const tfast_graph_prefetch *p)
{
    if (p->forks != forks) {
        return tfast_fail(TFAST_EINVAL, "a prefetch must be used by the process that "
                                        "made it, got a forked child; make another "
                                        "iterator there");
    }
    return TFAST_OK;
}

/* A job with these indices, in no list; NULL without memory. */
static job *
new_job(tfast_graph_prefetch *p, const int64_t *indices, int64_t n, int64_t tag)
{
    job *j = p->spare != NULL ? p->spare : calloc(1, sizeof *j);

    if (j == NULL) {
        return NULL;
    }
    p->spare = j; /* until it is whole */
    if (j->room < n) {
        int64_t *room = malloc((size_t)n * sizeof *room);

        if (room == NULL) {
            return NULL;
        }
        free(j->indices);
        j->indices = room;
        j->room = n;
    }
    p->spare = j->next;
    if (n > 0) {
        memcpy(j->indices, indices, (size_t)n * sizeof *indices);
    }
    j->n = n;
    j->tag = tag;
    j->next = NULL;
    j->state = QUEUED;
    j->batch = NULL;
    return j;
}

tfast_status
tfast_graph_prefetch_submit(tfast_graph_prefetch *p, const int64_t *indices, int64_t n,
                            int64_t tag)
{
    tfast_status status = check_owner(p);
    job *j = NULL;

    if (status != TFAST_OK) {
        return status;
    }
    if (n < 0 || n > INT32_MAX) {
        return tfast_fail(TFAST_EINVAL,
                          "a batch must have 0 .. 2147483647 graphs, got %lld; use a "
                          "smaller batch_size",
                          (long long)n);
    }
    if ((j = new_job(p, indices, n, tag)) == NULL) {
        return tfast_fail(TFAST_ENOMEM, "no memory for the indices of %lld graphs",
                          (long long)n);
    }
    lock(p);
    *(p->first == NULL ? &p->first : &p->last->next) = j;
    p->last = j;
    if (p->unstarted == NULL) {
        p->unstarted = j;
    }
    unlock(p);
    if (p->n_threads > 0) {
        pthread_cond_signal(&p->work);
    }
    p->pending++;
    return TFAST_OK;
}

static struct timespec
time_after(double seconds)
{
    const double most = 1e6; /* callers wait in a loop */
    struct timespec at;
    long long nanoseconds;

    seconds = seconds > 0 ? (seconds < most ? seconds : most) : 0;
    clock_gettime(CLOCK_MONOTONIC, &at);
    nanoseconds = at.tv_nsec + (long long)(seconds * 1e9);
    at.tv_sec += (time_t)(nanoseconds / 1000000000);
    at.tv_nsec = (long)(nanoseconds % 1000000000);
    return at;
}

/* Waits until the job is DONE; false when the time is over. The lock is held. */
static bool
wait_for(tfast_graph_prefetch *p, const job *j, double seconds)
{
    struct timespec until;

    if (j->state == DONE) {
        return true;
    }
    until = time_after(seconds);
    p->waiting = true;
    while (j->state != DONE &&
           pthread_cond_timedwait(&p->done, &p->lock, &until) != ETIMEDOUT) {
    }
    p->waiting = false;
    return j->state == DONE;
}

tfast_status
tfast_graph_prefetch_next(tfast_graph_prefetch *p, double seconds,
                          tfast_graph_batch **batch, int64_t *tag)
{
    tfast_status status = check_owner(p);
    job *j = p->first;
    bool done;

    *batch = NULL;
    if (status != TFAST_OK || p->pending == 0) {
        return status;
    }
    lock(p);
    if (j->state != DONE && p->unstarted != NULL) {
        job *own = start(p); /* j, or one after it while a thread makes j */

        unlock(p);
        run(p, own);
        lock(p);
        own->state = DONE;
    }
    done = wait_for(p, j, seconds);
    if (done) {
        p->first = j->next;
    }
    unlock(p);
    if (!done) {
        return TFAST_OK;
    }
    p->pending--;
    *batch = j->batch;
    *tag = j->tag;
    j->batch = NULL;
    j->next = p->spare;
    p->spare = j;
    return graph_return_error(&j->error);
}

int64_t
tfast_graph_prefetch_pending(const tfast_graph_prefetch *p)
{
    return p->pending;
}

static void
free_jobs(job *j)
{
    while (j != NULL) {
        job *next = j->next;

        tfast_graph_batch_release(j->batch);
        free(j->indices);
        free(j);
        j = next;
    }
}

void
tfast_graph_prefetch_free(tfast_graph_prefetch *p)
{
    if (p == NULL || p->forks != forks) {
        return; /* a forked child: the threads may have left anything half done */
    }
    pthread_mutex_lock(&p->lock);
    p->stopping = true;
    pthread_mutex_unlock(&p->lock);
    pthread_cond_broadcast(&p->work);
    for (int i = 0; i < p->n_threads; i++) {
        pthread_join(p->threads[i], NULL);
    }
    free_jobs(p->first);
    free_jobs(p->spare);
    pthread_cond_destroy(&p->done);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    tfast_graph_cache_release(p->cache);
    free(p);
}
