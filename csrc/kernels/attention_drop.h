/* Attention: dropout of a tile. */

/* What each element of a tile is multiplied by: 0, or the scale. `query` and `key` are
 * multiples of DROPOUT_BLOCK. */
static void
R(fill_dropout)(REAL *tile, const attention_head *h, int64_t query, int64_t n_q,
                int64_t key, int64_t n_k)
{
    enum { QUADS = DROPOUT_BLOCK / 4 };
    const tfast_attention_args *args = h->args;
    const int32_t threshold = (int32_t)tfast_dropout_threshold(args->dropout_p);
    const REAL kept = (REAL)tfast_dropout_scale((uint32_t)threshold);
    const int64_t quads = attention_round_up(n_k, DROPOUT_BLOCK) / 4;
    const philox_call call =
        philox_open((uint64_t)(args->seed_at ? *args->seed_at : args->seed),
                    (uint32_t)(h->batch * args->heads + h->head));

    for (int64_t i = 0; i < n_q; i += DROPOUT_BLOCK) {
        const philox_pairs pairs = philox_pairs_of(&call, (uint32_t)((query + i) / 2));

        for (int64_t quad = 0; quad < quads; quad++) {
            /* a quad's keys are two and two, half a block apart */
            REAL *to =
                tile + i +
                (quad / QUADS * DROPOUT_BLOCK + quad % QUADS * 2) * ATTENTION_QUERIES;
            uint32_t word[4][PHILOX_PAIRS];

            philox_words(word, &call, &pairs,
                         philox_quad_of(&call, (uint32_t)(key / 4 + quad)));
            for (int w = 0; w < 4; w++) {
                REAL *even = to + w % 2 * (DROPOUT_BLOCK / 2 * ATTENTION_QUERIES) +
                             w / 2 * PHILOX_PAIRS;
                REAL *odd = even + ATTENTION_QUERIES;

                for (int r = 0; r < PHILOX_PAIRS; r++) {
                    even[r] = (int32_t)(word[w][r] & 0xFFFF) < threshold ? 0 : kept;
                    odd[r] = (int32_t)(word[w][r] >> 16) < threshold ? 0 : kept;
                }
            }
        }
    }
}

static void
R(drop)(REAL *weights, const REAL *dropout, const R(panel) * p)
{
    for (int key = p->begin; key < p->end; key++) {
        for (int v = 0; v < p->vectors; v++) {
            const int64_t at = key * ATTENTION_QUERIES + v * VR_WIDTH;

            vr_store(weights + at,
                     vr_mul(vr_load(weights + at), vr_load(dropout + at)));
        }
    }
}
