/* Attention: the steps on a panel of scores between the products q k^T and p v: bounds,
 * mask, bias, ALiBi, softcap, and the gradients of these. */
#ifndef ATTENTION_SCORES_H
#define ATTENTION_SCORES_H

#include "attention_tile.h"

/* Up to PANEL queries from `query` on against a tile of keys from `key` on. All other
 * key indices count from `key`, the first key of the tile. */
typedef struct {
    const attention_head *head;
    int64_t query, key;     /* first query and first key in the batch item */
    int n;                  /* number of queries */
    int vectors;            /* number of vectors of queries: 1 or 2 */
    int begin, end;         /* keys that at least one query may look at */
    int from[2], to[2];     /* the same for each vector; begin and end if `whole` */
    int all_begin, all_end; /* keys that all queries may look at */
    real lowest[PANEL], highest[PANEL]; /* key bounds of each query, if has_border() */
} score_panel;

/* Whether keys from .. to - 1 include one that some query may not look at. */
static inline bool
has_border(const score_panel *p, int from, int to)
{
    return from < p->all_begin || to > p->all_end;
}

static inline int
clamp_to(int64_t x, int64_t least, int64_t most)
{
    return (int)attention_max(least, attention_min(most, x));
}

/* Sets the lowest and the highest key of each query. A bound outside the tile may be
 * replaced by any other value on the same side of the tile. */
static void
set_bounds(score_panel *p, int n_k)
{
    const attention_head *h = p->head;
    const int64_t diagonal = p->query + h->shift - p->key;
    const int left =
        h->bounded_left ? clamp_to(diagonal - h->window_left, -PANEL, n_k) : -PANEL;
    const int right =
        h->bounded_right ? clamp_to(diagonal + h->window_right, -PANEL, n_k) : n_k;
    const int least = clamp_to(h->begin_k - p->key, -1, n_k);
    const int most = clamp_to(h->end_k - 1 - p->key, -1, n_k);

    for (int i = 0; i < PANEL; i++) {
        const int at = i < p->n ? i : p->n - 1;
        const int lowest = left + at, highest = right + at;

        p->lowest[i] = (real)(lowest > least ? lowest : least);
        p->highest[i] = (real)(highest < most ? highest : most);
    }
}

/* `whole`: both vectors of queries get the same range of keys, begin .. end - 1. */
static score_panel
panel_of(const attention_head *head, int64_t query, int64_t n, int64_t key, int64_t n_k,
         bool whole)
{
    score_panel p = {.head = head, .query = query, .key = key};

    p.n = (int)attention_min(n, PANEL);
    p.vectors = p.n > VR_WIDTH ? 2 : 1;
    for (int v = 0; v < p.vectors; v++) {
        const int64_t last = attention_min(p.n, (v + 1) * VR_WIDTH) - 1;

        p.from[v] =
            clamp_to(attention_first_key(head, query + v * VR_WIDTH) - key, 0, n_k);
        p.to[v] = clamp_to(attention_end_key(head, query + last) - key, p.from[v], n_k);
    }
    p.begin = p.from[0];
    p.end = p.to[p.vectors - 1];
    p.all_begin = clamp_to(attention_first_key(head, query + p.n - 1) - key, 0, n_k);
    p.all_end = clamp_to(attention_end_key(head, query) - key, 0, n_k);
    for (int v = 0; whole && v < p.vectors; v++) {
        p.from[v] = p.begin;
        p.to[v] = p.end;
    }
    if (has_border(&p, p.begin, p.end)) {
        set_bounds(&p, (int)n_k);
    }
    return p;
}

/* Keys whose scores are computed together in registers: either keys of both vectors of
 * queries, or keys of only one. */
typedef struct {
    int rows, first, vectors; /* number of keys, first vector, number of vectors */
} score_strip;

/* The strip that begins at `key`. */
static inline score_strip
strip_at(const score_panel *p, int key)
{
    score_strip s = {.vectors = 1};
    int end = p->end;

    if (p->vectors == 2 && key < p->from[1] && key < p->to[0]) {
        end = p->from[1] < p->to[0] ? p->from[1] : p->to[0];
    } else if (p->vectors == 2 && key >= p->to[0]) {
        s.first = 1;
    } else if (p->vectors == 2) {
        s.vectors = 2;
        end = p->to[0];
    }
    s.rows = strip_rows(end - key);
    return s;
}

/* Zeroes the weights of keys that no query of a vector may look at, because the
 * products of a tile may read them. */
static void
clear_outside(real *tile, const score_panel *p, int n_k)
{
    for (int v = 0; v < p->vectors; v++) {
        real *at = tile + v * VR_WIDTH;

        for (int key = 0; key < p->from[v]; key++) {
            vr_store(at + key * ATTENTION_QUERIES, vr_set1(0));
        }
        for (int key = p->to[v]; key < n_k; key++) {
            vr_store(at + key * ATTENTION_QUERIES, vr_set1(0));
        }
    }
}

/* The scores of tile row `key`, -infinity where the query may not look at it. */
static inline __attribute__((always_inline)) vr
bound_scores(const score_panel *p, int v, int key, vr score)
{
    const vr at = vr_set1((real)key), none = vr_set1(-INFINITY);

    score = vr_if_less(at, vr_load(p->lowest + v * VR_WIDTH), none, score);
    return vr_if_less(vr_load(p->highest + v * VR_WIDTH), at, none, score);
}

/* ---- Terms ----------------------------------------------------------------------- */

/* Terms are the addends of scores: mask, bias, ALiBi and bounds (-infinity). They are
 * summed in a tile of their own, [key][PANEL], before the products q . k are formed, so
 * that the products stay in registers. */

static inline real
term_element(const tfast_attention_term *term, int64_t at)
{
    real x[VR_WIDTH];

    if (term->dtype == TFAST_BOOL) {
        return ((const uint8_t *)term->data)[at] ? 0 : -(real)INFINITY;
    }
    tile_read(x, term->data, term->dtype, at, 1);
    return x[0];
}

/* Score plus term. A term of -infinity forbids the key, whatever the score is. */
static inline __attribute__((always_inline)) vr
with_term(vr score, vr term)
{
    const vr least = vr_set1(-REAL_MAX);

    return vr_if_less(term, least, vr_set1(-INFINITY), vr_add(score, term));
}

/* with_term() plus `lse`, which is negated. */
static inline __attribute__((always_inline)) vr
with_both(vr score, vr term, vr lse)
{
    const vr least = vr_set1(-REAL_MAX), sum = vr_add(vr_add(score, term), lse);

    return vr_if_less(term, least, vr_set1(-INFINITY), sum);
}

/* VR_WIDTH elements of a term from `at` on. */
static inline vr
term_vector(const tfast_attention_term *term, int64_t at)
{
    real stage[VR_WIDTH];

    if (term->dtype == REAL_DTYPE) {
        return vr_load((const real *)term->data + at);
    }
    if (term->dtype == TFAST_BOOL) {
        for (int j = 0; j < VR_WIDTH; j++) {
            stage[j] = ((const uint8_t *)term->data)[at + j] ? 0 : -(real)INFINITY;
        }
    } else {
        tile_read(stage, term->data, term->dtype, at, VR_WIDTH);
    }
    return vr_load(stage);
}

/* Writes the term of VR_WIDTH keys for the first n (at most VR_WIDTH) queries, from
 * element `first` on, transposed to [key][PANEL]. `adds`: adds it to `to`. */
static inline __attribute__((always_inline)) void
add_term_block(real *to, const tfast_attention_term *term, int64_t first, int n,
               bool adds)
{
    vr block[VR_WIDTH];

    if (term->dtype == REAL_DTYPE && n >= VR_WIDTH) {
#pragma GCC unroll 16
        for (int i = 0; i < VR_WIDTH; i++) {
            block[i] = vr_load((const real *)term->data + first + i * term->stride[2]);
        }
    } else {
        for (int i = 0; i < VR_WIDTH; i++) {
            block[i] =
                i < n ? term_vector(term, first + i * term->stride[2]) : vr_set1(0);
        }
    }
    vr_transpose(block);
    for (int j = 0; j < VR_WIDTH; j++) {
        real *at = to + j * PANEL;

        vr_store(at, adds ? with_term(vr_load(at), block[j]) : block[j]);
    }
}

/* Writes, or with `adds` adds, the panel's part of a mask or bias. */
static void
add_term(real *to, const score_panel *p, const tfast_attention_term *term, bool adds)
{
    const int64_t *stride = term->stride;
    const int64_t first = attention_term_head(p->head, stride) + p->query * stride[2] +
                          p->key * stride[3];
    const int blocks =
        stride[2] != 0 && stride[3] == 1 ? (p->end - p->begin) / VR_WIDTH : 0;
    int key = p->begin;

    /* one vector at a time, because many rows a page apart share a cache set */
    for (int v = 0; v < p->vectors; v++) {
        for (int j = key; j < key + blocks * VR_WIDTH; j += VR_WIDTH) {
            add_term_block(to + j * PANEL + v * VR_WIDTH, term,
                           first + j + v * VR_WIDTH * stride[2], p->n - v * VR_WIDTH,
                           adds);
        }
    }
    key += blocks * VR_WIDTH;
    for (; key < p->end; key++) {
        real lane[PANEL] = {0};

        for (int i = 0; i < (stride[2] == 0 ? 1 : p->n); i++) {
            lane[i] = term_element(term, first + key * stride[3] + i * stride[2]);
        }
        for (int v = 0; v < p->vectors; v++) {
            real *at = to + key * PANEL + v * VR_WIDTH;
            const vr x =
                stride[2] == 0 ? vr_set1(lane[0]) : vr_load(lane + v * VR_WIDTH);

            vr_store(at, adds ? with_term(vr_load(at), x) : x);
        }
    }
}

/* The diagonal query + shift - p->key for the queries of vector v. ALiBi's distance
 * |query + shift - key| is |diagonal - r| for key r of the tile. */
static inline vr
alibi_diagonal(const score_panel *p, int v)
{
    real lane[VR_WIDTH];

    for (int i = 0; i < VR_WIDTH; i++) {
        lane[i] = (real)(p->query + p->head->shift - p->key + v * VR_WIDTH + i);
    }
    return vr_load(lane);
}

static void
subtract_alibi(real *to, const score_panel *p)
{
    const vr slope = vr_set1((real)attention_slope(p->head));

    for (int v = 0; v < p->vectors; v++) {
        const vr diagonal = alibi_diagonal(p, v);

        for (int key = p->begin; key < p->end; key++) {
            real *at = to + key * PANEL + v * VR_WIDTH;
            const vr far = vector_abs(vr_sub(diagonal, vr_set1((real)key)));

            vr_store(at, vr_sub(vr_load(at), vr_mul(slope, far)));
        }
    }
}

/* Writes -infinity for keys that a query may not look at, and in lanes without a
 * query. */
static void
bound_terms(real *to, const score_panel *p)
{
    const bool border = has_border(p, p->begin, p->end);

    for (int v = 0; v < p->vectors; v++) {
        for (int key = p->begin; border && key < p->end; key++) {
            real *at = to + key * PANEL + v * VR_WIDTH;

            vr_store(at, bound_scores(p, v, key, vr_load(at)));
        }
    }
    for (int key = p->begin; p->n < PANEL && key < p->end; key++) {
        for (int i = p->n; i < p->vectors * VR_WIDTH; i++) {
            to[key * PANEL + i] = -(real)INFINITY;
        }
    }
}

/* Writes all terms of the panel. */
static void
fill_terms(real *to, const score_panel *p)
{
    const tfast_attention_args *args = p->head->args;

    if (p->head->masked) {
        add_term(to, p, &args->mask, false);
    }
    if (args->bias.data != NULL) {
        add_term(to, p, &args->bias, p->head->masked);
    }
    if (!p->head->masked && args->bias.data == NULL) {
        memset(to + p->begin * PANEL, 0,
               sizeof(real) * (size_t)((p->end - p->begin) * PANEL));
    }
    if (args->alibi_slopes != NULL) {
        subtract_alibi(to, p);
    }
    bound_terms(to, p);
}

/* Adds to a prefetch plan the part of a term for the first PANEL of n_q queries from
 * `query` on, and n_k keys from `key` on. Its rows may be pages apart, where the
 * hardware does not prefetch. */
static void
plan_term(attention_ahead *ahead, const attention_head *h,
          const tfast_attention_term *term, int64_t query, int64_t n_q, int64_t key,
          int64_t n_k)
{
    const int64_t *stride = term->stride;
    const int64_t size = term->dtype == TFAST_BOOL
                             ? 1
                             : (int64_t)tfast_dtype_size((tfast_dtype)term->dtype);
    const int64_t begin = attention_max(key, attention_first_key(h, query));
    const int64_t n = attention_min(PANEL, n_q);
    int64_t end;

    if (term->data == NULL || stride[2] == 0 || stride[3] != 1 || n <= 0 || n_k <= 0) {
        return;
    }
    end = attention_min(key + n_k, attention_end_key(h, query + n - 1));
    if (begin >= end) {
        return;
    }
    ahead->arrays[ahead->n].data =
        (const char *)term->data +
        (attention_term_head(h, stride) + query * stride[2] + begin) * size;
    ahead->arrays[ahead->n].stride = stride[2] * size;
    ahead->arrays[ahead->n].rows = n;
    ahead->arrays[ahead->n++].bytes = (int)((end - begin) * size);
    ahead->end = attention_max(ahead->end, n);
    ahead->step = attention_max(ahead->step, n * V_ROWS / (end - begin) + 1);
}

/* Plans to prefetch all terms of a panel. */
static void
plan_terms(attention_ahead *ahead, const attention_head *h, int64_t query, int64_t n_q,
           int64_t key, int64_t n_k)
{
    if (h->masked) {
        plan_term(ahead, h, &h->args->mask, query, n_q, key, n_k);
    }
    plan_term(ahead, h, &h->args->bias, query, n_q, key, n_k);
}

/* ---- Softcap --------------------------------------------------------------------- */

/* Replaces x by softcap * tanh(x) in `rows` rows of a tile. `slope` (NULL: not wanted)
 * becomes 1 - tanh^2. */
static __attribute__((noinline)) void
apply_softcap(real *products, real *slope, int rows, int vectors, real softcap)
{
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            const int64_t at = r * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr x = vector_tanh(vr_load(products + at));

            if (slope != NULL) {
                vr_store(slope + at, vr_sub(vr_set1(1), vr_mul(x, x)));
            }
            vr_store(products + at, vr_mul(vr_set1(softcap), x));
        }
    }
}

/* The same for accumulators c, which pass through `products` in memory. */
static inline __attribute__((always_inline)) void
apply_softcap_strip(const int rows, const int vectors, vr c[V_ROWS][2], real *products,
                    real *slope, real softcap)
{
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            vr_store(products + r * ATTENTION_QUERIES + v * VR_WIDTH, c[r][v]);
        }
    }
    apply_softcap(products, slope, rows, vectors, softcap);
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            c[r][v] = vr_load(products + r * ATTENTION_QUERIES + v * VR_WIDTH);
        }
    }
}

/* ---- Gradients of scores --------------------------------------------------------- */

/* Multiplies score gradients by the slope of softcap, which makes them gradients of the
 * products of query and key. */
static void
softcap_gradients(real *gradients, const real *slope, const score_panel *p)
{
    for (int key = p->begin; key < p->end; key++) {
        for (int v = 0; v < p->vectors; v++) {
            const int64_t at = key * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr x = vr_load(gradients + at), y = vr_mul(x, vr_load(slope + at));

            /* the slope may be NaN where the gradient is 0 */
            vr_store(gradients + at, vr_if_less(vr_set1(0), vector_abs(x), y, x));
        }
    }
}

/* The panel's contribution to the gradient of its head's ALiBi slope. */
static double
alibi_gradient(const real *gradients, const score_panel *p)
{
    double sum = 0;

    for (int v = 0; v < p->vectors; v++) {
        const vr diagonal = alibi_diagonal(p, v);
        vr all = vr_set1(0);

        for (int key = p->begin; key < p->end; key++) {
            const vr far = vector_abs(vr_sub(diagonal, vr_set1((real)key)));

            all = vr_madd(vr_load(gradients + key * ATTENTION_QUERIES + v * VR_WIDTH),
                          far, all);
        }
        sum -= (double)vr_sum(all);
    }
    return sum;
}

/* Adds the gradients of VR_WIDTH keys, transposed, to n rows of dbias. `first`:
 * overwrites dbias. */
static inline __attribute__((always_inline)) void
add_dbias_block(real *to, int64_t stride, const real *gradients, int n, bool first)
{
    vr block[VR_WIDTH];

    for (int j = 0; j < VR_WIDTH; j++) {
        block[j] = vr_load(gradients + j * ATTENTION_QUERIES);
    }
    vr_transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < VR_WIDTH && !first; i++) {
        block[i] = vr_add(vr_load(to + (i < n ? i : 0) * stride), block[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < VR_WIDTH; i++) {
        if (i < n) {
            vr_store(to + i * stride, block[i]);
        }
    }
}

/* add_dbias() for a bias that is broadcast over queries. */
static void
add_dbias_of_keys(real *to, int64_t stride, const real *gradients, const score_panel *p)
{
    for (int key = p->begin; key < p->end; key++) {
        double sum = 0;

        for (int v = 0; v < p->vectors; v++) {
            sum += (double)vr_sum(
                vr_load(gradients + key * ATTENTION_QUERIES + v * VR_WIDTH));
        }
        to[key * stride] += (real)sum;
    }
}

/* Adds the score gradients of a panel to dbias, summed where the bias is broadcast.
 * `first`: overwrites dbias. */
static void
add_dbias(real *dbias, const int64_t *stride, const real *gradients,
          const score_panel *p, bool first)
{
    real *to = dbias + attention_term_head(p->head, stride) + p->query * stride[2] +
               p->key * stride[3];
    const int blocks = stride[3] == 1 ? (p->end - p->begin) / VR_WIDTH : 0;
    int key = p->begin;

    if (stride[2] == 0) {
        add_dbias_of_keys(to, stride[3], gradients, p);
        return;
    }
    /* one vector at a time, because many rows a page apart share a cache set */
    for (int v = 0; v < p->vectors; v++) {
        const int n = p->n - v * VR_WIDTH;

        for (int j = key; j < key + blocks * VR_WIDTH; j += VR_WIDTH) {
            real *rows = to + j + v * VR_WIDTH * stride[2];
            const real *from = gradients + j * ATTENTION_QUERIES + v * VR_WIDTH;

            if (n >= VR_WIDTH) { /* a constant n: no test for each row */
                add_dbias_block(rows, stride[2], from, VR_WIDTH, first);
            } else {
                add_dbias_block(rows, stride[2], from, n, first);
            }
        }
    }
    key += blocks * VR_WIDTH;
    for (; key < p->end; key++) {
        for (int i = 0; i < p->n; i++) {
            real *at = to + key * stride[3] + i * stride[2];

            *at = (first ? 0 : *at) + gradients[key * ATTENTION_QUERIES + i];
        }
    }
}

#endif
