/* Attention backward: one task, and where its sums are written. */
#ifndef ATTENTION_BACKWARD_TASK_H
#define ATTENTION_BACKWARD_TASK_H

#include "attention_backward_tile.h"

/* Where a gradient is summed: in the output if it can hold sums, else in `beside`, rows
 * of `width` elements; nowhere if it is not wanted. */
static row_sums
sums_of(const tfast_attention_args *args, const tfast_attention_rows *rows,
        int64_t first, int64_t dim, real *beside, int64_t width)
{
    if (rows->data == NULL) {
        return (row_sums){NULL, 0};
    }
    if (holds_sums(args, dim)) {
        return (row_sums){(real *)rows->data + first, rows->row};
    }
    return (row_sums){beside, width};
}

static void
clear_sums(row_sums to, int64_t first, int64_t n, int64_t width)
{
    for (int64_t i = first; i < first + n && to.rows != NULL; i++) {
        memset(to.rows + i * to.stride, 0, sizeof(real) * (size_t)width);
    }
}

/* Multiplies n rows of sums by `scale`. Returns whether all are finite. */
static bool
close_sums(row_sums sums, int64_t first, int64_t n, int64_t width, double scale)
{
    const vr factor = vr_set1((real)scale);
    vr odd = vr_set1(0);

    for (int64_t i = first; i < first + n && sums.rows != NULL; i++) {
        real *row = sums.rows + i * sums.stride;
        vr odd_row = vr_set1(0); /* one a row: a short chain of dependent FMAs */

        for (int64_t d = 0; d < width; d += VR_WIDTH) {
            const vr x = vr_load(row + d);

            if (scale != 1) {
                vr_store(row + d, vr_mul(x, factor));
            }
            odd_row = vr_madd(x, vr_set1(0), odd_row); /* NaN once x is not finite */
        }
        odd = vr_add(odd, odd_row);
    }
    return vr_sum(odd) == 0;
}

/* Writes rows first .. first + n - 1 of an output that cannot hold its sums `from`. Row
 * 0 begins at element `at`. */
static void
write_sums(const tfast_attention_args *args, const tfast_attention_rows *rows,
           int64_t at, row_sums from, int64_t first, int64_t n, int64_t dim)
{
    if (from.rows == NULL || holds_sums(args, dim)) {
        return;
    }
    for (int64_t i = first; i < first + n; i++) {
        tile_write(rows->data, from.rows + i * from.stride, args->dtype,
                   at + i * rows->row, (int)dim);
    }
}

/* Zeroes the gradient of keys past the item's kv_lens. */
static void
clear_rest(const attention_head *h, const tfast_attention_rows *rows, int64_t dim)
{
    const size_t size = tfast_dtype_size((tfast_dtype)h->args->dtype);

    for (int64_t j = h->n_k; j < h->rows_k && rows->data != NULL; j++) {
        memset((char *)rows->data + (size_t)attention_key_row(h, rows, j) * size, 0,
               (size_t)dim * size);
    }
}

/* At the last visit to the keys of n blocks, scales and writes their dk and dv. Returns
 * whether all are finite. */
static bool
close_blocks(const backward_work *work, const key_block *blocks, int64_t n)
{
    const tfast_attention_args *args = work->head->args;
    const backward_room *room = work->room;
    bool finite = true;

    for (int64_t i = 0; i < n && work->last; i++) {
        const key_block *b = &blocks[i];

        finite &= close_sums(b->dk, 0, b->n_k, room->q_width, late_scale(work));
        finite &= close_sums(b->dv, 0, b->n_k, room->v_width, 1);
        write_sums(args, &args->dk, work->dk_at + b->key * args->dk.row, b->dk, 0,
                   b->n_k, args->dim);
        write_sums(args, &args->dv, work->dv_at + b->key * args->dv.row, b->dv, 0,
                   b->n_k, args->dim_v);
    }
    return finite;
}

/* Zeroes the dk and dv of blocks that no query has visited. */
static void
clear_fresh(const backward_work *work, const key_block *blocks, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (blocks[i].fresh) {
            clear_sums(blocks[i].dk, 0, blocks[i].n_k, work->room->q_width);
            clear_sums(blocks[i].dv, 0, blocks[i].n_k, work->room->v_width);
        }
    }
}

/* Computes the blocks of a list for the queries of one head, several blocks together.
 * Returns whether all dk and dv that were completed are finite. */
static bool
backward_list(backward_work *work, int list, int lists)
{
    const attention_head *h = work->head;
    const int64_t most = attention_back_blocks(h->args);
    key_block blocks[ATTENTION_BACK_BLOCKS];
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
             (block_begin(work, key) - blocks[0].begin) % ATTENTION_QUERIES != 0)) {
            backward_blocks(work, blocks, n);
            clear_fresh(work, blocks, n);
            finite &= close_blocks(work, blocks, n);
            n = 0;
        }
        if (end) {
            return finite;
        }
        open_block(work, &blocks[n], n, key);
        n++;
    }
}

/* Where the dq of a part is summed. If keys are split, only part 0 can use the output;
 * the other parts use memory of the job. */
static row_sums
dq_sums(const attention_back_job *job, const attention_head *h, int64_t chain, int part,
        real *beside)
{
    const tfast_attention_args *args = job->args;
    const bool held = holds_sums(args, args->dim);
    const int64_t group = args->heads / args->kv_heads;
    const int64_t width = attention_round_up(args->dim, VR_WIDTH);

    if (attention_is_split(job) && !(held && part == 0)) {
        const int64_t place = ((part - held) * job->chains + chain) * group;

        beside = (real *)job->dq + (place + h->head % group) * args->n_q * width;
        return (row_sums){args->dq.data == NULL ? NULL : beside, width};
    }
    return sums_of(args, &args->dq, attention_query_row(h, &args->dq, 0), args->dim,
                   beside, width);
}

/* Prepares lse, delta and share of the query tiles of this segment, and zeroes their dq
 * in phase 0. Returns the tiles' part of the gradient of the sink if `sinks`, else
 * 0. */
static double
open_head(backward_work *work, const attention_back_job *job, bool sinks)
{
    const attention_head *h = work->head;
    double sink = 0;

    work->shared = false;
    for (int64_t i = work->segment * ATTENTION_QUERIES; i < h->n_q;
         i += work->turns * ATTENTION_QUERIES) {
        const int64_t end = attention_min(i + ATTENTION_QUERIES, h->n_q);

        open_sums(work, i, end);
        open_shares(work, i, end);
        if (sinks) {
            sink = sink_gradient(work, sink, i, end);
        }
        if (job->phase == 0) {
            clear_sums(work->dq, i, end - i, work->room->q_width);
        }
    }
    return sink / early_scale(work);
}

/* Computes one query head for the keys of a list. Returns whether the gradients that it
 * completed are finite: dq if keys are not split, dk and dv at the last visit. */
static bool
backward_query_head(backward_work *work, const attention_back_job *job,
                    const attention_back_task *task)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const backward_room *room = work->room;
    const int64_t number = h->batch * args->heads + h->head;
    const bool sinks = job->dsinks != NULL && task->list == 0;
    double alibi = 0, sink;
    bool finite;

    work->dbias = task->dbias;
    work->writes_dbias = job->writes_dbias &&
                         (h->batch == task->batch || !job->join_batch) &&
                         (h->head == 0 || !job->join_heads);
    work->dalibi = job->dalibi == NULL ? NULL : &alibi;
    work->dq = dq_sums(job, h, task->chain, task->list % job->parts, room->dq);
    sink = open_head(work, job, sinks);
    finite = backward_list(work, task->list, job->parts * job->turns);
    if (job->dalibi != NULL && !work->careful) {
        double *to = job->dalibi + task->list * args->batch * args->heads + number;
        *to = job->phase == 0 ? alibi : *to + alibi;
    }
    if (sinks) {
        double *to = job->dsinks + number;
        *to = job->phase == 0 ? sink : *to + sink;
    }
    if (!attention_is_split(job)) {
        finite &= close_sums(work->dq, 0, h->n_q, room->q_width, late_scale(work));
        write_sums(args, &args->dq, attention_query_row(h, &args->dq, 0), work->dq, 0,
                   h->n_q, args->dim);
    }
    return finite;
}

/* Where dk or dv is summed: in the output, in the job's memory if several tasks take
 * turns, or in the thread's (`room`). */
static row_sums
key_sums(const attention_back_job *job, const tfast_attention_rows *rows, int64_t at,
         int64_t dim, void *shared, int64_t chain, real *room)
{
    const int64_t width = attention_round_up(dim, VR_WIDTH);
    real *beside =
        job->turns > 1 ? (real *)shared + chain * job->args->n_k * width : room;

    return sums_of(job->args, rows, at, dim, beside, width);
}

/* Computes the task's list of blocks of one head of k and v, for all query heads that
 * share it. Returns whether the gradients that it completed are finite. */
static bool
backward_head(const attention_back_job *job, const backward_room *room,
              const attention_back_task *task, int64_t batch, int64_t kv_head,
              attention_ahead *ahead, bool careful)
{
    const tfast_attention_args *args = job->args;
    const int64_t group = args->heads / args->kv_heads;
    attention_head h = attention_head_of(args, batch, kv_head * group);
    const int64_t dk = attention_key_row(&h, &args->dk, 0);
    const int64_t dv = attention_key_row(&h, &args->dv, 0);
    backward_work work = {
        .room = room,
        .head = &h,
        .dk = key_sums(job, &args->dk, dk, args->dim, job->dk, task->chain, room->dk),
        .dv = key_sums(job, &args->dv, dv, args->dim_v, job->dv, task->chain, room->dv),
        .dk_at = dk,
        .dv_at = dv,
        .turns = job->turns,
        .segment = (task->list / job->parts + job->phase) % job->turns,
        .general = attention_is_general(&h),
        .careful = careful,
        .pairs = has_pairs(args) && !careful,
        .few = backward_is_few(args) && (careful || !has_pairs(args)),
        .ahead = ahead,
    };
    bool finite = true;

    for (int64_t i = 0; i < group; i++) {
        h.head = kv_head * group + i;
        work.first = i == 0 && job->phase == 0;
        work.last = i == group - 1 && job->phase == job->turns - 1;
        finite &= backward_query_head(&work, job, task);
    }
    if (task->list == 0) {
        clear_rest(&h, &args->dk, args->dim);
        clear_rest(&h, &args->dv, args->dim_v);
    }
    return finite;
}

/* backward_head(). If a gradient is not finite and keys may be forbidden, the head is
 * computed again with multiply_careful(): here, or by attention_backward_split() for
 * all tasks. */
static void
backward_head_checked(const attention_back_job *job, const attention_back_task *task,
                      int64_t batch, int64_t kv_head, attention_ahead *ahead,
                      void *memory)
{
    backward_room room;
    bool finite;

    backward_cut(&room, job, memory);
    finite = backward_head(job, &room, task, batch, kv_head, ahead, job->careful);
    if (finite || !attention_can_forbid(job->args)) {
        return;
    }
    if (attention_is_split(job)) {
        atomic_store(&job->odd[task->chain], 1);
    } else {
        backward_head(job, &room, task, batch, kv_head, NULL, true);
    }
}

/* Scales and adds the dq of all parts in order, for rows begin .. end - 1 of one head,
 * and writes the sum. Returns whether all parts are finite. */
static bool
join_parts(const attention_back_job *job, const attention_head *h, int64_t chain,
           int64_t begin, int64_t end)
{
    const tfast_attention_args *args = job->args;
    const int64_t width = attention_round_up(args->dim, VR_WIDTH), n = end - begin;
    const row_sums sum = sums_at(dq_sums(job, h, chain, 0, NULL), begin);
    const bool late = attention_is_general(h) || (has_pairs(args) && !job->careful);
    const double scale = late ? args->scale : 1;
    bool finite = close_sums(sum, 0, n, width, scale);

    for (int part = 1; part < job->parts && sum.rows != NULL; part++) {
        const row_sums from = sums_at(dq_sums(job, h, chain, part, NULL), begin);

        finite &= close_sums(from, 0, n, width, scale);
        for (int64_t i = 0; i < n; i++) {
            real *to = sum.rows + i * sum.stride;
            const real *row = from.rows + i * from.stride;

            for (int64_t d = 0; d < width; d += VR_WIDTH) {
                vr_store(to + d, vr_add(vr_load(to + d), vr_load(row + d)));
            }
        }
    }
    write_sums(args, &args->dq, attention_query_row(h, &args->dq, begin), sum, 0, n,
               args->dim);
    return finite;
}

#endif
