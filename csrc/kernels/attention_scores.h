/* Attention: what happens to a panel of scores between the two products. */

/* A panel: up to PANEL queries from `query` on, against the keys `key` .. of a tile. */
typedef struct {
    const attention_head *head;
    int64_t query, key;     /* of the item */
    int n;                  /* queries */
    int vectors;            /* that hold them: 1 or 2 */
    int begin, end;         /* keys of the tile that any of them may look at */
    int from[2], to[2];     /* the same of each vector; with `whole` begin and end */
    int all_begin, all_end; /* keys that all of them may look at */
    REAL lowest[PANEL], highest[PANEL]; /* each query's own, from `key` on */
} R(panel);

/* Whether there are keys from .. to - 1 that some may not look at. */
static inline bool
R(has_border)(const R(panel) * p, int from, int to)
{
    return from < p->all_begin || to > p->all_end;
}

static inline int
R(within)(int64_t x, int64_t least, int64_t most)
{
    return (int)attention_max(least, attention_min(most, x));
}

/* Each query's lowest and highest key; what lies outside of the tile may be anything
 * outside. */
static void
R(set_bounds)(R(panel) * p, int n_k)
{
    const attention_head *h = p->head;
    const int64_t diagonal = p->query + h->shift - p->key;
    const int left =
        h->bounded_left ? R(within)(diagonal - h->window_left, -PANEL, n_k) : -PANEL;
    const int right =
        h->bounded_right ? R(within)(diagonal + h->window_right, -PANEL, n_k) : n_k;
    const int least = R(within)(h->begin_k - p->key, -1, n_k);
    const int most = R(within)(h->end_k - 1 - p->key, -1, n_k);

    for (int i = 0; i < PANEL; i++) {
        const int at = i < p->n ? i : p->n - 1;
        const int lowest = left + at, highest = right + at;

        p->lowest[i] = (REAL)(lowest > least ? lowest : least);
        p->highest[i] = (REAL)(highest < most ? highest : most);
    }
}

/* `whole`: each vector has the keys of both. */
static R(panel) R(panel_of)(const attention_head *head, int64_t query, int64_t n,
                            int64_t key, int64_t n_k, bool whole)
{
    R(panel) p = {.head = head, .query = query, .key = key};

    p.n = (int)attention_min(n, PANEL);
    p.vectors = p.n > VR_WIDTH ? 2 : 1;
    for (int v = 0; v < p.vectors; v++) {
        const int64_t last = attention_min(p.n, (v + 1) * VR_WIDTH) - 1;

        p.from[v] =
            R(within)(attention_first_key(head, query + v * VR_WIDTH) - key, 0, n_k);
        p.to[v] =
            R(within)(attention_end_key(head, query + last) - key, p.from[v], n_k);
    }
    p.begin = p.from[0];
    p.end = p.to[p.vectors - 1];
    p.all_begin = R(within)(attention_first_key(head, query + p.n - 1) - key, 0, n_k);
    p.all_end = R(within)(attention_end_key(head, query) - key, 0, n_k);
    for (int v = 0; whole && v < p.vectors; v++) {
        p.from[v] = p.begin;
        p.to[v] = p.end;
    }
    if (R(has_border)(&p, p.begin, p.end)) {
        R(set_bounds)(&p, (int)n_k);
    }
    return p;
}

/* The next keys whose scores are computed together: those that both vectors look at,
 * or one of them. (Tried for windows, whose edges lie anywhere: edges at multiples of
 * four keys, for fewer short strips, gained nothing.) */
typedef struct {
    int rows, first, vectors; /* keys, first vector, vectors */
} R(strip);

static inline R(strip) R(strip_at)(const R(panel) * p, int key)
{
    R(strip) s = {.vectors = 1};
    int end = p->end;

    if (p->vectors == 2 && key < p->from[1] && key < p->to[0]) {
        end = p->from[1] < p->to[0] ? p->from[1] : p->to[0];
    } else if (p->vectors == 2 && key >= p->to[0]) {
        s.first = 1;
    } else if (p->vectors == 2) {
        s.vectors = 2;
        end = p->to[0];
    }
    s.rows = R(strip_rows)(end - key);
    return s;
}

/* Zeros where no query of a vector looks, for the products of a tile of n_k keys. */
static void
R(clear_outside)(REAL *tile, const R(panel) * p, int n_k)
{
    for (int v = 0; v < p->vectors; v++) {
        REAL *at = tile + v * VR_WIDTH;

        for (int key = 0; key < p->from[v]; key++) {
            vr_store(at + key * ATTENTION_QUERIES, vr_set1(0));
        }
        for (int key = p->to[v]; key < n_k; key++) {
            vr_store(at + key * ATTENTION_QUERIES, vr_set1(0));
        }
    }
}

/* Scores of tile row `key` as the bounds leave them. */
static inline __attribute__((always_inline)) vr
R(bound)(const R(panel) * p, int v, int key, vr score)
{
    const vr at = vr_set1((REAL)key), none = vr_set1(-INFINITY);

    score = vr_if_less(at, vr_load(p->lowest + v * VR_WIDTH), none, score);
    return vr_if_less(vr_load(p->highest + v * VR_WIDTH), at, none, score);
}

/* ---- Terms ----------------------------------------------------------------------- */

static inline REAL
R(term_element)(const tfast_attention_term *term, int64_t at)
{
    REAL x[VR_WIDTH];

    if (term->dtype == TFAST_BOOL) {
        return ((const uint8_t *)term->data)[at] ? 0 : -(REAL)INFINITY;
    }
    R(tile_read)(x, term->data, term->dtype, at, 1);
    return x[0];
}

/* A score with a term as it lies in the array: whatever the score is, -infinity forbids
 * it. */
static inline vr
R(with_term)(vr score, vr term)
{
    const vr least = vr_set1(-REAL_MAX);
    const vr sum = vr_add(score, vr_max(least, vr_mul(term, vr_set1(LOG2E))));

    return vr_if_less(term, least, vr_set1(-INFINITY), sum);
}

/* VR_WIDTH elements of a term from `at` on. */
static inline vr
R(term_vector)(const tfast_attention_term *term, int64_t at)
{
    REAL stage[VR_WIDTH];

    if (term->dtype == REAL_DTYPE) {
        return vr_load((const REAL *)term->data + at);
    }
    if (term->dtype == TFAST_BOOL) {
        for (int j = 0; j < VR_WIDTH; j++) {
            stage[j] = ((const uint8_t *)term->data)[at + j] ? 0 : -(REAL)INFINITY;
        }
    } else {
        R(tile_read)(stage, term->data, term->dtype, at, VR_WIDTH);
    }
    return vr_load(stage);
}

/* Adds a term's block, VR_WIDTH keys of each of up to VR_WIDTH queries from `first` on,
 * to scores, keys by queries. */
static void
R(add_term_block)(REAL *scores, const tfast_attention_term *term, int64_t first, int n)
{
    vr block[VR_WIDTH];

    for (int i = 0; i < VR_WIDTH; i++) {
        block[i] =
            i < n ? R(term_vector)(term, first + i * term->stride[2]) : vr_set1(0);
    }
    vr_transpose(block);
    for (int j = 0; j < VR_WIDTH; j++) {
        REAL *at = scores + j * ATTENTION_QUERIES;

        vr_store(at, R(with_term)(vr_load(at), block[j]));
    }
}

/* Adds a mask or bias to the scores of the panel. */
static void
R(add_term)(REAL *scores, const R(panel) * p, const tfast_attention_term *term)
{
    const int64_t *stride = term->stride;
    const int64_t first = attention_term_head(p->head, stride) + p->query * stride[2] +
                          p->key * stride[3];
    int key = p->begin;

    if (stride[2] != 0 && stride[3] == 1) {
        const int blocks = (p->end - key) / VR_WIDTH;

        for (int v = 0; v < p->vectors; v++) { /* rows that share a set of the cache */
            for (int b = 0; b < blocks; b++) {
                const int at = key + b * VR_WIDTH;
                R(add_term_block)
                (scores + at * ATTENTION_QUERIES + v * VR_WIDTH, term,
                 first + at + v * VR_WIDTH * stride[2], p->n - v * VR_WIDTH);
            }
        }
        key += blocks * VR_WIDTH;
    }
    for (; key < p->end; key++) {
        REAL lane[PANEL] = {0};

        for (int i = 0; i < (stride[2] == 0 ? 1 : p->n); i++) {
            lane[i] = R(term_element)(term, first + key * stride[3] + i * stride[2]);
        }
        for (int v = 0; v < p->vectors; v++) {
            REAL *at = scores + key * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr x =
                stride[2] == 0 ? vr_set1(lane[0]) : vr_load(lane + v * VR_WIDTH);

            vr_store(at, R(with_term)(vr_load(at), x));
        }
    }
}

/* Plans to ask for the panel's part of a term while a product of the panel is formed:
 * its rows may be as far apart as pages, which the processor does not foresee. */
static void
R(plan_term)(attention_ahead *ahead, const R(panel) * p,
             const tfast_attention_term *term)
{
    const int64_t *stride = term->stride;
    const int64_t size = term->dtype == TFAST_BOOL
                             ? 1
                             : (int64_t)tfast_dtype_size((tfast_dtype)term->dtype);
    const int64_t first = attention_term_head(p->head, stride) + p->query * stride[2] +
                          p->key * stride[3];

    if (term->data == NULL || stride[2] == 0 || stride[3] != 1 || p->begin == p->end) {
        return;
    }
    ahead->arrays[ahead->n].data = (const char *)term->data + (first + p->begin) * size;
    ahead->arrays[ahead->n].stride = stride[2] * size;
    ahead->arrays[ahead->n].rows = p->n;
    ahead->arrays[ahead->n++].bytes = (int)((p->end - p->begin) * size);
    ahead->end = p->n;
    ahead->step = p->n * V_ROWS / (p->end - p->begin) + 1;
}

/* ---- From products to scores ----------------------------------------------------- */

/* The distance |query + shift - key| of ALiBi is, for tile row `key` of the panel,
 * |diagonal - key|. */
static inline vr
R(alibi_diagonal)(const R(panel) * p, int v)
{
    REAL lane[VR_WIDTH];

    for (int i = 0; i < VR_WIDTH; i++) {
        lane[i] = (REAL)(p->query + p->head->shift - p->key + v * VR_WIDTH + i);
    }
    return vr_load(lane);
}

/* Softcap and ALiBi, in place. `slope` (NULL: not wanted) becomes 1 - tanh^2. */
static void
R(bend_scores)(REAL *scores, REAL *slope, const R(panel) * p)
{
    const tfast_attention_args *args = p->head->args;
    const vr cap = vr_set1((REAL)(args->softcap * LOG2E));
    const vr alibi = vr_set1((REAL)attention_slope(p->head));

    for (int v = 0; v < p->vectors; v++) {
        const vr diagonal = R(alibi_diagonal)(p, v);

        for (int key = p->begin; key < p->end; key++) {
            REAL *at = scores + key * ATTENTION_QUERIES + v * VR_WIDTH;
            vr s = vr_load(at);

            if (args->softcap != 0) {
                s = R(vector_tanh)(s);
                if (slope != NULL) {
                    vr_store(slope + key * ATTENTION_QUERIES + v * VR_WIDTH,
                             vr_sub(vr_set1(1), vr_mul(s, s)));
                }
                s = vr_mul(cap, s);
            }
            if (args->alibi_slopes != NULL) {
                const vr far = R(vector_abs)(vr_sub(diagonal, vr_set1((REAL)key)));
                s = vr_sub(s, vr_mul(alibi, far));
            }
            vr_store(at, s);
        }
    }
}

/* Turns products of query and key into scores, in place. With softcap, `slope` (NULL:
 * not wanted) becomes 1 - tanh^2. */
static void
R(finish_scores)(REAL *scores, REAL *slope, const R(panel) * p)
{
    const tfast_attention_args *args = p->head->args;

    if (args->softcap != 0 || args->alibi_slopes != NULL) {
        R(bend_scores)(scores, slope, p);
    }
    if (p->head->masked) {
        R(add_term)(scores, p, &args->mask);
    }
    if (args->bias.data != NULL) {
        R(add_term)(scores, p, &args->bias);
    }
    for (int v = 0; R(has_border)(p, p->begin, p->end) && v < p->vectors; v++) {
        for (int key = p->begin; key < p->end; key++) {
            REAL *at = scores + key * ATTENTION_QUERIES + v * VR_WIDTH;
            vr_store(at, R(bound)(p, v, key, vr_load(at)));
        }
    }
}

/* ---- Dropout --------------------------------------------------------------------- */

/* What each element of a tile is multiplied by: 0, or the scale. `query` and `key` are
 * multiples of DROPOUT_BLOCK. */
static void
R(fill_dropout)(REAL *tile, const attention_head *h, int64_t query, int64_t n_q,
                int64_t key, int64_t n_k)
{
    enum { PAIRS = DROPOUT_BLOCK / 2, QUADS = DROPOUT_BLOCK / 4 };
    const tfast_attention_args *args = h->args;
    const uint64_t seed = (uint64_t)(args->seed_at ? *args->seed_at : args->seed);
    const uint32_t threshold = tfast_dropout_threshold(args->dropout_p);
    const REAL kept = (REAL)tfast_dropout_scale(threshold);
    const uint32_t bh = (uint32_t)(h->batch * args->heads + h->head);

    for (int64_t j = 0; j < n_k; j += DROPOUT_BLOCK) {
        for (int64_t i = 0; i < n_q; i += DROPOUT_BLOCK) {
            REAL *block = tile + j * ATTENTION_QUERIES + i;
            const uint32_t r0 = (uint32_t)((query + i) / 2);
            const uint32_t c0 = (uint32_t)((key + j) / 4);

            for (int c = 0; c < QUADS; c++) {
                uint32_t word[4][PAIRS];

                for (int r = 0; r < PAIRS; r++) {
                    uint32_t w[4] = {r0 + (uint32_t)r, c0 + (uint32_t)c, bh, 0};

                    tfast_philox(w, (uint32_t)seed, (uint32_t)(seed >> 32));
                    word[0][r] = w[0];
                    word[1][r] = w[1];
                    word[2][r] = w[2];
                    word[3][r] = w[3];
                }
                for (int w = 0; w < 4; w++) {
                    REAL *to =
                        block + (w % 2 * 8 + c * 2) * ATTENTION_QUERIES + w / 2 * PAIRS;

                    for (int r = 0; r < PAIRS; r++) {
                        const uint32_t even = word[w][r] & 0xFFFF;
                        const uint32_t odd = word[w][r] >> 16;

                        to[r] = even < threshold ? 0 : kept;
                        to[ATTENTION_QUERIES + r] = odd < threshold ? 0 : kept;
                    }
                }
            }
        }
    }
}

static void
R(drop)(REAL *weights, const REAL *dropout, const R(panel) * p)
{
    for (int key = p->begin; key < p->end; key++) {
        for (int v = 0; v < p->vectors; v++) {
            const int64_t at = key * ATTENTION_QUERIES + v * VR_WIDTH;

            vr_store(weights + at,
                     vr_mul(vr_load(weights + at), vr_load(dropout + at)));
        }
    }
}

/* ---- Gradients of scores --------------------------------------------------------- */

/* From scores and products of dout and v to weights (after dropout) and gradients of
 * scores, in place. `lse` and `delta` are negated. Lanes without a query become 0. */
static void
R(finish_gradients)(REAL *weights, REAL *products, const REAL *dropout, const REAL *lse,
                    const REAL *delta, const R(panel) * p)
{
    const vr zero = vr_set1(0);

    for (int v = 0; v < p->vectors; v++) {
        const vr less = vr_load(lse + v * VR_WIDTH),
                 minus = vr_load(delta + v * VR_WIDTH);
        REAL lane[VR_WIDTH];
        vr there;

        for (int i = 0; i < VR_WIDTH; i++) {
            lane[i] = v * VR_WIDTH + i < p->n;
        }
        there = vr_load(lane);
        for (int key = p->begin; key < p->end; key++) {
            const int64_t at = key * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr weight = R(vector_exp2)(vr_add(vr_load(weights + at), less));
            const vr w = vr_if_less(zero, there, weight, zero);
            const vr keep = dropout == NULL ? vr_set1(1) : vr_load(dropout + at);
            const vr ds = vr_mul(w, vr_madd(vr_load(products + at), keep, minus));

            vr_store(products + at, vr_if_less(zero, w, ds, vr_mul(zero, w)));
            vr_store(weights + at, vr_mul(w, keep));
        }
    }
}

/* Gradients of scores become those of the products of query and key. */
static void
R(scale_gradients)(REAL *gradients, const REAL *slope, REAL scale, const R(panel) * p)
{
    for (int key = p->begin; key < p->end; key++) {
        for (int v = 0; v < p->vectors; v++) {
            const int64_t at = key * ATTENTION_QUERIES + v * VR_WIDTH;
            vr x = vr_mul(vr_load(gradients + at), vr_set1(scale));

            if (slope != NULL) { /* which may be NaN where the gradient is 0 */
                const vr y = vr_mul(x, vr_load(slope + at));
                x = vr_if_less(vr_set1(0), R(vector_abs)(x), y, x);
            }
            vr_store(gradients + at, x);
        }
    }
}

/* What a panel's gradients add to that of its head's slope. */
static double
R(alibi_gradient)(const REAL *gradients, const R(panel) * p)
{
    double sum = 0;

    for (int v = 0; v < p->vectors; v++) {
        const vr diagonal = R(alibi_diagonal)(p, v);
        vr all = vr_set1(0);

        for (int key = p->begin; key < p->end; key++) {
            const vr far = R(vector_abs)(vr_sub(diagonal, vr_set1((REAL)key)));

            all = vr_madd(vr_load(gradients + key * ATTENTION_QUERIES + v * VR_WIDTH),
                          far, all);
        }
        sum -= (double)vr_sum(all);
    }
    return sum;
}

/* VR_WIDTH keys' gradients, from tile rows to up to VR_WIDTH rows of a bias. */
static void
R(add_dbias_block)(REAL *to, int64_t stride, const REAL *gradients, int n, bool first)
{
    vr block[VR_WIDTH];

    for (int j = 0; j < VR_WIDTH; j++) {
        block[j] = vr_load(gradients + j * ATTENTION_QUERIES);
    }
    vr_transpose(block);
    for (int i = 0; i < VR_WIDTH && i < n; i++) {
        REAL *at = to + i * stride;

        vr_store(at, first ? block[i] : vr_add(vr_load(at), block[i]));
    }
}

/* The gradient of a bias that is the same for all queries. */
static void
R(add_dbias_of_keys)(REAL *to, int64_t stride, const REAL *gradients,
                     const R(panel) * p)
{
    for (int key = p->begin; key < p->end; key++) {
        double sum = 0;

        for (int v = 0; v < p->vectors; v++) {
            sum += (double)vr_sum(
                vr_load(gradients + key * ATTENTION_QUERIES + v * VR_WIDTH));
        }
        to[key * stride] += (REAL)sum;
    }
}

/* Adds a panel's gradients to those of the bias, summed where it is broadcast. `first`:
 * writes them. */
static void
R(add_dbias)(REAL *dbias, const int64_t *stride, const REAL *gradients,
             const R(panel) * p, bool first)
{
    REAL *to = dbias + attention_term_head(p->head, stride) + p->query * stride[2] +
               p->key * stride[3];
    int key = p->begin;

    if (stride[2] == 0) {
        R(add_dbias_of_keys)(to, stride[3], gradients, p);
        return;
    }
    for (; stride[3] == 1 && key + VR_WIDTH <= p->end; key += VR_WIDTH) {
        for (int v = 0; v < p->vectors; v++) {
            R(add_dbias_block)
            (to + key + v * VR_WIDTH * stride[2], stride[2],
             gradients + key * ATTENTION_QUERIES + v * VR_WIDTH, p->n - v * VR_WIDTH,
             first);
        }
    }
    for (; key < p->end; key++) {
        for (int i = 0; i < p->n; i++) {
            REAL *at = to + key * stride[3] + i * stride[2];

            *at = (first ? 0 : *at) + gradients[key * ATTENTION_QUERIES + i];
        }
    }
}
