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

/* One head of q against the keys of a part. Returns whether its dq is finite. */
static bool
R(backward_query_head)(R(backward_work) * work, const attention_back_job *job,
                       const attention_back_task *task, bool first)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const int part = task->part;
    const int64_t at = attention_query_row(h, &args->dq, 0);
    double alibi = 0;
    bool finite;

    R(open_head)(work);
    work->dbias = task->dbias;
    work->writes_dbias = job->writes_dbias &&
                         (h->batch == task->batch || !job->join_batch) &&
                         (h->head == 0 || !job->join_heads);
    work->dalibi = job->dalibi == NULL ? NULL : &alibi;
    work->dq = R(sums_of)(args, &args->dq, at, args->dim, room->dq, room->q_width);
    if (job->parts > 1 && args->dq.data != NULL) {
        work->dq.rows =
            (REAL *)job->dq + attention_partial_row(job, h, part) * room->q_width;
        work->dq.stride = room->q_width;
    }
    R(clear_sums)(work->dq, 0, h->n_q, room->q_width);
    for (int64_t block = 0; block * ATTENTION_BACK_KEYS < h->n_k; block++) {
        if (attention_part_of(block, job->parts) == part) {
            R(backward_keys)(work, block * ATTENTION_BACK_KEYS, first);
        }
    }
    if (job->dalibi != NULL && !work->careful) {
        job->dalibi[part * args->batch * args->heads + h->batch * args->heads +
                    h->head] = alibi;
    }
    if (job->dsinks != NULL && part == 0) {
        job->dsinks[h->batch * args->heads + h->head] = R(sink_gradient)(work);
    }
    finite = R(close_sums)(work->dq, 0, h->n_q, room->q_width, R(late_scale)(work));
    if (job->parts == 1) {
        R(write_sums)(args, &args->dq, at, work->dq, 0, h->n_q, args->dim);
    }
    return finite;
}

/* The keys of part `part` of one head of k and v, with the heads of q that share them.
 * Returns whether all gradients are finite. */
static bool
R(backward_head)(const attention_back_job *job, const R(backward_room) * room,
                 const attention_back_task *task, int64_t batch, int64_t kv_head,
                 attention_ahead *ahead, bool careful)
{
    const tfast_attention_args *args = job->args;
    const int part = task->part;
    const int64_t group = args->heads / args->kv_heads;
    attention_head h = attention_head_of(args, batch, kv_head * group);
    const int64_t dk = attention_key_row(&h, &args->dk, 0);
    const int64_t dv = attention_key_row(&h, &args->dv, 0);
    R(backward_work)
    work = {
        .room = room,
        .head = &h,
        .dk = R(sums_of)(args, &args->dk, dk, args->dim, room->dk, room->q_width),
        .dv = R(sums_of)(args, &args->dv, dv, args->dim_v, room->dv, room->v_width),
        .general = attention_is_general(&h),
        .careful = careful,
        .pairs = R(has_pairs)(args) && !careful,
        .few = R(backward_is_few)(args) && (careful || !R(has_pairs)(args)),
        .ahead = ahead,
    };
    bool finite = true;

    for (int64_t i = 0; i < group; i++) {
        h.head = kv_head * group + i;
        finite &= R(backward_query_head)(&work, job, task, i == 0);
    }
    for (int64_t block = 0; block * ATTENTION_BACK_KEYS < h.n_k; block++) {
        const int64_t key = block * ATTENTION_BACK_KEYS;
        const int64_t n = attention_min(ATTENTION_BACK_KEYS, h.n_k - key);

        if (attention_part_of(block, job->parts) == part) {
            finite &=
                R(close_sums)(work.dk, key, n, room->q_width, R(late_scale)(&work));
            finite &= R(close_sums)(work.dv, key, n, room->v_width, 1);
            R(write_sums)(args, &args->dk, dk, work.dk, key, n, args->dim);
            R(write_sums)(args, &args->dv, dv, work.dv, key, n, args->dim_v);
        }
    }
    if (part == 0) {
        R(clear_rest)(&h, &args->dk, args->dim);
        R(clear_rest)(&h, &args->dv, args->dim_v);
    }
    return finite;
}

/* The task's part of one head of k and v. */
static void
R(attention_backward)(const attention_back_job *job, const attention_back_task *task,
                      int64_t batch, int64_t kv_head, attention_ahead *ahead,
                      void *memory)
{
    R(backward_room) room;

    R(backward_cut)(&room, job->args, job->parts > 1, memory);
    if (!R(backward_head)(job, &room, task, batch, kv_head, ahead, false) &&
        attention_can_forbid(job->args)) {
        R(backward_head)(job, &room, task, batch, kv_head, NULL, true);
    }
}

/* Adds up the parts' dq of one head, in order, and writes it. */
static void
R(join_parts)(const attention_back_job *job, const attention_head *h)
{
    const tfast_attention_args *args = job->args;
    const int64_t width = attention_round_up(args->dim, VR_WIDTH);
    REAL *const all = job->dq, *const sum =
                                   all + attention_partial_row(job, h, 0) * width;

    for (int part = 1; part < job->parts; part++) {
        const REAL *from = all + attention_partial_row(job, h, part) * width;

        for (int64_t i = 0; i < h->n_q * width; i += VR_WIDTH) {
            vr_store(sum + i, vr_add(vr_load(sum + i), vr_load(from + i)));
        }
    }
    for (int64_t i = 0; i < h->n_q; i++) {
        R(tile_write)
        (args->dq.data, sum + i * width, args->dtype,
         attention_query_row(h, &args->dq, i), (int)args->dim);
    }
}
