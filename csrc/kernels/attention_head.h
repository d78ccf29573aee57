/* Attention: one head of one batch item: where its rows lie, which keys its queries may
 * look at, and prefetching of the next head or block. */
#ifndef ATTENTION_HEAD_H
#define ATTENTION_HEAD_H

#include "../tfast.h"
#include "vector_math.h"

#include <math.h>

/* Queries and keys of a tile of scores; BACK: of the backward pass. Multiples of PANEL
 * and of DROPOUT_BLOCK, the unit in which dropout's random numbers are indexed. */
enum {
    ATTENTION_QUERIES = 96,
    ATTENTION_KEYS = 128,
    ATTENTION_BACK_KEYS = 96,
    DROPOUT_BLOCK = 16
};

typedef struct {
    const tfast_attention_args *args;
    int64_t batch, head;      /* batch item and query head */
    int64_t n_q, n_k, shift;  /* of the item; diagonal: key = query + shift */
    int64_t rows_k;           /* keys of the item, past kv_lens too */
    int64_t first_q, first_k; /* first rows of the item with cu_seqlens, or 0 */
    int64_t window_left, window_right; /* valid if bounded; causal: right is 0 */
    bool bounded_right, bounded_left;
    int64_t begin_k, end_k; /* keys outside are forbidden to all queries */
    bool masked;            /* args->mask must be applied to begin_k .. end_k - 1 */
} attention_head;

/* A bool mask that is broadcast over heads and queries marks padding. Padding at the
 * ends is excluded by begin_k and end_k; the mask is applied only if there is more
 * between them. */
static void
attention_read_padding(attention_head *h)
{
    const tfast_attention_term *mask = &h->args->mask;
    const int64_t step = mask->stride[3];
    const uint8_t *allowed = mask->data;

    h->begin_k = 0;
    h->end_k = h->n_k;
    h->masked = allowed != NULL;
    if (allowed == NULL || mask->dtype != TFAST_BOOL || mask->stride[1] != 0 ||
        mask->stride[2] != 0) {
        return;
    }
    allowed += h->batch * mask->stride[0];
    while (h->end_k > 0 && !allowed[(h->end_k - 1) * step]) {
        h->end_k--;
    }
    while (h->begin_k < h->end_k && !allowed[h->begin_k * step]) {
        h->begin_k++;
    }
    h->masked = false;
    for (int64_t j = h->begin_k; j < h->end_k && !h->masked; j++) {
        h->masked = !allowed[j * step];
    }
}

static attention_head
attention_head_of(const tfast_attention_args *args, int64_t batch, int64_t head)
{
    attention_head h = {.args = args, .batch = batch, .head = head};

    h.n_q = args->n_q;
    h.n_k = args->n_k;
    if (args->cu_seqlens_q != NULL) {
        h.first_q = args->cu_seqlens_q[batch];
        h.first_k = args->cu_seqlens_k[batch];
        h.n_q = args->cu_seqlens_q[batch + 1] - h.first_q;
        h.n_k = args->cu_seqlens_k[batch + 1] - h.first_k;
    }
    h.rows_k = h.n_k;
    if (args->kv_lens != NULL) {
        h.n_k = args->kv_lens[batch] < h.n_k ? args->kv_lens[batch] : h.n_k;
    }
    h.shift = args->bottom_right ? h.n_k - h.n_q : 0;
    h.bounded_left = args->window_left >= 0;
    h.bounded_right = args->window_right >= 0 || args->is_causal;
    h.window_left = args->window_left;
    h.window_right = args->is_causal ? 0 : args->window_right;
    attention_read_padding(&h);
    return h;
}

/* The first key that query i may look at. Non-decreasing in i, like
 * attention_end_key(). */
static inline int64_t
attention_first_key(const attention_head *h, int64_t i)
{
    const int64_t first = i + h->shift - h->window_left;

    return !h->bounded_left || first < h->begin_k ? h->begin_k
           : first < h->end_k                     ? first
                                                  : h->end_k;
}

/* One past the last key that query i may look at. */
static inline int64_t
attention_end_key(const attention_head *h, int64_t i)
{
    const int64_t end = i + h->shift + h->window_right + 1;

    return !h->bounded_right || end > h->end_k ? h->end_k : end < 0 ? 0 : end;
}

/* The first query that may look at key j, and one past the last. */
static inline int64_t
attention_first_query(const attention_head *h, int64_t j)
{
    const int64_t first = j - h->shift - h->window_right;

    return !h->bounded_right || first < 0 ? 0 : first < h->n_q ? first : h->n_q;
}

static inline int64_t
attention_end_query(const attention_head *h, int64_t j)
{
    const int64_t end = j - h->shift + h->window_left + 1;

    return !h->bounded_left || end > h->n_q ? h->n_q : end < 0 ? 0 : end;
}

/* The element where row `row` of head `head` begins; `first` is the item's first
 * row. */
static inline int64_t
attention_row(const attention_head *h, const tfast_attention_rows *rows, int64_t head,
              int64_t first, int64_t row)
{
    const int64_t batch = h->args->cu_seqlens_q == NULL ? h->batch * rows->batch : 0;

    return batch + head * rows->head + (first + row) * rows->row;
}

static inline int64_t
attention_query_row(const attention_head *h, const tfast_attention_rows *rows,
                    int64_t row)
{
    return attention_row(h, rows, h->head, h->first_q, row);
}

static inline int64_t
attention_key_row(const attention_head *h, const tfast_attention_rows *rows,
                  int64_t row)
{
    const int64_t group = h->args->heads / h->args->kv_heads;

    return attention_row(h, rows, h->head / group, h->first_k, row);
}

/* The index of this head's first row in lse. */
static inline int64_t
attention_lse_row(const attention_head *h)
{
    const int64_t batch = h->args->cu_seqlens_q == NULL ? h->batch : 0;

    return batch * h->args->lse_batch + h->head * h->args->lse_head + h->first_q;
}

/* The index of this head's first element in an array that broadcasts to the scores. */
static inline int64_t
attention_term_head(const attention_head *h, const int64_t *stride)
{
    return h->batch * stride[0] + h->head * stride[1];
}

/* Whether a mask, bias or ALiBi is added to the scores. */
static inline bool
attention_head_has_terms(const attention_head *h)
{
    return h->masked || h->args->bias.data != NULL || h->args->alibi_slopes != NULL;
}

/* Whether a key can have a weight of exactly 0 for one query and not for another,
 * because it is forbidden or dropped. A NaN or infinity in its row of k or v must not
 * reach the former. */
static inline bool
attention_can_forbid(const tfast_attention_args *args)
{
    return args->is_causal || args->window_left >= 0 || args->window_right >= 0 ||
           args->mask.data != NULL || args->bias.data != NULL || args->dropout_p > 0;
}

static inline int64_t
attention_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t
attention_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t
attention_round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

static inline double
attention_slope(const attention_head *h)
{
    const tfast_attention_args *args = h->args;
    const real *slopes = args->alibi_slopes;

    return slopes == NULL ? 0 : (double)slopes[h->batch * args->alibi_batch + h->head];
}

static inline double
attention_sink(const attention_head *h)
{
    const tfast_attention_args *args = h->args;

    return args->sinks == NULL ? -INFINITY
                               : (double)((const real *)args->sinks)[h->head];
}

/* General path: softcap, bias, mask, ALiBi or dropout. Also taken for abs(scale) <
 * 1e-20, where the fast path would underflow the gradient of the sink. */
static inline bool
attention_is_general(const attention_head *h)
{
    return attention_head_has_terms(h) || h->args->softcap != 0 ||
           h->args->dropout_p > 0 || fabs(h->args->scale) < 1e-20;
}

/* Scores are base 2 on the fast path and natural on the general path, where a mask may
 * be too large to be multiplied by log2 e; this is the conversion factor. */
static inline double
attention_unit(const attention_head *h)
{
    return attention_is_general(h) ? 1 : LOG2E;
}

/* The natural log-sum-exp, from the maximum in units of scores and log2 of the sum of
 * exponentials relative to it. */
static inline double
attention_lse(double top, double log2_sum, double unit)
{
    return unit == 1 ? top + log2_sum * LN2 : (top + log2_sum) * LN2;
}

/* Whether lse is so large that its rounding matters: the relative error of a weight
 * exp(s - lse) is the absolute error of lse, 2^-16 at this bound in float32. A row
 * whose keys all have a mask of -1e9 has an lse with an error of up to 32. */
static inline bool
attention_is_far(double lse)
{
    return fabs(lse) > 256 && fabs(lse) < INFINITY;
}

/* The factor of queries that makes q k^T the score, or with softcap the argument of
 * tanh. */
static inline double
attention_query_scale(const attention_head *h)
{
    const tfast_attention_args *args = h->args;

    return args->softcap != 0 ? args->scale / args->softcap
                              : args->scale * attention_unit(h);
}

/* The stride of copied rows: whole vectors, and no multiple of the size of a page,
 * which would put all rows in the same cache sets. */
static inline int64_t
attention_copy_stride(int64_t dim)
{
    return attention_round_up(dim, 16) + 16;
}

/* ---- Prefetching ----------------------------------------------------------------- */

/* What to prefetch: rows of several arrays, `step` rows of each in a call of
 * attention_look_ahead(). Small heads, and blocks of queries of larger ones, are
 * prefetched while the one before is computed. */
typedef struct {
    struct {
        const char *data;
        int64_t stride, rows; /* stride in bytes, number of rows */
        int bytes;            /* of a row */
    } arrays[8];
    int n;             /* number of arrays */
    int64_t next, end; /* rows prefetched so far, rows of the longest array */
    int64_t step;      /* rows prefetched in a call */
} attention_ahead;

/* Whole heads are prefetched if q, k, v and out have at most AHEAD_BYTES in a head, and
 * at least COLD_BYTES in all heads, too many to be in the cache (see
 * attention_is_cold()). */
enum {
    ATTENTION_AHEAD_BYTES = 256 << 10,
    ATTENTION_COLD_BYTES = 8 << 20,
    CACHE_LINE = 64
};

/* Prefetches the next rows of the plan; NULL: does nothing. */
static inline void
attention_look_ahead(attention_ahead *ahead)
{
    int64_t end;

    if (ahead == NULL) {
        return;
    }
    end = attention_min(ahead->next + ahead->step, ahead->end);
    for (; ahead->next < end; ahead->next++) {
        for (int i = 0; i < ahead->n; i++) {
            const char *row =
                ahead->arrays[i].data + ahead->next * ahead->arrays[i].stride;
            const int bytes =
                ahead->next < ahead->arrays[i].rows ? ahead->arrays[i].bytes : 0;

            for (int at = 0; at < bytes; at += CACHE_LINE) {
                __builtin_prefetch(row + at, 0, 3);
            }
        }
    }
}

/* Adds n rows of `dim` elements, from element `first` on, to the plan. */
static inline void
attention_plan_rows(attention_ahead *ahead, const attention_head *h,
                    const tfast_attention_rows *rows, int64_t first, int64_t n,
                    int64_t dim)
{
    const int64_t size = (int64_t)tfast_dtype_size((tfast_dtype)h->args->dtype);

    if (rows->data != NULL) {
        ahead->arrays[ahead->n].data = (const char *)rows->data + first * size;
        ahead->arrays[ahead->n].stride = rows->row * size;
        ahead->arrays[ahead->n].rows = n;
        ahead->arrays[ahead->n++].bytes = (int)(dim * size);
        ahead->end = attention_max(ahead->end, n);
    }
}

/* Plans to prefetch all of a head in `calls` calls of attention_look_ahead(). */
static inline void
attention_plan(attention_ahead *ahead, const attention_head *h, int64_t calls,
               bool backward)
{
    const tfast_attention_args *args = h->args;
    const tfast_attention_rows *queries[] = {&args->q, &args->dq};
    const tfast_attention_rows *outs[] = {&args->out, &args->dout};
    const tfast_attention_rows *keys[] = {&args->k, &args->dk};
    const tfast_attention_rows *values[] = {&args->v, &args->dv};

    ahead->n = 0;
    ahead->next = ahead->end = 0;
    for (int i = 0; i < (backward ? 2 : 1); i++) {
        attention_plan_rows(ahead, h, queries[i], attention_query_row(h, queries[i], 0),
                            h->n_q, args->dim);
        attention_plan_rows(ahead, h, outs[i], attention_query_row(h, outs[i], 0),
                            h->n_q, args->dim_v);
        attention_plan_rows(ahead, h, keys[i], attention_key_row(h, keys[i], 0), h->n_k,
                            args->dim);
        attention_plan_rows(ahead, h, values[i], attention_key_row(h, values[i], 0),
                            h->n_k, args->dim_v);
    }
    ahead->step = ahead->end / attention_max(1, calls) + 1;
}

/* Plans to prefetch what the block of n_q queries from `query` on reads and the block
 * from `before` on, of the same head, does not: q, out and, with a left window, the
 * keys and values before the window of `before`. Four rows in a call, because a block
 * makes about a hundred calls. */
static inline void
attention_plan_block(attention_ahead *ahead, const attention_head *h, int64_t query,
                     int64_t n_q, int64_t before)
{
    const tfast_attention_args *args = h->args;
    const int64_t key = attention_first_key(h, query);
    const int64_t n_k = attention_max(0, attention_first_key(h, before) - key);

    ahead->n = 0;
    ahead->next = ahead->end = 0;
    ahead->step = 4;
    attention_plan_rows(ahead, h, &args->q, attention_query_row(h, &args->q, query),
                        n_q, args->dim);
    attention_plan_rows(ahead, h, &args->out, attention_query_row(h, &args->out, query),
                        n_q, args->dim_v);
    attention_plan_rows(ahead, h, &args->k, attention_key_row(h, &args->k, key), n_k,
                        args->dim);
    attention_plan_rows(ahead, h, &args->v, attention_key_row(h, &args->v, key), n_k,
                        args->dim_v);
}

#endif
