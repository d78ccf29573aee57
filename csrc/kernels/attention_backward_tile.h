/* Attention backward, inner loops: blocks of keys of one head of k and v against tiles
 * of queries of the query heads that share it. The forward pass stores only lse, so the
 * weights are recomputed, one tile at a time:
 *
 *   p  = exp(s - lse)                    the weight, before dropout
 *   ds = p * (keep * dout . v - delta)   delta = dout . out - dlse
 *   dv += (keep * p)^T dout    dk += scale * ds^T q    dq += scale * ds k
 *
 * keep is the dropout factor, 0 or 1 / (1 - dropout_p). With softcap, ds is multiplied
 * by 1 - tanh^2 in dk and dq. */
#ifndef ATTENTION_BACKWARD_TILE_H
#define ATTENTION_BACKWARD_TILE_H

#include "attention_backward_head.h"

/* ---- A tile ---------------------------------------------------------------------- */

/* One panel of queries against one block of keys. */
typedef struct {
    const real *k, *v;                          /* rows of the block */
    int64_t k_stride, v_stride, depth, depth_v; /* depths: dims, or pairs of dims */
    bool pairs;
    real scale; /* applied to q . k after the product; only with pairs */
    const real *queries, *douts, *lse, *delta, *share; /* of the panel */
    const score_panel *panel;
    const real *terms;   /* addends of scores, bounds included; NULL: none */
    const real *dropout; /* dropout factors; NULL: no dropout */
    real *slope;         /* output: 1 - tanh^2; NULL: no softcap */
    real softcap;
    real *weights, *scores; /* outputs: keep * p and ds, in tiles of scores */
    attention_ahead *ahead;
} backward_call;

/* Turns c, which holds dout . v (less delta if `dropout` is NULL), into gradients of
 * scores, and multiplies the stored weights by the dropout factors. */
static inline __attribute__((always_inline)) void
finish_strip(const int rows, const int vectors, const backward_call *call,
             const real *dropout, int lane, vr c[V_ROWS][2], real *weights,
             real *scores)
{
    const vr zero = vr_set1(0);

#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            const int64_t at = r * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr p = vr_load(weights + at);
            vr x = c[r][v], ds;

            if (dropout != NULL) {
                const vr keep = vr_load(dropout + at);

                x = vr_madd(x, keep, vr_load(call->delta + lane + v * VR_WIDTH));
                vr_store(weights + at, vr_mul(p, keep));
            }
            ds = vr_mul(p, x);
            /* where p is 0, ds is 0 even if x is not finite; a NaN in p stays */
            vr_store(scores + at, vr_if_less(zero, p, ds, p));
        }
    }
}

/* Computes weights and score gradients of `rows` keys from `key` on for `vectors`
 * vectors of queries, of which `first` is the first in the panel, with the products in
 * registers. `at`: the strip's offset in the tile. `general`: see
 * attention_is_general(). */
static inline __attribute__((always_inline)) void
backward_strip(const int rows, const int vectors, const bool pairs, const bool general,
               const backward_call *call, int key, int first, int64_t at)
{
    const bool border =
        (!general || call->terms == NULL) && has_border(call->panel, key, key + rows);
    const bool dropped = general && call->dropout != NULL;
    const int lane = first * VR_WIDTH;
    real *weights = call->weights + at, *scores = call->scores + at;
    vr c[V_ROWS][2];

#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            c[r][v] = vr_set1(0); /* not -lse: a large initial value costs precision */
        }
    }
    multiply(rows, vectors, pairs, false, call->k + key * call->k_stride,
             call->k_stride, call->queries + lane, PANEL, call->depth, c);
    scale_strip(rows, vectors, pairs, c, call->scale);
    if (general && call->slope != NULL) {
        apply_softcap_strip(rows, vectors, c, weights, call->slope + at, call->softcap);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            const vr lse = vr_load(call->lse + lane + v * VR_WIDTH);
            vr s = c[r][v];

            if (general && call->terms != NULL) {
                const int64_t term = (key + r) * PANEL + lane + v * VR_WIDTH;
                s = with_both(s, vr_load(call->terms + term), lse);
            } else {
                s = vr_add(s, lse);
            }
            if (border) {
                s = bound_scores(call->panel, first + v, key + r, s);
            }
            vr_store(weights + r * ATTENTION_QUERIES + v * VR_WIDTH,
                     vector_power(!general, s));
            c[r][v] = dropped ? vr_set1(0) : vr_load(call->delta + lane + v * VR_WIDTH);
        }
    }
    multiply(rows, vectors, pairs, false, call->v + key * call->v_stride,
             call->v_stride, call->douts + lane, PANEL, call->depth_v, c);
    if (general) {
        finish_strip(rows, vectors, call, dropped ? call->dropout + at : NULL, lane, c,
                     weights, scores);
        return;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            const int64_t to = r * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr p = vr_load(weights + to), zero = vr_set1(0);
            const vr ds = vr_mul(p, c[r][v]);

            vr_store(scores + to, border ? vr_if_less(zero, p, ds, zero) : ds);
        }
    }
}

/* Not inlined: in a loop over strips the compiler would keep the constants of exp2 in
 * registers and the accumulators in memory. */
static __attribute__((noinline)) void
plain_strip(const backward_call *call, score_strip s, int key, int64_t at)
{
    ATTENTION_PAIRED(backward_strip, s.rows, s.vectors, call->pairs, false, call, key,
                     s.first, at)
}

static __attribute__((noinline)) void
general_strip(const backward_call *call, score_strip s, int key, int64_t at)
{
    ATTENTION_PAIRED(backward_strip, s.rows, s.vectors, call->pairs, true, call, key,
                     s.first, at)
}

/* The products in the layout for few queries (backward_is_few()): writes q . k, after
 * softcap, to the weights and dout . v to the scores. Lanes without a query are not
 * written. */
static void
few_products(const backward_call *call)
{
    const score_panel *p = call->panel;
    const int64_t first = p->begin * ATTENTION_QUERIES;
    const scores_call of_keys = {.k = call->k,
                                 .k_stride = call->k_stride,
                                 .depth = call->depth,
                                 .queries = call->queries,
                                 .panel = p};
    const scores_call of_values = {.k = call->v,
                                   .k_stride = call->v_stride,
                                   .depth = call->depth_v,
                                   .queries = call->douts,
                                   .panel = p};

    few_panel(&of_keys, call->weights);
    few_panel(&of_values, call->scores);
    if (call->slope != NULL) {
        apply_softcap(call->weights + first, call->slope + first, p->end - p->begin, 1,
                      call->softcap);
    }
}

/* Computes weights and score gradients in the layout for few queries. Scores must round
 * exactly as in the forward pass, or s - lse keeps the rounding error. */
static void
few_gradients(const backward_call *call, bool general)
{
    const score_panel *p = call->panel;
    const bool border = call->terms == NULL && has_border(p, p->begin, p->end);
    const vr zero = vr_set1(0), lse = vr_load(call->lse), delta = vr_load(call->delta);

    few_products(call);
    for (int key = p->begin; key < p->end; key++) {
        const int64_t at = key * ATTENTION_QUERIES;
        vr s = vr_load(call->weights + at), x = vr_load(call->scores + at), weight;

        if (key % V_ROWS == 0) {
            attention_look_ahead(call->ahead);
        }
        if (call->terms != NULL) {
            s = with_both(s, vr_load(call->terms + key * PANEL), lse);
        } else {
            s = vr_add(s, lse);
        }
        if (border) {
            s = bound_scores(p, 0, key, s);
        }
        weight = general ? vector_exp(s) : vector_exp2(s);
        if (call->dropout != NULL) {
            const vr keep = vr_load(call->dropout + at);

            x = vr_madd(x, keep, delta);
            vr_store(call->weights + at, vr_mul(weight, keep));
        } else {
            x = vr_add(x, delta);
            vr_store(call->weights + at, weight);
        }
        x = vr_mul(weight, x);
        if (general || border) {
            x = vr_if_less(zero, weight, x, weight); /* weight 0: x = 0, not NaN */
        }
        vr_store(call->scores + at, x);
    }
}

static void
backward_panel(const backward_call *call, bool few, bool general)
{
    const score_panel *p = call->panel;

    if (few) {
        few_gradients(call, general);
        return;
    }
    for (int key = p->begin; key < p->end;) {
        const score_strip s = strip_at(p, key);
        const int64_t at = key * ATTENTION_QUERIES + s.first * VR_WIDTH;

        attention_look_ahead(call->ahead);
        if (general) {
            general_strip(call, s, key, at);
        } else {
            plain_strip(call, s, key, at);
        }
        key += s.rows;
    }
}

/* Multiplies weights and score gradients by the normaliser `share` of each query (see
 * open_shares()). */
static void
apply_shares(const backward_call *call)
{
    const score_panel *p = call->panel;

    for (int key = p->begin; key < p->end; key++) {
        for (int v = 0; v < p->vectors; v++) {
            const int64_t at = key * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr share = vr_load(call->share + v * VR_WIDTH);

            vr_store(call->weights + at, vr_mul(share, vr_load(call->weights + at)));
            vr_store(call->scores + at, vr_mul(share, vr_load(call->scores + at)));
        }
    }
}

/* Adds the panel's score gradients to the gradients of bias and ALiBi slope, then
 * multiplies them by the derivative of softcap. The careful pass, which repeats the
 * first, must not add them a second time. */
static void
close_general(const backward_work *work, const backward_call *call)
{
    const tfast_attention_args *args = work->head->args;

    if (!work->careful && work->dbias != NULL) {
        add_dbias(work->dbias, args->dbias_stride, call->scores, call->panel,
                  work->writes_dbias);
    }
    if (!work->careful && work->dalibi != NULL) {
        *work->dalibi += alibi_gradient(call->scores, call->panel);
    }
    if (call->slope != NULL) {
        softcap_gradients(call->scores, call->slope, call->panel);
    }
}

/* Plans what to prefetch while the products of a panel are formed: its part of dbias,
 * and the terms of the next panel. */
static void
plan_general(attention_ahead *ahead, const backward_work *work, const score_panel *p,
             int64_t n_k)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const int64_t *stride = args->dbias_stride, next = p->query + PANEL;
    const tfast_attention_term gradient = {
        work->dbias, {stride[0], stride[1], stride[2], stride[3]}, REAL_DTYPE};

    *ahead = (attention_ahead){0};
    plan_term(ahead, h, &gradient, p->query, p->n, p->key, n_k);
    plan_terms(ahead, h, next, h->n_q - next, p->key, n_k);
}

/* Packs weights and score gradients of a panel into pairs: pairs of queries for dk and
 * dv, whose inner dimension is queries, and pairs of keys (`paired`) for dq. The unused
 * lane after an odd last query is paired with that query, and is set to 0 because it
 * may be NaN. */
static void
pair_tile(const backward_room *room, int64_t at, int64_t n_k, const score_panel *p)
{
    const int64_t width = p->vectors * VR_WIDTH;

    for (int64_t j = 0; j < n_k && p->n % 2 != 0; j++) {
        room->weights[at + j * ATTENTION_QUERIES + p->n] = 0;
        room->scores[at + j * ATTENTION_QUERIES + p->n] = 0;
    }
    pair_rows(room->paired + at, ATTENTION_QUERIES, room->scores + at,
              ATTENTION_QUERIES, n_k, width);
    pair_columns(room->paired_weights + at / 2, room->weights + at, ATTENTION_QUERIES,
                 n_k, width);
    pair_columns(room->paired_scores + at / 2, room->scores + at, ATTENTION_QUERIES,
                 n_k, width);
}

/* A block of up to ATTENTION_BACK_KEYS keys. */
typedef struct {
    int64_t key, n_k;             /* first key, number of keys */
    int64_t begin, end;           /* query tiles begin at `begin`, see block_begin() */
    const real *k, *k_factor, *v; /* rows: k for dq, k_factor and v for scores and ds */
    int64_t k_stride, k_factor_stride, v_stride;
    row_sums dk, dv; /* of the block's keys */
    bool fresh;      /* dk and dv are not initialised: the first product overwrites */
} key_block;

/* Computes weights and score gradients of a block of keys for a tile of n_q queries
 * from `query` on. */
static void
backward_tile(const backward_work *work, const key_block *block, int64_t query,
              int64_t n_q)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const backward_room *room = work->room;
    const bool terms = attention_head_has_terms(h), dropped = args->dropout_p > 0;
    const int64_t depth = product_depth(work->pairs, args->dim);
    const int64_t depth_v = product_depth(work->pairs, args->dim_v);
    const int64_t key = block->key, n_k = block->n_k;

    if (dropped) {
        fill_dropout(room->dropout, h, query, n_q, key, n_k);
    }
    for (int64_t i = 0; i < n_q; i += PANEL) {
        const score_panel p = panel_of(h, query + i, n_q - i, key, n_k, work->general);
        const int64_t at = query + i;
        attention_ahead ahead;
        backward_call call = {
            .k = block->k_factor,
            .v = block->v,
            .k_stride = block->k_factor_stride,
            .v_stride = block->v_stride,
            .depth = depth,
            .depth_v = depth_v,
            .pairs = work->pairs,
            .scale = (real)attention_query_scale(h),
            .queries = room->queries + i * depth,
            .douts = room->douts + i * depth_v,
            .lse = room->lse + at,
            .delta = room->delta + at,
            .share = room->share + at,
            .panel = &p,
            .terms = terms ? room->terms : NULL,
            .dropout = dropped ? room->dropout + i : NULL,
            .slope = args->softcap != 0 ? room->slope + i : NULL,
            .softcap = (real)args->softcap,
            .weights = room->weights + i,
            .scores = room->scores + i,
            .ahead = work->ahead,
        };

        if (terms) {
            plan_general(&ahead, work, &p, n_k);
            call.ahead = &ahead;
            fill_terms(room->terms, &p);
        }
        backward_panel(&call, work->few, work->general);
        if (work->shared) {
            apply_shares(&call);
        }
        if (work->general) {
            close_general(work, &call);
        }
        clear_outside(call.weights, &p, (int)n_k);
        clear_outside(call.scores, &p, (int)n_k);
        if (work->pairs) {
            pair_tile(room, i, n_k, &p);
        }
    }
}

/* ---- Products of a tile ---------------------------------------------------------- */

static __attribute__((noinline)) void
accumulate_rows(int rows, int vectors, const tile_product *p)
{
    ATTENTION_PAIRED(accumulate_strip, rows, vectors, p->pairs, false, p)
}

/* to += tile . rows, for the keys of the block: dv from weights and dout, dk from ds
 * and q. */
static void
add_to_keys(const backward_work *work, const key_block *block, row_sums to,
            const real *tile, const real *rows, int64_t stride, int64_t width,
            int64_t query, int64_t n_q)
{
    const attention_head *h = work->head;
    tile_product p = {.a_stride = product_depth(work->pairs, ATTENTION_QUERIES),
                      .b_stride = stride,
                      .careful = work->careful,
                      .pairs = work->pairs,
                      .first = block->fresh,
                      .c_stride = to.stride};

    for (int64_t d = 0; d < width && to.rows != NULL; d += PANEL) {
        const int vectors = width - d > VR_WIDTH ? 2 : 1;

        for (int64_t j = 0; j < block->n_k;) {
            const int n = strip_rows(block->n_k - j);
            const int64_t key = block->key + j;
            const int64_t begin =
                attention_max(0, attention_first_query(h, key) - query);
            const int64_t end =
                attention_min(n_q, attention_end_query(h, key + n - 1) - query);

            set_depth(&p, begin, end);
            p.a = tile + j * p.a_stride + p.skipped;
            p.b = rows + p.skipped * stride + d;
            p.c = to.rows + j * to.stride + d;
            if (p.depth > 0 || p.first) {
                attention_look_ahead(work->ahead);
                accumulate_rows(n, vectors, &p);
            }
            j += n;
        }
    }
}

/* dq += ds . k, for the queries of the tile. */
static void
add_to_queries(const backward_work *work, const key_block *block, int64_t query,
               int64_t n_q)
{
    const attention_head *h = work->head;
    const int64_t width = work->room->q_width;
    tile_product p = {.a_stride = ATTENTION_QUERIES,
                      .b_stride = block->k_stride,
                      .careful = work->careful,
                      .pairs = work->pairs,
                      .c_stride = work->dq.stride};

    for (int64_t d = 0; d < width && work->dq.rows != NULL; d += PANEL) {
        const int vectors = width - d > VR_WIDTH ? 2 : 1;

        for (int64_t i = 0; i < n_q;) {
            const int n = strip_rows(n_q - i);
            const int64_t begin =
                attention_max(0, attention_first_key(h, query + i) - block->key);
            const int64_t end = attention_min(
                block->n_k, attention_end_key(h, query + i + n - 1) - block->key);

            set_depth(&p, begin, end);
            p.a = (work->pairs ? work->room->paired : work->room->scores) +
                  p.skipped * ATTENTION_QUERIES + i;
            p.b = block->k + p.skipped * block->k_stride + d;
            p.c = work->dq.rows + (query + i) * work->dq.stride + d;
            if (p.depth > 0) {
                attention_look_ahead(work->ahead);
                accumulate_columns(n, vectors, &p);
            }
            i += n;
        }
    }
}

/* ---- Blocks of keys -------------------------------------------------------------- */

/* The query at which the query tiles of the block from `key` on begin. If lists take
 * turns to add to the same dq, all tiles begin at multiples of ATTENTION_QUERIES, so
 * that tiles of different lists do not overlap. */
static int64_t
block_begin(const backward_work *work, int64_t key)
{
    enum { ALIGN = PANEL > DROPOUT_BLOCK ? PANEL : DROPOUT_BLOCK };
    const int64_t align = work->turns > 1 ? ATTENTION_QUERIES : ALIGN;

    return attention_first_query(work->head, key) / align * align;
}

static row_sums
sums_at(row_sums all, int64_t row)
{
    return all.rows == NULL ? all : (row_sums){all.rows + row * all.stride, all.stride};
}

/* Prepares the block of keys from `key` on; rows that cannot be used in place are
 * copied to slot `i` of the scratch memory. */
static void
open_block(const backward_work *work, key_block *block, int64_t i, int64_t key)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const backward_room *room = work->room;
    const int64_t n_k = attention_min(ATTENTION_BACK_KEYS, h->n_k - key);
    const bool padding = key >= h->end_k || key + n_k <= h->begin_k;
    const int64_t first_k = attention_key_row(h, &args->k, key);
    const int64_t stride = attention_copy_stride(args->dim);
    const int64_t at = i * ATTENTION_BACK_KEYS;
    /* scratch memory holds dk and dv of the current blocks only, see room_keys() */
    const bool local = args->heads == args->kv_heads && work->turns == 1;

    block->key = key;
    block->n_k = n_k;
    block->begin = block_begin(work, key);
    block->end = padding ? 0 : attention_end_query(h, key + n_k - 1);
    block->k = open_lanes(work->pairs, room->k + at * stride, stride, room->stage,
                          args->k.data, args->dtype, first_k, args->k.row, n_k,
                          args->dim, &block->k_stride);
    block->k_factor = block->k;
    block->k_factor_stride = block->k_stride;
    if (work->pairs) {
        block->k_factor =
            open_pairs(room->k_factor + at * stride, stride, args->k.data, first_k,
                       args->k.row, n_k, args->dim, &block->k_factor_stride);
    }
    block->v = open_backward(work, room->v + at * attention_copy_stride(args->dim_v),
                             &args->v, args->dim_v, key, n_k, &block->v_stride);
    block->dk = sums_at(work->dk, local && !holds_sums(args, args->dim) ? at : key);
    block->dv = sums_at(work->dv, local && !holds_sums(args, args->dim_v) ? at : key);
    block->fresh = work->first;
}

/* Adds the gradients of a block of keys and the query tile from `query` on, which
 * open_tile() has prepared. */
static void
backward_block(const backward_work *work, key_block *block, int64_t query)
{
    const backward_room *room = work->room;
    const int64_t n_q = attention_min(ATTENTION_QUERIES, block->end - query);

    backward_tile(work, block, query, n_q);
    add_to_keys(work, block, block->dv,
                work->pairs ? room->paired_weights : room->weights, work->dout,
                work->dout_stride, room->v_width, query, n_q);
    add_to_keys(work, block, block->dk,
                work->pairs ? room->paired_scores : room->scores, work->q,
                work->q_stride, room->q_width, query, n_q);
    add_to_queries(work, block, query, n_q);
    block->fresh = false;
}

/* Computes n blocks of keys for the query tiles of work->segment. The blocks' `begin`
 * differ by multiples of ATTENTION_QUERIES, so that they share query tiles. */
static void
backward_blocks(backward_work *work, key_block *blocks, int64_t n)
{
    int64_t end = 0;

    for (int64_t i = 0; i < n; i++) {
        end = attention_max(end, blocks[i].end);
    }
    for (int64_t query = blocks[0].begin; query < end; query += ATTENTION_QUERIES) {
        bool open = false;

        if (query / ATTENTION_QUERIES % work->turns != work->segment &&
            work->turns > 1) {
            continue;
        }
        for (int64_t i = 0; i < n; i++) {
            if (query < blocks[i].begin || query >= blocks[i].end) {
                continue;
            }
            if (!open) {
                open_tile(work, query);
                open = true;
            }
            backward_block(work, &blocks[i], query);
        }
    }
}

#endif
