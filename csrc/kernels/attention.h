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
