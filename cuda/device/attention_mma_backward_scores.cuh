/* Attention backward by tensor cores: from the products of a step to weights and
 * gradients of scores. */
#ifndef TFAST_ATTENTION_MMA_BACKWARD_SCORES_CUH
#define TFAST_ATTENTION_MMA_BACKWARD_SCORES_CUH

#include "attention_mma_backward_tiles.cuh"

/* ---- Weights -------------------------------------------------------------------- */

/* lse (or delta, with `second`) of the queries of fragment n's columns. */
template <typename S>
DEVICE float2
numbers_of(smem base, int stage, int n, int second)
{
    const int at = (stage * 2 + second) * S::STREAMED + fragment_column(n, 0);

    return ld_shared_2f32(base + S::NUMBERS_AT + at * 4);
}

/* Weights become 0 where a query may not look. */
template <typename S>
DEVICE void
bound_weights(mma_scores<S> *s, const tfast_attention_args &args,
              const mma_backward_block &block, int tile)
{
    const int64_t row = block.first + warp_row<S>() + threadIdx.x % 32 / 4;
    const int64_t column = (int64_t)tile * S::STREAMED;

#pragma unroll
    for (int i = 0; i < (S::KEYS ? S::STREAMED / 4 : 2); i++) { /* a thread's queries */
        const attention_reach reach =
            S::KEYS
                ? reach_of(args, block.h, column + fragment_column(i / 2, i), row, 16)
                : reach_of(args, block.h, row + i * 8, column, S::STREAMED);
#pragma unroll
        for (int j = 0; j < (S::KEYS ? 2 : S::STREAMED / 4); j++) { /* and keys */
            const int r = S::KEYS ? j : i, c = S::KEYS ? i : j;
            const int key = S::KEYS ? r * 8 : fragment_column(c / 2, c);
            if (key < reach.first || key >= reach.end) {
                s->at[c / 2][r * 2 + c % 2] = 0;
            }
        }
    }
}

/* Products become weights. */
template <typename PATH, typename S>
DEVICE void
weigh_step(mma_scores<S> *s, const mma_backward_block &block,
           const mma_backward_thread<PATH, S> &own, int stage)
{
#pragma unroll
    for (int n = 0; n < S::STREAMED / 8; n++) {
        float2 lse = make_float2(own.lse[0], own.lse[1]);
        if constexpr (S::KEYS) {
            lse = numbers_of<S>(own.base, stage, n, 0);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float of = (S::KEYS ? i % 2 : i / 2) == 0 ? lse.x : lse.y;
            s->at[n][i] = ex2_approx(fused(s->at[n][i], block.unit, of * -1.44269504f));
        }
    }
}

/* The same with options and bounds. With softcap `slope` becomes the derivative. */
template <typename PATH, typename S>
DEVICE void
weigh_step_with_options(mma_scores<S> *s, mma_scores<S> *slope,
                        const tfast_attention_args &args,
                        const mma_backward_block &block, const attention_head &h,
                        const mma_backward_thread<PATH, S> &own, int tile, int stage)
{
    [[maybe_unused]] constexpr int AT_ONCE = mma_scores<S>::AT_ONCE;
    const int64_t row = block.first + warp_row<S>() + threadIdx.x % 32 / 4;
    const int64_t column = (int64_t)tile * S::STREAMED;
    const int64_t first = S::KEYS ? row : column; /* the keys' */
    attention_reach reach[2];
    float lse[2] = {own.lse[0], own.lse[1]};

    for (int r = 0; !S::KEYS && r < 2; r++) {
        reach[r] = reach_of(args, h, row + r * 8, first, S::STREAMED);
    }
#pragma unroll(AT_ONCE)
    for (int n = 0; n < S::STREAMED / 8; n++) {
        if constexpr (S::KEYS) {
            const float2 two = numbers_of<S>(own.base, stage, n, 0);
            lse[0] = two.x;
            lse[1] = two.y;
            for (int c = 0; c < 2; c++) {
                reach[c] = reach_of(args, h, column + fragment_column(n, c), first, 16);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i / 2, c = i % 2, which = S::KEYS ? c : r;
            const int64_t query =
                S::KEYS ? column + fragment_column(n, c) : row + r * 8;
            const int key = S::KEYS ? r * 8 : fragment_column(n, c);
            const bool allowed = reach[which].first <= key && key < reach[which].end;
            float *p = &s->at[0][i]; /* fragments take turns: see turn_fragments() */
            attention_rule<float> rule = rule_of<float>(args, h);
            rule.scale = block.unit;
            const float score = allowed ? score_of(&slope->at[0][i], *p, args, h, rule,
                                                   query, first + key)
                                        : -INFINITY;
            *p = score == -INFINITY ? 0 : exponential(score - lse[which]);
        }
        turn_fragments(s, 0);
        turn_fragments(s, 2);
        turn_fragments(slope, 0);
        turn_fragments(slope, 2);
    }
}

/* Makes the weights of far rows sum to 1, in blocks that own keys: see share_of().
 * Those that own queries have no need to before their sums are done. */
template <typename PATH, typename S>
DEVICE void
share_step(mma_scores<S> *s, const mma_call &call, const attention_head &h,
           const mma_backward_thread<PATH, S> &own, int tile, int stage)
{
    const int fragment = (int)threadIdx.x / 4 % (S::STREAMED / 8);
    const float2 two = numbers_of<S>(own.base, stage, fragment, 0);

    if (call.shares == nullptr || !__any_sync(~0u, is_far(two.x) || is_far(two.y))) {
        return;
    }
#pragma unroll
    for (int i = 0; i < S::STREAMED / 4; i++) {
        const int64_t query =
            (int64_t)tile * S::STREAMED + fragment_column(i / 2, i % 2);
        const float share = share_at(call, h, query);
        s->at[i / 2][i % 2] *= share;
        s->at[i / 2][i % 2 + 2] *= share;
    }
}

/* Which of a thread's elements dropout keeps: bit 4 n + i for element i of fragment n.
 */
template <typename S>
DEVICE uint32_t
kept_elements(const tfast_attention_args &args, const mma_backward_block &block,
              const attention_head &h, int tile)
{
    const attention_dropout dropout = dropout_of(args, h);
    const int64_t row = block.first + warp_row<S>() + threadIdx.x % 32 / 4;
    uint32_t kept = 0;

#pragma unroll 1
    for (int i = 0; i < S::STREAMED / 8; i++) { /* a block of 16 x 16's columns by 2 */
        const int64_t column =
            (int64_t)tile * S::STREAMED + fragment_column(i / 2 * 2, i % 2);
        uint32_t word[4];
        dropout_words(word, dropout, S::KEYS ? column : row, S::KEYS ? row : column);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int r = e / 2 * 8, c = (int)threadIdx.x % 4 * 2 + i % 2 + e % 2 * 8;
            const int g = (int)threadIdx.x % 32 / 4 + r;
            const bool is = is_kept(word, dropout, S::KEYS ? c : g, S::KEYS ? g : c);
            const int fragment = i / 2 * 2 + e % 2, element = e / 2 * 2 + i % 2;
            kept |= (uint32_t)is << (fragment * 4 + element);
        }
    }
    return kept;
}

/* Products of dout and v become gradients of what the softmax takes. */
template <typename T, typename PATH, typename S>
DEVICE void
finish_step(mma_scores<S> *e, const mma_scores<S> &p,
            const mma_backward_thread<PATH, S> &own, const mma_backward_block &block,
            int stage, uint32_t kept)
{
#pragma unroll
    for (int n = 0; n < S::STREAMED / 8; n++) {
        float2 two = make_float2(0, 0);
        if constexpr (S::KEYS) {
            two = numbers_of<S>(own.base, stage, n, 1);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float delta =
                S::KEYS ? (i % 2 == 0 ? two.x : two.y) : own.delta[i / 2];
            float x = e->at[n][i];
            if constexpr (S::OPTIONS || T::SCALED) {
                x *= S::KEYS || !T::SCALED ? block.product : own.product[i / 2];
                x = (kept >> (n * 4 + i) & 1) != 0 ? x : 0;
            }
            e->at[n][i] = p.at[n][i] == 0 ? 0 : p.at[n][i] * (x - delta);
        }
    }
}

/* These become gradients of products of query and key, but for scale. A slope may be
 * NaN where the gradient is 0. */
template <typename S>
DEVICE void
bend_step(mma_scores<S> *e, const mma_scores<S> &slope,
          const tfast_attention_args &args)
{
#pragma unroll
    for (int i = 0; i < S::STREAMED / 2; i++) {
        float *x = &e->at[i / 4][i % 4];
        *x = args.softcap != 0 && *x != 0 ? *x * slope.at[i / 4][i % 4] : *x;
    }
}

#endif
