/* Attention: dropout of a tile of scores. */
#ifndef DROPOUT_H
#define DROPOUT_H

#include "../attention_dropout.h"
#include "attention_scores.h"

/* Fills a tile with the dropout factor of each score: 0, or tfast_dropout_scale() if
 * the score is kept. `query` and `key` are multiples of DROPOUT_BLOCK. */
static void
fill_dropout(real *tile, const attention_head *h, int64_t query, int64_t n_q,
             int64_t key, int64_t n_k)
{
    enum { QUADS = DROPOUT_BLOCK / 4 };
    const tfast_attention_args *args = h->args;
    const int32_t threshold = (int32_t)tfast_dropout_threshold(args->dropout_p);
    const real kept = (real)tfast_dropout_scale((uint32_t)threshold);
    const int64_t quads = attention_round_up(n_k, DROPOUT_BLOCK) / 4;
    philox_row row = {.seed = (uint64_t)(args->seed_at ? *args->seed_at : args->seed),
                      .head = (uint32_t)(h->batch * args->heads + h->head),
                      .first_quad = (uint32_t)(key / 4),
                      .n_quads = (int)quads};
    uint32_t words[ATTENTION_KEYS / 4][4][PHILOX_PAIRS];

    for (int64_t i = 0; i < n_q; i += DROPOUT_BLOCK) {
        row.first_pair = (uint32_t)((query + i) / 2);
        philox_words(words, row);
        for (int64_t quad = 0; quad < quads; quad++) {
            /* a quad is two neighbouring keys, and two more half a block later */
            real *to =
                tile + i +
                (quad / QUADS * DROPOUT_BLOCK + quad % QUADS * 2) * ATTENTION_QUERIES;
            uint32_t(*word)[PHILOX_PAIRS] = words[quad];

            for (int w = 0; w < 4; w++) {
                real *even = to + w % 2 * (DROPOUT_BLOCK / 2 * ATTENTION_QUERIES) +
                             w / 2 * PHILOX_PAIRS;
                real *odd = even + ATTENTION_QUERIES;

                for (int r = 0; r < PHILOX_PAIRS; r++) {
                    even[r] = (int32_t)(word[w][r] & 0xFFFF) < threshold ? 0 : kept;
                    odd[r] = (int32_t)(word[w][r] >> 16) < threshold ? 0 : kept;
                }
            }
        }
    }
}

static void
apply_dropout(real *weights, const real *dropout, const score_panel *p)
{
    for (int key = p->begin; key < p->end; key++) {
        for (int v = 0; v < p->vectors; v++) {
            const int64_t at = key * ATTENTION_QUERIES + v * VR_WIDTH;

            vr_store(weights + at,
                     vr_mul(vr_load(weights + at), vr_load(dropout + at)));
        }
    }
}

#endif
