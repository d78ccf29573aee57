/* Attention on the CPU: which blocks there are, and which thread takes one. A block's
 * result does not depend on who computes it. */

typedef struct {
    const tfast_attention_args *args;
    char *room; /* of all threads */
    size_t room_bytes;
    int64_t tasks, blocks; /* blocks of a head */
    _Atomic int64_t next;
    int64_t run; /* tasks taken at a time */
    bool look_ahead;
} attention_job;

/* Tasks worth another thread: about 20 us. In multiply-adds. */
enum { ATTENTION_PART_COST = 1 << 21 };

/* One thread's room begins on a page of its own, but not at the same place in its cache
 * as the next one's. */
static size_t
attention_room_bytes(size_t bytes)
{
    return (size_t)attention_round_up((int64_t)bytes, 4096) + 256;
}

/* In double: products of sizes may pass 2^63. */
static int
attention_parts(const tfast_attention_args *args, int64_t tasks)
{
    const double work = (double)args->batch * (double)args->heads * (double)args->n_q *
                        (double)args->n_k * (double)(args->dim + args->dim_v);
    const int64_t worth = 1 + (int64_t)fmin(work / ATTENTION_PART_COST, 1 << 20);
    const int64_t most = attention_min(tasks, tfast_num_threads());

    return (int)attention_min(worth, most);
}

/* An output that may be fresh: all its rows, and what lies between them. */
static void
attention_hint(const tfast_attention_args *args, const tfast_attention_rows *rows,
               int64_t heads, int64_t n, int64_t total, int64_t dim)
{
    const bool packed = args->cu_seqlens_q != NULL;
    const int64_t batches = packed ? 0 : args->batch - 1;
    const int64_t last = (packed ? total : n) - 1;
    const int64_t elements =
        batches * rows->batch + (heads - 1) * rows->head + last * rows->row + dim;

    if (rows->data != NULL && elements > 0) {
        tfast_hint_large_pages(
            rows->data, (size_t)elements * tfast_dtype_size((tfast_dtype)args->dtype));
    }
}

static void
attention_forward_task(const attention_job *job, int64_t task, attention_ahead *ahead,
                       void *room)
{
    const tfast_attention_args *args = job->args;
    const int64_t head = task / job->blocks;
    /* The last blocks of a causal head have the most work: first. */
    const int64_t block = job->blocks - 1 - task % job->blocks;
    const attention_head h =
        attention_head_of(args, head / args->heads, head % args->heads);

    if (block * ATTENTION_QUERIES >= h.n_q) {
        return;
    }
    if (args->dtype == TFAST_F64) {
        attention_forward_f64(&h, block * ATTENTION_QUERIES, ahead, room);
    } else {
        attention_forward_f32(&h, block * ATTENTION_QUERIES, ahead, room);
    }
}

/* How many strips of products a head has: about. */
static int64_t
attention_strips(const attention_head *h, bool backward)
{
    const tfast_attention_args *args = h->args;
    const int64_t scores = h->n_q * h->n_k / (args->is_causal ? 2 : 1);
    const int64_t width = 2 * VF_WIDTH;
    const int64_t q_panels = (args->dim + width - 1) / width;
    const int64_t v_panels = (args->dim_v + width - 1) / width;
    const int64_t rows = backward ? h->n_q * q_panels + h->n_k * (q_panels + v_panels)
                                  : h->n_q * v_panels;

    return scores / (width * V_ROWS) + rows / V_ROWS;
}

/* What to ask for while task `task` is computed, `next` being the thread's one after
 * it. Returns NULL for nothing. */
static attention_ahead *
attention_forward_ahead(const attention_job *job, attention_ahead *ahead, int64_t task,
                        int64_t next)
{
    const tfast_attention_args *args = job->args;
    const int64_t head = next / job->blocks;
    const int64_t block = job->blocks - 1 - next % job->blocks;
    const int64_t before = job->blocks - 1 - task % job->blocks;
    attention_head h;

    if (next >= job->tasks || (!job->look_ahead && head != task / job->blocks)) {
        return NULL;
    }
    h = attention_head_of(args, head / args->heads, head % args->heads);
    if (job->look_ahead) {
        attention_plan(ahead, &h, attention_strips(&h, false), false);
    } else if (attention_head_has_terms(&h)) {
        return NULL; /* of which each panel asks for its own part */
    } else {
        const int64_t query = block * ATTENTION_QUERIES;
        const int64_t n_q = attention_min(ATTENTION_QUERIES, h.n_q - query);

        attention_plan_block(ahead, &h, query, attention_max(0, n_q),
                             before * ATTENTION_QUERIES);
    }
    return ahead;
}

static void
attention_forward_part(void *context, int part, int parts)
{
    attention_job *job = context;
    void *room = job->room + job->room_bytes * (size_t)part;
    int64_t begin = atomic_fetch_add(&job->next, job->run), next;
    attention_ahead ahead, *planned = NULL;

    (void)parts;
    for (; begin < job->tasks; begin = next) {
        const int64_t end = attention_min(begin + job->run, job->tasks);

        next = atomic_fetch_add(&job->next, job->run);
        for (int64_t t = begin; t < end; t++) {
            if (t == begin || !job->look_ahead) {
                const int64_t after = job->look_ahead || t + 1 == end ? next : t + 1;

                planned = attention_forward_ahead(job, &ahead, t, after);
            }
            attention_forward_task(job, t, planned, room);
        }
    }
}

/* Whether heads are small, but too many to be in the cache. */
static bool
attention_is_cold(const tfast_attention_args *args)
{
    const double head = ((double)args->n_q + (double)args->n_k) *
                        (double)(args->dim + args->dim_v) *
                        (double)tfast_dtype_size((tfast_dtype)args->dtype);

    return head <= ATTENTION_AHEAD_BYTES &&
           head * (double)args->batch * (double)args->heads >= ATTENTION_COLD_BYTES;
}

/* ---- Decoding -------------------------------------------------------------------- */

enum { ATTENTION_SPLIT_TASKS = 64, ATTENTION_SPLIT_KEYS = 4 * ATTENTION_KEYS };

static bool
attention_is_few(const tfast_attention_args *args)
{
    return args->dtype == TFAST_F64 ? attention_is_few_f64(args)
                                    : attention_is_few_f32(args);
}

static void
attention_decode_part(void *context, int part, int parts)
{
    attention_decode_job *job = context;
    const tfast_attention_args *args = job->args;
    void *room = job->room + job->room_bytes * (size_t)part;

    (void)parts;
    for (int64_t t; (t = atomic_fetch_add(&job->next, 1)) < job->tasks;) {
        const int split = (int)(t % job->splits);
        const int64_t head = t / job->splits % args->kv_heads;
        const int64_t batch = t / job->splits / args->kv_heads;

        if (args->dtype == TFAST_F64) {
            attention_decode_f64(job, batch, head, split, room);
        } else {
            attention_decode_f32(job, batch, head, split, room);
        }
    }
}

static tfast_status
attention_decode(const tfast_attention_args *args)
{
    const bool wide = args->dtype == TFAST_F64;
    forward_room_f32 room_f32;
    forward_room_f64 room_f64;
    attention_decode_job job = {.args = args};
    const int64_t heads = args->batch * args->kv_heads;
    const int64_t most = (args->n_k + ATTENTION_SPLIT_KEYS - 1) / ATTENTION_SPLIT_KEYS;
    const size_t width = (size_t)attention_round_up(args->dim_v, 16) + 2;
    size_t bytes, results;
    char *memory;
    int parts;

    job.splits = (int)attention_max(
        1, attention_min(most, (ATTENTION_SPLIT_TASKS + heads - 1) / heads));
    job.keys =
        attention_round_up((args->n_k + job.splits - 1) / job.splits, ATTENTION_KEYS);
    job.tasks = heads * job.splits;
    bytes = wide ? forward_cut_f64(&room_f64, args, decode_queries_f64(args), NULL)
                 : forward_cut_f32(&room_f32, args, decode_queries_f32(args), NULL);
    job.room_bytes = attention_room_bytes(bytes);
    parts = attention_parts(args, job.tasks);
    results = (size_t)(job.splits * args->batch * args->heads * args->n_q) * width *
              (wide ? 8 : 4);
    results = (results + 4095) / 4096 * 4096;
    memory = tfast_scratch_take(results + job.room_bytes * (size_t)parts);
    if (memory == NULL) {
        return tfast_fail(TFAST_ENOMEM, "attention cannot allocate %zu bytes",
                          results + job.room_bytes * (size_t)parts);
    }
    job.results = memory;
    job.room = memory + results;
    tfast_parallel(parts, attention_decode_part, &job);
    for (int64_t i = 0; i < args->batch * args->heads; i++) {
        const attention_head h =
            attention_head_of(args, i / args->heads, i % args->heads);

        if (wide) {
            join_splits_f64(&job, &h, job.room);
        } else {
            join_splits_f32(&job, &h, job.room);
        }
    }
    tfast_scratch_give(memory);
    return TFAST_OK;
}

static tfast_status
attention_forward(const tfast_attention_args *args)
{
    forward_room_f32 narrow;
    forward_room_f64 wide;
    const size_t bytes = args->dtype == TFAST_F64
                             ? forward_cut_f64(&wide, args, ATTENTION_QUERIES, NULL)
                             : forward_cut_f32(&narrow, args, ATTENTION_QUERIES, NULL);
    attention_job job = {.args = args, .room_bytes = attention_room_bytes(bytes)};
    int parts;

    job.blocks = (args->n_q + ATTENTION_QUERIES - 1) / ATTENTION_QUERIES;
    job.tasks = args->batch * args->heads * job.blocks;
    if (job.tasks == 0) {
        return TFAST_OK;
    }
    if (attention_is_few(args)) {
        return attention_decode(args);
    }
    parts = attention_parts(args, job.tasks);
    /* A head's blocks share its keys: to one thread, where there are many heads. */
    job.run = args->batch * args->heads >= 4 * parts ? job.blocks : 1;
    job.look_ahead = args->batch * args->heads >= 4 * parts && attention_is_cold(args);
    job.room = tfast_scratch_take(job.room_bytes * (size_t)parts);
    if (job.room == NULL) {
        return tfast_fail(TFAST_ENOMEM, "attention cannot allocate %zu bytes",
                          job.room_bytes * (size_t)parts);
    }
    attention_hint(args, &args->out, args->heads, args->n_q, args->total_q,
                   args->dim_v);
    tfast_parallel(parts, attention_forward_part, &job);
    tfast_scratch_give(job.room);
    return TFAST_OK;
}

/* ---- Backward -------------------------------------------------------------------- */

/* Enough tasks for most machines; more would cost memory for sums of dq. */
enum { ATTENTION_BACK_TASKS = 8 };

/* How many tasks a head's keys are dealt out to. A bias that is broadcast over keys has
 * its gradient summed by one task. */
static int
attention_back_parts(const tfast_attention_args *args, int64_t heads)
{
    const int64_t blocks =
        (args->n_k + 2 * ATTENTION_BACK_KEYS - 1) / (2 * ATTENTION_BACK_KEYS);
    const int64_t wanted = (ATTENTION_BACK_TASKS + heads - 1) / heads;

    if (args->dbias != NULL && args->dbias_stride[3] == 0) {
        return 1;
    }
    return (int)attention_max(1, attention_min(wanted, blocks));
}

static attention_back_task
attention_back_task_of(const attention_back_job *job, int64_t i)
{
    const tfast_attention_args *args = job->args;
    const int64_t heads = job->join_heads ? 1 : args->kv_heads;
    const int64_t first = i / job->parts / heads, head = i / job->parts % heads;
    attention_back_task task = {.batch = first,
                                .end_batch = first + 1,
                                .head = head,
                                .end_head = job->join_heads ? args->kv_heads : head + 1,
                                .part = (int)(i % job->parts),
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

/* `next`: what the thread does then; NULL: nothing. */
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
        if (args->dtype == TFAST_F64) {
            attention_backward_f64(job, task, this_b, this_h, planned, room);
        } else {
            attention_backward_f32(job, task, this_b, this_h, planned, room);
        }
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

static void
attention_join_part(void *context, int part, int parts)
{
    attention_back_job *job = context;
    const tfast_attention_args *args = job->args;

    for (int64_t i = part; i < args->batch * args->heads; i += parts) {
        const attention_head h =
            attention_head_of(args, i / args->heads, i % args->heads);

        if (args->dtype == TFAST_F64) {
            join_parts_f64(job, &h);
        } else {
            join_parts_f32(job, &h);
        }
    }
}

static void
attention_write_number(const tfast_attention_args *args, void *array, int64_t i,
                       double number)
{
    if (args->dtype == TFAST_F64) {
        ((double *)array)[i] = number;
    } else {
        ((float *)array)[i] = (float)number;
    }
}

/* Adds up the gradients of slopes and sinks, in a fixed order. */
static void
attention_join_numbers(const attention_back_job *job)
{
    const tfast_attention_args *args = job->args;
    const int64_t heads = args->heads, all = args->batch * heads;

    for (int64_t i = 0; i < all && job->dalibi != NULL; i++) {
        for (int part = 1; part < job->parts; part++) {
            job->dalibi[i] += job->dalibi[part * all + i];
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
            attention_write_number(args, args->dalibi, i, job->dalibi[i]);
        }
    }
    for (int64_t i = 0; i < heads && job->dsinks != NULL; i++) {
        attention_write_number(args, args->dsinks, i, job->dsinks[i]);
    }
}

/* Bytes of what all tasks share. Places it at `memory`, unless that is NULL. */
static size_t
attention_back_shared(attention_back_job *job, char *memory)
{
    const tfast_attention_args *args = job->args;
    /* for no item, too, as there still are heads whose gradient is 0 */
    const size_t all = (size_t)(attention_max(1, args->batch) * args->heads);
    const size_t size = args->dtype == TFAST_F64 ? 8 : 4;
    const size_t dq = job->parts == 1 || args->dq.data == NULL
                          ? 0
                          : (size_t)(job->parts * args->heads * job->rows) * size *
                                (size_t)attention_round_up(args->dim, 16);
    const size_t alibi = args->dalibi == NULL ? 0 : all * (size_t)job->parts * 8;
    const size_t sinks = args->dsinks == NULL ? 0 : all * 8;
    const size_t numbers = (alibi + sinks + 63) / 64 * 64;
    const size_t dbias = (size_t)(job->groups - 1) * job->dbias_bytes;

    if (memory != NULL) {
        job->dq = memory;
        job->dalibi = alibi == 0 ? NULL : (double *)(memory + dq);
        job->dsinks = sinks == 0 ? NULL : (double *)(memory + dq + alibi);
        job->dbias = memory + dq + numbers;
        memset(memory + dq, 0, numbers + (job->writes_dbias ? 0 : dbias));
    }
    return (dq + numbers + dbias + 4095) / 4096 * 4096;
}

static tfast_status
attention_backward(const tfast_attention_args *args)
{
    backward_room_f32 narrow;
    backward_room_f64 wide;
    attention_back_job job = {.args = args};
    int64_t heads;
    size_t bytes, shared;
    char *memory;
    int threads;

    job.join_batch = args->dbias != NULL && args->dbias_stride[0] == 0;
    job.join_heads = args->dbias != NULL && args->dbias_stride[1] == 0;
    job.writes_dbias = attention_writes_dbias(args);
    job.rows = args->cu_seqlens_q != NULL ? args->total_q : args->batch * args->n_q;
    heads = job.join_heads ? 1 : args->kv_heads;
    job.groups = attention_dbias_groups(args, heads, &job.dbias_bytes);
    heads *= job.join_batch ? job.groups : args->batch;
    job.parts = heads == 0 ? 1 : attention_back_parts(args, heads);
    job.tasks = args->batch == 0 || args->kv_heads == 0 ? 0 : heads * job.parts;
    bytes = args->dtype == TFAST_F64
                ? backward_cut_f64(&wide, args, job.parts > 1, NULL)
                : backward_cut_f32(&narrow, args, job.parts > 1, NULL);
    job.room_bytes = attention_room_bytes(bytes);
    threads = attention_parts(args, attention_max(1, job.tasks));
    job.look_ahead = job.parts == 1 && args->batch * args->kv_heads >= 4 * threads &&
                     attention_is_cold(args);
    shared = attention_back_shared(&job, NULL);
    memory = tfast_scratch_take(shared + job.room_bytes * (size_t)threads);
    if (memory == NULL) {
        return tfast_fail(TFAST_ENOMEM, "attention_backward cannot allocate %zu bytes",
                          shared + job.room_bytes * (size_t)threads);
    }
    job.room = memory + shared;
    attention_back_shared(&job, memory);
    if (args->dbias != NULL) {
        attention_hint_dbias(args);
    }
    if (args->dbias != NULL && !job.writes_dbias) {
        tfast_parallel(threads, attention_clear_part, &job);
    }
    attention_hint(args, &args->dq, args->heads, args->n_q, args->total_q, args->dim);
    attention_hint(args, &args->dk, args->kv_heads, args->n_k, args->total_k,
                   args->dim);
    attention_hint(args, &args->dv, args->kv_heads, args->n_k, args->total_k,
                   args->dim_v);
    tfast_parallel(threads, attention_backward_part, &job);
    if (job.parts > 1 && args->dq.data != NULL) {
        tfast_parallel(threads, attention_join_part, &job);
    }
    if (job.groups > 1) {
        tfast_parallel(threads, attention_join_groups, &job);
    }
    attention_join_numbers(&job);
    tfast_scratch_give(memory);
    return TFAST_OK;
}
