/* Attention backward on the CPU: splits a call into tasks, runs them, and joins their
 * partial sums. Results do not depend on the number of threads. */
#ifndef ATTENTION_BACKWARD_H
#define ATTENTION_BACKWARD_H

#include "../scratch.h"
#include "attention_backward_head.h"
#include "attention_backward_task.h"
#include "attention_parts.h"

/* ---- The gradient of a bias ------------------------------------------------------ */

/* Limits of attention_dbias_groups(). */
enum {
    ATTENTION_GROUP_TASKS = 32,     /* most tasks, enough for most CPUs */
    ATTENTION_GROUP_ITEMS = 8,      /* least items of a group */
    ATTENTION_GROUP_BYTES = 4 << 20 /* most bytes of dbias to join, which costs time */
};

/* Sets `n` to the shape of dbias (1 where it is broadcast), `elements` to its number of
 * elements, and `extent` to the elements of memory from its first to its last. */
static void
attention_dbias_size(const tfast_attention_args *args, int64_t n[4], int64_t *elements,
                     int64_t *extent)
{
    const int64_t full[4] = {args->batch, args->heads, args->n_q, args->n_k};
    const int64_t *stride = args->dbias_stride;

    *elements = *extent = 1;
    for (int d = 0; d < 4; d++) {
        n[d] = stride[d] == 0 ? 1 : full[d];
        *elements *= n[d];
        *extent += (n[d] - 1) * stride[d];
    }
}

/* The number of groups into which the batch is split where all items share the bias.
 * Each group sums a dbias of its own, of `bytes` bytes, in parallel with the others,
 * and has `heads` chains. Depends on sizes alone, so that the order of additions does
 * not depend on the number of threads. */
static int
attention_dbias_groups(const tfast_attention_args *args, int64_t heads, size_t *bytes)
{
    const int64_t size = (int64_t)sizeof(real);
    int64_t n[4], elements, extent, most, least = 0;

    if (args->dbias == NULL || args->dbias_stride[0] != 0 || heads == 0) {
        return 1;
    }
    for (int d = 1; d < 4; d++) {
        least = attention_min(least, args->dbias_stride[d]);
    }
    attention_dbias_size(args, n, &elements, &extent);
    if (least < 0 || elements == 0 || elements != extent ||
        extent > ATTENTION_GROUP_BYTES / size) {
        return 1;
    }
    *bytes = (size_t)attention_round_up(extent * size, 64);
    most = attention_min(1 + ATTENTION_GROUP_BYTES / (int64_t)*bytes,
                         args->batch / ATTENTION_GROUP_ITEMS);
    return (int)attention_max(1, attention_min(ATTENTION_GROUP_TASKS / heads, most));
}

static void
attention_hint_dbias(const tfast_attention_args *args)
{
    int64_t n[4], elements, extent;

    attention_dbias_size(args, n, &elements, &extent);
    if (elements > 0 && extent > 0) {
        tfast_hint_large_pages(args->dbias, (size_t)extent * sizeof(real));
    }
}

/* Whether the first visit writes every element of dbias, so that it need not be zeroed:
 * every query looks at every key, and the bias is not broadcast over queries or keys.
 * False if there is no task. */
static bool
attention_writes_dbias(const tfast_attention_args *args)
{
    const bool bounded = args->is_causal || args->window_left >= 0 ||
                         args->window_right >= 0 || args->cu_seqlens_q != NULL ||
                         args->kv_lens != NULL || args->mask.data != NULL;

    return args->dbias != NULL && args->dbias_stride[2] != 0 &&
           args->dbias_stride[3] != 0 && !bounded && args->batch > 0 &&
           args->kv_heads > 0;
}

/* Zeroes dbias, which has one element in each broadcast dimension. */
static void
attention_clear_part(void *context, int part, int parts)
{
    const attention_back_job *job = context;
    const tfast_attention_args *args = job->args;
    const size_t size = sizeof(real);
    const int64_t *stride = args->dbias_stride;
    int64_t n[4], elements, extent;

    attention_dbias_size(args, n, &elements, &extent);
    for (int64_t at = n[0] * n[1] * n[2] * part / parts;
         at < n[0] * n[1] * n[2] * (part + 1) / parts; at++) {
        const int64_t b = at / n[2] / n[1], h = at / n[2] % n[1], i = at % n[2];
        char *row = (char *)args->dbias +
                    size * (size_t)(b * stride[0] + h * stride[1] + i * stride[2]);

        for (int64_t j = 0; j < n[3] && stride[3] > 1; j++) {
            memset(row + size * (size_t)(j * stride[3]), 0, size);
        }
        if (stride[3] <= 1) {
            memset(row, 0, size * (size_t)n[3]);
        }
    }
}

/* Adds the dbias of groups 1, 2, ... to args->dbias, which holds that of group 0. All
 * have the same layout, without gaps. */
static void
attention_join_groups(void *context, int part, int parts)
{
    const attention_back_job *job = context;
    const tfast_attention_args *args = job->args;
    int64_t n[4], elements, extent;

    attention_dbias_size(args, n, &elements, &extent);
    for (int group = 1; group < job->groups; group++) {
        const real *from =
            (const real *)(const void *)(job->dbias +
                                         (size_t)(group - 1) * job->dbias_bytes);
        const int64_t end = extent * (part + 1) / parts;

        for (int64_t i = extent * part / parts; i < end; i++) {
            ((real *)args->dbias)[i] += from[i];
        }
    }
}

/* ---- Tasks ----------------------------------------------------------------------- */

/* Tasks to aim for, enough for most CPUs; the most copies of a head's dq. */
enum { ATTENTION_BACK_TASKS = 8, ATTENTION_BACK_PARTS = 4 };

/* Sets job->parts and job->turns (see attention_back_job). With few chains, the blocks
 * of keys of a step are split into several lists. A bias that is broadcast over keys
 * allows only one list, because all lists would add to the same elements of dbias. */
static void
attention_split_keys(attention_back_job *job)
{
    const tfast_attention_args *args = job->args;
    const int64_t chains = attention_max(1, job->chains);
    const int64_t blocks =
        (args->n_k + 2 * ATTENTION_BACK_KEYS - 1) / (2 * ATTENTION_BACK_KEYS);
    const int64_t wanted = (ATTENTION_BACK_TASKS + chains - 1) / chains;
    const bool whole = args->dbias != NULL && args->dbias_stride[3] == 0;
    const int lists = whole ? 1 : (int)attention_max(1, attention_min(wanted, blocks));

    job->turns = lists > ATTENTION_BACK_PARTS ? 2 : 1;
    job->parts = (lists + job->turns - 1) / job->turns;
}

/* Task i: list i % lists of chain i / lists, where lists = parts * turns. */
static attention_back_task
attention_back_task_of(const attention_back_job *job, int64_t i)
{
    const tfast_attention_args *args = job->args;
    const int64_t heads = job->join_heads ? 1 : args->kv_heads;
    const int lists = job->parts * job->turns;
    const int64_t chain = i / lists, first = chain / heads, head = chain % heads;
    attention_back_task task = {.chain = chain,
                                .batch = first,
                                .end_batch = first + 1,
                                .head = head,
                                .end_head = job->join_heads ? args->kv_heads : head + 1,
                                .list = (int)(i % lists),
                                .dbias = args->dbias};

    if (job->join_batch) {
        task.batch = args->batch * first / job->groups;
        task.end_batch = args->batch * (first + 1) / job->groups;
    }
    if (job->join_batch && first > 0) {
        task.dbias = job->dbias + (size_t)(first - 1) * job->dbias_bytes;
    }
    return task;
}

/* Computes the heads of k and v of a task, and with job->look_ahead prefetches the next
 * head meanwhile. `next` is the thread's next task, or NULL. */
static void
attention_backward_task(const attention_back_job *job, const attention_back_task *task,
                        const attention_back_task *next, void *room)
{
    const tfast_attention_args *args = job->args;
    attention_ahead ahead, *planned;

    for (int64_t b = task->batch, h = task->head; b < task->end_batch;) {
        const bool same = h + 1 < task->end_head;
        int64_t next_b = same ? b : b + 1, next_h = same ? h + 1 : task->head;
        const int64_t this_b = b, this_h = h;

        b = next_b;
        h = next_h;
        if (b == task->end_batch && next != NULL) {
            next_b = next->batch;
            next_h = next->head;
        }
        planned = NULL;
        if (job->look_ahead && (b < task->end_batch || next != NULL)) {
            const attention_head head = attention_head_of(
                args, next_b, next_h * (args->heads / args->kv_heads));

            planned = &ahead;
            attention_plan(planned, &head, attention_strips(&head, true), true);
        }
        backward_head_checked(job, task, this_b, this_h, planned, room);
    }
}

static void
attention_backward_part(void *context, int part, int parts)
{
    attention_back_job *job = context;
    void *room = job->room + job->room_bytes * (size_t)part;
    int64_t i = atomic_fetch_add(&job->next, 1);

    (void)parts;
    while (i < job->tasks) {
        const attention_back_task task = attention_back_task_of(job, i);
        attention_back_task next;

        i = atomic_fetch_add(&job->next, 1);
        next = attention_back_task_of(job, i);
        attention_backward_task(job, &task, i < job->tasks ? &next : NULL, room);
    }
}

/* ---- Backward of few heads ------------------------------------------------------- */

/* Sets the batch item and the head of k and v of step job->step of the task's chain.
 * False if the chain has no such step or, in a careful pass, need not be repeated. */
static bool
attention_step_of(const attention_back_job *job, const attention_back_task *task,
                  int64_t *batch, int64_t *kv_head)
{
    const int64_t heads = task->end_head - task->head;

    *batch = task->batch + job->step / heads;
    *kv_head = task->head + job->step % heads;
    return *batch < task->end_batch &&
           (!job->careful || atomic_load(&job->odd[task->chain]));
}

static void
attention_phase_part(void *context, int part, int parts)
{
    attention_back_job *job = context;
    void *room = job->room + job->room_bytes * (size_t)part;

    (void)parts;
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->tasks;) {
        const attention_back_task task = attention_back_task_of(job, i);
        int64_t batch, kv_head;

        if (!attention_step_of(job, &task, &batch, &kv_head)) {
            continue;
        }
        backward_head_checked(job, &task, batch, kv_head, NULL, room);
    }
}

/* Rows of dq that are joined at a time. */
enum { ATTENTION_JOIN_ROWS = 4 * ATTENTION_QUERIES };

static void
attention_join_part(void *context, int part, int parts)
{
    attention_back_job *job = context;
    const tfast_attention_args *args = job->args;
    const int64_t group = args->heads / args->kv_heads;
    const int64_t pieces = (args->n_q + ATTENTION_JOIN_ROWS - 1) / ATTENTION_JOIN_ROWS;

    for (int64_t i = part; i < job->chains * group * pieces; i += parts) {
        const int64_t chain = i / pieces / group,
                      begin = i % pieces * ATTENTION_JOIN_ROWS;
        const attention_back_task task =
            attention_back_task_of(job, chain * job->parts * job->turns);
        int64_t batch, kv_head, end;
        attention_head h;

        if (!attention_step_of(job, &task, &batch, &kv_head)) {
            continue;
        }
        h = attention_head_of(args, batch, kv_head * group + i / pieces % group);
        end = attention_min(begin + ATTENTION_JOIN_ROWS, h.n_q);
        if (begin < end && !join_parts(job, &h, chain, begin, end)) {
            atomic_store(&job->odd[chain], 1);
        }
    }
}

/* Computes one step of all chains: its phases in order, then the sum of the parts'
 * dq. */
static void
attention_step(attention_back_job *job, int threads)
{
    for (job->phase = 0; job->phase < job->turns; job->phase++) {
        atomic_store(&job->next, 0);
        tfast_parallel(threads, attention_phase_part, job);
    }
    if (job->args->dq.data != NULL) {
        tfast_parallel(threads, attention_join_part, job);
    }
}

/* Computes all chains step by step. A step after which a gradient is not finite is
 * repeated with multiply_careful(). */
static void
attention_backward_split(attention_back_job *job, int threads)
{
    const tfast_attention_args *args = job->args;
    const int64_t items =
        job->join_batch ? (args->batch + job->groups - 1) / job->groups : 1;
    const int64_t steps = items * (job->join_heads ? args->kv_heads : 1);

    for (job->step = 0; job->step < steps && job->tasks > 0; job->step++) {
        bool odd = false;

        for (int64_t i = 0; i < job->chains; i++) {
            atomic_store(&job->odd[i], 0);
        }
        job->careful = false;
        attention_step(job, threads);
        for (int64_t i = 0; i < job->chains; i++) {
            odd |= atomic_load(&job->odd[i]) != 0;
        }
        job->careful = odd && attention_can_forbid(args);
        if (job->careful) {
            attention_step(job, threads);
        }
    }
}

/* ---- Gradients of options -------------------------------------------------------- */

/* Sums the gradients of ALiBi slopes over lists, sums those of slopes and sinks over
 * batch items, each in a fixed order, and writes them. */
static void
attention_join_numbers(const attention_back_job *job)
{
    const tfast_attention_args *args = job->args;
    const int64_t heads = args->heads, all = args->batch * heads;

    for (int64_t i = 0; i < all && job->dalibi != NULL; i++) {
        for (int list = 1; list < job->parts * job->turns; list++) {
            job->dalibi[i] += job->dalibi[list * all + i];
        }
    }
    for (int64_t i = heads; i < all; i++) {
        if (job->dalibi != NULL && args->alibi_batch == 0) {
            job->dalibi[i % heads] += job->dalibi[i];
        }
        if (job->dsinks != NULL) {
            job->dsinks[i % heads] += job->dsinks[i];
        }
    }
    for (int64_t i = 0; i < (args->alibi_batch == 0 ? heads : all); i++) {
        if (job->dalibi != NULL) {
            ((real *)args->dalibi)[i] = (real)job->dalibi[i];
        }
    }
    for (int64_t i = 0; i < heads && job->dsinks != NULL; i++) {
        ((real *)args->dsinks)[i] = (real)job->dsinks[i];
    }
}

/* ---- Scratch of the backward ----------------------------------------------------- */

/* A call that needs fewer bytes uses tfast_scratch_take(), whose block is kept between
 * calls: page faults of fresh memory from the caller cost more than a small problem. */
enum { ATTENTION_OWN_SCRATCH = 1 << 20 };

/* Elements per row of gradient sums outside of the output; 0 if there are none, because
 * the output holds the sums or is not wanted. */
static int64_t
attention_width(const tfast_attention_args *args, const tfast_attention_rows *rows,
                int64_t dim)
{
    const bool none = rows->data == NULL || holds_sums(args, dim);

    return none ? 0 : attention_round_up(dim, 16);
}

/* Carves the memory that all tasks share from `memory`; NULL: only measures it. Returns
 * its bytes, a multiple of 4096. */
static size_t
attention_back_shared(attention_back_job *job, char *memory)
{
    const tfast_attention_args *args = job->args;
    /* at least one item: with a batch of 0, dalibi and dsinks are still written, as
     * 0 */
    const int64_t all = attention_max(1, args->batch) * args->heads;
    const int64_t size = (int64_t)sizeof(real);
    const int64_t dq_width = attention_width(args, &args->dq, args->dim);
    const int64_t parts = args->dq.data == NULL || !attention_is_split(job) ? 0
                          : dq_width == 0 ? job->parts - 1
                                          : job->parts;
    const int64_t rows =
        args->kv_heads == 0 ? 0 : args->heads / args->kv_heads * args->n_q;
    const int64_t keys = job->turns == 1 ? 0 : job->chains * args->n_k;
    const int64_t lists = job->parts * job->turns;
    int64_t used = 0;
    const struct {
        void **part;
        int64_t bytes;
    } places[] = {
        {&job->dq,
         parts * job->chains * rows * attention_round_up(args->dim, 16) * size},
        {&job->dk, keys * attention_width(args, &args->dk, args->dim) * size},
        {&job->dv, keys * attention_width(args, &args->dv, args->dim_v) * size},
        {(void **)&job->dbias, (job->groups - 1) * (int64_t)job->dbias_bytes},
        {(void **)&job->dalibi, args->dalibi == NULL ? 0 : all * lists * 8},
        {(void **)&job->dsinks, args->dsinks == NULL ? 0 : all * 8},
        {(void **)&job->odd, job->chains * (int64_t)sizeof *job->odd},
    };

    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        /* `sums`: cleared or overwritten before their first use; the others start at
         * 0 */
        const bool sums = i < 3 || (i == 3 && job->writes_dbias);

        *places[i].part = memory == NULL || places[i].bytes == 0 ? NULL : memory + used;
        if (*places[i].part != NULL && !sums) {
            memset(*places[i].part, 0, (size_t)places[i].bytes);
        }
        used += attention_round_up(places[i].bytes, 64);
    }
    return (size_t)attention_round_up(used, 4096);
}

static attention_back_job
attention_back_plan(const tfast_attention_args *args)
{
    attention_back_job job = {.args = args};
    backward_room room;
    int64_t heads;

    job.join_batch = args->dbias != NULL && args->dbias_stride[0] == 0;
    job.join_heads = args->dbias != NULL && args->dbias_stride[1] == 0;
    job.writes_dbias = attention_writes_dbias(args);
    heads = job.join_heads ? 1 : args->kv_heads;
    job.groups = attention_dbias_groups(args, heads, &job.dbias_bytes);
    job.chains = heads * (job.join_batch ? job.groups : args->batch);
    attention_split_keys(&job);
    job.tasks = args->batch == 0 || args->kv_heads == 0
                    ? 0
                    : job.chains * job.parts * job.turns;
    job.room_bytes = attention_room_bytes(backward_cut(&room, &job, NULL));
    return job;
}

static size_t
attention_back_bytes(attention_back_job *job, int threads)
{
    return attention_back_shared(job, NULL) + job->room_bytes * (size_t)threads + 64;
}

static tfast_status
attention_scratch(int64_t *bytes, const tfast_attention_args *args, bool backward)
{
    *bytes = 0;
    if (backward) {
        attention_back_job job = attention_back_plan(args);
        const int threads = attention_parts(args, attention_max(1, job.tasks));
        const size_t needed = attention_back_bytes(&job, threads);

        *bytes = needed < ATTENTION_OWN_SCRATCH ? 0 : (int64_t)needed;
    }
    return TFAST_OK;
}

/* ---- Backward: the call ---------------------------------------------------------- */

static void
attention_backward_run(attention_back_job *job, int threads)
{
    const tfast_attention_args *args = job->args;

    if (args->dbias != NULL) {
        attention_hint_dbias(args);
    }
    if (args->dbias != NULL && !job->writes_dbias) {
        tfast_parallel(threads, attention_clear_part, job);
    }
    attention_hint(args, &args->dq, args->heads, args->n_q, args->total_q, args->dim);
    attention_hint(args, &args->dk, args->kv_heads, args->n_k, args->total_k,
                   args->dim);
    attention_hint(args, &args->dv, args->kv_heads, args->n_k, args->total_k,
                   args->dim_v);
    if (attention_is_split(job)) {
        attention_backward_split(job, threads);
    } else {
        tfast_parallel(threads, attention_backward_part, job);
    }
    if (job->groups > 1) {
        tfast_parallel(threads, attention_join_groups, job);
    }
    attention_join_numbers(job);
}

/* The number of threads or the backend may have changed since the caller asked
 * tfast_attention_scratch(). Reduces the number of threads until args->scratch
 * suffices; if it does not suffice for one thread, uses tfast_scratch_take(). */
static tfast_status
attention_backward(const tfast_attention_args *args)
{
    attention_back_job job = attention_back_plan(args);
    int threads = attention_parts(args, attention_max(1, job.tasks));
    size_t bytes = attention_back_bytes(&job, threads);
    char *own = NULL, *memory = args->scratch;

    while (memory != NULL && threads > 1 && bytes > (size_t)args->scratch_bytes) {
        bytes = attention_back_bytes(&job, --threads);
    }
    if (memory == NULL || bytes > (size_t)args->scratch_bytes) {
        own = memory = tfast_scratch_take(bytes);
    }
    if (memory == NULL) {
        return tfast_fail(TFAST_ENOMEM, "attention_backward cannot allocate %zu bytes",
                          bytes);
    }
    memory += (64 - (uintptr_t)memory % 64) % 64;
    job.room = memory + attention_back_shared(&job, memory);
    job.look_ahead = !attention_is_split(&job) &&
                     args->batch * args->kv_heads >= 4 * threads &&
                     attention_is_cold(args);
    attention_backward_run(&job, threads);
    tfast_scratch_give(own);
    return TFAST_OK;
}

#endif
