/* Native threads that collate batches before they are asked for. Jobs are started and
 * delivered in the order of submission. A caller that asks for a batch which is not
 * done first collates the first job that no thread has begun: either the wanted batch
 * itself, which costs less than waking a thread and waiting for it, or a later one
 * while a thread collates the wanted batch. */
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
    int64_t n, room;   /* indices in use, indices allocated */
    int64_t tag;       /* the caller's */
    graph_error error; /* from the thread that ran the job */
    tfast_graph_batch *batch;
} job;

/* The caller's thread alone changes first, last, spare and pending. `lock` protects
 * first, last, unstarted, waiting, stopping, and each job's next and state. */
struct tfast_graph_prefetch {
    tfast_graph_cache *cache;
    const tfast_graph_selection *selection;
    int64_t forks; /* value of `forks` at creation; it differs in a forked child */
    int64_t pending;
    job *spare; /* list of delivered jobs for reuse */
    pthread_mutex_t lock;
    pthread_cond_t work, done; /* a job was queued; the first job is DONE */
    job *first, *last;      /* list of undelivered jobs, in the order of submission */
    job *unstarted;         /* the first job of the list that is QUEUED */
    bool waiting, stopping; /* the caller waits for `done`; threads must return */
    int n_threads;
    pthread_t threads[MAX_THREADS];
};

/* The number of forks between the process that loaded the core and this one. Cheaper
 * than getpid(), which is a system call. */
static int64_t forks;

static void
count_fork(void)
{
    forks++;
}

__attribute__((constructor)) static void
at_load(void)
{
    pthread_atfork(NULL, NULL, count_fork); /* runs in the child */
}

/* Without threads no lock is needed. */
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

/* Takes the first QUEUED job, which must exist. The caller holds the lock. */
static job *
start(tfast_graph_prefetch *p)
{
    job *j = p->unstarted;

    j->state = RUNNING;
    p->unstarted = j->next;
    return j;
}

/* Collates a job's batch. No lock: no other thread uses a RUNNING job's data. */
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

/* Starts up to `threads` threads. Fewer are no error: the caller collates the rest. */
static void
start_threads(tfast_graph_prefetch *p, int threads)
{
    sigset_t all, before;

    sigfillset(&all); /* signals go to the interpreter's threads */
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
    pthread_mutex_init(&p->lock, NULL); /* these calls cannot fail on Linux */
    pthread_cond_init(&p->work, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->done, &monotonic);
    pthread_condattr_destroy(&monotonic);
    start_threads(p, threads);
    *prefetch = p;
    return TFAST_OK;
}

/* TFAST_EINVAL in a forked child: it has none of the threads, and a thread may have
 * held the lock when the process forked. */
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

/* A QUEUED job with a copy of these indices, in no list; NULL if there is no memory. */
static job *
new_job(tfast_graph_prefetch *p, const int64_t *indices, int64_t n, int64_t tag)
{
    job *j = p->spare != NULL ? p->spare : calloc(1, sizeof *j);

    if (j == NULL) {
        return NULL;
    }
    p->spare = j; /* keeps it if malloc() fails */
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

/* The CLOCK_MONOTONIC time in `seconds` from now, at most 1e6. */
static struct timespec
time_after(double seconds)
{
    const double most = 1e6; /* avoids overflow; callers wait in a loop */
    struct timespec at;
    long long nanoseconds;

    seconds = seconds > 0 ? (seconds < most ? seconds : most) : 0;
    clock_gettime(CLOCK_MONOTONIC, &at);
    nanoseconds = at.tv_nsec + (long long)(seconds * 1e9);
    at.tv_sec += (time_t)(nanoseconds / 1000000000);
    at.tv_nsec = (long)(nanoseconds % 1000000000);
    return at;
}

/* Waits until job j is DONE; false after a timeout. The caller holds the lock. */
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
        job *own = start(p); /* j, or a later job if a thread runs j */

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
        return; /* in a forked child the state may be inconsistent: leak it */
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
