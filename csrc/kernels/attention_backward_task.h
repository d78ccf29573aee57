/* Attention backward: what one thread does at a time, and what it leaves where. */

/* Where the sums of n rows are formed: in the output, beside it, or nowhere. */
static R(sums)
    R(sums_of)(const tfast_attention_args *args, const tfast_attention_rows *rows,
               int64_t first, int64_t dim, REAL *beside, int64_t width)
{
    if (rows->data == NULL) {
        return (R(sums)){NULL, 0};
    }
    if (R(holds_sums)(args, dim)) {
        return (R(sums)){(REAL *)rows->data + first, rows->row};
    }
    return (R(sums)){beside, width};
}

static void
R(clear_sums)(R(sums) to, int64_t first, int64_t n, int64_t width)
{
    for (int64_t i = first; i < first + n && to.rows != NULL; i++) {
        memset(to.rows + i * to.stride, 0, sizeof(REAL) * (size_t)width);
    }
}

/* Multiplies sums by `scale`. Returns whether all are finite. */
static bool
R(close_sums)(R(sums) sums, int64_t first, int64_t n, int64_t width, double scale)
{
    const vr factor = vr_set1((REAL)scale);
    vr odd = vr_set1(0);

    for (int64_t i = first; i < first + n && sums.rows != NULL; i++) {
        REAL *row = sums.rows + i * sums.stride;
        vr odd_row = vr_set1(0); /* a chain of additions as short as the row */

        for (int64_t d = 0; d < width; d += VR_WIDTH) {
            const vr x = vr_load(row + d);

            if (scale != 1) {
                vr_store(row + d, vr_mul(x, factor));
            }
            odd_row = vr_madd(x, vr_set1(0), odd_row); /* 0, or NaN from then on */
        }
        odd = vr_add(odd, odd_row);
    }
    return vr_sum(odd) == 0;
}

/* Writes rows first .. first + n - 1 of an output whose sums are beside it. */
static void
R(write_sums)(const tfast_attention_args *args, const tfast_attention_rows *rows,
              int64_t at, R(sums) from, int64_t first, int64_t n, int64_t dim)
{
    if (from.rows == NULL || R(holds_sums)(args, dim)) {
        return;
    }
    for (int64_t i = first; i < first + n; i++) {
        R(tile_write)
        (rows->data, from.rows + i * from.stride, args->dtype, at + i * rows->row,
         (int)dim);
    }
}

/* Keys past the item's length have a gradient of 0. */
static void
R(clear_rest)(const attention_head *h, const tfast_attention_rows *rows, int64_t dim)
{
    const size_t size = tfast_dtype_size((tfast_dtype)h->args->dtype);

    for (int64_t j = h->n_k; j < h->rows_k && rows->data != NULL; j++) {
        memset((char *)rows->data + (size_t)attention_key_row(h, rows, j) * size, 0,
               (size_t)dim * size);
    }
}

/* Closes blocks after the last visit to their keys. Returns whether all is finite. */
static bool
R(close_blocks)(const R(backward_work) * work, const R(key_block) * blocks, int64_t n)
{
    const tfast_attention_args *args = work->head->args;
    const R(backward_room) *room = work->room;
    bool finite = true;

    for (int64_t i = 0; i < n && work->last; i++) {
        const R(key_block) *b = &blocks[i];

        finite &= R(close_sums)(b->dk, 0, b->n_k, room->q_width, R(late_scale)(work));
        finite &= R(close_sums)(b->dv, 0, b->n_k, room->v_width, 1);
        R(write_sums)
        (args, &args->dk, work->dk_at + b->key * args->dk.row, b->dk, 0, b->n_k,
         args->dim);
        R(write_sums)
        (args, &args->dv, work->dv_at + b->key * args->dv.row, b->dv, 0, b->n_k,
         args->dim_v);
    }
    return finite;
}

/* Blocks that no query has visited get 0. */
static void
R(clear_fresh)(const R(backward_work) * work, const R(key_block) * blocks, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (blocks[i].fresh) {
            R(clear_sums)(blocks[i].dk, 0, blocks[i].n_k, work->room->q_width);
            R(clear_sums)(blocks[i].dv, 0, blocks[i].n_k, work->room->v_width);
        }
    }
}

/* The blocks of a list against the queries. Returns whether what is closed is finite.
 */
static bool
R(backward_list)(R(backward_work) * work, int list, int lists)
{
    const attention_head *h = work->head;
    const int64_t most = attention_back_blocks(h->args);
    R(key_block) blocks[ATTENTION_BACK_BLOCKS];
    bool finite = true;
    int64_t n = 0;

    for (int64_t block = 0;; block++) {
        const int64_t key = block * ATTENTION_BACK_KEYS;
        const bool end = key >= h->n_k;

        if (!end && attention_list_of(block, lists) != list) {
            continue;
        }
        if (n > 0 &&
            (end || n == most ||
             (R(block_begin)(work, key) - blocks[0].begin) % ATTENTION_QUERIES != 0)) {
            R(backward_blocks)(work, blocks, n);
            R(clear_fresh)(work, blocks, n);
            finite &= R(close_blocks)(work, blocks, n);
            n = 0;
        }
        if (end) {
            return finite;
        }
        R(open_block)(work, &blocks[n], n, key);
        n++;
    }
}

/* Where a part's sums of dq are: if split all but the first that the output holds. */
static R(sums) R(dq_sums)(const attention_back_job *job, const attention_head *h,
                          int64_t chain, int part, REAL *beside)
{
    const tfast_attention_args *args = job->args;
    const bool held = R(holds_sums)(args, args->dim);
    const int64_t group = args->heads / args->kv_heads;
    const int64_t width = attention_round_up(args->dim, VR_WIDTH);

    if (attention_is_split(job) && !(held && part == 0)) {
        const int64_t place = ((part - held) * job->chains + chain) * group;

        beside = (REAL *)job->dq + (place + h->head % group) * args->n_q * width;
        return (R(sums)){args->dq.data == NULL ? NULL : beside, width};
    }
    return R(sums_of)(args, &args->dq, attention_query_row(h, &args->dq, 0), args->dim,
                      beside, width);
}

/* What is made ready of a head's queries that are visited. Returns the gradient of its
 * sink, where that is wanted. */
static double
R(open_head)(R(backward_work) * work, const attention_back_job *job, bool sinks)
{
    const attention_head *h = work->head;
    double sink = 0;

    work->shared = false;
    for (int64_t i = work->segment * ATTENTION_QUERIES; i < h->n_q;
         i += work->turns * ATTENTION_QUERIES) {
        const int64_t end = attention_min(i + ATTENTION_QUERIES, h->n_q);

        R(open_sums)(work, i, end);
        R(open_shares)(work, i, end);
        if (sinks) {
            sink = R(sink_gradient)(work, sink, i, end);
        }
        if (job->phase == 0) {
            R(clear_sums)(work->dq, i, end - i, work->room->q_width);
        }
    }
    return sink / R(early_scale)(work);
}

/* One head of q against the keys of a list. Returns whether its dq is finite, unless it
 * is split, and dk and dv, if this is the last visit. */
static bool
R(backward_query_head)(R(backward_work) * work, const attention_back_job *job,
                       const attention_back_task *task)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const int64_t number = h->batch * args->heads + h->head;
    const bool sinks = job->dsinks != NULL && task->list == 0;
    double alibi = 0, sink;
    bool finite;

    work->dbias = task->dbias;
    work->writes_dbias = job->writes_dbias &&
                         (h->batch == task->batch || !job->join_batch) &&
                         (h->head == 0 || !job->join_heads);
    work->dalibi = job->dalibi == NULL ? NULL : &alibi;
    work->dq = R(dq_sums)(job, h, task->chain, task->list % job->parts, room->dq);
    sink = R(open_head)(work, job, sinks);
    finite = R(backward_list)(work, task->list, job->parts * job->turns);
    if (job->dalibi != NULL && !work->careful) {
        double *to = job->dalibi + task->list * args->batch * args->heads + number;
        *to = job->phase == 0 ? alibi : *to + alibi;
    }
    if (sinks) {
        double *to = job->dsinks + number;
        *to = job->phase == 0 ? sink : *to + sink;
    }
    if (!attention_is_split(job)) {
        finite &=
            R(close_sums)(work->dq, 0, h->n_q, room->q_width, R(late_scale)(work));
        R(write_sums)
        (args, &args->dq, attention_query_row(h, &args->dq, 0), work->dq, 0, h->n_q,
         args->dim);
    }
    return finite;
}

/* Where sums of dk or dv are: in the output, in the job or in the thread's room. */
static R(sums)
    R(key_sums)(const attention_back_job *job, const tfast_attention_rows *rows,
                int64_t at, int64_t dim, void *shared, int64_t chain, REAL *room)
{
    const int64_t width = attention_round_up(dim, VR_WIDTH);
    REAL *beside =
        job->turns > 1 ? (REAL *)shared + chain * job->args->n_k * width : room;

    return R(sums_of)(job->args, rows, at, dim, beside, width);
}

/* The task's list of blocks of one head of k and v, with the heads of q that share it.
 * Returns whether what it has closed is finite. */
static bool
R(backward_head)(const attention_back_job *job, const R(backward_room) * room,
                 const attention_back_task *task, int64_t batch, int64_t kv_head,
                 attention_ahead *ahead, bool careful)
{
    const tfast_attention_args *args = job->args;
    const int64_t group = args->heads / args->kv_heads;
    attention_head h = attention_head_of(args, batch, kv_head * group);
    const int64_t dk = attention_key_row(&h, &args->dk, 0);
    const int64_t dv = attention_key_row(&h, &args->dv, 0);
    R(backward_work)
    work = {
        .room = room,
        .head = &h,
        .dk =
            R(key_sums)(job, &args->dk, dk, args->dim, job->dk, task->chain, room->dk),
        .dv = R(key_sums)(job, &args->dv, dv, args->dim_v, job->dv, task->chain,
                          room->dv),
        .dk_at = dk,
        .dv_at = dv,
        .turns = job->turns,
        .segment = (task->list / job->parts + job->phase) % job->turns,
        .general = attention_is_general(&h),
        .careful = careful,
        .pairs = R(has_pairs)(args) && !careful,
        .few = R(backward_is_few)(args) && (careful || !R(has_pairs)(args)),
        .ahead = ahead,
    };
    bool finite = true;

    for (int64_t i = 0; i < group; i++) {
        h.head = kv_head * group + i;
        work.first = i == 0 && job->phase == 0;
        work.last = i == group - 1 && job->phase == job->turns - 1;
        finite &= R(backward_query_head)(&work, job, task);
    }
    if (task->list == 0) {
        R(clear_rest)(&h, &args->dk, args->dim);
        R(clear_rest)(&h, &args->dv, args->dim_v);
    }
    return finite;
}

/* The task's list of one head of k and v. */
static void
R(attention_backward)(const attention_back_job *job, const attention_back_task *task,
                      int64_t batch, int64_t kv_head, attention_ahead *ahead,
                      void *memory)
{
    R(backward_room) room;
    bool finite;

    R(backward_cut)(&room, job, memory);
    finite = R(backward_head)(job, &room, task, batch, kv_head, ahead, job->careful);
    if (finite || !attention_can_forbid(job->args)) {
        return;
    }
    if (attention_is_split(job)) {
        atomic_store(&job->odd[task->chain], 1);
    } else {
        R(backward_head)(job, &room, task, batch, kv_head, NULL, true);
    }
}

/* Adds up the parts' dq of rows begin .. end - 1 of one head, in order, and writes
 * them. Returns whether all are finite. */
static bool
R(join_parts)(const attention_back_job *job, const attention_head *h, int64_t chain,
              int64_t begin, int64_t end)
{
    const tfast_attention_args *args = job->args;
    const int64_t width = attention_round_up(args->dim, VR_WIDTH), n = end - begin;
    const R(sums) sum = R(sums_at)(R(dq_sums)(job, h, chain, 0, NULL), begin);
    const bool late = attention_is_general(h) || (R(has_pairs)(args) && !job->careful);
    const double scale = late ? args->scale : 1;
    bool finite = R(close_sums)(sum, 0, n, width, scale);

    for (int part = 1; part < job->parts && sum.rows != NULL; part++) {
        const R(sums) from = R(sums_at)(R(dq_sums)(job, h, chain, part, NULL), begin);

        finite &= R(close_sums)(from, 0, n, width, scale);
        for (int64_t i = 0; i < n; i++) {
            REAL *to = sum.rows + i * sum.stride;
            const REAL *row = from.rows + i * from.stride;

            for (int64_t d = 0; d < width; d += VR_WIDTH) {
                vr_store(to + d, vr_add(vr_load(to + d), vr_load(row + d)));
            }
        }
    }
    R(write_sums)
    (args, &args->dq, attention_query_row(h, &args->dq, begin), sum, 0, n, args->dim);
    return finite;
}
