/* Which graphs come when: a keyed permutation, batches by number and size, and what
 * each rank gets of them.
 *
 * An epoch is its graphs in permuted order; a place is a number in that order. Ranks
 * take their batches in rounds: one for each rank, one after another. A position is the
 * place where a round begins, and what the round is follows from it alone, so an epoch
 * can be entered anywhere, also with another world_size.
 *
 * Batches are filled greedily. So that all ranks end together, a round must leave
 * enough for the rounds after it: what lies behind a place can be shared out where,
 * filled greedily, it makes at most as many batches as fit into whole rounds, and has a
 * graph for each batch of those. Where that would not be so, the round's batches are
 * made smaller. */
#include "graph_cache.h"

#include <math.h>

/* ---- The permutation ------------------------------------------------------------- */

/* With 16, permutations of up to 6 are equally likely as far as chi squared of 15,000
 * draws can tell; with 12 those of 6 are not, with 8 those of 5. Larger n need less. */
enum { HALF_ROUNDS = 16, HALF_ROUNDS_OF_MANY = 8, MANY = 1024 };

/* A Feistel network on pairs (row, column), of which there are a few more than n; a
 * number outside is permuted on until it falls inside (Black and Rogaway, "Ciphers with
 * arbitrary finite domains", 2002). */
typedef struct {
    uint64_t n, rows, columns;
    uint64_t keys[HALF_ROUNDS];
    int half_rounds;
} permutation;

/* SplitMix64's last step (Steele, Lea and Flood, 2014). */
static uint64_t
mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static permutation
permutation_of(const tfast_graph_order *order)
{
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    const uint64_t n = order->n > 1 ? (uint64_t)order->n : 1;
    const uint64_t key = mix(mix(order->seed + golden) + golden * (order->epoch + 1));
    permutation p = {.n = n, .rows = (uint64_t)ceil(sqrt((double)n))};

    p.columns = (n + p.rows - 1) / p.rows;
    p.half_rounds = n < MANY ? HALF_ROUNDS : HALF_ROUNDS_OF_MANY;
    for (int i = 0; i < p.half_rounds; i++) {
        p.keys[i] = mix(key + golden * (uint64_t)(i + 1));
    }
    return p;
}

/* x moved by a number in 0 .. size - 1 that depends on `other`. */
static uint64_t
moved(uint64_t x, uint64_t size, uint64_t key, uint64_t other)
{
    x += (uint64_t)((unsigned __int128)mix(key + other) * size >> 64);
    return x < size ? x : x - size;
}

static int64_t
permuted(const permutation *p, int64_t i)
{
    uint64_t x = (uint64_t)i;

    do {
        uint64_t row = x / p->columns, column = x % p->columns;

        for (int k = 0; k < p->half_rounds; k += 2) {
            row = moved(row, p->rows, p->keys[k], column);
            column = moved(column, p->columns, p->keys[k + 1], row);
        }
        x = row * p->columns + column;
    } while (x >= p->n);
    return (int64_t)x;
}

static int64_t
graph_at(const tfast_graph_order *order, const permutation *p, int64_t place)
{
    const int64_t i = order->shuffle ? permuted(p, place) : place;

    return order->subset != NULL ? order->subset[i] : i;
}

int64_t
tfast_graph_order_at(const tfast_graph_order *order, int64_t i)
{
    const permutation p = permutation_of(order);

    return graph_at(order, &p, i);
}

/* ---- Rounds of batches by number alone ------------------------------------------- */

/* A round: where the rank's batch lies, and where the next round begins. An empty one
 * is the end of the epoch. */
typedef struct {
    int64_t begin, end;
    int64_t next;
} share;

/* Where piece i begins when `total` is cut into pieces as equal as can be. */
static int64_t
piece_begin(int64_t total, int64_t pieces, int64_t i)
{
    const int64_t longer = total % pieces;

    return total / pieces * i + (i < longer ? i : longer);
}

static share
round_by_number(const tfast_graph_order *order, int64_t place)
{
    const int64_t ranks = order->world_size, left = order->n - place;
    int64_t all, rounds = 1, graphs = left;

    if (__builtin_mul_overflow(ranks, order->batch_size, &all)) {
        all = INT64_MAX;
    }
    if (left == 0 || (order->drop_last && left < all)) {
        return (share){order->n, order->n, order->n};
    }
    if (left >= all && (left - all == 0 || left - all >= ranks || order->drop_last)) {
        graphs = all;
    } else if (left > all) { /* the rest is too little for a round */
        rounds = 2;
    }
    return (share){
        place + piece_begin(graphs, rounds * ranks, order->rank),
        place + piece_begin(graphs, rounds * ranks, order->rank + 1),
        place + piece_begin(graphs, rounds * ranks, ranks),
    };
}

/* ---- Rounds of batches by size --------------------------------------------------- */

/* Batches are counted from where the walk began. It looks ahead of the round that it
 * works on: `ahead` is the end of greedy batch number `ahead_batches`. */
typedef struct {
    const tfast_graph_order *order;
    permutation permutation;
    int64_t place, batches;
    int64_t ahead, ahead_batches;
} walk;

static walk
walk_from(const tfast_graph_order *order, int64_t place)
{
    return (walk){.order = order,
                  .permutation = permutation_of(order),
                  .place = place,
                  .ahead = place};
}

static tfast_status
too_large(const tfast_graph_order *order, int64_t graph, int budget)
{
    return tfast_fail(TFAST_EINVAL,
                      "graph %lld must be within budget %d of a batch, %lld, got %lld "
                      "(oversize_alone gives it a batch of its own)",
                      (long long)graph, budget, (long long)order->budgets[budget],
                      (long long)order->sizes[budget][graph]);
}

/* Where the greedy batch that begins at `place` ends; *full: not by the epoch's end. */
static tfast_status
fill_batch(const walk *w, int64_t place, int64_t *end, bool *full)
{
    const tfast_graph_order *order = w->order;
    const int64_t left = order->n - place;
    const int64_t most = left < order->batch_size ? left : order->batch_size;
    int64_t sums[TFAST_GRAPH_MAX_BUDGETS] = {0};
    int64_t n = 0;

    *full = false;
    for (; n < most && !*full; n++) {
        const int64_t graph = graph_at(order, &w->permutation, place + n);

        for (int b = 0; b < order->n_budgets; b++) {
            const int64_t size = order->sizes[b][graph], budget = order->budgets[b];

            if (size > budget && !order->oversize_alone) {
                return too_large(order, graph, b);
            }
            *full = *full || size > budget - sums[b];
            sums[b] += *full ? 0 : size;
        }
    }
    n -= *full && n > 1; /* the one that did not fit, unless it is alone */
    *full = *full || n == order->batch_size;
    for (int b = 0; b < order->n_budgets; b++) {
        *full = *full || sums[b] == order->budgets[b];
    }
    *end = place + n;
    return TFAST_OK;
}

/* Whether what begins at `place`, after greedy batch number `batches`, can be shared
 * out. Any `ranks` - 1 graphs that share a batch with another suffice, so mostly the
 * next batch decides it. */
static tfast_status
can_share_out(walk *w, int64_t place, int64_t batches, bool *can)
{
    const int64_t ranks = w->order->world_size, left = w->order->n - place;
    int64_t greedy;

    *can = left % ranks == 0; /* one graph a batch */
    if (*can) {
        return TFAST_OK;
    }
    if (w->ahead < place) {
        w->ahead = place;
        w->ahead_batches = batches;
    }
    while (w->ahead < w->order->n &&
           w->ahead - place - (w->ahead_batches - batches) < ranks - 1) {
        bool full;
        const tfast_status status = fill_batch(w, w->ahead, &w->ahead, &full);

        if (status != TFAST_OK) {
            return status;
        }
        w->ahead_batches++;
    }
    greedy = w->ahead_batches - batches;
    *can = w->ahead - place - greedy >= ranks - 1 ||
           (greedy + ranks - 1) / ranks * ranks <= left;
    return TFAST_OK;
}

/* The round from w->place on, where greedy batches would not come out even: the walk
 * has seen all to the end, and some batches are cut so that whole rounds come of it. */
static tfast_status
round_of_pieces(walk *w, share *round)
{
    const int64_t ranks = w->order->world_size, n = w->order->n;
    int64_t batches = w->ahead_batches - w->batches, place = w->place, done = 0;
    int64_t missing = (ranks - batches % ranks) % ranks;

    if (missing > n - place - batches) {
        return tfast_fail(TFAST_EINVAL,
                          "graphs must be enough for batches of all %lld ranks, got "
                          "%lld (with drop_last those left over are not needed)",
                          (long long)ranks, (long long)(n - place));
    }
    while (done < ranks) {
        int64_t end, more, rest;
        bool full;
        const tfast_status status = fill_batch(w, place, &end, &full);

        if (status != TFAST_OK) {
            return status;
        }
        more = (missing + batches - 1) / batches; /* cuts of this batch, fairly, */
        more = more < end - place - 1 ? more : end - place - 1;
        batches--;
        rest = n - end - batches; /* and those that the others have no graphs for */
        more = missing - more > rest ? missing - rest : more;
        missing -= more;
        for (int64_t i = 0; i <= more && done < ranks; i++, done++) {
            const int64_t begin = place + piece_begin(end - place, more + 1, i);

            round->next = place + piece_begin(end - place, more + 1, i + 1);
            if (done == w->order->rank) {
                round->begin = begin;
                round->end = round->next;
            }
        }
        place = end;
    }
    return TFAST_OK;
}

/* The round at w->place; the walk goes on to the next. */
static tfast_status
round_by_size(walk *w, share *round)
{
    const tfast_graph_order *order = w->order;
    int64_t place = w->place, done = 0;
    bool full = true, fits;
    tfast_status status = TFAST_OK;

    *round = (share){order->n, order->n, order->n};
    for (; done < order->world_size && place < order->n; done++) {
        const int64_t begin = place;

        if ((status = fill_batch(w, begin, &place, &full)) != TFAST_OK) {
            return status;
        }
        if (done == order->rank) {
            *round = (share){begin, place, order->n};
        }
    }
    fits = done == order->world_size;
    if (done == 0 || order->drop_last) {
        if (!fits || !full) { /* the end */
            *round = (share){order->n, order->n, order->n};
        } else {
            round->next = place;
        }
    } else {
        if (fits && order->world_size > 1) {
            status = can_share_out(w, place, w->batches + done, &fits);
        } else if (!fits) {
            w->ahead = place;
            w->ahead_batches = w->batches + done;
        }
        round->next = place;
        if (status == TFAST_OK && !fits) {
            status = round_of_pieces(w, round);
            *w = walk_from(order, round->next);
            return status;
        }
    }
    w->place = round->next;
    w->batches += done;
    return status;
}

/* ---- The contract ---------------------------------------------------------------- */

static tfast_status
must(const char *argument, const char *rule, int64_t got)
{
    return tfast_fail(TFAST_EINVAL, "%s must be %s, got %lld", argument, rule,
                      (long long)got);
}

static tfast_status
check(const tfast_graph_order *order)
{
    const int64_t ranks = order->world_size;

    if (order->n < 0 || order->n > INT64_MAX / 4) {
        return must("n", "at least 0 and below 2^61", order->n);
    }
    if (order->batch_size < 1) {
        return must("batch_size", "at least 1", order->batch_size);
    }
    if (ranks < 1) {
        return must("world_size", "at least 1", ranks);
    }
    if (order->rank < 0 || order->rank >= ranks) {
        return must("rank", "at least 0 and below world_size", order->rank);
    }
    if (order->n_budgets < 0 || order->n_budgets > TFAST_GRAPH_MAX_BUDGETS) {
        return must("the number of budgets", "0 .. 8", order->n_budgets);
    }
    for (int b = 0; b < order->n_budgets; b++) {
        if (order->budgets[b] < 0) {
            return must("a budget", "at least 0", order->budgets[b]);
        }
    }
    return TFAST_OK;
}

/* That every rank can have as many batches as the others, from `place` on. With
 * budgets only planning can tell. */
static tfast_status
check_shares(const tfast_graph_order *order, int64_t place)
{
    const int64_t ranks = order->world_size, left = order->n - place;

    if (order->drop_last || left == 0) {
        return TFAST_OK;
    }
    if (left < ranks) {
        return tfast_fail(TFAST_EINVAL,
                          "graphs must be at least as many as ranks (%lld), got %lld",
                          (long long)ranks, (long long)left);
    }
    if (order->batch_size == 1 && left % ranks != 0) {
        return tfast_fail(TFAST_EINVAL,
                          "with batch_size 1 and without drop_last the number of "
                          "graphs must be a multiple of the ranks (%lld), got %lld",
                          (long long)ranks, (long long)left);
    }
    return TFAST_OK;
}

static tfast_status
begin_at(const tfast_graph_order *order, int64_t place)
{
    const tfast_status status = check(order);

    if (status != TFAST_OK) {
        return status;
    }
    if (place < 0 || place > order->n) {
        return must("position", "one that an epoch of these graphs has", place);
    }
    return check_shares(order, place);
}

tfast_status
tfast_graph_order_next(const tfast_graph_order *order, int64_t *position,
                       int64_t *indices, int64_t *n)
{
    tfast_status status = begin_at(order, *position);
    share round;
    walk w;

    if (status != TFAST_OK) {
        return status;
    }
    w = walk_from(order, *position);
    if (order->n_budgets == 0) {
        round = round_by_number(order, *position);
    } else if ((status = round_by_size(&w, &round)) != TFAST_OK) {
        return status;
    }
    for (int64_t place = round.begin; place < round.end; place++) {
        indices[place - round.begin] = graph_at(order, &w.permutation, place);
    }
    *n = round.end - round.begin;
    *position = round.next;
    return TFAST_OK;
}

tfast_status
tfast_graph_order_batches(const tfast_graph_order *order, int64_t *n)
{
    tfast_status status = begin_at(order, 0);
    share round = {0, 0, 0};
    walk w;

    *n = 0;
    if (status != TFAST_OK) {
        return status;
    }
    if (order->n_budgets == 0) {
        const int64_t most = order->n / order->world_size / order->batch_size;
        const int64_t rest = order->n - most * order->world_size * order->batch_size;

        *n = most + (rest > 0 && !order->drop_last);
        return TFAST_OK;
    }
    w = walk_from(order, 0);
    for (;;) {
        status = round_by_size(&w, &round);
        if (status != TFAST_OK || round.begin == round.end) {
            return status;
        }
        (*n)++;
    }
}
