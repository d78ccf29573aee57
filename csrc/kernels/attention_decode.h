/* Attention forward for few queries against many keys (decoding): the keys are split
 * among tasks, each with a result of its own, and all heads that share keys go through
 * them together, so that they are read once. */

/* Queries of the room: a panel of statistics for each head. */
static inline int64_t
R(decode_queries)(const tfast_attention_args *args)
{
    return args->heads / args->kv_heads * PANEL;
}

/* sum = weights . v for rows of `vectors` vectors: in registers, or about. Of 16 loads
 * in a row the processor foresees each one by itself, a row ahead: rows further on are
 * asked for. */
static inline __attribute__((always_inline)) void
R(few_values_held)(const int vectors, REAL *sum, const REAL *weights,
                   int64_t weight_stride, const REAL *v, int64_t v_stride, int64_t n_k)
{
    vr c[16];

    for (int i = 0; i < vectors; i++) {
        c[i] = vr_set1(0);
    }
    for (int64_t j = 0; j < n_k; j++) {
        const vr weight = vr_set1(weights[j * weight_stride]);

        for (int i = 0; vectors == 16 && i < 16 * VR_WIDTH;
             i += CACHE_LINE / (int)sizeof(REAL)) {
            __builtin_prefetch(v + (j + 8) * v_stride + i);
        }
#pragma GCC unroll 16
        for (int i = 0; i < vectors; i++) {
            c[i] = vr_madd(weight, vr_load(v + j * v_stride + i * VR_WIDTH), c[i]);
        }
    }
    for (int i = 0; i < vectors; i++) {
        vr_store(sum + i * VR_WIDTH, c[i]);
    }
}

/* out = fade * out + weights . v for one query. A row is read from end to end, and then
 * the next one. (Tried: two passes over halves of rows, which took 1.4 times as long
 * from memory with D128 on 8 lanes, and two or four rows at once, no faster than that;
 * with prefetching of v while k is read, and of the next k, 16 lanes lost 9 %.) */
static inline void
R(few_values)(REAL *out, REAL fade, const REAL *weights, int64_t weight_stride,
              const REAL *v, int64_t v_stride, int64_t n_k, int64_t width, bool careful)
{
    REAL sum[TFAST_ATTENTION_MAX_DIM];

    if (!careful && width == 8 * VR_WIDTH) {
        R(few_values_held)(8, sum, weights, weight_stride, v, v_stride, n_k);
    } else if (!careful && width == 4 * VR_WIDTH) {
        R(few_values_held)(4, sum, weights, weight_stride, v, v_stride, n_k);
    } else if (!careful && width == 16 * VR_WIDTH) {
        R(few_values_held)(16, sum, weights, weight_stride, v, v_stride, n_k);
    } else {
        memset(sum, 0, sizeof(REAL) * (size_t)width);
        for (int64_t j = 0; j < n_k; j++) {
            const REAL weight = weights[j * weight_stride];

            if (careful && weight == 0) {
                continue;
            }
            for (int64_t d = 0; d < width; d += VR_WIDTH) {
                vr_store(sum + d,
                         vr_madd(vr_set1(weight), vr_load(v + j * v_stride + d),
                                 vr_load(sum + d)));
            }
        }
    }
    for (int64_t d = 0; d < width; d += VR_WIDTH) {
        vr_store(out + d, vr_madd(vr_set1(fade), vr_load(out + d), vr_load(sum + d)));
    }
}

/* The room of one of the heads that share keys: its own queries, sums and output. */
static R(forward_room) R(decode_room)(const R(forward_room) * room, int64_t i,
                                      const tfast_attention_args *args)
{
    R(forward_room) one = *room;

    one.queries += i * PANEL * attention_round_up(args->dim, VR_WIDTH);
    one.out += i * PANEL * room->out_stride;
    one.top += i * PANEL;
    one.sum += i * PANEL;
    one.fade += i * PANEL;
    return one;
}

static void
R(decode_open)(const R(forward_room) * room, const attention_head *h)
{
    const tfast_attention_args *args = h->args;

    R(scale_rows)
    (room->queries, args->q.data, args->dtype, attention_query_row(h, &args->q, 0),
     args->q.row, h->n_q, args->dim, (REAL)attention_query_scale(h));
    for (int i = 0; i < PANEL; i++) {
        room->top[i] = -REAL_MAX;
        room->sum[i] = 0;
        room->fade[i] = 1;
    }
    memset(room->out, 0, sizeof(REAL) * (size_t)(h->n_q * room->out_stride));
}

/* n scores of one query, side by side in whole vectors, become weights. */
static void
R(few_weights)(const R(forward_room) * room, REAL *scores, int64_t n)
{
    const int64_t whole = attention_round_up(n, VR_WIDTH);
    const REAL before = room->top[0];
    REAL lanes[VR_WIDTH], top = before;
    vr most = vr_set1(before), sum = vr_set1(0);

    for (int64_t j = n; j < whole; j++) {
        scores[j] = -(REAL)INFINITY;
    }
    for (int64_t j = 0; j < whole; j += VR_WIDTH) {
        most = vr_max(vr_load(scores + j), most);
    }
    vr_store(lanes, most);
    for (int i = 0; i < VR_WIDTH; i++) {
        top = lanes[i] > top ? lanes[i] : top;
    }
    for (int64_t j = 0; j < whole; j += VR_WIDTH) {
        const vr x = R(vector_exp2)(vr_sub(vr_load(scores + j), vr_set1(top)));

        vr_store(scores + j, x);
        sum = vr_add(sum, x);
    }
    vr_store(lanes, R(vector_exp2)(vr_set1(before - top)));
    room->top[0] = top;
    room->fade[0] = lanes[0];
    room->sum[0] = lanes[0] * room->sum[0] + vr_sum(sum);
}

/* Keys begin .. end - 1 of a tile for one query whose scores are products alone: what
 * is not reading works on whole vectors of keys, not of empty queries. */
static void
R(decode_one)(const R(forward_room) * room, const tfast_attention_args *args,
              int64_t begin, int64_t end, const REAL *k, int64_t k_stride,
              const REAL *v, int64_t v_stride, bool careful)
{
    const int64_t width = attention_round_up(args->dim, VR_WIDTH);

    for (int64_t j = begin; j < end; j += VR_WIDTH) {
        R(few_scores)
        (room->queries, k + j * k_stride, k_stride, width,
         (int)attention_min(VR_WIDTH, end - j), room->scores + j - begin);
    }
    R(few_weights)(room, room->scores, end - begin);
    R(few_values)
    (room->out, room->fade[0], room->scores, 1, v + begin * v_stride, v_stride,
     end - begin, room->out_stride, careful);
}

/* Whether decode_one serves a head. */
static inline bool
R(decode_is_plain)(const attention_head *h)
{
    return h->n_q == 1 && !attention_is_general(h);
}

/* Keys key .. key + n_k - 1 for one head. */
static void
R(decode_tile)(const R(forward_room) * room, const attention_head *h, const REAL *k,
               int64_t k_stride, const REAL *v, int64_t v_stride, int64_t key,
               int64_t n_k, bool careful)
{
    const R(panel) p = R(panel_of)(h, 0, h->n_q, key, n_k, true);
    const bool dropped = h->args->dropout_p > 0;

    if (p.begin == p.end) {
        return;
    }
    if (R(decode_is_plain)(h)) {
        R(decode_one)(room, h->args, p.begin, p.end, k, k_stride, v, v_stride, careful);
        return;
    }
    if (dropped) {
        R(fill_dropout)(room->dropout, h, 0, h->n_q, key, n_k);
    }
    R(forward_panel)(room, &p, k, k_stride, 0, (int)n_k);
    for (int64_t i = 0; i < h->n_q; i++) {
        R(few_values)
        (room->out + i * room->out_stride, room->fade[i],
         room->scores + p.begin * ATTENTION_QUERIES + i, ATTENTION_QUERIES,
         v + p.begin * v_stride, v_stride, p.end - p.begin, room->out_stride, careful);
    }
}

/* Keys of a tile. Where they are read in place for plain products they may be more than
 * the room has copies of rows: every change from k to v and back costs a pause in
 * reading. Of heads that share them all but the first find them in the cache. */
static inline int64_t
R(decode_tile_keys)(const attention_head *h)
{
    const tfast_attention_args *args = h->args;
    const bool in_place = args->dtype == REAL_DTYPE && args->dim % VR_WIDTH == 0 &&
                          args->dim_v % VR_WIDTH == 0;

    return !in_place || !R(decode_is_plain)(h) ? ATTENTION_KEYS
           : args->heads == args->kv_heads     ? 4 * ATTENTION_KEYS
                                               : 2 * ATTENTION_KEYS;
}

/* All heads that share keys, against keys begin .. end - 1. */
static void
R(decode_keys)(const R(forward_room) * room, const attention_head *first, int64_t begin,
               int64_t end, bool careful)
{
    const tfast_attention_args *args = first->args;
    const int64_t group = args->heads / args->kv_heads;
    const int64_t tile = R(decode_tile_keys)(first);
    attention_head h = *first;

    for (int64_t i = 0; i < group; i++) {
        const R(forward_room) one = R(decode_room)(room, i, args);

        h.head = first->head + i;
        R(decode_open)(&one, &h);
    }
    for (int64_t key = begin; key < end; key += tile) {
        const int64_t n_k = attention_min(tile, end - key);
        int64_t k_stride, v_stride;
        const REAL *k = R(open_rows)(room->k, room->k_stride, args->k.data, args->dtype,
                                     attention_key_row(first, &args->k, key),
                                     args->k.row, n_k, args->dim, false, &k_stride);
        const REAL *v = R(open_rows)(room->v, room->v_stride, args->v.data, args->dtype,
                                     attention_key_row(first, &args->v, key),
                                     args->v.row, n_k, args->dim_v, false, &v_stride);

        for (int64_t i = 0; i < group; i++) {
            const R(forward_room) one = R(decode_room)(room, i, args);

            h.head = first->head + i;
            R(decode_tile)(&one, &h, k, k_stride, v, v_stride, key, n_k, careful);
        }
    }
}

/* Where a split's result for one head is: n_q rows of maximum, sum and output. */
static inline REAL *
R(decode_result)(const attention_decode_job *job, const attention_head *h, int split)
{
    const tfast_attention_args *args = job->args;
    const int64_t width = attention_round_up(args->dim_v, VR_WIDTH) + 2;
    const int64_t place = (split * args->batch + h->batch) * args->heads + h->head;

    return (REAL *)job->results + place * args->n_q * width;
}

/* A task: the keys of one split for all heads that share them. */
static void
R(attention_decode)(const attention_decode_job *job, int64_t batch, int64_t kv_head,
                    int split, void *memory)
{
    const tfast_attention_args *args = job->args;
    const int64_t group = args->heads / args->kv_heads;
    attention_head h = attention_head_of(args, batch, kv_head * group);
    const int64_t from = attention_first_key(&h, 0) / ATTENTION_KEYS * ATTENTION_KEYS;
    const int64_t to = attention_end_key(&h, h.n_q - 1);
    const int64_t begin = attention_max(from, split * job->keys);
    const int64_t end = attention_min(to, (split + 1) * job->keys);
    R(forward_room) room;
    bool finite = true;

    R(forward_cut)(&room, args, R(decode_queries)(args), memory);
    room.few = true;
    for (int careful = 0; careful < 2; careful++) {
        R(decode_keys)(&room, &h, begin, end, careful);
        for (int64_t i = 0; i < group; i++) {
            const R(forward_room) one = R(decode_room)(&room, i, args);

            h.head = kv_head * group + i;
            for (int64_t j = 0; j < h.n_q; j++) {
                REAL *to = R(decode_result)(job, &h, split) + j * (room.out_stride + 2);

                to[0] = one.top[j];
                to[1] = one.sum[j];
                memcpy(to + 2, one.out + j * room.out_stride,
                       sizeof(REAL) * (size_t)room.out_stride);
                for (int64_t d = 0; d < room.out_stride; d++) {
                    finite &= to[2 + d] * 0 == 0;
                }
            }
        }
        h.head = kv_head * group;
        if (finite || !attention_can_forbid(args)) {
            return;
        }
    }
}

/* One head's result from those of its splits, in order. */
static void
R(join_splits)(const attention_decode_job *job, const attention_head *h, void *memory)
{
    const tfast_attention_args *args = job->args;
    const double to_log2 = LOG2E / attention_unit(h);
    R(forward_room) room;

    R(forward_cut)(&room, args, R(decode_queries)(args), memory);
    R(decode_open)(&room, h);
    for (int64_t j = 0; j < h->n_q; j++) {
        REAL *out = room.out + j * room.out_stride;

        for (int split = 0; split < job->splits; split++) {
            const REAL *from =
                R(decode_result)(job, h, split) + j * (room.out_stride + 2);
            const REAL top = from[0] > room.top[j] ? from[0] : room.top[j];
            const REAL old = (REAL)exp2((double)(room.top[j] - top) * to_log2);
            const REAL new = (REAL)exp2((double)(from[0] - top) * to_log2);

            room.top[j] = top;
            room.sum[j] = room.sum[j] * old + from[1] * new;
            for (int64_t d = 0; d < room.out_stride; d++) {
                out[d] = out[d] * old + from[2 + d] * new;
            }
        }
    }
    R(forward_close)(&room, h, 0, h->n_q);
}
