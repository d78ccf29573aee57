/* Attention: one head of one batch item, its arrays and which keys its queries see. */
/* Queries and keys of a tile of scores: multiples of 16, as dropout's blocks are, and
 * of every panel's width. (Tried on 8 lanes: half the keys lose 1 to 5 %, twice as many
 * gain less than 2.) */
enum {
    ATTENTION_QUERIES = 96,
    ATTENTION_KEYS = 128,
    ATTENTION_BACK_KEYS = 96,
    DROPOUT_BLOCK = 16
};

static const double LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;

typedef struct {
    const tfast_attention_args *args;
    int64_t batch, head;
    int64_t n_q, n_k, shift;           /* of this item */
    int64_t rows_k;                    /* its keys, those past kv_lens too */
    int64_t first_q, first_k;          /* its first rows with variable lengths */
    int64_t window_left, window_right; /* with causal in it; negative left: any */
    bool bounded_right, bounded_left;
    int64_t begin_k, end_k; /* keys outside are forbidden to all queries */
    bool masked;            /* there is a mask, and it forbids some between them */
} attention_head;

/* A mask that is the same for all heads and queries says which keys are padding: where
 * they lie at the ends, there is no more to do about it than to leave them out. */
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

/* The first key that query i may look at. Does not fall as i grows, as the next. */
static inline int64_t
attention_first_key(const attention_head *h, int64_t i)
{
    const int64_t first = i + h->shift - h->window_left;

    return !h->bounded_left || first < h->begin_k ? h->begin_k
           : first < h->end_k                     ? first
                                                  : h->end_k;
}

/* One past the last. */
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

/* The element where row `row` of this head begins. */
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

/* Where this head's first row is in lse. */
static inline int64_t
attention_lse_row(const attention_head *h)
{
    const int64_t batch = h->args->cu_seqlens_q == NULL ? h->batch : 0;

    return batch * h->args->lse_batch + h->head * h->args->lse_head + h->first_q;
}

/* Where this head's scores are in an array that broadcasts to them. */
static inline int64_t
attention_term_head(const attention_head *h, const int64_t *stride)
{
    return h->batch * stride[0] + h->head * stride[1];
}

/* Whether something is added to scores. */
static inline bool
attention_head_has_terms(const attention_head *h)
{
    return h->masked || h->args->bias.data != NULL || h->args->alibi_slopes != NULL;
}

/* Whether there can be keys that one query may look at and another may not. */
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

/* Element i of an array of lse's dtype. */
static inline double
attention_number(const tfast_attention_args *args, const void *array, int64_t i)
{
    return args->dtype == TFAST_F64 ? ((const double *)array)[i]
                                    : (double)((const float *)array)[i];
}

static inline double
attention_slope(const attention_head *h)
{
    const tfast_attention_args *args = h->args;

    return args->alibi_slopes == NULL
               ? 0
               : attention_number(args, args->alibi_slopes,
                                  h->batch * args->alibi_batch + h->head);
}

static inline double
attention_sink(const attention_head *h)
{
    const tfast_attention_args *args = h->args;

    return args->sinks == NULL ? -INFINITY
                               : attention_number(args, args->sinks, h->head);
}

/* Whether the kernels take the way on which scores may have a softcap, terms and
 * dropout. The other one multiplies gradients of weights by scale, too, which 0 and
 * the least of numbers would lose to those of sinks. */
static inline bool
attention_is_general(const attention_head *h)
{
    return attention_head_has_terms(h) || h->args->softcap != 0 ||
           h->args->dropout_p > 0 || fabs(h->args->scale) < 1e-20;
}

/* What numbers are multiplied by to be in the units of scores: those of log2, exp(s)
 * being exp2(s * log2 e); but on the general way those that terms come in, for a mask
 * may be as large as numbers are. */
static inline double
attention_unit(const attention_head *h)
{
    return attention_is_general(h) ? 1 : LOG2E;
}

/* lse, of a maximum in units of scores and the log2 of the sum over it. */
static inline double
attention_lse(double top, double log2_sum, double unit)
{
    return unit == 1 ? top + log2_sum * LN2 : (top + log2_sum) * LN2;
}

/* Whether lse is so far from 0 that its rounding matters: a weight exp(s - lse) is off
 * by as much as lse is, at this bound by 2^-16 of itself in float32. A row whose keys
 * all have a mask of -1e9 has an lse that is off by up to 32. */
static inline bool
attention_is_far(double lse)
{
    return fabs(lse) > 256 && fabs(lse) < INFINITY;
}

/* What queries are multiplied by, so that q k^T is the score, or with softcap the
 * argument of tanh. */
static inline double
attention_query_scale(const attention_head *h)
{
    const tfast_attention_args *args = h->args;

    return args->softcap != 0 ? args->scale / args->softcap
                              : args->scale * attention_unit(h);
}

/* The stride of copied rows: whole vectors, and not a multiple of a page's. */
static inline int64_t
attention_copy_stride(int64_t dim)
{
    return attention_round_up(dim, 16) + 16;
}
