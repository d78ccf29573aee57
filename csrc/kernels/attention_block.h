/* Attention forward: one block of up to ATTENTION_QUERIES queries of one head against
 * all its keys, with online softmax: a tile of scores at a time, and a running maximum
 * and sum for each query. */
#ifndef ATTENTION_BLOCK_H
#define ATTENTION_BLOCK_H

#include "attention_scores.h"
#include "dropout.h"

/* Scratch memory of one thread; parts that a call does not need are empty. */
typedef struct {
    real *queries; /* packed in panels, or with `few` rows of whole vectors */
    real *scores;  /* [ATTENTION_KEYS][ATTENTION_QUERIES]: scores, then weights */
    real *dropout; /* dropout factors, laid out like scores */
    real *paired;  /* [ATTENTION_KEYS / 2][ATTENTION_QUERIES]: weights, pairs of keys */
    real *terms;   /* [ATTENTION_KEYS][PANEL]: addends of scores */
    real *out;     /* [n_q][out_stride]: weighted sums of values, not normalised */
    real *k, *v;   /* copies of rows that cannot be used in place */
    int64_t k_stride, v_stride, out_stride;
    real *stage;            /* VR_WIDTH rows, for packing */
    bool few;               /* the layout for few queries, see attention_is_few() */
    bool pairs;             /* bfloat16 pairs, see has_pairs() */
    attention_ahead *ahead; /* prefetch plan; NULL: none */
    /* of each query: running maximum `top`, sum of exp(score - top), and the factor
     * exp(previous top - top) of sums from before the current tile */
    real *top, *sum, *fade;
} forward_room;

/* Carves the scratch memory for n_q queries from `base`; NULL: only measures it.
 * Returns its bytes. */
static size_t
forward_cut(forward_room *room, const tfast_attention_args *args, int64_t n_q,
            real *base)
{
    const int64_t q_width = attention_round_up(args->dim, VR_WIDTH);
    const int64_t v_width = attention_round_up(args->dim_v, VR_WIDTH);
    const int64_t tile = (int64_t)ATTENTION_KEYS * ATTENTION_QUERIES;
    int64_t used = 0;
    const struct {
        real **part;
        int64_t count;
    } parts[] = {
        {&room->queries, n_q * q_width},
        {&room->scores, tile},
        {&room->dropout, args->dropout_p > 0 ? tile : 0},
        {&room->paired, has_pairs(args) ? tile / 2 : 0},
        {&room->terms, ATTENTION_KEYS * PANEL},
        {&room->out, n_q * v_width},
        {&room->k, ATTENTION_KEYS * attention_copy_stride(args->dim)},
        {&room->v, ATTENTION_KEYS * attention_copy_stride(args->dim_v)},
        {&room->stage, VR_WIDTH * (q_width > v_width ? q_width : v_width)},
        {&room->top, n_q},
        {&room->sum, n_q},
        {&room->fade, n_q},
    };

    room->k_stride = attention_copy_stride(args->dim);
    room->v_stride = attention_copy_stride(args->dim_v);
    room->out_stride = v_width;
    room->few = false;
    room->pairs = false;
    room->ahead = NULL;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].part = base == NULL ? NULL : base + used;
        used += attention_round_up(parts[i].count, 16);
    }
    return (size_t)used * sizeof(real);
}

/* ---- Scores ---------------------------------------------------------------------- */

/* The scores of one panel of queries and one tile of keys. */
typedef struct {
    const real *k;
    int64_t k_stride, depth; /* depth: dim, in pairs if `pairs` */
    const real *queries;
    const score_panel *panel;
    bool pairs;
    real scale;        /* applied to q . k after the product; only with pairs */
    const real *terms; /* addends of scores, bounds included; NULL: none */
    real softcap;      /* 0: none */
    attention_ahead *ahead;
} scores_call;

/* Computes the scores of keys key .. key + rows - 1 of the tile for `vectors` vectors
 * of queries, of which `first` is the first in the panel. Raises `top` to their
 * maximum. */
static inline __attribute__((always_inline)) void
scores_strip(const int rows, const int vectors, const bool pairs,
             const scores_call *call, int key, int first, real *to, vr *top)
{
    vr c[V_ROWS][2], most[2] = {top[0], top[vectors - 1]};

    for (int r = 0; r < rows; r++) {
        c[r][0] = c[r][1] = vr_set1(0);
    }
    multiply(rows, vectors, pairs, false, call->k + key * call->k_stride,
             call->k_stride, call->queries + first * VR_WIDTH, PANEL, call->depth, c);
    scale_strip(rows, vectors, pairs, c, call->scale);
    if (call->softcap != 0) {
        apply_softcap_strip(rows, vectors, c, to, NULL, call->softcap);
    }
    if (call->terms != NULL) {
        const real *terms = call->terms + key * PANEL + first * VR_WIDTH;

#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            for (int v = 0; v < vectors; v++) {
                c[r][v] = with_term(c[r][v], vr_load(terms + r * PANEL + v * VR_WIDTH));
            }
        }
    } else if (has_border(call->panel, key, key + rows)) {
        for (int r = 0; r < rows; r++) {
            for (int v = 0; v < vectors; v++) {
                c[r][v] = bound_scores(call->panel, first + v, key + r, c[r][v]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            vr_store(to + r * ATTENTION_QUERIES + v * VR_WIDTH, c[r][v]);
            most[v] = vr_max(c[r][v], most[v]);
        }
    }
    for (int v = 0; v < vectors; v++) {
        top[v] = most[v];
    }
}

/* Computes the scores of a panel and raises `top` to their maximum for each query. */
static __attribute__((noinline)) void
scores_panel(const scores_call *call, real *scores, real *top)
{
    const score_panel *p = call->panel;
    vr most[2] = {vr_load(top), p->vectors == 2 ? vr_load(top + VR_WIDTH) : vr_set1(0)};

    for (int key = p->begin; key < p->end;) {
        const score_strip s = strip_at(p, key);
        real *to = scores + key * ATTENTION_QUERIES + s.first * VR_WIDTH;

        attention_look_ahead(call->ahead);
        ATTENTION_PAIRED(scores_strip, s.rows, s.vectors, call->pairs, call, key,
                         s.first, to, most + s.first)
        key += s.rows;
    }
    for (int v = 0; v < p->vectors; v++) {
        vr_store(top + v * VR_WIDTH, most[v]);
    }
}

/* Whether there are so few queries, as in decoding, that vectors with queries as lanes
 * would be mostly empty. Vectors then run along dim, or along keys. */
static inline bool
attention_is_few(const tfast_attention_args *args)
{
    return args->n_q <= VR_WIDTH / 2;
}

/* The dot products of one query with up to VR_WIDTH keys; `dim` is a multiple of
 * VR_WIDTH. Keys are read one after the other; then one transpose sums the lanes of
 * all. Writes VR_WIDTH elements. */
static inline void
few_scores(const real *query, const real *k, int64_t k_stride, int64_t dim, int keys,
           real *to)
{
    vr sums[VR_WIDTH];

    for (int j = 0; j < keys; j++) {
        const real *row = k + j * k_stride;
        vr even = vr_set1(0), odd = vr_set1(0);
        int64_t d = 0;

        for (; d + 2 * VR_WIDTH <= dim; d += 2 * VR_WIDTH) {
            even = vr_madd(vr_load(query + d), vr_load(row + d), even);
            odd = vr_madd(vr_load(query + d + VR_WIDTH), vr_load(row + d + VR_WIDTH),
                          odd);
        }
        if (d < dim) {
            even = vr_madd(vr_load(query + d), vr_load(row + d), even);
        }
        sums[j] = vr_add(even, odd);
    }
    for (int j = keys; j < VR_WIDTH; j++) {
        sums[j] = vr_set1(0);
    }
    vr_transpose(sums);
    for (int half = VR_WIDTH / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; j++) {
            sums[j] = vr_add(sums[j], sums[j + half]);
        }
    }
    vr_store(to, sums[0]);
}

/* The dot products of a panel in the layout for few queries. */
static void
few_panel(const scores_call *call, real *scores)
{
    const score_panel *p = call->panel;
    const int64_t width = attention_round_up(call->depth, VR_WIDTH);

    for (int key = p->begin; key < p->end; key += VR_WIDTH) {
        const int n = (int)attention_min(VR_WIDTH, p->end - key);

        for (int i = 0; i < p->n; i++) {
            real lane[VR_WIDTH];

            few_scores(call->queries + i * width, call->k + key * call->k_stride,
                       call->k_stride, width, n, lane);
            for (int j = 0; j < n; j++) {
                scores[(key + j) * ATTENTION_QUERIES + i] = lane[j];
            }
        }
    }
}

/* Turns the dot products of few_panel() into scores and raises `top` to their
 * maximum. */
static void
finish_few(const scores_call *call, real *scores, real *top)
{
    const score_panel *p = call->panel;

    if (call->softcap != 0) {
        apply_softcap(scores + p->begin * ATTENTION_QUERIES, NULL, p->end - p->begin,
                      p->vectors, call->softcap);
    }
    for (int v = 0; v < p->vectors; v++) {
        vr most = vr_load(top + v * VR_WIDTH);

        for (int key = p->begin; key < p->end; key++) {
            real *at = scores + key * ATTENTION_QUERIES + v * VR_WIDTH;
            vr s = vr_load(at);

            if (call->terms != NULL) {
                s = with_term(s, vr_load(call->terms + key * PANEL + v * VR_WIDTH));
            } else if (has_border(p, p->begin, p->end)) {
                s = bound_scores(p, v, key, s);
            }
            vr_store(at, s);
            most = vr_max(s, most);
        }
        vr_store(top + v * VR_WIDTH, most);
    }
}

/* Replaces the scores of vector v by exp(score - top), or exp2 with `in_log2`. Returns
 * their sum over keys. */
static inline __attribute__((always_inline)) vr
exponentials(const bool in_log2, real *scores, const score_panel *p, int v, vr top)
{
    const int end = p->to[v];
    vr sum = vr_set1(0);

#pragma GCC unroll 4
    for (int key = p->from[v]; key < end; key++) {
        real *at = scores + key * ATTENTION_QUERIES + v * VR_WIDTH;
        const vr x = vector_power(in_log2, vr_sub(vr_load(at), top));

        vr_store(at, x);
        sum = vr_add(sum, x);
    }
    return sum;
}

/* Computes the weights of a panel for the keys of a tile, before dropout, and updates
 * maximum, sum and fade of each query. `at`: the panel's first query in the scratch
 * memory. */
static void
weigh_panel(const forward_room *room, const score_panel *p, const real *k,
            int64_t k_stride, int64_t at)
{
    const tfast_attention_args *args = p->head->args;
    const bool terms = attention_head_has_terms(p->head);
    const bool general = attention_is_general(p->head);
    const int64_t depth = product_depth(room->pairs, args->dim);
    const scores_call call = {.k = k,
                              .k_stride = k_stride,
                              .depth = depth,
                              .queries = room->queries + at * depth,
                              .panel = p,
                              .pairs = room->pairs,
                              .scale = (real)attention_query_scale(p->head),
                              .terms = terms ? room->terms : NULL,
                              .softcap = (real)args->softcap,
                              .ahead = room->ahead};
    real *scores = room->scores + at, *top = room->top + at;
    vr before[2];

    for (int v = 0; v < p->vectors; v++) {
        before[v] = vr_load(top + v * VR_WIDTH);
    }
    if (terms) {
        fill_terms(room->terms, p);
    }
    if (room->few) {
        few_panel(&call, scores);
        finish_few(&call, scores, top);
    } else {
        scores_panel(&call, scores, top);
    }
    for (int v = 0; v < p->vectors; v++) {
        real *total = room->sum + at + v * VR_WIDTH;
        const vr most = vr_load(top + v * VR_WIDTH);
        const vr rise = vr_sub(before[v], most);
        const vr fade = general ? vector_exp(rise) : vector_exp2(rise);
        const vr sum = general ? exponentials(false, scores, p, v, most)
                               : exponentials(true, scores, p, v, most);

        vr_store(room->fade + at + v * VR_WIDTH, fade);
        vr_store(total, vr_madd(fade, vr_load(total), sum));
    }
}

/* Computes the weights of a panel as the product with n_k rows of v needs them: 0 for
 * forbidden keys, multiplied by the dropout factors, as pairs if room->pairs. */
static void
forward_panel(const forward_room *room, const score_panel *p, const real *k,
              int64_t k_stride, int64_t at, int n_k)
{
    weigh_panel(room, p, k, k_stride, at);
    clear_outside(room->scores + at, p, n_k);
    if (p->head->args->dropout_p > 0) {
        apply_dropout(room->scores + at, room->dropout + at, p);
    }
    if (room->pairs) {
        pair_rows(room->paired + at, ATTENTION_QUERIES, room->scores + at,
                  ATTENTION_QUERIES, n_k, p->vectors * VR_WIDTH);
    }
}

/* ---- A block --------------------------------------------------------------------- */

/* out = fade * out + weights . v, for n_q queries from `query` on. `first`: overwrites
 * out. If a query may look at only one key of a pair, the other has weight 0. */
static void
forward_values(const forward_room *room, const attention_head *h, int64_t query,
               int64_t n_q, int64_t key, int64_t n_k, const real *v, int64_t v_stride,
               bool first, bool careful)
{
    tile_product p = {.a_stride = ATTENTION_QUERIES,
                      .b_stride = v_stride,
                      .first = first,
                      .careful = careful,
                      .pairs = room->pairs,
                      .c_stride = room->out_stride};

    for (int64_t d = 0; d < room->out_stride; d += PANEL) {
        const int vectors = room->out_stride - d > VR_WIDTH ? 2 : 1;

        for (int64_t i = 0; i < n_q;) {
            const int rows = strip_rows(n_q - i);
            const int64_t begin =
                attention_max(0, attention_first_key(h, query + i) - key);
            const int64_t end =
                attention_min(n_k, attention_end_key(h, query + i + rows - 1) - key);

            set_depth(&p, begin, end);
            p.a = (room->pairs ? room->paired : room->scores) +
                  p.skipped * ATTENTION_QUERIES + i;
            p.b = v + p.skipped * v_stride + d;
            p.factor = room->fade + i;
            attention_look_ahead(room->ahead);
            p.c = room->out + i * room->out_stride + d;
            accumulate_columns(rows, vectors, &p);
            i += rows;
        }
    }
}

/* Replaces `sum` by the factor of each row of out, 1 / (sum + sink's weight), and `top`
 * by lse. A sum is 0 only for a row without an allowed key, because the key with the
 * highest score adds 1. */
static void
normalise(const forward_room *room, const attention_head *h, int64_t n_q)
{
    const double unit = attention_unit(h), to_log2 = LOG2E / unit;
    const double sink = attention_sink(h) * unit;
    real *sum = room->sum, *top = room->top;

    if (sink == -INFINITY) {
        for (int64_t i = 0; i < n_q; i++) {
            const double all = logarithm((double)sum[i]);

            top[i] = (real)attention_lse((double)top[i], all, unit);
        }
        for (int64_t i = 0; i < n_q; i += VR_WIDTH) {
            const vr x = vr_load(sum + i), least = vr_set1(REAL_MIN);
            const vr share = vr_div(vr_set1(1), x), none = vr_set1(-INFINITY);

            vr_store(sum + i, vr_if_less(x, least, vr_set1(0), share));
            vr_store(top + i, vr_if_less(x, least, none, vr_load(top + i)));
        }
        return;
    }
    for (int64_t i = 0; i < n_q; i++) {
        const double most = sink > (double)top[i] ? sink : (double)top[i];
        const double fade = exp2(((double)top[i] - most) * to_log2);
        const double all = (double)sum[i] * fade + exp2((sink - most) * to_log2);

        top[i] = (real)(sum[i] == 0 ? -INFINITY : attention_lse(most, log2(all), unit));
        sum[i] = (real)(sum[i] == 0 ? 0 : fade / all);
    }
}

/* Writes the block's output and lse. Returns whether all of the output is finite. */
static bool
forward_close(const forward_room *room, const attention_head *h, int64_t query,
              int64_t n_q)
{
    const tfast_attention_args *args = h->args;
    const int64_t first = attention_query_row(h, &args->out, query);
    const bool held = args->dtype == REAL_DTYPE && args->dim_v % VR_WIDTH == 0;
    vr odd = vr_set1(0); /* 0, or NaN after an infinity or NaN */

    normalise(room, h, n_q);
    for (int64_t i = 0; i < n_q; i++) {
        const int64_t at = first + i * args->out.row;
        const real *row = room->out + i * room->out_stride;
        real *to =
            held ? (real *)args->out.data + at : room->out + i * room->out_stride;
        const vr factor = vr_set1(room->sum[i]);
        vr odd_row = vr_set1(0); /* one a row: a short chain of dependent FMAs */

        for (int64_t d = 0; d < room->out_stride; d += VR_WIDTH) {
            const vr x = vr_mul(vr_load(row + d), factor);

            odd_row = vr_madd(x, vr_set1(0), odd_row);
            vr_store(to + d, x);
        }
        odd = vr_add(odd, odd_row);
        if (!held) {
            tile_write(args->out.data, to, args->dtype, at, (int)args->dim_v);
        }
    }
    if (args->lse != NULL) {
        memcpy((real *)args->lse + attention_lse_row(h) + query, room->top,
               sizeof(real) * (size_t)n_q);
    }
    return vr_sum(odd) == 0;
}

/* Packs n_q queries from `query` on and resets maximum, sum and fade. */
static void
forward_open(const forward_room *room, const attention_head *h, int64_t query,
             int64_t n_q)
{
    const tfast_attention_args *args = h->args;

    pack_panels(room->queries, room->stage, room->pairs, args->q.data, args->dtype,
                attention_query_row(h, &args->q, query), args->q.row, n_q, args->dim,
                (real)attention_query_scale(h));
    for (int i = 0; i < ATTENTION_QUERIES; i++) {
        room->top[i] = -REAL_MAX;
        room->sum[i] = 0;
        room->fade[i] = 1;
    }
}

/* Plans to prefetch the terms of the panel that is computed after the one at `query` +
 * i: the next one of this tile of keys, or the first one of the next tile. */
static void
plan_next(attention_ahead *ahead, const attention_head *h, int64_t query, int64_t n_q,
          int64_t i, int64_t key, int64_t end)
{
    *ahead = (attention_ahead){0};
    i += PANEL;
    if (i >= n_q) {
        i = 0;
        key += ATTENTION_KEYS;
    }
    plan_terms(ahead, h, query + i, n_q - i, key,
               attention_min(ATTENTION_KEYS, end - key));
}

/* Computes a block, with multiply_careful() if `careful`. Returns whether its output is
 * finite. */
static bool
forward_try(forward_room *room, const attention_head *h, int64_t query, int64_t n_q,
            bool careful)
{
    attention_ahead *const planned = room->ahead;
    const tfast_attention_args *args = h->args;
    const int64_t end = attention_end_key(h, query + n_q - 1);
    const bool terms = attention_head_has_terms(h);
    int64_t key = attention_first_key(h, query) / DROPOUT_BLOCK * DROPOUT_BLOCK;
    bool first = true;

    room->pairs = has_pairs(args) && !careful;
    forward_open(room, h, query, n_q);
    if (key >= end) {
        memset(room->out, 0, sizeof(real) * (size_t)(n_q * room->out_stride));
    }
    for (; key < end; key += ATTENTION_KEYS, first = false) {
        const int64_t n_k = attention_min(ATTENTION_KEYS, end - key);
        int64_t k_stride, v_stride;
        const real *k = open_factor(room->pairs, room->k, room->k_stride, args->k.data,
                                    args->dtype, attention_key_row(h, &args->k, key),
                                    args->k.row, n_k, args->dim, &k_stride);
        const real *v =
            open_lanes(room->pairs, room->v, room->v_stride, room->stage, args->v.data,
                       args->dtype, attention_key_row(h, &args->v, key), args->v.row,
                       n_k, args->dim_v, &v_stride);

        if (args->dropout_p > 0) {
            fill_dropout(room->dropout, h, query, n_q, key, n_k);
        }
        for (int64_t i = 0; i < n_q; i += PANEL) {
            const score_panel panel = panel_of(h, query + i, n_q - i, key, n_k, terms);
            attention_ahead ahead;

            if (terms && planned == NULL) {
                plan_next(&ahead, h, query, n_q, i, key, end);
                room->ahead = &ahead;
            }
            forward_panel(room, &panel, k, k_stride, i, (int)n_k);
        }
        room->ahead = planned;
        forward_values(room, h, query, n_q, key, n_k, v, v_stride, first, careful);
    }
    return forward_close(room, h, query, n_q);
}

/* Computes the block of queries from `query` on. If the output is not finite and keys
 * may be forbidden, computes it again with multiply_careful(): the weight 0 of a
 * forbidden key times a NaN or infinity in its value would be NaN. */
static void
attention_forward_block(const attention_head *h, int64_t query, attention_ahead *ahead,
                        void *memory)
{
    const int64_t n_q = attention_min(ATTENTION_QUERIES, h->n_q - query);
    forward_room room;

    forward_cut(&room, h->args, ATTENTION_QUERIES, memory);
    room.ahead = ahead;
    if (!forward_try(&room, h, query, n_q, false) && attention_can_forbid(h->args)) {
        forward_try(&room, h, query, n_q, true);
    }
}

#endif
