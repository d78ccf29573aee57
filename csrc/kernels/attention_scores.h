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

/* What is added to a panel's products before they are scores lies in a tile of its own,
 * [key][PANEL], so that products need not leave their registers for it. With a learned
 * bias the forward gained 5 to 10 %, and the backward, whose gradient of the bias is
 * bound by memory, 6 to 7. (Tried: asking for rows into the first or the second cache,
 * to read or to write, is the same; of not asking whether a term is -infinity less than
 * 1 % is left.) */

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

/* A score with a term, and with -lse. A term of -infinity forbids it, whatever the
 * others are. */
static inline __attribute__((always_inline)) vr
R(with_term)(vr score, vr term)
{
    const vr least = vr_set1(-REAL_MAX);

    return vr_if_less(term, least, vr_set1(-INFINITY), vr_add(score, term));
}

static inline __attribute__((always_inline)) vr
R(with_both)(vr score, vr term, vr lse)
{
    const vr least = vr_set1(-REAL_MAX), sum = vr_add(vr_add(score, term), lse);

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

/* A term's block, VR_WIDTH keys of each of up to VR_WIDTH queries from `first` on: keys
 * by queries. `adds`: to what is there. */
static inline __attribute__((always_inline)) void
R(add_term_block)(REAL *to, const tfast_attention_term *term, int64_t first, int n,
                  bool adds)
{
    vr block[VR_WIDTH];

    if (term->dtype == REAL_DTYPE && n >= VR_WIDTH) {
#pragma GCC unroll 16
        for (int i = 0; i < VR_WIDTH; i++) {
            block[i] = vr_load((const REAL *)term->data + first + i * term->stride[2]);
        }
    } else {
        for (int i = 0; i < VR_WIDTH; i++) {
            block[i] =
                i < n ? R(term_vector)(term, first + i * term->stride[2]) : vr_set1(0);
        }
    }
    vr_transpose(block);
    for (int j = 0; j < VR_WIDTH; j++) {
        REAL *at = to + j * PANEL;

        vr_store(at, adds ? R(with_term)(vr_load(at), block[j]) : block[j]);
    }
}

/* A mask or bias of the panel. */
static void
R(add_term)(REAL *to, const R(panel) * p, const tfast_attention_term *term, bool adds)
{
    const int64_t *stride = term->stride;
    const int64_t first = attention_term_head(p->head, stride) + p->query * stride[2] +
                          p->key * stride[3];
    const int blocks =
        stride[2] != 0 && stride[3] == 1 ? (p->end - p->begin) / VR_WIDTH : 0;
    int key = p->begin;

    for (int v = 0; v < p->vectors; v++) { /* whose rows may share a set of the cache */
        for (int j = key; j < key + blocks * VR_WIDTH; j += VR_WIDTH) {
            R(add_term_block)
            (to + j * PANEL + v * VR_WIDTH, term, first + j + v * VR_WIDTH * stride[2],
             p->n - v * VR_WIDTH, adds);
        }
    }
    key += blocks * VR_WIDTH;
    for (; key < p->end; key++) {
        REAL lane[PANEL] = {0};

        for (int i = 0; i < (stride[2] == 0 ? 1 : p->n); i++) {
            lane[i] = R(term_element)(term, first + key * stride[3] + i * stride[2]);
        }
        for (int v = 0; v < p->vectors; v++) {
            REAL *at = to + key * PANEL + v * VR_WIDTH;
            const vr x =
                stride[2] == 0 ? vr_set1(lane[0]) : vr_load(lane + v * VR_WIDTH);

            vr_store(at, adds ? R(with_term)(vr_load(at), x) : x);
        }
    }
}

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

static void
R(subtract_alibi)(REAL *to, const R(panel) * p)
{
    const vr slope = vr_set1((REAL)attention_slope(p->head));

    for (int v = 0; v < p->vectors; v++) {
        const vr diagonal = R(alibi_diagonal)(p, v);

        for (int key = p->begin; key < p->end; key++) {
            REAL *at = to + key * PANEL + v * VR_WIDTH;
            const vr far = R(vector_abs)(vr_sub(diagonal, vr_set1((REAL)key)));

            vr_store(at, vr_sub(vr_load(at), vr_mul(slope, far)));
        }
    }
}

/* -infinity where a query may not look, and for lanes without a query. */
static void
R(bound_terms)(REAL *to, const R(panel) * p)
{
    const bool border = R(has_border)(p, p->begin, p->end);

    for (int v = 0; v < p->vectors; v++) {
        for (int key = p->begin; border && key < p->end; key++) {
            REAL *at = to + key * PANEL + v * VR_WIDTH;

            vr_store(at, R(bound)(p, v, key, vr_load(at)));
        }
    }
    for (int key = p->begin; p->n < PANEL && key < p->end; key++) {
        for (int i = p->n; i < p->vectors * VR_WIDTH; i++) {
            to[key * PANEL + i] = -(REAL)INFINITY;
        }
    }
}

/* All that is added to the panel's products. */
static void
R(fill_terms)(REAL *to, const R(panel) * p)
{
    const tfast_attention_args *args = p->head->args;

    if (p->head->masked) {
        R(add_term)(to, p, &args->mask, false);
    }
    if (args->bias.data != NULL) {
        R(add_term)(to, p, &args->bias, p->head->masked);
    }
    if (!p->head->masked && args->bias.data == NULL) {
        memset(to + p->begin * PANEL, 0,
               sizeof(REAL) * (size_t)((p->end - p->begin) * PANEL));
    }
    if (args->alibi_slopes != NULL) {
        R(subtract_alibi)(to, p);
    }
    R(bound_terms)(to, p);
}

/* Plans to ask for the part of a term that n_q queries from `query` on have of n_k keys
 * while a product is formed: its rows may be as far apart as pages, which the processor
 * does not foresee. */
static void
R(plan_term)(attention_ahead *ahead, const attention_head *h,
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

/* The same for all terms of a panel. */
static void
R(plan_terms)(attention_ahead *ahead, const attention_head *h, int64_t query,
              int64_t n_q, int64_t key, int64_t n_k)
{
    if (h->masked) {
        R(plan_term)(ahead, h, &h->args->mask, query, n_q, key, n_k);
    }
    R(plan_term)(ahead, h, &h->args->bias, query, n_q, key, n_k);
}

/* ---- Softcap --------------------------------------------------------------------- */

/* softcap * tanh(x) in place of x, for `rows` of a tile. `slope` (NULL: not wanted)
 * becomes 1 - tanh^2. */
static __attribute__((noinline)) void
R(bend)(REAL *products, REAL *slope, int rows, int vectors, REAL softcap)
{
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            const int64_t at = r * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr x = R(vector_tanh)(vr_load(products + at));

            if (slope != NULL) {
                vr_store(slope + at, vr_sub(vr_set1(1), vr_mul(x, x)));
            }
            vr_store(products + at, vr_mul(vr_set1(softcap), x));
        }
    }
}

/* The same for accumulators, by way of memory. */
static inline __attribute__((always_inline)) void
R(bend_strip)(const int rows, const int vectors, vr c[V_ROWS][2], REAL *products,
              REAL *slope, REAL softcap)
{
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            vr_store(products + r * ATTENTION_QUERIES + v * VR_WIDTH, c[r][v]);
        }
    }
    R(bend)(products, slope, rows, vectors, softcap);
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            c[r][v] = vr_load(products + r * ATTENTION_QUERIES + v * VR_WIDTH);
        }
    }
}

/* ---- Gradients of scores --------------------------------------------------------- */

/* Gradients of scores become those of the products of query and key. */
static void
R(bend_gradients)(REAL *gradients, const REAL *slope, const R(panel) * p)
{
    for (int key = p->begin; key < p->end; key++) {
        for (int v = 0; v < p->vectors; v++) {
            const int64_t at = key * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr x = vr_load(gradients + at), y = vr_mul(x, vr_load(slope + at));

            /* which may be NaN where the gradient is 0 */
            vr_store(gradients + at, vr_if_less(vr_set1(0), R(vector_abs)(x), y, x));
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
static inline __attribute__((always_inline)) void
R(add_dbias_block)(REAL *to, int64_t stride, const REAL *gradients, int n, bool first)
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
    const int blocks = stride[3] == 1 ? (p->end - p->begin) / VR_WIDTH : 0;
    int key = p->begin;

    if (stride[2] == 0) {
        R(add_dbias_of_keys)(to, stride[3], gradients, p);
        return;
    }
    for (int v = 0; v < p->vectors; v++) { /* whose rows may share a set of the cache */
        const int n = p->n - v * VR_WIDTH;

        for (int j = key; j < key + blocks * VR_WIDTH; j += VR_WIDTH) {
            REAL *rows = to + j + v * VR_WIDTH * stride[2];
            const REAL *from = gradients + j * ATTENTION_QUERIES + v * VR_WIDTH;

            if (n >= VR_WIDTH) { /* the same, without a question a row */
                R(add_dbias_block)(rows, stride[2], from, VR_WIDTH, first);
            } else {
                R(add_dbias_block)(rows, stride[2], from, n, first);
            }
        }
    }
    key += blocks * VR_WIDTH;
    for (; key < p->end; key++) {
        for (int i = 0; i < p->n; i++) {
            REAL *at = to + key * stride[3] + i * stride[2];

            *at = (first ? 0 : *at) + gradients[key * ATTENTION_QUERIES + i];
        }
    }
}
