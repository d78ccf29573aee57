/* Native threads that collate batches before they are asked for. Jobs are started and
 * delivered in the order of submission. A caller that asks for a batch which is not
 * done first collates the first job that no thread has begun: either the wanted batch
 * itself, which costs less than waking a thread and waiting for it, or a later one
 * while a thread collates the wanted batch. So where batches take less time than waking
 * a thread, the caller collates them all and the threads sleep. */
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

/* A batch is quick if it is collated within QUICK_NS nanoseconds, about what it costs
 * to wake a thread that has slept for a training step. No thread is woken while the
 * last QUICK_RUN batches were quick, nor before the first that was not. A batch that is
 * large or comes from the disk is not quick, and wakes a thread for those after it. */
enum { QUICK_NS = 10000, QUICK_RUN = 16 };

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

/* The caller's thread alone uses n_threads, most_threads, pending and spare, and alone
 * changes first and last. `lock` protects all from first on, and each job's next and
 * state. */
struct tfast_graph_prefetch {
    tfast_graph_cache *cache;
    const tfast_graph_selection *selection;
    int64_t forks;    /* value of `forks` at creation; it differs in a forked child */
    bool has_threads; /* or will have: then one thread copies a batch, else several */
    int n_threads, most_threads; /* started; how many start when one is first woken */
    int64_t pending;
    job *spare; /* list of delivered jobs for reuse */
    pthread_mutex_t lock;
    pthread_cond_t work, done; /* a job was queued; the first job is DONE */
    job *first, *last;      /* list of undelivered jobs, in the order of submission */
    job *unstarted;         /* the first job of the list that is QUEUED */
    int quick_run;          /* quick batches in a row, at most QUICK_RUN */
    bool waiting, stopping; /* the caller waits for `done`; threads must return */
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

static int64_t
nanoseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Collates the batch of the first QUEUED job, which must exist, and returns the job.
 * The caller holds the lock. It is released meanwhile: no other thread uses the data of
 * a RUNNING job. */
static job *
run_next(tfast_graph_prefetch *p)
{
    job *j = p->unstarted;
    tfast_status status;
    int64_t began;
    bool quick;

    j->state = RUNNING;
    p->unstarted = j->next;
    pthread_mutex_unlock(&p->lock);
    began = nanoseconds();
    status = tfast_graph_collate(p->cache, p->selection, j->indices, j->n,
                                 p->has_threads, &j->batch);
    quick = nanoseconds() - began < QUICK_NS;
    j->error.status = status;
    if (status != TFAST_OK) {
        graph_keep_error(&j->error, status);
    }
    pthread_mutex_lock(&p->lock);
    j->state = DONE;
    if (!quick) {
        p->quick_run = 0;
    } else if (p->quick_run < QUICK_RUN) {
        p->quick_run++;
    }
    return j;
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
        j = run_next(p);
        if (p->waiting && j == p->first) {
            pthread_cond_signal(&p->done);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* Starts up to most_threads. Fewer are no error: the caller collates the rest. */
static void
start_threads(tfast_graph_prefetch *p)
{
    sigset_t all, before;

    sigfillset(&all); /* signals go to the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p->n_threads < p->most_threads &&
           pthread_create(&p->threads[p->n_threads], NULL, thread_main, p) == 0) {
        p->n_threads++;
    }
    p->most_threads = p->n_threads; /* no second try */
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
    p->most_threads = threads;
    p->has_threads = threads > 0;
    p->quick_run = QUICK_RUN;
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
    bool wake;

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
    pthread_mutex_lock(&p->lock);
    *(p->first == NULL ? &p->first : &p->last->next) = j;
    p->last = j;
    if (p->unstarted == NULL) {
        p->unstarted = j;
    }
    wake = p->quick_run < QUICK_RUN;
    pthread_mutex_unlock(&p->lock);
    if (wake && p->n_threads < p->most_threads) {
        start_threads(p);
    } else if (wake && p->n_threads > 0) {
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
    const double wait = seconds > 0 ? (seconds < most ? seconds : most) : 0;
    const int64_t at = nanoseconds() + (int64_t)(wait * 1e9);

    return (struct timespec){.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000};
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
    pthread_mutex_lock(&p->lock);
    if (j->state != DONE && p->unstarted != NULL) {
        run_next(p); /* j, or a later job if a thread runs j */
    }
    done = wait_for(p, j, seconds);
    if (done) {
        p->first = j->next;
    }
    pthread_mutex_unlock(&p->lock);
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
