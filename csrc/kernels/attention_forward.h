/* Attention forward on the CPU: splits a call into tasks, blocks of queries or, for
 * decoding, ranges of keys, and shares them among threads. Results do not depend on the
 * number of threads. */
#ifndef ATTENTION_FORWARD_H
#define ATTENTION_FORWARD_H

#include "../scratch.h"
#include "attention_block.h"
#include "attention_parts.h"

#include <stdatomic.h>

/* ---- Decoding -------------------------------------------------------------------- */

/* Decoding: few queries against many keys. The keys are split among tasks, each of
 * which computes a maximum, sum and output of its own (split-K); join_splits() combines
 * them. A task computes all query heads that share a head of k and v, so that keys and
 * values are read from memory once. */

/* The keys of each head of k and v are split into `splits` ranges of `keys` keys, one
 * task each. Both depend on sizes alone, so that results do not depend on the number of
 * threads. */
typedef struct {
    const tfast_attention_args *args;
    char *room;        /* scratch memory of all threads */
    size_t room_bytes; /* of one thread */
    int splits;
    int64_t keys;
    void *results; /* [splits][batch][heads][n_q][maximum, sum, output] */
    int64_t tasks;
    _Atomic int64_t next; /* the first task that no thread has taken */
} attention_decode_job;

/* Rows of queries in the scratch memory: a panel for each query head that shares
 * keys. */
static inline int64_t
decode_queries(const tfast_attention_args *args)
{
    return args->heads / args->kv_heads * PANEL;
}

/* sum = weights . v, for rows of v that are `vectors` vectors wide. All sums stay in
 * registers, except that 16 are slightly too many for AVX2. With 16 vectors a row,
 * later rows are prefetched, because the hardware prefetches only one row ahead. */
static inline __attribute__((always_inline)) void
few_values_held(const int vectors, real *sum, const real *weights,
                int64_t weight_stride, const real *v, int64_t v_stride, int64_t n_k)
{
    vr c[16];

    for (int i = 0; i < vectors; i++) {
        c[i] = vr_set1(0);
    }
    for (int64_t j = 0; j < n_k; j++) {
        const vr weight = vr_set1(weights[j * weight_stride]);

        for (int i = 0; vectors == 16 && i < 16 * VR_WIDTH;
             i += CACHE_LINE / (int)sizeof(real)) {
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

/* out = fade * out + weights . v for one query; `careful`: skips weights of 0. Reads v
 * once, row by row, because several passes over columns are slower from memory. */
static inline void
few_values(real *out, real fade, const real *weights, int64_t weight_stride,
           const real *v, int64_t v_stride, int64_t n_k, int64_t width, bool careful)
{
    real sum[TFAST_ATTENTION_MAX_DIM];

    if (!careful && width == 8 * VR_WIDTH) {
        few_values_held(8, sum, weights, weight_stride, v, v_stride, n_k);
    } else if (!careful && width == 4 * VR_WIDTH) {
        few_values_held(4, sum, weights, weight_stride, v, v_stride, n_k);
    } else if (!careful && width == 16 * VR_WIDTH) {
        few_values_held(16, sum, weights, weight_stride, v, v_stride, n_k);
    } else {
        memset(sum, 0, sizeof(real) * (size_t)width);
        for (int64_t j = 0; j < n_k; j++) {
            const real weight = weights[j * weight_stride];

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

/* The scratch memory of query head i of those that share keys: queries, sums and output
 * of its own, and the common tiles. */
static forward_room
decode_room(const forward_room *room, int64_t i, const tfast_attention_args *args)
{
    forward_room one = *room;

    one.queries += i * PANEL * attention_round_up(args->dim, VR_WIDTH);
    one.out += i * PANEL * room->out_stride;
    one.top += i * PANEL;
    one.sum += i * PANEL;
    one.fade += i * PANEL;
    return one;
}

static void
decode_open(const forward_room *room, const attention_head *h)
{
    const tfast_attention_args *args = h->args;

    scale_rows(room->queries, args->q.data, args->dtype,
               attention_query_row(h, &args->q, 0), args->q.row, h->n_q, args->dim,
               (real)attention_query_scale(h));
    for (int i = 0; i < PANEL; i++) {
        room->top[i] = -REAL_MAX;
        room->sum[i] = 0;
        room->fade[i] = 1;
    }
    memset(room->out, 0, sizeof(real) * (size_t)(h->n_q * room->out_stride));
}

/* Online softmax of one query: replaces n contiguous scores by weights and updates
 * maximum, sum and fade. Pads `scores` to whole vectors. */
static void
few_weights(const forward_room *room, real *scores, int64_t n)
{
    const int64_t whole = attention_round_up(n, VR_WIDTH);
    const real before = room->top[0];
    real lanes[VR_WIDTH], top = before;
    vr most = vr_set1(before), sum = vr_set1(0);

    for (int64_t j = n; j < whole; j++) {
        scores[j] = -(real)INFINITY;
    }
    for (int64_t j = 0; j < whole; j += VR_WIDTH) {
        most = vr_max(vr_load(scores + j), most);
    }
    vr_store(lanes, most);
    for (int i = 0; i < VR_WIDTH; i++) {
        top = lanes[i] > top ? lanes[i] : top;
    }
    for (int64_t j = 0; j < whole; j += VR_WIDTH) {
        const vr x = vector_exp2(vr_sub(vr_load(scores + j), vr_set1(top)));

        vr_store(scores + j, x);
        sum = vr_add(sum, x);
    }
    vr_store(lanes, vector_exp2(vr_set1(before - top)));
    room->top[0] = top;
    room->fade[0] = lanes[0];
    room->sum[0] = lanes[0] * room->sum[0] + vr_sum(sum);
}

/* Adds keys begin .. end - 1 of a tile for one query on the fast path (see
 * attention_is_general()). Its scores are contiguous, so that vector lanes are keys. */
static void
decode_one(const forward_room *room, const tfast_attention_args *args, int64_t begin,
           int64_t end, const real *k, int64_t k_stride, const real *v,
           int64_t v_stride, bool careful)
{
    const int64_t width = attention_round_up(args->dim, VR_WIDTH);

    for (int64_t j = begin; j < end; j += VR_WIDTH) {
        few_scores(room->queries, k + j * k_stride, k_stride, width,
                   (int)attention_min(VR_WIDTH, end - j), room->scores + j - begin);
    }
    few_weights(room, room->scores, end - begin);
    few_values(room->out, room->fade[0], room->scores, 1, v + begin * v_stride,
               v_stride, end - begin, room->out_stride, careful);
}

/* Whether decode_one() can compute a head. */
static inline bool
decode_is_plain(const attention_head *h)
{
    return h->n_q == 1 && !attention_is_general(h);
}

/* Adds keys key .. key + n_k - 1 to the maximum, sum and output of one query head. */
static void
decode_tile(const forward_room *room, const attention_head *h, const real *k,
            int64_t k_stride, const real *v, int64_t v_stride, int64_t key, int64_t n_k,
            bool careful)
{
    const score_panel p = panel_of(h, 0, h->n_q, key, n_k, true);
    const bool dropped = h->args->dropout_p > 0;

    if (p.begin == p.end) {
        return;
    }
    if (decode_is_plain(h)) {
        decode_one(room, h->args, p.begin, p.end, k, k_stride, v, v_stride, careful);
        return;
    }
    if (dropped) {
        fill_dropout(room->dropout, h, 0, h->n_q, key, n_k);
    }
    forward_panel(room, &p, k, k_stride, 0, (int)n_k);
    for (int64_t i = 0; i < h->n_q; i++) {
        few_values(room->out + i * room->out_stride, room->fade[i],
                   room->scores + p.begin * ATTENTION_QUERIES + i, ATTENTION_QUERIES,
                   v + p.begin * v_stride, v_stride, p.end - p.begin, room->out_stride,
                   careful);
    }
}

/* The number of keys of a tile. On the fast path, keys that are read in place need no
 * scratch rows, and tiles are larger, because each change between k and v interrupts
 * the stream from memory. With shared keys only the first head reads from memory, the
 * others from the cache, so tiles are smaller. */
static inline int64_t
decode_tile_keys(const attention_head *h)
{
    const tfast_attention_args *args = h->args;
    const bool in_place = args->dtype == REAL_DTYPE && args->dim % VR_WIDTH == 0 &&
                          args->dim_v % VR_WIDTH == 0;

    return !in_place || !decode_is_plain(h) ? ATTENTION_KEYS
           : args->heads == args->kv_heads  ? 4 * ATTENTION_KEYS
                                            : 2 * ATTENTION_KEYS;
}

/* Computes all query heads that share a head of k and v for keys begin .. end - 1. */
static void
decode_keys(const forward_room *room, const attention_head *first, int64_t begin,
            int64_t end, bool careful)
{
    const tfast_attention_args *args = first->args;
    const int64_t group = args->heads / args->kv_heads;
    const int64_t tile = decode_tile_keys(first);
    attention_head h = *first;

    for (int64_t i = 0; i < group; i++) {
        const forward_room one = decode_room(room, i, args);

        h.head = first->head + i;
        decode_open(&one, &h);
    }
    for (int64_t key = begin; key < end; key += tile) {
        const int64_t n_k = attention_min(tile, end - key);
        int64_t k_stride, v_stride;
        const real *k = open_rows(room->k, room->k_stride, args->k.data, args->dtype,
                                  attention_key_row(first, &args->k, key), args->k.row,
                                  n_k, args->dim, false, &k_stride);
        const real *v = open_rows(room->v, room->v_stride, args->v.data, args->dtype,
                                  attention_key_row(first, &args->v, key), args->v.row,
                                  n_k, args->dim_v, false, &v_stride);

        for (int64_t i = 0; i < group; i++) {
            const forward_room one = decode_room(room, i, args);

            h.head = first->head + i;
            decode_tile(&one, &h, k, k_stride, v, v_stride, key, n_k, careful);
        }
    }
}

/* Where the result of a split for one head lies: n_q rows of maximum, sum and
 * output. */
static inline real *
decode_result(const attention_decode_job *job, const attention_head *h, int split)
{
    const tfast_attention_args *args = job->args;
    const int64_t width = attention_round_up(args->dim_v, VR_WIDTH) + 2;
    const int64_t place = (split * args->batch + h->batch) * args->heads + h->head;

    return (real *)job->results + place * args->n_q * width;
}

/* A task: the keys of one split for all query heads that share them. If an output is
 * not finite and keys may be forbidden, repeats it skipping weights of 0. */
static void
decode_split(const attention_decode_job *job, int64_t batch, int64_t kv_head, int split,
             void *memory)
{
    const tfast_attention_args *args = job->args;
    const int64_t group = args->heads / args->kv_heads;
    attention_head h = attention_head_of(args, batch, kv_head * group);
    const int64_t from = attention_first_key(&h, 0) / ATTENTION_KEYS * ATTENTION_KEYS;
    const int64_t to = attention_end_key(&h, h.n_q - 1);
    const int64_t begin = attention_max(from, split * job->keys);
    const int64_t end = attention_min(to, (split + 1) * job->keys);
    forward_room room;
    bool finite = true;

    forward_cut(&room, args, decode_queries(args), memory);
    room.few = true;
    for (int careful = 0; careful < 2; careful++) {
        decode_keys(&room, &h, begin, end, careful);
        for (int64_t i = 0; i < group; i++) {
            const forward_room one = decode_room(&room, i, args);

            h.head = kv_head * group + i;
            for (int64_t j = 0; j < h.n_q; j++) {
                real *to = decode_result(job, &h, split) + j * (room.out_stride + 2);

                to[0] = one.top[j];
                to[1] = one.sum[j];
                memcpy(to + 2, one.out + j * room.out_stride,
                       sizeof(real) * (size_t)room.out_stride);
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

/* Combines the results of the splits of one head in order, each rescaled to the common
 * maximum, and writes the output. */
static void
join_splits(const attention_decode_job *job, const attention_head *h, void *memory)
{
    const tfast_attention_args *args = job->args;
    const double to_log2 = LOG2E / attention_unit(h);
    forward_room room;

    forward_cut(&room, args, decode_queries(args), memory);
    decode_open(&room, h);
    for (int64_t j = 0; j < h->n_q; j++) {
        real *out = room.out + j * room.out_stride;

        for (int split = 0; split < job->splits; split++) {
            const real *from = decode_result(job, h, split) + j * (room.out_stride + 2);
            const real top = from[0] > room.top[j] ? from[0] : room.top[j];
            const real old = (real)exp2((double)(room.top[j] - top) * to_log2);
            const real new = (real)exp2((double)(from[0] - top) * to_log2);

            room.top[j] = top;
            room.sum[j] = room.sum[j] * old + from[1] * new;
            for (int64_t d = 0; d < room.out_stride; d++) {
                out[d] = out[d] * old + from[2 + d] * new;
            }
        }
    }
    forward_close(&room, h, 0, h->n_q);
}

/* About SPLIT_TASKS tasks in all; at most one split for each SPLIT_KEYS keys. */
enum { ATTENTION_SPLIT_TASKS = 64, ATTENTION_SPLIT_KEYS = 4 * ATTENTION_KEYS };

static void
attention_decode_part(void *context, int part, int parts)
{
    attention_decode_job *job = context;
    const tfast_attention_args *args = job->args;
    void *room = job->room + job->room_bytes * (size_t)part;

    (void)parts;
    for (int64_t t; (t = atomic_fetch_add(&job->next, 1)) < job->tasks;) {
        const int split = (int)(t % job->splits);
        const int64_t head = t / job->splits % args->kv_heads;
        const int64_t batch = t / job->splits / args->kv_heads;

        decode_split(job, batch, head, split, room);
    }
}

static tfast_status
attention_decode(const tfast_attention_args *args)
{
    forward_room room;
    attention_decode_job job = {.args = args};
    const int64_t heads = args->batch * args->kv_heads;
    const int64_t most = (args->n_k + ATTENTION_SPLIT_KEYS - 1) / ATTENTION_SPLIT_KEYS;
    const size_t width = (size_t)attention_round_up(args->dim_v, 16) + 2;
    size_t results;
    char *memory;
    int parts;

    job.splits = (int)attention_max(
        1, attention_min(most, (ATTENTION_SPLIT_TASKS + heads - 1) / heads));
    job.keys =
        attention_round_up((args->n_k + job.splits - 1) / job.splits, ATTENTION_KEYS);
    job.tasks = heads * job.splits;
    job.room_bytes =
        attention_room_bytes(forward_cut(&room, args, decode_queries(args), NULL));
    parts = attention_parts(args, job.tasks);
    results = (size_t)(job.splits * args->batch * args->heads * args->n_q) * width *
              sizeof(real);
    results = (results + 4095) / 4096 * 4096;
    memory = tfast_scratch_take(results + job.room_bytes * (size_t)parts);
    if (memory == NULL) {
        return tfast_fail(TFAST_ENOMEM, "attention cannot allocate %zu bytes",
                          results + job.room_bytes * (size_t)parts);
    }
    job.results = memory;
    job.room = memory + results;
    tfast_parallel(parts, attention_decode_part, &job);
    for (int64_t i = 0; i < args->batch * args->heads; i++) {
        const attention_head h =
            attention_head_of(args, i / args->heads, i % args->heads);

        join_splits(&job, &h, job.room);
    }
    tfast_scratch_give(memory);
    return TFAST_OK;
}

/* ---- Blocks of queries ----------------------------------------------------------- */

typedef struct {
    const tfast_attention_args *args;
    char *room;            /* scratch memory of all threads */
    size_t room_bytes;     /* of one thread */
    int64_t tasks, blocks; /* blocks of a head; tasks of the call, one a block */
    _Atomic int64_t next;  /* the first task that no thread has taken */
    int64_t run;           /* tasks that a thread takes at a time */
    bool look_ahead;       /* prefetch whole heads, not blocks */
} attention_job;

static void
attention_forward_task(const attention_job *job, int64_t task, attention_ahead *ahead,
                       void *room)
{
    const tfast_attention_args *args = job->args;
    const int64_t head = task / job->blocks;
    /* The last blocks of a causal head have the most work: they come first. */
    const int64_t block = job->blocks - 1 - task % job->blocks;
    const attention_head h =
        attention_head_of(args, head / args->heads, head % args->heads);

    if (block * ATTENTION_QUERIES >= h.n_q) {
        return;
    }
    attention_forward_block(&h, block * ATTENTION_QUERIES, ahead, room);
}

/* Plans what to prefetch while a thread computes `task`. `next` is a later task of the
 * thread: with look_ahead its whole head is prefetched, otherwise its block, and only
 * if it is of the same head. Returns NULL if there is nothing to prefetch. */
static attention_ahead *
attention_forward_ahead(const attention_job *job, attention_ahead *ahead, int64_t task,
                        int64_t next)
{
    const tfast_attention_args *args = job->args;
    const int64_t head = next / job->blocks;
    const int64_t block = job->blocks - 1 - next % job->blocks;
    const int64_t before = job->blocks - 1 - task % job->blocks;
    attention_head h;

    if (next >= job->tasks || (!job->look_ahead && head != task / job->blocks)) {
        return NULL;
    }
    h = attention_head_of(args, head / args->heads, head % args->heads);
    if (job->look_ahead) {
        attention_plan(ahead, &h, attention_strips(&h, false), false);
    } else if (attention_head_has_terms(&h)) {
        return NULL; /* forward_try() plans to prefetch terms */
    } else {
        const int64_t query = block * ATTENTION_QUERIES;
        const int64_t n_q = attention_min(ATTENTION_QUERIES, h.n_q - query);

        attention_plan_block(ahead, &h, query, attention_max(0, n_q),
                             before * ATTENTION_QUERIES);
    }
    return ahead;
}

static void
attention_forward_part(void *context, int part, int parts)
{
    attention_job *job = context;
    void *room = job->room + job->room_bytes * (size_t)part;
    int64_t begin = atomic_fetch_add(&job->next, job->run), next;
    attention_ahead ahead, *planned = NULL;

    (void)parts;
    for (; begin < job->tasks; begin = next) {
        const int64_t end = attention_min(begin + job->run, job->tasks);

        next = atomic_fetch_add(&job->next, job->run);
        for (int64_t t = begin; t < end; t++) {
            if (t == begin || !job->look_ahead) {
                const int64_t after = job->look_ahead || t + 1 == end ? next : t + 1;

                planned = attention_forward_ahead(job, &ahead, t, after);
            }
            attention_forward_task(job, t, planned, room);
        }
    }
}

static tfast_status
attention_forward(const tfast_attention_args *args)
{
    forward_room room;
    const size_t bytes = forward_cut(&room, args, ATTENTION_QUERIES, NULL);
    attention_job job = {.args = args, .room_bytes = attention_room_bytes(bytes)};
    int parts;

    job.blocks = (args->n_q + ATTENTION_QUERIES - 1) / ATTENTION_QUERIES;
    job.tasks = args->batch * args->heads * job.blocks;
    if (job.tasks == 0) {
        return TFAST_OK;
    }
    if (attention_is_few(args)) {
        return attention_decode(args);
    }
    parts = attention_parts(args, job.tasks);
    /* With many heads a thread takes all blocks of a head, because they share its
     * keys. */
    job.run = args->batch * args->heads >= 4 * parts ? job.blocks : 1;
    job.look_ahead = args->batch * args->heads >= 4 * parts && attention_is_cold(args);
    job.room = tfast_scratch_take(job.room_bytes * (size_t)parts);
    if (job.room == NULL) {
        return tfast_fail(TFAST_ENOMEM, "attention cannot allocate %zu bytes",
                          job.room_bytes * (size_t)parts);
    }
    attention_hint(args, &args->out, args->heads, args->n_q, args->total_q,
                   args->dim_v);
    tfast_parallel(parts, attention_forward_part, &job);
    tfast_scratch_give(job.room);
    return TFAST_OK;
}

#endif
