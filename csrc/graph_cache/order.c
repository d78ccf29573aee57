/* The order of graphs in an epoch: a keyed permutation, batches limited by number and
 * size, and their distribution over ranks.
 *
 * An epoch is a permuted list of graphs; a place is an index into that list. Batches
 * come in rounds: one batch for each rank, in adjacent places, rank 0 first. A position
 * is the place where a round begins. A round depends only on its position, so an epoch
 * can be resumed at any position, even with another world_size.
 *
 * Batches are filled greedily. Since all ranks must get the same number of batches, the
 * graphs behind a round must again divide into whole rounds without empty batches. They
 * do if the number of their greedy batches, rounded up to a multiple of world_size, is
 * at most the number of graphs. If they do not, the round gets smaller batches. */
#include "graph_cache.h"
#include "io.h"
#include "shuffle.h"

/* The index of the graph at a place. */
static int64_t
graph_at(const tfast_graph_order *order, const graph_shuffle *shuffle, int64_t place)
{
    const int64_t i = order->shuffle ? graph_shuffled(shuffle, place) : place;

    return order->subset != NULL ? order->subset[i] : i;
}

int64_t
tfast_graph_order_at(const tfast_graph_order *order, int64_t i)
{
    const graph_shuffle shuffle = graph_shuffle_of(order->n, order->seed, order->epoch);

    return graph_at(order, &shuffle, i);
}

/* ---- Rounds without budgets ------------------------------------------------------ */

/* A round: places begin .. end - 1 are the rank's batch, `next` is where the next round
 * begins. begin == end: the epoch has ended. */
typedef struct {
    int64_t begin, end;
    int64_t next;
} share;

/* Where piece i begins if `total` is cut into pieces that differ by at most 1. */
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
    } else if (left > all) { /* too few would be left: two equal rounds */
        rounds = 2;
    }
    return (share){
        place + piece_begin(graphs, rounds * ranks, order->rank),
        place + piece_begin(graphs, rounds * ranks, order->rank + 1),
        place + piece_begin(graphs, rounds * ranks, ranks),
    };
}

/* ---- Rounds with budgets --------------------------------------------------------- */

/* A walk over rounds. The current round begins at `place`, after `batches` batches of
 * the walk. Greedy batches have been planned on to place `ahead`, where batch number
 * `ahead_batches` of the walk ends; later rounds use this result again. */
typedef struct {
    const tfast_graph_order *order;
    graph_shuffle shuffle;
    int64_t place, batches;
    int64_t ahead, ahead_batches;
} walk;

static walk
walk_from(const tfast_graph_order *order, int64_t place)
{
    return (walk){.order = order,
                  .shuffle = graph_shuffle_of(order->n, order->seed, order->epoch),
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

/* *end: the place behind the greedy batch that begins at `place`. *full: batch_size or
 * a budget ended the batch, not just the end of the epoch. */
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
        const int64_t graph = graph_at(order, &w->shuffle, place + n);

        for (int b = 0; b < order->n_budgets; b++) {
            const int64_t size = order->sizes[b][graph], budget = order->budgets[b];

            if (size > budget && !order->oversize_alone) {
                return too_large(order, graph, b);
            }
            *full = *full || size > budget - sums[b];
            sums[b] += *full ? 0 : size;
        }
    }
    n -= *full && n > 1; /* drop the graph that did not fit, unless alone */
    *full = *full || n == order->batch_size;
    for (int b = 0; b < order->n_budgets; b++) {
        *full = *full || sums[b] == order->budgets[b];
    }
    *end = place + n;
    return TFAST_OK;
}

/* *can: the graphs from `place` on, where batch number `batches` of the walk ends, can
 * be divided into whole rounds. Rounding up to whole rounds adds at most ranks - 1
 * batches, so it is enough to plan greedy batches until they hold ranks - 1 graphs more
 * than there are batches; usually the first batch does. */
static tfast_status
can_share_out(walk *w, int64_t place, int64_t batches, bool *can)
{
    const int64_t ranks = w->order->world_size, left = w->order->n - place;
    int64_t greedy;
    bool full;
    tfast_status status = TFAST_OK;

    *can = left % ranks == 0; /* with one graph in each batch */
    if (*can) {
        return TFAST_OK;
    }
    if (w->ahead < place) {
        w->ahead = place;
        w->ahead_batches = batches;
    }
    while (w->ahead < w->order->n &&
           w->ahead - place - (w->ahead_batches - batches) < ranks - 1) {
        TRY(fill_batch(w, w->ahead, &w->ahead, &full));
        w->ahead_batches++;
    }
    greedy = w->ahead_batches - batches;
    *can = w->ahead - place - greedy >= ranks - 1 ||
           (greedy + ranks - 1) / ranks * ranks <= left;
fail:
    return status;
}

/* The round at w->place if the greedy batches do not divide into whole rounds. The walk
 * has planned them to the end of the epoch (w->ahead); `missing` more batches make
 * whole rounds, so batches are cut into pieces until there are enough. */
static tfast_status
round_of_pieces(walk *w, share *round)
{
    const int64_t ranks = w->order->world_size, n = w->order->n;
    int64_t batches = w->ahead_batches - w->batches, place = w->place, done = 0;
    int64_t missing = (ranks - batches % ranks) % ranks;
    tfast_status status = TFAST_OK;

    if (missing > n - place - batches) {
        return tfast_fail(TFAST_EINVAL,
                          "graphs must be enough for batches of all %lld ranks, got "
                          "%lld (with drop_last those left over are not needed)",
                          (long long)ranks, (long long)(n - place));
    }
    while (done < ranks) {
        int64_t end, more, rest;
        bool full;

        TRY(fill_batch(w, place, &end, &full));
        more = (missing + batches - 1) / batches; /* an equal share of the cuts, */
        more = more < end - place - 1 ? more : end - place - 1;
        batches--;
        rest = n - end - batches; /* plus cuts that do not fit into later batches */
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
fail:
    return status;
}

/* The round at w->place with greedy batches. *batches: their number, less than
 * world_size at the end of the epoch; *full: the last batch is full. */
static tfast_status
greedy_round(const walk *w, share *round, int64_t *batches, bool *full)
{
    const tfast_graph_order *order = w->order;
    tfast_status status = TFAST_OK;

    round->next = w->place;
    *full = false;
    for (*batches = 0; *batches < order->world_size && round->next < order->n;
         ++*batches) {
        const int64_t begin = round->next;

        TRY(fill_batch(w, begin, &round->next, full));
        if (*batches == order->rank) {
            round->begin = begin;
            round->end = round->next;
        }
    }
fail:
    return status;
}

/* The round at w->place; moves the walk to the next round. */
static tfast_status
round_by_size(walk *w, share *round)
{
    const tfast_graph_order *order = w->order;
    int64_t batches;
    bool full, even;
    tfast_status status = greedy_round(w, round, &batches, &full);

    if (status != TFAST_OK) {
        return status;
    }
    even = batches == order->world_size;
    if (batches == 0 || (order->drop_last && !(even && full))) {
        *round = (share){order->n, order->n, order->n};
        return TFAST_OK;
    }
    if (!even) {
        w->ahead = order->n;
        w->ahead_batches = w->batches + batches;
    } else if (!order->drop_last && order->world_size > 1) {
        status = can_share_out(w, round->next, w->batches + batches, &even);
    }
    if (status == TFAST_OK && !even) {
        status = round_of_pieces(w, round);
        *w = walk_from(order, round->next);
        return status;
    }
    w->place = round->next;
    w->batches += batches;
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

/* TFAST_EINVAL if the ranks cannot get the same number of batches from `place` on. With
 * budgets this check is not complete; round_of_pieces() makes the final one. */
static tfast_status
check_shares(const tfast_graph_order *order, int64_t place)
{
    const int64_t ranks = order->world_size, left = order->n - place;

    if (order->drop_last || left == 0) {
        return TFAST_OK;
    }
    if (left < ranks) {
        return tfast_fail(TFAST_EINVAL,
                          "graphs must be at least as many as ranks (%lld), got %lld; "
                          "use fewer ranks, or drop_last",
                          (long long)ranks, (long long)left);
    }
    if (order->batch_size == 1 && left % ranks != 0) {
        return tfast_fail(TFAST_EINVAL,
                          "with batch_size 1 and without drop_last the number of "
                          "graphs must be a multiple of the ranks (%lld), got %lld; "
                          "use drop_last",
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
    *n = round.end - round.begin;
    if (order->shuffle) {
        graph_shuffled_run(&w.shuffle, round.begin, *n, indices);
    }
    for (int64_t i = 0; i < *n; i++) {
        const int64_t place = order->shuffle ? indices[i] : round.begin + i;

        indices[i] = order->subset != NULL ? order->subset[place] : place;
    }
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
