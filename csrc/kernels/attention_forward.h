/* Attention forward: one block of up to ATTENTION_QUERIES queries of one head against
 * all its keys, a tile of scores at a time, with a running maximum and sum. */

/* Room of one thread; parts that a call does not need are empty. */
typedef struct {
    REAL *queries; /* panels, or with `few` rows of whole vectors */
    REAL *scores;  /* [ATTENTION_KEYS][ATTENTION_QUERIES] */
    REAL *dropout; /* the same */
    REAL *paired;  /* [ATTENTION_KEYS / 2][ATTENTION_QUERIES]: weights */
    REAL *terms;   /* [ATTENTION_KEYS][PANEL] */
    REAL *out;     /* [ATTENTION_QUERIES][width of a value] */
    REAL *k, *v;   /* copies of rows; their strides: */
    int64_t k_stride, v_stride, out_stride;
    REAL *stage;            /* VR_WIDTH rows */
    bool few;               /* queries: rows, not panels */
    bool pairs;             /* products are of pairs */
    attention_ahead *ahead; /* NULL: nothing to look ahead for */
    /* of each query: maximum so far, sum so far, what the last maximum is worth */
    REAL *top, *sum, *fade;
} R(forward_room);

/* Cuts the room for n_q queries, or with base NULL only measures it. Returns its bytes.
 */
static size_t
R(forward_cut)(R(forward_room) * room, const tfast_attention_args *args, int64_t n_q,
               REAL *base)
{
    const int64_t q_width = attention_round_up(args->dim, VR_WIDTH);
    const int64_t v_width = attention_round_up(args->dim_v, VR_WIDTH);
    const int64_t tile = (int64_t)ATTENTION_KEYS * ATTENTION_QUERIES;
    int64_t used = 0;
    const struct {
        REAL **part;
        int64_t count;
    } parts[] = {
        {&room->queries, n_q * q_width},
        {&room->scores, tile},
        {&room->dropout, args->dropout_p > 0 ? tile : 0},
        {&room->paired, R(has_pairs)(args) ? tile / 2 : 0},
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
    return (size_t)used * sizeof(REAL);
}

/* ---- Scores ---------------------------------------------------------------------- */

typedef struct {
    const REAL *k;
    int64_t k_stride, depth;
    const REAL *queries;
    const R(panel) * panel;
    bool pairs;
    REAL scale;        /* of products of pairs */
    const REAL *terms; /* NULL: none; bounds are among them */
    REAL softcap;      /* 0: none */
    attention_ahead *ahead;
} R(scores_call);

/* Keys key .. key + rows - 1 of the tile, for `vectors` from `first` on. */
static inline __attribute__((always_inline)) void
R(scores_strip)(const int rows, const int vectors, const bool pairs,
                const R(scores_call) * call, int key, int first, REAL *to, vr *top)
{
    vr c[V_ROWS][2], most[2] = {top[0], top[vectors - 1]};

    for (int r = 0; r < rows; r++) {
        c[r][0] = c[r][1] = vr_set1(0);
    }
    R(multiply)
    (rows, vectors, pairs, false, call->k + key * call->k_stride, call->k_stride,
     call->queries + first * VR_WIDTH, PANEL, call->depth, c);
    R(scale_strip)(rows, vectors, pairs, c, call->scale);
    if (call->softcap != 0) {
        R(bend_strip)(rows, vectors, c, to, NULL, call->softcap);
    }
    if (call->terms != NULL) {
        const REAL *terms = call->terms + key * PANEL + first * VR_WIDTH;

#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            for (int v = 0; v < vectors; v++) {
                c[r][v] =
                    R(with_term)(c[r][v], vr_load(terms + r * PANEL + v * VR_WIDTH));
            }
        }
    } else if (R(has_border)(call->panel, key, key + rows)) {
        for (int r = 0; r < rows; r++) {
            for (int v = 0; v < vectors; v++) {
                c[r][v] = R(bound)(call->panel, first + v, key + r, c[r][v]);
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

/* The scores of a panel, and the maximum of each query's with top. */
static __attribute__((noinline)) void
R(scores_panel)(const R(scores_call) * call, REAL *scores, REAL *top)
{
    const R(panel) *p = call->panel;
    vr most[2] = {vr_load(top), p->vectors == 2 ? vr_load(top + VR_WIDTH) : vr_set1(0)};

    for (int key = p->begin; key < p->end;) {
        const R(strip) s = R(strip_at)(p, key);
        REAL *to = scores + key * ATTENTION_QUERIES + s.first * VR_WIDTH;

        attention_look_ahead(call->ahead);
        ATTENTION_PAIRED(R(scores_strip), s.rows, s.vectors, call->pairs, call, key,
                         s.first, to, most + s.first)
        key += s.rows;
    }
    for (int v = 0; v < p->vectors; v++) {
        vr_store(top + v * VR_WIDTH, most[v]);
    }
}

/* Whether panels of queries would be mostly empty. */
static inline bool
R(attention_is_few)(const tfast_attention_args *args)
{
    return args->n_q <= VR_WIDTH / 2;
}

/* Up to VR_WIDTH keys' products with one query, whose row is whole vectors. Keys are
 * read one after the other; then lanes are added up for all of them together. */
static inline void
R(few_scores)(const REAL *query, const REAL *k, int64_t k_stride, int64_t dim, int keys,
              REAL *to)
{
    vr sums[VR_WIDTH];

    for (int j = 0; j < keys; j++) {
        const REAL *row = k + j * k_stride;
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

/* The products of a panel of few queries: lanes are dims, for a vector of queries would
 * be mostly empty. */
static void
R(few_panel)(const R(scores_call) * call, REAL *scores)
{
    const R(panel) *p = call->panel;
    const int64_t width = attention_round_up(call->depth, VR_WIDTH);

    for (int key = p->begin; key < p->end; key += VR_WIDTH) {
        const int n = (int)attention_min(VR_WIDTH, p->end - key);

        for (int i = 0; i < p->n; i++) {
            REAL lane[VR_WIDTH];

            R(few_scores)
            (call->queries + i * width, call->k + key * call->k_stride, call->k_stride,
             width, n, lane);
            for (int j = 0; j < n; j++) {
                scores[(key + j) * ATTENTION_QUERIES + i] = lane[j];
            }
        }
    }
}

/* Products of few queries become scores; with them the maximum. */
static void
R(finish_few)(const R(scores_call) * call, REAL *scores, REAL *top)
{
    const R(panel) *p = call->panel;

    if (call->softcap != 0) {
        R(bend)
        (scores + p->begin * ATTENTION_QUERIES, NULL, p->end - p->begin, p->vectors,
         call->softcap);
    }
    for (int v = 0; v < p->vectors; v++) {
        vr most = vr_load(top + v * VR_WIDTH);

        for (int key = p->begin; key < p->end; key++) {
            REAL *at = scores + key * ATTENTION_QUERIES + v * VR_WIDTH;
            vr s = vr_load(at);

            if (call->terms != NULL) {
                s = R(with_term)(s, vr_load(call->terms + key * PANEL + v * VR_WIDTH));
            } else if (R(has_border)(p, p->begin, p->end)) {
                s = R(bound)(p, v, key, s);
            }
            vr_store(at, s);
            most = vr_max(s, most);
        }
        vr_store(top + v * VR_WIDTH, most);
    }
}

/* Scores of vector v become exp(score - top). Returns their sum. */
static inline __attribute__((always_inline)) vr
R(exponentials)(const bool in_log2, REAL *scores, const R(panel) * p, int v, vr top)
{
    const int end = p->to[v];
    vr sum = vr_set1(0);

#pragma GCC unroll 4
    for (int key = p->from[v]; key < end; key++) {
        REAL *at = scores + key * ATTENTION_QUERIES + v * VR_WIDTH;
        const vr x = R(vector_power)(in_log2, vr_sub(vr_load(at), top));

        vr_store(at, x);
        sum = vr_add(sum, x);
    }
    return sum;
}

/* One panel against a tile's keys: weights in place of scores, before dropout, and what
 * is kept of each query. */
static void
R(weigh_panel)(const R(forward_room) * room, const R(panel) * p, const REAL *k,
               int64_t k_stride, int64_t at)
{
    const tfast_attention_args *args = p->head->args;
    const bool terms = attention_head_has_terms(p->head);
    const bool general = attention_is_general(p->head);
    const int64_t depth = R(depth)(room->pairs, args->dim);
    const R(scores_call) call = {.k = k,
                                 .k_stride = k_stride,
                                 .depth = depth,
                                 .queries = room->queries + at * depth,
                                 .panel = p,
                                 .pairs = room->pairs,
                                 .scale = (REAL)attention_query_scale(p->head),
                                 .terms = terms ? room->terms : NULL,
                                 .softcap = (REAL)args->softcap,
                                 .ahead = room->ahead};
    REAL *scores = room->scores + at, *top = room->top + at;
    vr before[2];

    for (int v = 0; v < p->vectors; v++) {
        before[v] = vr_load(top + v * VR_WIDTH);
    }
    if (terms) {
        R(fill_terms)(room->terms, p);
    }
    if (room->few) {
        R(few_panel)(&call, scores);
        R(finish_few)(&call, scores, top);
    } else {
        R(scores_panel)(&call, scores, top);
    }
    for (int v = 0; v < p->vectors; v++) {
        REAL *total = room->sum + at + v * VR_WIDTH;
        const vr most = vr_load(top + v * VR_WIDTH);
        const vr rise = vr_sub(before[v], most);
        const vr fade = general ? R(vector_exp)(rise) : R(vector_exp2)(rise);
        const vr sum = general ? R(exponentials)(false, scores, p, v, most)
                               : R(exponentials)(true, scores, p, v, most);

        vr_store(room->fade + at + v * VR_WIDTH, fade);
        vr_store(total, vr_madd(fade, vr_load(total), sum));
    }
}

/* The same, ready for the product with n_k values. */
static void
R(forward_panel)(const R(forward_room) * room, const R(panel) * p, const REAL *k,
                 int64_t k_stride, int64_t at, int n_k)
{
    R(weigh_panel)(room, p, k, k_stride, at);
    R(clear_outside)(room->scores + at, p, n_k);
    if (p->head->args->dropout_p > 0) {
        R(drop)(room->scores + at, room->dropout + at, p);
    }
    if (room->pairs) {
        R(pair_rows)
        (room->paired + at, ATTENTION_QUERIES, room->scores + at, ATTENTION_QUERIES,
         n_k, p->vectors * VR_WIDTH);
    }
}

/* ---- A block --------------------------------------------------------------------- */

/* out = fade * out + weights . v, for n_q queries from `query` on. Pairs at the ends of
 * their keys have weights of 0 in them. */
static void
R(forward_values)(const R(forward_room) * room, const attention_head *h, int64_t query,
                  int64_t n_q, int64_t key, int64_t n_k, const REAL *v,
                  int64_t v_stride, bool first, bool careful)
{
    R(product)
    p = {.a_stride = ATTENTION_QUERIES,
         .b_stride = v_stride,
         .first = first,
         .careful = careful,
         .pairs = room->pairs,
         .c_stride = room->out_stride};

    for (int64_t d = 0; d < room->out_stride; d += PANEL) {
        const int vectors = room->out_stride - d > VR_WIDTH ? 2 : 1;

        for (int64_t i = 0; i < n_q;) {
            const int rows = R(strip_rows)(n_q - i);
            const int64_t begin =
                attention_max(0, attention_first_key(h, query + i) - key);
            const int64_t end =
                attention_min(n_k, attention_end_key(h, query + i + rows - 1) - key);

            R(set_depth)(&p, begin, end);
            p.a = (room->pairs ? room->paired : room->scores) +
                  p.skipped * ATTENTION_QUERIES + i;
            p.b = v + p.skipped * v_stride + d;
            p.factor = room->fade + i;
            attention_look_ahead(room->ahead);
            p.c = room->out + i * room->out_stride + d;
            R(accumulate_columns)(rows, vectors, &p);
            i += rows;
        }
    }
}

/* The sums become what each row of out is multiplied by, and the maxima its lse. A row
 * without a key has sum 0: the key of the maximum counts 1. */
static void
R(normalise)(const R(forward_room) * room, const attention_head *h, int64_t n_q)
{
    const double unit = attention_unit(h), to_log2 = LOG2E / unit;
    const double sink = attention_sink(h) * unit;
    REAL *sum = room->sum, *top = room->top;

    if (sink == -INFINITY) {
        for (int64_t i = 0; i < n_q; i++) {
            const double all = R(logarithm)((double)sum[i]);

            top[i] = (REAL)attention_lse((double)top[i], all, unit);
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

        top[i] = (REAL)(sum[i] == 0 ? -INFINITY : attention_lse(most, log2(all), unit));
        sum[i] = (REAL)(sum[i] == 0 ? 0 : fade / all);
    }
}

/* Writes the block's output and lse. Returns whether all of the output is finite. */
static bool
R(forward_close)(const R(forward_room) * room, const attention_head *h, int64_t query,
                 int64_t n_q)
{
    const tfast_attention_args *args = h->args;
    const int64_t first = attention_query_row(h, &args->out, query);
    const bool held = args->dtype == REAL_DTYPE && args->dim_v % VR_WIDTH == 0;
    vr odd = vr_set1(0); /* 0, or NaN from the first infinity or NaN on */

    R(normalise)(room, h, n_q);
    for (int64_t i = 0; i < n_q; i++) {
        const int64_t at = first + i * args->out.row;
        const REAL *row = room->out + i * room->out_stride;
        REAL *to =
            held ? (REAL *)args->out.data + at : room->out + i * room->out_stride;
        const vr factor = vr_set1(room->sum[i]);
        vr odd_row = vr_set1(0); /* a chain of additions as short as the row */

        for (int64_t d = 0; d < room->out_stride; d += VR_WIDTH) {
            const vr x = vr_mul(vr_load(row + d), factor);

            odd_row = vr_madd(x, vr_set1(0), odd_row);
            vr_store(to + d, x);
        }
        odd = vr_add(odd, odd_row);
        if (!held) {
            R(tile_write)(args->out.data, to, args->dtype, at, (int)args->dim_v);
        }
    }
    if (args->lse != NULL) {
        memcpy((REAL *)args->lse + attention_lse_row(h) + query, room->top,
               sizeof(REAL) * (size_t)n_q);
    }
    return vr_sum(odd) == 0;
}

static void
R(forward_open)(const R(forward_room) * room, const attention_head *h, int64_t query,
                int64_t n_q)
{
    const tfast_attention_args *args = h->args;

    R(pack_panels)
    (room->queries, room->stage, room->pairs, args->q.data, args->dtype,
     attention_query_row(h, &args->q, query), args->q.row, n_q, args->dim,
     (REAL)attention_query_scale(h));
    for (int i = 0; i < ATTENTION_QUERIES; i++) {
        room->top[i] = -REAL_MAX;
        room->sum[i] = 0;
        room->fade[i] = 1;
    }
}

/* Plans to ask for the terms of the panel after the one from `query` + i on. */
static void
R(plan_next)(attention_ahead *ahead, const attention_head *h, int64_t query,
             int64_t n_q, int64_t i, int64_t key, int64_t end)
{
    *ahead = (attention_ahead){0};
    i += PANEL;
    if (i >= n_q) {
        i = 0;
        key += ATTENTION_KEYS;
    }
    R(plan_terms)
    (ahead, h, query + i, n_q - i, key, attention_min(ATTENTION_KEYS, end - key));
}

static bool
R(forward_try)(R(forward_room) * room, const attention_head *h, int64_t query,
               int64_t n_q, bool careful)
{
    attention_ahead *const planned = room->ahead;
    const tfast_attention_args *args = h->args;
    const int64_t end = attention_end_key(h, query + n_q - 1);
    const bool terms = attention_head_has_terms(h);
    int64_t key = attention_first_key(h, query) / DROPOUT_BLOCK * DROPOUT_BLOCK;
    bool first = true;

    room->pairs = R(has_pairs)(args) && !careful;
    R(forward_open)(room, h, query, n_q);
    if (key >= end) {
        memset(room->out, 0, sizeof(REAL) * (size_t)(n_q * room->out_stride));
    }
    for (; key < end; key += ATTENTION_KEYS, first = false) {
        const int64_t n_k = attention_min(ATTENTION_KEYS, end - key);
        int64_t k_stride, v_stride;
        const REAL *k =
            R(open_factor)(room->pairs, room->k, room->k_stride, args->k.data,
                           args->dtype, attention_key_row(h, &args->k, key),
                           args->k.row, n_k, args->dim, &k_stride);
        const REAL *v = R(open_lanes)(room->pairs, room->v, room->v_stride, room->stage,
                                      args->v.data, args->dtype,
                                      attention_key_row(h, &args->v, key), args->v.row,
                                      n_k, args->dim_v, &v_stride);

        if (args->dropout_p > 0) {
            R(fill_dropout)(room->dropout, h, query, n_q, key, n_k);
        }
        for (int64_t i = 0; i < n_q; i += PANEL) {
            const R(panel) panel = R(panel_of)(h, query + i, n_q - i, key, n_k, terms);
            attention_ahead ahead;

            if (terms && planned == NULL) {
                R(plan_next)(&ahead, h, query, n_q, i, key, end);
                room->ahead = &ahead;
            }
            R(forward_panel)(room, &panel, k, k_stride, i, (int)n_k);
        }
        room->ahead = planned;
        R(forward_values)(room, h, query, n_q, key, n_k, v, v_stride, first, careful);
    }
    return R(forward_close)(room, h, query, n_q);
}

/* The block of queries from `query` on. */
static void
R(attention_forward)(const attention_head *h, int64_t query, attention_ahead *ahead,
                     void *memory)
{
    const int64_t n_q = attention_min(ATTENTION_QUERIES, h->n_q - query);
    R(forward_room) room;

    R(forward_cut)(&room, h->args, ATTENTION_QUERIES, memory);
    room.ahead = ahead;
    if (!R(forward_try)(&room, h, query, n_q, false) && attention_can_forbid(h->args)) {
        R(forward_try)(&room, h, query, n_q, true);
    }
}
