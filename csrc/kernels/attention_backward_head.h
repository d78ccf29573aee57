/* Attention backward: the job of a call, the scratch memory of one thread, and the
 * preparation of a head: lse, delta, packed queries. */
#ifndef ATTENTION_BACKWARD_HEAD_H
#define ATTENTION_BACKWARD_HEAD_H

#include "attention_block.h"

#include <stdatomic.h>

/* ---- The call's job -------------------------------------------------------------- */

/* How a backward call is split.
 *
 * A chain is a sequence of steps that are computed in order. A step is one head of k
 * and v of one batch item, with the query heads that share it. A chain has one step,
 * unless dbias is summed over batch items or heads: then all steps that add to the same
 * dbias are one chain.
 *
 * With few chains, the blocks of keys of a step are split into parts * turns lists, one
 * task each. Each part sums a dq of its own. The `turns` lists of a part add to the
 * same dq, so a step runs in `turns` phases: in each phase, the lists of a part visit
 * different tiles of queries. parts and turns depend on sizes alone, so that sums do
 * not depend on the number of threads. */
typedef struct {
    const tfast_attention_args *args;
    char *room;        /* scratch memory of all threads */
    size_t room_bytes; /* of one thread */
    int parts, turns;
    int64_t chains;
    bool join_batch, join_heads; /* a chain has all batch items of a group, all heads */
    int groups;         /* groups of batch items, each with a dbias of its own */
    bool writes_dbias;  /* the first visit writes all of dbias: no need to zero it */
    size_t dbias_bytes; /* of one group */
    char *dbias;      /* [groups - 1][dbias_bytes]; the first group uses args->dbias */
    void *dq;         /* [parts][chains][group][n_q][width], if split; without the first
                         part where the output holds sums; group: heads / kv_heads */
    void *dk, *dv;    /* [chains][n_k][width], if turns > 1 and outputs hold no sums */
    double *dalibi;   /* [parts * turns][batch][heads]; NULL: not wanted */
    double *dsinks;   /* [batch][heads]; NULL: not wanted */
    _Atomic int *odd; /* [chains]: a gradient of the step is not finite; if split */
    int64_t step;     /* the current step of all chains, if split */
    int phase;        /* 0 .. turns - 1 */
    bool careful;     /* a step is repeated with multiply_careful() for odd chains */
    bool look_ahead;  /* prefetch the next head */
    int64_t tasks;
    _Atomic int64_t next; /* the first task that no thread has taken */
} attention_back_job;

/* One list of blocks of keys, for the steps of a chain: batch items batch .. end_batch
 * - 1 and heads of k and v head .. end_head - 1. */
typedef struct {
    int64_t chain, batch, end_batch, head, end_head;
    int list;
    void *dbias; /* where the gradient of the bias is summed */
} attention_back_task;

/* Most blocks of keys that are computed together for each tile of queries, so that a
 * tile is packed once for all of them. They fit a 512 KB cache together with their
 * sums. */
enum { ATTENTION_BACK_BLOCKS = 4 };

/* The number of blocks computed together: fewer where rows are longer than 64. */
static inline int64_t
attention_back_blocks(const tfast_attention_args *args)
{
    const int64_t dim = attention_max(args->dim, args->dim_v);
    const int64_t all = (args->n_k + ATTENTION_BACK_KEYS - 1) / ATTENTION_BACK_KEYS;
    const int64_t most = attention_min(ATTENTION_BACK_BLOCKS, all);

    return attention_max(1, attention_min(64 * ATTENTION_BACK_BLOCKS / dim, most));
}

static inline bool
attention_is_split(const attention_back_job *job)
{
    return job->parts * job->turns > 1;
}

/* The list of a block. Lists get blocks in the order 0 .. lists - 1, lists - 1 .. 0,
 * because under a causal mask the first blocks have the most queries. */
static inline int
attention_list_of(int64_t block, int lists)
{
    const int place = (int)(block % (2 * lists));

    return place < lists ? place : 2 * lists - 1 - place;
}

/* ---- Scratch memory of a thread -------------------------------------------------- */

/* The rows in which a gradient is summed: of the output itself, or of memory beside
 * it. */
typedef struct {
    real *rows; /* NULL: not wanted */
    int64_t stride;
} row_sums;

typedef struct {
    /* q and dout of a query tile, packed in panels, or with `few` rows of whole
     * vectors; dout is multiplied by early_scale() */
    real *queries, *douts;
    real *q, *dout;         /* copies of a query tile's rows */
    real *lse, *delta;      /* of each query of a head, see open_sums() */
    real *share;            /* of each query of a head, see open_shares() */
    real *weights, *scores; /* [ATTENTION_BACK_KEYS][ATTENTION_QUERIES]: p and ds */
    real *dropout, *slope;  /* the same; dropout factors and 1 - tanh^2 of softcap */
    real *terms;            /* [ATTENTION_BACK_KEYS][PANEL]: addends of scores */
    real *paired, *paired_weights, *paired_scores; /* see pair_tile() */
    real *k, *v;              /* copies of rows of blocks of keys */
    real *k_factor;           /* with pairs: the same of k as pairs along dim */
    real *dq, *dk, *dv;       /* sums that neither the outputs nor the job hold */
    real *stage;              /* VR_WIDTH rows, at least two, for packing */
    int64_t q_width, v_width; /* of copied rows and of sums */
} backward_room;

/* The computation of one query head by one task. */
typedef struct {
    const backward_room *room;
    const attention_head *head;
    const real *q, *dout; /* rows of the current query tile */
    int64_t q_stride, dout_stride;
    /* gradient sums of the head; dk and dv may be of some blocks, see open_block() */
    row_sums dq, dk, dv;
    int64_t dk_at, dv_at; /* the elements of args->dk and dv where the head begins */
    int turns, segment;   /* visits query tile t if t % turns == segment */
    bool first, last;     /* the first or last addition to these dk and dv */
    bool general;         /* see attention_is_general() */
    bool careful, pairs;
    bool few;               /* the layout for few queries, see attention_is_few() */
    real *dbias;            /* NULL: not wanted */
    bool writes_dbias;      /* this head is the first to add to dbias: overwrites it */
    bool shared;            /* some rows have a share other than 1, see open_shares() */
    double *dalibi;         /* NULL: not wanted */
    attention_ahead *ahead; /* prefetch plan; NULL: none */
} backward_work;

/* Whether the rows of an output, of `dim` elements, can hold the sums of a gradient:
 * they are of dtype `real` and whole vectors. */
static inline bool
holds_sums(const tfast_attention_args *args, int64_t dim)
{
    return args->dtype == REAL_DTYPE && dim % VR_WIDTH == 0;
}

/* Whether products without pairs use the layout for few queries. The forward pass makes
 * the same choice: scores must round exactly as there, or s - lse keeps the rounding
 * error. */
static inline bool
backward_is_few(const tfast_attention_args *args)
{
    return attention_is_few(args);
}

/* Keys whose dk and dv are summed in the scratch memory of a thread: those of the
 * current blocks, or all keys where several query heads add to them. */
static inline int64_t
room_keys(const tfast_attention_args *args)
{
    return args->heads > args->kv_heads
               ? args->n_k
               : attention_back_blocks(args) * ATTENTION_BACK_KEYS;
}

/* Carves the scratch memory from `base`; NULL: only measures it. Returns its bytes. */
static size_t
backward_cut(backward_room *room, const attention_back_job *job, real *base)
{
    const tfast_attention_args *args = job->args;
    const bool split = attention_is_split(job), dk = job->turns == 1;
    const int64_t tile = (int64_t)ATTENTION_BACK_KEYS * ATTENTION_QUERIES;
    const int64_t n_q = attention_round_up(args->n_q, PANEL);
    const int64_t rows = attention_min(ATTENTION_QUERIES, n_q);
    const int64_t keys = attention_back_blocks(args) * ATTENTION_BACK_KEYS;
    const int64_t q_width = attention_round_up(args->dim, VR_WIDTH);
    const int64_t v_width = attention_round_up(args->dim_v, VR_WIDTH);
    const bool few = backward_is_few(args);
    const bool q_held = holds_sums(args, args->dim);
    const bool v_held = holds_sums(args, args->dim_v);
    const bool pairs = has_pairs(args);
    int64_t used = 0;
    const struct {
        real **part;
        int64_t count;
    } parts[] = {
        {&room->queries, rows * (few ? q_width : args->dim)},
        {&room->douts, rows * (few ? v_width : args->dim_v)},
        {&room->q, q_held ? 0 : rows * q_width},
        {&room->dout, v_held ? 0 : rows * v_width},
        {&room->lse, n_q},
        {&room->delta, n_q},
        {&room->share, n_q},
        {&room->weights, tile},
        {&room->scores, tile},
        {&room->dropout, args->dropout_p > 0 ? tile : 0},
        {&room->slope, args->softcap != 0 ? tile : 0},
        {&room->terms, ATTENTION_BACK_KEYS * PANEL},
        {&room->paired, pairs ? tile / 2 : 0},
        {&room->paired_weights, pairs ? tile / 2 : 0},
        {&room->paired_scores, pairs ? tile / 2 : 0},
        {&room->k_factor, pairs ? keys * attention_copy_stride(args->dim) : 0},
        {&room->k, q_held ? 0 : keys * attention_copy_stride(args->dim)},
        {&room->v, v_held ? 0 : keys * attention_copy_stride(args->dim_v)},
        {&room->dq, q_held || split ? 0 : args->n_q * q_width},
        {&room->dk, q_held || !dk ? 0 : room_keys(args) * q_width},
        {&room->dv, v_held || !dk ? 0 : room_keys(args) * v_width},
        {&room->stage, attention_max(2, VR_WIDTH) * attention_max(q_width, v_width)},
    };

    room->q_width = q_width;
    room->v_width = v_width;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].part = base == NULL ? NULL : base + used;
        used += attention_round_up(parts[i].count, 16);
    }
    return (size_t)used * sizeof(real);
}

/* ---- Opening a head -------------------------------------------------------------- */

/* dq and dk have a factor of scale. On the fast path it is applied early, to dout and
 * delta, and thus to ds. On the general path, where dbias needs ds without it, and with
 * pairs, it is applied late, to the sums dq and dk. */
static inline double
early_scale(const backward_work *work)
{
    return work->general || work->pairs ? 1 : work->head->args->scale;
}

static inline double
late_scale(const backward_work *work)
{
    return work->general || work->pairs ? work->head->args->scale : 1;
}

/* Sets lse, in units of scores, and delta = dout . out - dlse, times early_scale(), of
 * queries begin .. end - 1, both negated. An lse of -infinity, where all scores are
 * -infinity, becomes 0, which keeps the weights 0 instead of NaN. */
static void
open_sums(const backward_work *work, int64_t begin, int64_t end)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const backward_room *room = work->room;
    const real *lse = (const real *)args->lse + attention_lse_row(h);
    const real *dlse = (const real *)args->dlse + attention_lse_row(h);
    const real scale = (real)early_scale(work);
    const real unit = (real)attention_unit(h);
    const int64_t first_out = attention_query_row(h, &args->out, 0);
    const int64_t first_dout = attention_query_row(h, &args->dout, 0);

    for (int64_t i = begin; i < end; i++) {
        int64_t stride;
        const real *out =
            open_rows(room->stage, 0, args->out.data, args->dtype,
                      first_out + i * args->out.row, 0, 1, args->dim_v, false, &stride);
        const real *dout = open_rows(room->stage + room->v_width, 0, args->dout.data,
                                     args->dtype, first_dout + i * args->dout.row, 0, 1,
                                     args->dim_v, false, &stride);
        vr sum = vr_set1(0);

        for (int64_t d = 0; d < args->dim_v; d += VR_WIDTH) {
            sum = vr_madd(vr_load(dout + d), vr_load(out + d), sum);
        }
        room->delta[i] = -vr_sum(sum);
        if (args->dlse != NULL && lse[i] != -(real)INFINITY) {
            room->delta[i] += dlse[i];
        }
        room->delta[i] *= scale;
        room->lse[i] = lse[i] == -(real)INFINITY ? 0 : -lse[i] * unit;
    }
    for (int64_t i = end; i < attention_round_up(end, PANEL); i++) {
        room->delta[i] = 0;
        room->lse[i] = -(real)INFINITY;
    }
}

/* Returns n_k rows of k or v from `key` on, as the factor of scores (k) or of their
 * gradients (v). */
static const real *
open_backward(const backward_work *work, real *copy, const tfast_attention_rows *rows,
              int64_t dim, int64_t key, int64_t n_k, int64_t *stride)
{
    const attention_head *h = work->head;
    const tfast_dtype dtype = h->args->dtype;
    const int64_t first = attention_key_row(h, rows, key);
    const int64_t copy_stride = attention_copy_stride(dim);

    if (work->few) { /* vector lanes run along dim */
        return open_rows(copy, copy_stride, rows->data, dtype, first, rows->row, n_k,
                         dim, false, stride);
    }
    return open_factor(work->pairs, copy, copy_stride, rows->data, dtype, first,
                       rows->row, n_k, dim, stride);
}

/* ---- Queries --------------------------------------------------------------------- */

/* Packs n queries from `query` on, times the scale, as the factor of scores. */
static void
open_queries(const backward_work *work, int64_t query, int64_t n)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const backward_room *room = work->room;
    const int64_t q = attention_query_row(h, &args->q, query);
    const real scale = (real)attention_query_scale(h);

    if (work->few) {
        scale_rows(room->queries, args->q.data, args->dtype, q, args->q.row, n,
                   args->dim, scale);
    } else {
        pack_panels(room->queries, room->stage, work->pairs, args->q.data, args->dtype,
                    q, args->q.row, n, args->dim, scale);
    }
}

/* Packs n rows of dout from `query` on, times early_scale(), as the factor of score
 * gradients. */
static void
open_douts(const backward_work *work, int64_t query, int64_t n)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const backward_room *room = work->room;
    const int64_t dout = attention_query_row(h, &args->dout, query);
    const real scale = (real)early_scale(work);

    if (work->few) {
        scale_rows(room->douts, args->dout.data, args->dtype, dout, args->dout.row, n,
                   args->dim_v, scale);
    } else {
        pack_panels(room->douts, room->stage, work->pairs, args->dout.data, args->dtype,
                    dout, args->dout.row, n, args->dim_v, scale);
    }
}

/* Prepares the tile of queries from `query` on: q and dout packed for scores and their
 * gradients, and as rows for dk and dv. */
static void
open_tile(backward_work *work, int64_t query)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const backward_room *room = work->room;
    const int64_t n = attention_min(ATTENTION_QUERIES, h->n_q - query);
    const int64_t q = attention_query_row(h, &args->q, query);
    const int64_t dout = attention_query_row(h, &args->dout, query);

    work->q = open_lanes(work->pairs, room->q, room->q_width, room->stage, args->q.data,
                         args->dtype, q, args->q.row, n, args->dim, &work->q_stride);
    work->dout = open_lanes(work->pairs, room->dout, room->v_width, room->stage,
                            args->dout.data, args->dtype, dout, args->dout.row, n,
                            args->dim_v, &work->dout_stride);
    open_queries(work, query, n);
    open_douts(work, query, n);
}

/* ---- Rows whose lse is rounded too coarsely -------------------------------------- */

/* Computes maximum and sum of the panel of queries from `query` on again, as the
 * forward pass did, but without the sink. */
static void
sum_panel(const backward_work *work, int64_t query, real *top, real *sum)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const int64_t n = attention_min(PANEL, h->n_q - query);
    const int64_t end = attention_end_key(h, query + n - 1);
    real fade[PANEL];
    const forward_room room = {.queries = work->room->queries,
                               .few = work->few,
                               .pairs = work->pairs,
                               .scores = work->room->weights,
                               .terms = work->room->terms,
                               .top = top,
                               .sum = sum,
                               .fade = fade};

    open_queries(work, query, n);
    for (int i = 0; i < PANEL; i++) {
        top[i] = -REAL_MAX;
        sum[i] = 0;
    }
    for (int64_t key = attention_first_key(h, query); key < end;
         key += ATTENTION_BACK_KEYS) {
        const int64_t n_k = attention_min(ATTENTION_BACK_KEYS, end - key);
        int64_t stride;
        const real *k =
            open_backward(work, work->room->k, &args->k, args->dim, key, n_k, &stride);
        const score_panel p =
            panel_of(h, query, n, key, n_k, attention_head_has_terms(h));

        weigh_panel(&room, &p, k, stride, 0);
    }
}

/* Sets `share` of queries begin .. end - 1; begin is a multiple of PANEL. A row with a
 * large lse (attention_is_far()) gets its maximum in place of lse, and the share 1 /
 * sum of exp(score - maximum), by which its weights are multiplied. All other rows get
 * a share of 1. Every task repeats this, because such rows are rare. */
static void
open_shares(backward_work *work, int64_t begin, int64_t end)
{
    const attention_head *h = work->head;
    const real *lse = (const real *)h->args->lse + attention_lse_row(h);
    const double unit = attention_unit(h), to_log2 = LOG2E / unit;
    const double sink = attention_sink(h) * unit;

    for (int64_t i = begin; i < attention_round_up(end, PANEL); i++) {
        work->room->share[i] = 1;
    }
    for (int64_t i = begin; i < end; i++) {
        real top[PANEL], sum[PANEL];

        if (!attention_is_far((double)lse[i])) {
            continue;
        }
        work->shared = true;
        i = i / PANEL * PANEL;
        sum_panel(work, i, top, sum);
        for (int j = 0; j < PANEL && i + j < end; j++) {
            const real most = (double)top[j] > sink ? top[j] : (real)sink;
            const double all = (double)sum[j] * exp2((double)(top[j] - most) * to_log2);

            if (attention_is_far((double)lse[i + j])) {
                work->room->lse[i + j] = -most;
                work->room->share[i + j] =
                    (real)(1 / (all + exp2((sink - (double)most) * to_log2)));
            }
        }
        i += PANEL - 1;
    }
}

/* ---- Sinks ----------------------------------------------------------------------- */

/* The gradient of this head's sink is -sum of (the sink's weight) * delta over queries.
 * Adds queries begin .. end - 1 to `sum`, which includes early_scale() like delta. */
static double
sink_gradient(const backward_work *work, double sum, int64_t begin, int64_t end)
{
    const attention_head *h = work->head;
    const backward_room *room = work->room;
    const real *lse = (const real *)h->args->lse + attention_lse_row(h);
    const double sink = attention_sink(h), unit = attention_unit(h);

    for (int64_t i = begin; i < end; i++) {
        double weight = exp2(sink * LOG2E - (double)lse[i] * LOG2E);

        if (attention_is_far((double)lse[i])) {
            weight = exp2((sink * unit + (double)room->lse[i]) * LOG2E / unit) *
                     (double)room->share[i];
        }
        if (lse[i] != -(real)INFINITY) {
            sum += weight * (double)room->delta[i];
        }
    }
    return sum;
}

#endif
