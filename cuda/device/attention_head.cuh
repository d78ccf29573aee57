/* One head of one batch item as kernels see it: which rows are its own, which keys its
 * queries may look at, and what becomes of a score. Lengths that lie on the device are
 * clamped here, never trusted. */
#ifndef TFAST_ATTENTION_HEAD_CUH
#define TFAST_ATTENTION_HEAD_CUH

#include "attention_dropout.h"
#include "element.cuh"

struct attention_head {
    int64_t batch, head;
    int64_t n_q, n_k, shift;  /* of this item; n_k without keys past kv_lens */
    int64_t rows_k;           /* with them */
    int64_t first_q, first_k; /* its first rows with variable lengths */
};

DEVICE int64_t
clamped(int64_t x, int64_t least, int64_t most)
{
    return x < least ? least : x > most ? most : x;
}

/* Rows of one item: the first, and how many. */
DEVICE void
packed_rows(int64_t *first, int64_t *n, const int64_t *cu_seqlens, int64_t batch,
            int64_t total, int64_t longest)
{
    *first = clamped(cu_seqlens[batch], 0, total);
    *n = clamped(cu_seqlens[batch + 1], *first, total) - *first;
    *n = *n < longest ? *n : longest;
}

DEVICE attention_head
attention_head_of(const tfast_attention_args &args, int64_t batch, int64_t head)
{
    attention_head h = {batch, head, args.n_q, 0, 0, args.n_k, 0, 0};

    if (args.cu_seqlens_q != nullptr) {
        packed_rows(&h.first_q, &h.n_q, args.cu_seqlens_q, batch, args.total_q,
                    args.n_q);
        packed_rows(&h.first_k, &h.rows_k, args.cu_seqlens_k, batch, args.total_k,
                    args.n_k);
    }
    h.n_k =
        args.kv_lens == nullptr ? h.rows_k : clamped(args.kv_lens[batch], 0, h.rows_k);
    h.shift = args.bottom_right ? h.n_k - h.n_q : 0;
    return h;
}

/* ---- Which keys, which queries --------------------------------------------------- */

/* How far right of its diagonal a query may look; negative: any distance. */
DEVICE int64_t
window_right(const tfast_attention_args &args)
{
    return args.is_causal ? 0 : args.window_right;
}

/* The first key that query i may look at. Does not fall as i grows, as the next. */
DEVICE int64_t
first_key(const tfast_attention_args &args, const attention_head &h, int64_t i)
{
    return args.window_left < 0 ? 0 : clamped(i + h.shift - args.window_left, 0, h.n_k);
}

/* One past the last. */
DEVICE int64_t
end_key(const tfast_attention_args &args, const attention_head &h, int64_t i)
{
    const int64_t right = window_right(args);

    return right < 0 ? h.n_k : clamped(i + h.shift + right + 1, 0, h.n_k);
}

/* The first query that may look at key j, and one past the last. */
DEVICE int64_t
first_query(const tfast_attention_args &args, const attention_head &h, int64_t j)
{
    const int64_t right = window_right(args);

    return right < 0 ? 0 : clamped(j - h.shift - right, 0, h.n_q);
}

DEVICE int64_t
end_query(const tfast_attention_args &args, const attention_head &h, int64_t j)
{
    return args.window_left < 0 ? h.n_q
                                : clamped(j - h.shift + args.window_left + 1, 0, h.n_q);
}

/* Of `n` keys from `key` on, those from `first` to `end` - 1. */
struct attention_reach {
    int first, end;
};

DEVICE attention_reach
reach_of(const tfast_attention_args &args, const attention_head &h, int64_t query,
         int64_t key, int n)
{
    if (query >= h.n_q) {
        return {0, 0};
    }
    return {(int)clamped(first_key(args, h, query) - key, 0, n),
            (int)clamped(end_key(args, h, query) - key, 0, n)};
}

/* ---- Where rows and numbers are -------------------------------------------------- */

/* The element where a row of this head begins. */
DEVICE int64_t
query_row(const tfast_attention_args &args, const attention_head &h,
          const tfast_attention_rows &rows, int64_t row)
{
    const int64_t batch = args.cu_seqlens_q == nullptr ? h.batch * rows.batch : 0;

    return batch + h.head * rows.head + (h.first_q + row) * rows.row;
}

/* The same for keys and values, of the head that this one shares with others. */
DEVICE int64_t
key_row(const tfast_attention_args &args, const attention_head &h,
        const tfast_attention_rows &rows, int64_t row)
{
    const int64_t batch = args.cu_seqlens_q == nullptr ? h.batch * rows.batch : 0;
    const int64_t head = h.head / (args.heads / args.kv_heads);

    return batch + head * rows.head + (h.first_k + row) * rows.row;
}

/* Where this head's first row is in lse. */
DEVICE int64_t
lse_row(const tfast_attention_args &args, const attention_head &h)
{
    const int64_t batch = args.cu_seqlens_q == nullptr ? h.batch * args.lse_batch : 0;

    return batch + h.head * args.lse_head + h.first_q;
}

/* The first of this head's queries among all of the call's: [batch, heads, n_q], or
 * [heads, total_q]. */
DEVICE int64_t
number_row(const tfast_attention_args &args, const attention_head &h)
{
    return args.cu_seqlens_q == nullptr ? (h.batch * args.heads + h.head) * args.n_q
                                        : h.head * args.total_q + h.first_q;
}

/* Where this head's scores are in an array that broadcasts to them. */
DEVICE int64_t
term_head(const attention_head &h, const int64_t *stride)
{
    return h.batch * stride[0] + h.head * stride[1];
}

/* ---- Scores ---------------------------------------------------------------------- */

template <typename REAL>
DEVICE REAL
largest()
{
    return (REAL)(sizeof(REAL) == 4 ? 3.402823466e38 : 1.7976931348623157e308);
}

DEVICE float
exponential(float x)
{
    return ex2_approx(x * 1.44269504f);
}

DEVICE double
exponential(double x)
{
    return exp(x);
}

DEVICE float
tangent(float x)
{
    return tanhf(x);
}

DEVICE double
tangent(double x)
{
    return tanh(x);
}

DEVICE float
logarithm(float x)
{
    return logf(x);
}

DEVICE double
logarithm(double x)
{
    return log(x);
}

/* What a head's scores are made with; the scale is that of tanh's argument where there
 * is a softcap. */
template <typename REAL>
struct attention_rule {
    REAL scale, alibi;
};

template <typename REAL>
DEVICE attention_rule<REAL>
rule_of(const tfast_attention_args &args, const attention_head &h)
{
    const double scale = args.softcap != 0 ? args.scale / args.softcap : args.scale;
    const REAL *slopes = (const REAL *)args.alibi_slopes;

    return {(REAL)scale,
            slopes == nullptr ? 0 : slopes[h.batch * args.alibi_batch + h.head]};
}

/* The distance that ALiBi's slope is multiplied by. */
template <typename REAL>
DEVICE REAL
distance(const attention_head &h, int64_t i, int64_t j)
{
    const int64_t far = i + h.shift - j;

    return (REAL)(far < 0 ? -far : far);
}

/* Only -infinity forbids: whatever the score is. */
template <typename REAL>
DEVICE REAL
with_term(REAL score, const tfast_attention_term &term, const attention_head &h,
          int64_t i, int64_t j)
{
    const int64_t at =
        term_head(h, term.stride) + i * term.stride[2] + j * term.stride[3];

    if (term.dtype == TFAST_BOOL) {
        return ((const uint8_t *)term.data)[at] != 0 ? score : -(REAL)INFINITY;
    }
    const REAL x = read_element<REAL>(term.data, term.dtype, at);
    return x < -largest<REAL>() ? x : score + x;
}

/* The score of query i and a key j in its reach, from their product. With softcap
 * `slope` becomes the derivative by the scaled product. */
template <typename REAL>
DEVICE REAL
score_of(REAL *slope, REAL product, const tfast_attention_args &args,
         const attention_head &h, const attention_rule<REAL> &rule, int64_t i,
         int64_t j)
{
    REAL score = product * rule.scale;

    if (args.softcap != 0) {
        const REAL bent = tangent(score);
        *slope = 1 - bent * bent;
        score = bent * (REAL)args.softcap;
    }
    if (args.alibi_slopes != nullptr) {
        score -= rule.alibi * distance<REAL>(h, i, j);
    }
    if (args.mask.data != nullptr) {
        score = with_term(score, args.mask, h, i, j);
    }
    if (args.bias.data != nullptr) {
        score = with_term(score, args.bias, h, i, j);
    }
    return score;
}

/* ---- Far rows -------------------------------------------------------------------- */

/* Whether lse is so far from 0 that its rounding matters: a weight exp(s - lse) is off
 * by as much as lse is, in float32 at this bound by 2^-16 of itself, and with a mask of
 * -1e9 on all of the row's keys by any factor up to how many there are. */
template <typename REAL>
DEVICE bool
is_far(REAL lse)
{
    return fabs(lse) > 256 && fabs(lse) < (REAL)INFINITY;
}

/* What makes weights exp(s - lse) of a far row sum to 1, from their sum, the sink's
 * included. What is no matter of rounding stays: lse may be that of more keys. */
template <typename REAL>
DEVICE REAL
share_of(REAL sum, REAL lse)
{
    const REAL rounding = (REAL)(sizeof(REAL) == 4 ? 4.8e-7 : 8.9e-16); /* 8 units */

    return fabs(logarithm(sum)) <= rounding * fabs(lse) ? 1 / sum : 1;
}

/* ---- Dropout --------------------------------------------------------------------- */

/* See tfast.h. */
struct attention_dropout {
    uint32_t key0, key1, head, threshold;
    double scale; /* of what is kept */
};

DEVICE attention_dropout
dropout_of(const tfast_attention_args &args, const attention_head &h)
{
    const uint64_t seed =
        (uint64_t)(args.seed_at != nullptr ? *args.seed_at : args.seed);
    const uint32_t threshold = tfast_dropout_threshold(args.dropout_p);

    return {(uint32_t)seed, (uint32_t)(seed >> 32),
            (uint32_t)(h.batch * args.heads + h.head), threshold,
            tfast_dropout_scale(threshold)};
}

/* The words for the 16 x 16 block's elements that lie multiples of 8 from (i, j), and
 * j's neighbour within a pair. */
DEVICE void
dropout_words(uint32_t word[4], const attention_dropout &dropout, int64_t i, int64_t j)
{
    word[0] = (uint32_t)(i / 16 * 8 + i % 8);
    word[1] = (uint32_t)(j / 16 * 4 + j % 8 / 2);
    word[2] = dropout.head;
    word[3] = 0;
    tfast_philox(word, dropout.key0, dropout.key1);
}

/* Whether one of them is kept; `i` and `j` count from anywhere in steps of 16. */
DEVICE bool
is_kept(const uint32_t word[4], const attention_dropout &dropout, int i, int j)
{
    const uint32_t row0 = (j & 8) != 0 ? word[1] : word[0];
    const uint32_t row8 = (j & 8) != 0 ? word[3] : word[2];
    const uint32_t both = (i & 8) != 0 ? row8 : row0;

    return ((j & 1) != 0 ? both >> 16 : both & 0xFFFF) >= dropout.threshold;
}

#endif
