/* Attention on the CPU: which blocks there are, and which thread takes one. A block's
 * result does not depend on who computes it. */

typedef struct {
    const tfast_attention_args *args;
    char *room; /* of all threads */
    size_t room_bytes;
    int64_t tasks, blocks; /* blocks of a head */
    _Atomic int64_t next;
    int64_t run; /* tasks taken at a time */
} attention_job;

/* Tasks worth another thread: about 20 us. In multiply-adds. */
enum { ATTENTION_PART_COST = 1 << 21 };

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

static void
attention_forward_part(void *context, int part, int parts)
{
    attention_job *job = context;
    const tfast_attention_args *args = job->args;
    void *room = job->room + job->room_bytes * (size_t)part;

    (void)parts;
    for (;;) {
        const int64_t begin = atomic_fetch_add(&job->next, job->run);

        for (int64_t t = begin; t < attention_min(begin + job->run, job->tasks); t++) {
            const int64_t head = t / job->blocks;
            /* The last blocks of a causal head have the most work: first. */
            const int64_t block = job->blocks - 1 - t % job->blocks;
            const attention_head h =
                attention_head_of(args, head / args->heads, head % args->heads);

            if (block * ATTENTION_QUERIES >= h.n_q) {
                continue;
            }
            if (args->dtype == TFAST_F64) {
                attention_forward_f64(&h, block * ATTENTION_QUERIES, room);
            } else {
                attention_forward_f32(&h, block * ATTENTION_QUERIES, room);
            }
        }
        if (begin >= job->tasks) {
            return;
        }
    }
}

static tfast_status
attention_forward(const tfast_attention_args *args)
{
    forward_room_f32 narrow;
    forward_room_f64 wide;
    const size_t bytes = args->dtype == TFAST_F64
                             ? forward_cut_f64(&wide, args, NULL)
                             : forward_cut_f32(&narrow, args, NULL);
    attention_job job = {.args = args,
                         .room_bytes = (bytes + 4095) / 4096 * 4096 + 256};
    int parts;

    job.blocks = (args->n_q + ATTENTION_QUERIES - 1) / ATTENTION_QUERIES;
    job.tasks = args->batch * args->heads * job.blocks;
    if (job.tasks == 0) {
        return TFAST_OK;
    }
    parts = attention_parts(args, job.tasks);
    /* A head's blocks share its keys: to one thread, where there are many heads. */
    job.run = args->batch * args->heads >= 4 * parts ? job.blocks : 1;
    job.room = tfast_scratch_take(job.room_bytes * (size_t)parts);
    if (job.room == NULL) {
        return tfast_fail(TFAST_ENOMEM, "attention cannot allocate %zu bytes",
                          job.room_bytes * (size_t)parts);
    }
    tfast_parallel(parts, attention_forward_part, &job);
    tfast_scratch_give(job.room);
    return TFAST_OK;
}
