/* Attention backward: the keys of one head of k and v, a block at a time, against all
 * queries of the heads that share them. Weights and their gradients are formed again, a
 * tile at a time:
 *
 *   p  = exp(s - lse)                    the weight, before dropout
 *   ds = p * (keep * dout . v - delta)   delta = dout . out - dlse
 *   dv += (keep * p)^T dout    dk += scale * ds^T q    dq += scale * ds k
 *
 * and with softcap ds times 1 - tanh^2 in the last two. */

/* Where sums of rows are: in the output itself, or beside it. */
typedef struct {
    REAL *rows; /* NULL: not wanted */
    int64_t stride;
} R(sums);

typedef struct {
    REAL *queries, *douts;  /* panels of a head; douts times scale, if not `general` */
    REAL *q, *dout;         /* copies of its rows */
    REAL *lse, *delta;      /* of its rows, negated, lse in units of log2 */
    REAL *weights, *scores; /* [ATTENTION_BACK_KEYS][ATTENTION_QUERIES]: p and ds */
    REAL *dropout, *slope;  /* the same; slope: 1 - tanh^2 */
    REAL *k, *v;            /* copies of a block's rows */
    REAL *dq, *dk, *dv;     /* sums that the outputs cannot hold */
    REAL *stage;            /* VR_WIDTH rows */
    int64_t q_width, v_width; /* of copied rows and of sums */
} R(backward_room);

/* One head at work. */
typedef struct {
    const R(backward_room) * room;
    const attention_head *head;
    const REAL *q, *dout; /* rows */
    int64_t q_stride, dout_stride;
    R(sums) dq, dk, dv;
    bool general; /* there are terms, dropout or gradients of terms */
    bool careful;
    bool writes_dbias;      /* the first to visit it */
    double *dalibi;         /* NULL: not wanted */
    attention_ahead *ahead; /* NULL: nothing to look ahead for */
} R(backward_work);

/* Whether sums of rows of this width can be formed in an output. */
static inline bool
R(holds_sums)(const tfast_attention_args *args, int64_t dim)
{
    return args->dtype == REAL_DTYPE && dim % VR_WIDTH == 0;
}

/* Cuts the room, or with base NULL only measures it. Returns its bytes. */
static size_t
R(backward_cut)(R(backward_room) * room, const tfast_attention_args *args, bool split,
                REAL *base)
{
    const int64_t tile = (int64_t)ATTENTION_BACK_KEYS * ATTENTION_QUERIES;
    const int64_t n_q = attention_round_up(args->n_q, PANEL);
    const int64_t q_width = attention_round_up(args->dim, VR_WIDTH);
    const int64_t v_width = attention_round_up(args->dim_v, VR_WIDTH);
    const bool q_held = R(holds_sums)(args, args->dim);
    const bool v_held = R(holds_sums)(args, args->dim_v);
    int64_t used = 0;
    const struct {
        REAL **part;
        int64_t count;
    } parts[] = {
        {&room->queries, n_q * args->dim},
        {&room->douts, n_q * args->dim_v},
        {&room->q, q_held ? 0 : args->n_q * q_width},
        {&room->dout, v_held ? 0 : args->n_q * v_width},
        {&room->lse, n_q},
        {&room->delta, n_q},
        {&room->weights, tile},
        {&room->scores, tile},
        {&room->dropout, args->dropout_p > 0 ? tile : 0},
        {&room->slope, args->softcap != 0 ? tile : 0},
        {&room->k, ATTENTION_BACK_KEYS * attention_copy_stride(args->dim)},
        {&room->v, ATTENTION_BACK_KEYS * attention_copy_stride(args->dim_v)},
        {&room->dq, q_held || split ? 0 : args->n_q * q_width},
        {&room->dk, q_held ? 0 : args->n_k * q_width},
        {&room->dv, v_held ? 0 : args->n_k * v_width},
        {&room->stage, VR_WIDTH * (q_width > v_width ? q_width : v_width)},
    };

    room->q_width = q_width;
    room->v_width = v_width;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].part = base == NULL ? NULL : base + used;
        used += attention_round_up(parts[i].count, 16);
    }
    return (size_t)used * sizeof(REAL);
}

/* ---- Opening a head -------------------------------------------------------------- */

/* lse and delta of each query, negated. With an lse of -infinity all scores are, and
 * any other number keeps the weights 0. */
static void
R(open_sums)(const R(backward_work) * work)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const REAL *lse = (const REAL *)args->lse + attention_lse_row(h);
    const REAL *dlse = (const REAL *)args->dlse + attention_lse_row(h);
    const REAL scale = work->general ? 1 : (REAL)args->scale;
    const int64_t first = attention_query_row(h, &args->out, 0);

    for (int64_t i = 0; i < h->n_q; i++) {
        const REAL *dout = work->dout + i * work->dout_stride;
        int64_t stride;
        const REAL *out =
            R(open_rows)(room->stage, 0, args->out.data, args->dtype,
                         first + i * args->out.row, 0, 1, args->dim_v, false, &stride);
        vr sum = vr_set1(0);

        for (int64_t d = 0; d < args->dim_v; d += VR_WIDTH) {
            sum = vr_madd(vr_load(dout + d), vr_load(out + d), sum);
        }
        room->delta[i] = -vr_sum(sum);
        if (args->dlse != NULL && lse[i] != -(REAL)INFINITY) {
            room->delta[i] += dlse[i];
        }
        room->delta[i] *= scale;
        room->lse[i] = lse[i] == -(REAL)INFINITY ? 0 : -lse[i] * (REAL)LOG2E;
    }
    for (int64_t i = h->n_q; i < attention_round_up(h->n_q, PANEL); i++) {
        room->delta[i] = 0;
        room->lse[i] = -(REAL)INFINITY;
    }
}

static void
R(open_head)(R(backward_work) * work)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const int64_t q = attention_query_row(h, &args->q, 0);
    const int64_t dout = attention_query_row(h, &args->dout, 0);

    work->q = R(open_rows)(room->q, room->q_width, args->q.data, args->dtype, q,
                           args->q.row, h->n_q, args->dim, false, &work->q_stride);
    work->dout =
        R(open_rows)(room->dout, room->v_width, args->dout.data, args->dtype, dout,
                     args->dout.row, h->n_q, args->dim_v, false, &work->dout_stride);
    R(pack_panels)
    (room->queries, room->stage, args->q.data, args->dtype, q, args->q.row, h->n_q,
     args->dim, (REAL)attention_query_scale(args));
    R(pack_panels)
    (room->douts, room->stage, args->dout.data, args->dtype, dout, args->dout.row,
     h->n_q, args->dim_v, work->general ? 1 : (REAL)args->scale);
    R(open_sums)(work);
}

/* The gradient of this head's sink: minus the sum of its weight times delta. */
static double
R(sink_gradient)(const R(backward_work) * work)
{
    const attention_head *h = work->head;
    const REAL *lse = (const REAL *)h->args->lse + attention_lse_row(h);
    const double scale = work->general ? 1 : h->args->scale;
    const double sink = attention_sink(h);
    double sum = 0;

    for (int64_t i = 0; i < h->n_q; i++) {
        if (lse[i] != -(REAL)INFINITY) {
            sum += exp2(sink - (double)lse[i] * LOG2E) * (double)work->room->delta[i];
        }
    }
    return scale == 0 ? 0 : sum / scale;
}

/* ---- A tile ---------------------------------------------------------------------- */

typedef struct {
    const REAL *k, *v; /* rows of the block */
    int64_t k_stride, v_stride, dim, dim_v;
    const REAL *queries, *douts, *lse, *delta; /* of the panel */
    const R(panel) * panel;
    attention_ahead *ahead;
} R(backward_call);

/* Weights and their gradients for `rows` keys and `vectors` of a panel from `first` on,
 * in registers. */
static inline __attribute__((always_inline)) void
R(backward_strip)(const int rows, const int vectors, const R(backward_call) * call,
                  int key, int first, REAL *weights, REAL *scores)
{
    const bool border = R(has_border)(call->panel, key, key + rows);
    const int lane = first * VR_WIDTH;
    vr c[V_ROWS][2];

#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            c[r][v] = vr_set1(0); /* not lse: a sum that starts large rounds coarsely */
        }
    }
    R(multiply)
    (rows, vectors, false, call->k + key * call->k_stride, call->k_stride,
     call->queries + lane, PANEL, call->dim, c);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            const vr t = vr_add(c[r][v], vr_load(call->lse + lane + v * VR_WIDTH));
            const vr s = border ? R(bound)(call->panel, first + v, key + r, t) : t;

            vr_store(weights + r * ATTENTION_QUERIES + v * VR_WIDTH, R(vector_exp2)(s));
            c[r][v] = vr_load(call->delta + lane + v * VR_WIDTH);
        }
    }
    R(multiply)
    (rows, vectors, false, call->v + key * call->v_stride, call->v_stride,
     call->douts + lane, PANEL, call->dim_v, c);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            const int64_t at = r * ATTENTION_QUERIES + v * VR_WIDTH;
            const vr p = vr_load(weights + at), zero = vr_set1(0);
            const vr ds = vr_mul(p, c[r][v]);

            vr_store(scores + at, border ? vr_if_less(zero, p, ds, zero) : ds);
        }
    }
}

/* Not inlined: in a loop over strips the compiler keeps the constants of exp2 in
 * registers, and accumulators in memory. */
static __attribute__((noinline)) void
R(backward_any_strip)(const R(backward_call) * call, R(strip) s, int key, REAL *weights,
                      REAL *scores)
{
    ATTENTION_STRIP(R(backward_strip), s.rows, s.vectors, call, key, s.first, weights,
                    scores)
}

static void
R(backward_panel)(const R(backward_call) * call, REAL *weights, REAL *scores)
{
    const R(panel) *p = call->panel;

    for (int key = p->begin; key < p->end;) {
        const R(strip) s = R(strip_at)(p, key);
        const int64_t at = key * ATTENTION_QUERIES + s.first * VR_WIDTH;

        attention_look_ahead(call->ahead);
        R(backward_any_strip)(call, s, key, weights + at, scores + at);
        key += s.rows;
    }
}

/* The same with everything that a call may ask for: scores and products come through
 * memory. Adds to the gradients of the terms, unless this is the second, careful time.
 */
static void
R(backward_general)(const R(backward_work) * work, const R(backward_call) * call,
                    int64_t at)
{
    const R(panel) *p = call->panel;
    const tfast_attention_args *args = work->head->args;
    const R(backward_room) *room = work->room;
    REAL *weights = room->weights + at, *scores = room->scores + at,
         ignored[PANEL] = {0};
    const int64_t *stride = args->dbias_stride;
    const tfast_attention_term gradient = {
        args->dbias, {stride[0], stride[1], stride[2], stride[3]}, REAL_DTYPE};
    attention_ahead terms = {0}, dbias = {0};
    const R(scores_call)
        of_k = {call->k, call->k_stride, call->dim, call->queries, p, false, &terms};
    const R(scores_call)
        of_v = {call->v, call->v_stride, call->dim_v, call->douts, p, false, &dbias};
    REAL *slope = args->softcap != 0 ? room->slope + at : NULL;

    if (p->head->masked) {
        R(plan_term)(&terms, p, &args->mask);
    }
    R(plan_term)(&terms, p, &args->bias);
    R(plan_term)(&dbias, p, &gradient);
    R(scores_panel)(&of_k, weights, ignored);
    R(finish_scores)(weights, slope, p);
    R(scores_panel)(&of_v, scores, ignored);
    R(finish_gradients)
    (weights, scores, args->dropout_p > 0 ? room->dropout + at : NULL, call->lse,
     call->delta, p);
    if (!work->careful && args->dbias != NULL) {
        R(add_dbias)(args->dbias, args->dbias_stride, scores, p, work->writes_dbias);
    }
    if (!work->careful && work->dalibi != NULL) {
        *work->dalibi += R(alibi_gradient)(scores, p);
    }
    R(scale_gradients)(scores, slope, (REAL)args->scale, p);
}

/* Weights and gradients of a tile: n_q queries from `query` on, n_k keys from `key`. */
static void
R(backward_tile)(const R(backward_work) * work, const REAL *k, int64_t k_stride,
                 const REAL *v, int64_t v_stride, int64_t query, int64_t n_q,
                 int64_t key, int64_t n_k)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;

    if (args->dropout_p > 0) {
        R(fill_dropout)(room->dropout, h, query, n_q, key, n_k);
    }
    for (int64_t i = 0; i < n_q; i += PANEL) {
        const R(panel) p = R(panel_of)(h, query + i, n_q - i, key, n_k, work->general);
        const int64_t at = query + i;
        const R(backward_call) call = {
            .k = k,
            .v = v,
            .k_stride = k_stride,
            .v_stride = v_stride,
            .dim = args->dim,
            .dim_v = args->dim_v,
            .queries = room->queries + at * args->dim,
            .douts = room->douts + at * args->dim_v,
            .lse = room->lse + at,
            .delta = room->delta + at,
            .panel = &p,
            .ahead = work->ahead,
        };

        if (work->general) {
            R(backward_general)(work, &call, i);
        } else {
            R(backward_panel)(&call, room->weights + i, room->scores + i);
        }
        R(clear_outside)(room->weights + i, &p, (int)n_k);
        R(clear_outside)(room->scores + i, &p, (int)n_k);
    }
}

/* ---- Products of a tile ---------------------------------------------------------- */

static __attribute__((noinline)) void
R(accumulate_rows)(int rows, int vectors, const R(product) * p)
{
    ATTENTION_STRIP(R(accumulate_strip), rows, vectors, false, p)
}

/* to += tile . rows, for the keys of the tile: dv and dk. */
static void
R(add_to_keys)(const R(backward_work) * work, R(sums) to, const REAL *tile,
               const REAL *rows, int64_t stride, int64_t width, int64_t query,
               int64_t n_q, int64_t key, int64_t n_k, bool first)
{
    const attention_head *h = work->head;
    R(product)
    p = {.a_stride = ATTENTION_QUERIES,
         .b_stride = stride,
         .careful = work->careful,
         .first = first,
         .c_stride = to.stride};

    for (int64_t d = 0; d < width; d += PANEL) {
        const int vectors = width - d > VR_WIDTH ? 2 : 1;

        for (int64_t j = 0; j < n_k;) {
            const int n = R(strip_rows)(n_k - j);
            const int64_t begin =
                attention_max(0, attention_first_query(h, key + j) - query);
            const int64_t end =
                attention_min(n_q, attention_end_query(h, key + j + n - 1) - query);

            p.depth = attention_max(0, end - begin);
            p.a = tile + j * ATTENTION_QUERIES + begin;
            p.b = rows + (query + begin) * stride + d;
            p.c = to.rows + (key + j) * to.stride + d;
            if (p.depth > 0 || first) {
                attention_look_ahead(work->ahead);
                R(accumulate_rows)(n, vectors, &p);
            }
            j += n;
        }
    }
}

/* dq += ds . k, for the queries of the tile. */
static void
R(add_to_queries)(const R(backward_work) * work, const REAL *k, int64_t k_stride,
                  int64_t query, int64_t n_q, int64_t key, int64_t n_k)
{
    const attention_head *h = work->head;
    const int64_t width = work->room->q_width;
    R(product)
    p = {.a_stride = ATTENTION_QUERIES,
         .b_stride = k_stride,
         .careful = work->careful,
         .c_stride = work->dq.stride};

    for (int64_t d = 0; d < width; d += PANEL) {
        const int vectors = width - d > VR_WIDTH ? 2 : 1;

        for (int64_t i = 0; i < n_q;) {
            const int n = R(strip_rows)(n_q - i);
            const int64_t begin =
                attention_max(0, attention_first_key(h, query + i) - key);
            const int64_t end =
                attention_min(n_k, attention_end_key(h, query + i + n - 1) - key);

            p.depth = attention_max(0, end - begin);
            p.a = work->room->scores + begin * ATTENTION_QUERIES + i;
            p.b = k + begin * k_stride + d;
            p.c = work->dq.rows + (query + i) * work->dq.stride + d;
            if (p.depth > 0) {
                attention_look_ahead(work->ahead);
                R(accumulate_columns)(n, vectors, &p);
            }
            i += n;
        }
    }
}

/* ---- A block of keys ------------------------------------------------------------- */

/* The keys from `key` on against all queries of the head. `first`: of those that share
 * the keys. */
static void
R(backward_keys)(const R(backward_work) * work, int64_t key, bool first)
{
    enum { ALIGN = PANEL > DROPOUT_BLOCK ? PANEL : DROPOUT_BLOCK };
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const int64_t n_k = attention_min(ATTENTION_BACK_KEYS, h->n_k - key);
    const bool padding = key >= h->end_k || key + n_k <= h->begin_k;
    const int64_t end = padding ? 0 : attention_end_query(h, key + n_k - 1);
    int64_t query = attention_first_query(h, key) / ALIGN * ALIGN, k_stride, v_stride;
    const REAL *k =
        R(open_rows)(room->k, attention_copy_stride(args->dim), args->k.data,
                     args->dtype, attention_key_row(h, &args->k, key), args->k.row, n_k,
                     args->dim, false, &k_stride);
    const REAL *v =
        R(open_rows)(room->v, attention_copy_stride(args->dim_v), args->v.data,
                     args->dtype, attention_key_row(h, &args->v, key), args->v.row, n_k,
                     args->dim_v, true, &v_stride);

    for (; query < end || first; query += ATTENTION_QUERIES, first = false) {
        const int64_t n_q =
            attention_max(0, attention_min(ATTENTION_QUERIES, end - query));

        R(backward_tile)(work, k, k_stride, v, v_stride, query, n_q, key, n_k);
        if (work->dv.rows != NULL) {
            R(add_to_keys)
            (work, work->dv, room->weights, work->dout, work->dout_stride,
             room->v_width, query, n_q, key, n_k, first);
        }
        if (work->dk.rows != NULL) {
            R(add_to_keys)
            (work, work->dk, room->scores, work->q, work->q_stride, room->q_width,
             query, n_q, key, n_k, first);
        }
        if (work->dq.rows != NULL) {
            R(add_to_queries)(work, k, k_stride, query, n_q, key, n_k);
        }
    }
}
