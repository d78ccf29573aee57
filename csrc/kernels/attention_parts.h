/* Attention: how many threads a call uses, and estimates for prefetching. */
#ifndef ATTENTION_PARTS_H
#define ATTENTION_PARTS_H

#include "../scratch.h"
#include "../threads.h"
#include "attention_tile.h"

#include <math.h>

/* Multiply-adds that are worth another thread: about 20 us. */
enum { ATTENTION_PART_COST = 1 << 21 };

/* The distance between the scratch memories of two threads: whole pages and 256 bytes,
 * so that equal parts of them do not share a set of the cache. */
static size_t
attention_room_bytes(size_t bytes)
{
    return (size_t)attention_round_up((int64_t)bytes, 4096) + 256;
}

/* The number of threads for a call of `tasks` tasks. The work is computed in double,
 * because the product of sizes may exceed 2^63. */
static int
attention_parts(const tfast_attention_args *args, int64_t tasks)
{
    const double work = (double)args->batch * (double)args->heads * (double)args->n_q *
                        (double)args->n_k * (double)(args->dim + args->dim_v);
    const int64_t worth = 1 + (int64_t)fmin(work / ATTENTION_PART_COST, 1 << 20);
    const int64_t most = attention_min(tasks, tfast_num_threads());

    return (int)attention_min(worth, most);
}

/* Asks the system for large pages for an output, whose memory may not have been touched
 * yet: from its first row to its last, gaps between rows included. Only a hint. */
static void
attention_hint(const tfast_attention_args *args, const tfast_attention_rows *rows,
               int64_t heads, int64_t n, int64_t total, int64_t dim)
{
    const bool packed = args->cu_seqlens_q != NULL;
    const int64_t batches = packed ? 0 : args->batch - 1;
    const int64_t last = (packed ? total : n) - 1;
    const int64_t elements =
        batches * rows->batch + (heads - 1) * rows->head + last * rows->row + dim;

    if (rows->data != NULL && elements > 0) {
        tfast_hint_large_pages(
            rows->data, (size_t)elements * tfast_dtype_size((tfast_dtype)args->dtype));
    }
}

/* About how many register tiles a head has, each of which calls
 * attention_look_ahead(). */
static int64_t
attention_strips(const attention_head *h, bool backward)
{
    const tfast_attention_args *args = h->args;
    const int64_t scores = h->n_q * h->n_k / (args->is_causal ? 2 : 1);
    const int64_t q_panels = (args->dim + PANEL - 1) / PANEL;
    const int64_t v_panels = (args->dim_v + PANEL - 1) / PANEL;
    const int64_t rows = backward ? h->n_q * q_panels + h->n_k * (q_panels + v_panels)
                                  : h->n_q * v_panels;

    return scores / (PANEL * V_ROWS) + rows / V_ROWS;
}

/* Whether heads are small enough to be prefetched whole, but together too large to be
 * in the cache. */
static bool
attention_is_cold(const tfast_attention_args *args)
{
    const double head = ((double)args->n_q + (double)args->n_k) *
                        (double)(args->dim + args->dim_v) *
                        (double)tfast_dtype_size((tfast_dtype)args->dtype);

    return head <= ATTENTION_AHEAD_BYTES &&
           head * (double)args->batch * (double)args->heads >= ATTENTION_COLD_BYTES;
}

#endif
