/* Attention backward: the room of one thread, and what is made ready of one head. */

/* Where sums of rows are: in the output itself, or beside it. */
typedef struct {
    REAL *rows; /* NULL: not wanted */
    int64_t stride;
} R(sums);

typedef struct {
    /* panels of a tile's queries, or with `few` rows; douts times scale, if not
     * `general` */
    REAL *queries, *douts;
    REAL *q, *dout;         /* copies of a tile's rows */
    REAL *lse, *delta;      /* of a head's rows, negated, lse in units of scores */
    REAL *share;            /* what a row's weights are multiplied by, if `shared` */
    REAL *weights, *scores; /* [ATTENTION_BACK_KEYS][ATTENTION_QUERIES]: p and ds */
    REAL *dropout, *slope;  /* the same; slope: 1 - tanh^2 */
    REAL *terms;            /* [ATTENTION_BACK_KEYS][PANEL] */
    REAL *paired, *paired_weights, *paired_scores; /* see pair_tile */
    REAL *k, *v;                                   /* copies of blocks' rows */
    REAL *k_factor;           /* with pairs: k's, to be broadcast */
    REAL *dq, *dk, *dv;       /* sums that neither the outputs nor the job hold */
    REAL *stage;              /* VR_WIDTH rows, at least two */
    int64_t q_width, v_width; /* of copied rows and of sums */
} R(backward_room);

/* One head at work. */
typedef struct {
    const R(backward_room) * room;
    const attention_head *head;
    const REAL *q, *dout; /* rows of a tile */
    int64_t q_stride, dout_stride;
    R(sums) dq, dk, dv;   /* of the head's rows; dk and dv may be of some blocks' */
    int64_t dk_at, dv_at; /* the elements where its rows of dk and dv begin */
    int turns, segment;   /* tiles of queries that are visited: one in `turns` */
    bool first, last;     /* visit to these keys */
    bool general;         /* there are terms, dropout or gradients of terms */
    bool careful, pairs;
    bool few;               /* queries: rows, not panels */
    REAL *dbias;            /* NULL: not wanted */
    bool writes_dbias;      /* the first to visit it */
    bool shared;            /* there are rows whose lse says too little */
    double *dalibi;         /* NULL: not wanted */
    attention_ahead *ahead; /* NULL: nothing to look ahead for */
} R(backward_work);

/* Whether sums of rows of this width can be formed in an output. */
static inline bool
R(holds_sums)(const tfast_attention_args *args, int64_t dim)
{
    return args->dtype == REAL_DTYPE && dim % VR_WIDTH == 0;
}

/* Whether products have dims as lanes, as the forward pass then has: its scores must be
 * rounded as here, or most of what lse cancels is left. With 1 to 4 queries that takes
 * half the time or as much; with 5 to 8 up to 1.35 times, but as much from memory. */
static inline bool
R(backward_is_few)(const tfast_attention_args *args)
{
    return R(attention_is_few)(args);
}

/* Keys whose sums lie side by side in a thread's room: those of the blocks at work, or
 * all where several heads add to them. */
static inline int64_t
R(room_keys)(const tfast_attention_args *args)
{
    return args->heads > args->kv_heads
               ? args->n_k
               : attention_back_blocks(args) * ATTENTION_BACK_KEYS;
}

/* Cuts the room, or with base NULL only measures it. Returns its bytes. */
static size_t
R(backward_cut)(R(backward_room) * room, const attention_back_job *job, REAL *base)
{
    const tfast_attention_args *args = job->args;
    const bool split = attention_is_split(job), dk = job->turns == 1;
    const int64_t tile = (int64_t)ATTENTION_BACK_KEYS * ATTENTION_QUERIES;
    const int64_t n_q = attention_round_up(args->n_q, PANEL);
    const int64_t rows = attention_min(ATTENTION_QUERIES, n_q);
    const int64_t keys = attention_back_blocks(args) * ATTENTION_BACK_KEYS;
    const int64_t q_width = attention_round_up(args->dim, VR_WIDTH);
    const int64_t v_width = attention_round_up(args->dim_v, VR_WIDTH);
    const bool few = R(backward_is_few)(args);
    const bool q_held = R(holds_sums)(args, args->dim);
    const bool v_held = R(holds_sums)(args, args->dim_v);
    const bool pairs = R(has_pairs)(args);
    int64_t used = 0;
    const struct {
        REAL **part;
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
        {&room->dk, q_held || !dk ? 0 : R(room_keys)(args) * q_width},
        {&room->dv, v_held || !dk ? 0 : R(room_keys)(args) * v_width},
        {&room->stage, attention_max(2, VR_WIDTH) * attention_max(q_width, v_width)},
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

/* What dout is multiplied by before its products, and what is left for the sums. */
static inline double
R(early_scale)(const R(backward_work) * work)
{
    return work->general || work->pairs ? 1 : work->head->args->scale;
}

static inline double
R(late_scale)(const R(backward_work) * work)
{
    return work->general || work->pairs ? work->head->args->scale : 1;
}

/* lse and delta of queries begin .. end - 1, negated. With an lse of -infinity all
 * scores are, and any other number keeps the weights 0. */
static void
R(open_sums)(const R(backward_work) * work, int64_t begin, int64_t end)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const REAL *lse = (const REAL *)args->lse + attention_lse_row(h);
    const REAL *dlse = (const REAL *)args->dlse + attention_lse_row(h);
    const REAL scale = (REAL)R(early_scale)(work);
    const REAL unit = (REAL)attention_unit(h);
    const int64_t first_out = attention_query_row(h, &args->out, 0);
    const int64_t first_dout = attention_query_row(h, &args->dout, 0);

    for (int64_t i = begin; i < end; i++) {
        int64_t stride;
        const REAL *out = R(open_rows)(room->stage, 0, args->out.data, args->dtype,
                                       first_out + i * args->out.row, 0, 1, args->dim_v,
                                       false, &stride);
        const REAL *dout = R(open_rows)(room->stage + room->v_width, 0, args->dout.data,
                                        args->dtype, first_dout + i * args->dout.row, 0,
                                        1, args->dim_v, false, &stride);
        vr sum = vr_set1(0);

        for (int64_t d = 0; d < args->dim_v; d += VR_WIDTH) {
            sum = vr_madd(vr_load(dout + d), vr_load(out + d), sum);
        }
        room->delta[i] = -vr_sum(sum);
        if (args->dlse != NULL && lse[i] != -(REAL)INFINITY) {
            room->delta[i] += dlse[i];
        }
        room->delta[i] *= scale;
        room->lse[i] = lse[i] == -(REAL)INFINITY ? 0 : -lse[i] * unit;
    }
    for (int64_t i = end; i < attention_round_up(end, PANEL); i++) {
        room->delta[i] = 0;
        room->lse[i] = -(REAL)INFINITY;
    }
}

/* Rows of k or v from `key` on as a factor of scores or of their gradients. */
static const REAL *
R(open_backward)(const R(backward_work) * work, REAL *copy,
                 const tfast_attention_rows *rows, int64_t dim, int64_t key,
                 int64_t n_k, int64_t *stride)
{
    const attention_head *h = work->head;
    const tfast_dtype dtype = h->args->dtype;
    const int64_t first = attention_key_row(h, rows, key);
    const int64_t copy_stride = attention_copy_stride(dim);

    if (work->few) { /* lanes are dims */
        return R(open_rows)(copy, copy_stride, rows->data, dtype, first, rows->row, n_k,
                            dim, false, stride);
    }
    return R(open_factor)(work->pairs, copy, copy_stride, rows->data, dtype, first,
                          rows->row, n_k, dim, stride);
}

/* ---- Queries --------------------------------------------------------------------- */

/* n queries from `query` on as a factor of scores. */
static void
R(open_queries)(const R(backward_work) * work, int64_t query, int64_t n)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const int64_t q = attention_query_row(h, &args->q, query);
    const REAL scale = (REAL)attention_query_scale(h);

    if (work->few) {
        R(scale_rows)
        (room->queries, args->q.data, args->dtype, q, args->q.row, n, args->dim, scale);
    } else {
        R(pack_panels)
        (room->queries, room->stage, work->pairs, args->q.data, args->dtype, q,
         args->q.row, n, args->dim, scale);
    }
}

/* The same of dout. */
static void
R(open_douts)(const R(backward_work) * work, int64_t query, int64_t n)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const int64_t dout = attention_query_row(h, &args->dout, query);
    const REAL scale = (REAL)R(early_scale)(work);

    if (work->few) {
        R(scale_rows)
        (room->douts, args->dout.data, args->dtype, dout, args->dout.row, n,
         args->dim_v, scale);
    } else {
        R(pack_panels)
        (room->douts, room->stage, work->pairs, args->dout.data, args->dtype, dout,
         args->dout.row, n, args->dim_v, scale);
    }
}

/* The tile of queries from `query` on: factors, and rows for the products of keys. */
static void
R(open_tile)(R(backward_work) * work, int64_t query)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const R(backward_room) *room = work->room;
    const int64_t n = attention_min(ATTENTION_QUERIES, h->n_q - query);
    const int64_t q = attention_query_row(h, &args->q, query);
    const int64_t dout = attention_query_row(h, &args->dout, query);

    work->q =
        R(open_lanes)(work->pairs, room->q, room->q_width, room->stage, args->q.data,
                      args->dtype, q, args->q.row, n, args->dim, &work->q_stride);
    work->dout = R(open_lanes)(work->pairs, room->dout, room->v_width, room->stage,
                               args->dout.data, args->dtype, dout, args->dout.row, n,
                               args->dim_v, &work->dout_stride);
    R(open_queries)(work, query, n);
    R(open_douts)(work, query, n);
}

/* ---- Rows whose lse says too little ---------------------------------------------- */

/* The maximum and the sum of a panel's rows from `query` on, found again as the forward
 * pass did; a sink is left out. */
static void
R(sum_panel)(const R(backward_work) * work, int64_t query, REAL *top, REAL *sum)
{
    const attention_head *h = work->head;
    const tfast_attention_args *args = h->args;
    const int64_t n = attention_min(PANEL, h->n_q - query);
    const int64_t end = attention_end_key(h, query + n - 1);
    REAL fade[PANEL];
    const R(forward_room) room = {.queries = work->room->queries,
                                  .few = work->few,
                                  .pairs = work->pairs,
                                  .scores = work->room->weights,
                                  .terms = work->room->terms,
                                  .top = top,
                                  .sum = sum,
                                  .fade = fade};

    R(open_queries)(work, query, n);
    for (int i = 0; i < PANEL; i++) {
        top[i] = -REAL_MAX;
        sum[i] = 0;
    }
    for (int64_t key = attention_first_key(h, query); key < end;
         key += ATTENTION_BACK_KEYS) {
        const int64_t n_k = attention_min(ATTENTION_BACK_KEYS, end - key);
        int64_t stride;
        const REAL *k = R(open_backward)(work, work->room->k, &args->k, args->dim, key,
                                         n_k, &stride);
        const R(panel) p =
            R(panel_of)(h, query, n, key, n_k, attention_head_has_terms(h));

        R(weigh_panel)(&room, &p, k, stride, 0);
    }
}

/* Of queries begin .. end - 1, begin being a panel's first: where lse is large its row
 * gets, in place of it, its maximum and a share. All other rows keep theirs, and a
 * share of 1. Every task does this by itself: such rows are few, or their scores are so
 * large that they are no use. */
static void
R(open_shares)(R(backward_work) * work, int64_t begin, int64_t end)
{
    const attention_head *h = work->head;
    const REAL *lse = (const REAL *)h->args->lse + attention_lse_row(h);
    const double unit = attention_unit(h), to_log2 = LOG2E / unit;
    const double sink = attention_sink(h) * unit;

    for (int64_t i = begin; i < attention_round_up(end, PANEL); i++) {
        work->room->share[i] = 1;
    }
    for (int64_t i = begin; i < end; i++) {
        REAL top[PANEL], sum[PANEL];

        if (!attention_is_far((double)lse[i])) {
            continue;
        }
        work->shared = true;
        i = i / PANEL * PANEL;
        R(sum_panel)(work, i, top, sum);
        for (int j = 0; j < PANEL && i + j < end; j++) {
            const REAL most = (double)top[j] > sink ? top[j] : (REAL)sink;
            const double all = (double)sum[j] * exp2((double)(top[j] - most) * to_log2);

            if (attention_is_far((double)lse[i + j])) {
                work->room->lse[i + j] = -most;
                work->room->share[i + j] =
                    (REAL)(1 / (all + exp2((sink - (double)most) * to_log2)));
            }
        }
        i += PANEL - 1;
    }
}

/* ---- Sinks ----------------------------------------------------------------------- */

/* The gradient of this head's sink is minus the sum of its weight times delta. Goes on
 * with `sum`, which still has delta's scale, for queries begin .. end - 1. */
static double
R(sink_gradient)(const R(backward_work) * work, double sum, int64_t begin, int64_t end)
{
    const attention_head *h = work->head;
    const R(backward_room) *room = work->room;
    const REAL *lse = (const REAL *)h->args->lse + attention_lse_row(h);
    const double sink = attention_sink(h), unit = attention_unit(h);

    for (int64_t i = begin; i < end; i++) {
        double weight = exp2(sink * LOG2E - (double)lse[i] * LOG2E);

        if (attention_is_far((double)lse[i])) {
            weight = exp2((sink * unit + (double)room->lse[i]) * LOG2E / unit) *
                     (double)room->share[i];
        }
        if (lse[i] != -(REAL)INFINITY) {
            sum += weight * (double)room->delta[i];
        }
    }
    return sum;
}
