/* The words of Philox (see ../attention_dropout.h) for eight neighbouring pairs of
 * queries at once. A pair is queries i and i + 8. A quad is keys j, j + 1, j + 8, j + 9
 * (see tfast_attention() in tfast.h). Include it after a vocabulary, vec_SET_words.h:
 * csrc/simd/SET_words.c compiles it once for both arithmetic types.
 *
 * The counter is (pair of queries, quad of keys, head, 0). After two rounds each word
 * depends on the pair alone, on the quad alone, or is the exclusive or of two such
 * numbers, and one product of the third round depends on the pair alone. These parts
 * are computed once for each pair and each quad, which leaves 15 of 20 products for
 * each combination of a pair and a quad. */
#ifndef PHILOX_H
#define PHILOX_H

#include "philox_row.h"

#define PHILOX_0 0xD2511F53u
#define PHILOX_2 0xCD9E8D57u
enum { PHILOX_ROUNDS = 10 };

typedef struct {
    uint32_t key0[PHILOX_ROUNDS], key1[PHILOX_ROUNDS];
    uint64_t head; /* the product of the head in the first round */
} philox_call;

/* The parts of the third round that depend on eight pairs alone. Only the low 32 bits
 * of each of the eight 64-bit elements of a v8 are used. */
typedef struct {
    v8 word2;   /* before the exclusive or with the quad's */
    v8 mix0;    /* word 0 after the round: this xor the high half of word 2's product */
    v8 mix2;    /* word 2 after the round, before the xor with the quad's word 3 */
    v8 product; /* word 3 after the round */
} philox_pairs;

/* The parts that the second round computes from a quad alone. */
typedef struct {
    uint32_t word2, word3;
} philox_quad;

static philox_call
philox_open(uint64_t seed, uint32_t head)
{
    philox_call call = {.head = (uint64_t)PHILOX_2 * head};

    for (uint32_t i = 0; i < PHILOX_ROUNDS; i++) {
        call.key0[i] = (uint32_t)seed + i * 0x9E3779B9u;
        call.key1[i] = (uint32_t)(seed >> 32) + i * 0xBB67AE85u;
    }
    return call;
}

/* Pairs first .. first + 7. */
static philox_pairs
philox_pairs_of(const philox_call *call, uint32_t first)
{
    const v8 one = v8_mul(v8_count(first), PHILOX_0);
    const v8 two = v8_mul(v8_xor(v8_high(one), v8_set1(call->key1[0])), PHILOX_2);
    const v8 word0 =
        v8_xor(v8_high(two), v8_set1((uint32_t)call->head ^ call->key0[1]));
    const v8 three = v8_mul(word0, PHILOX_0);

    return (philox_pairs){
        .word2 = v8_xor(one, v8_set1(call->key1[1])),
        .mix0 = v8_xor(two, v8_set1(call->key0[2])),
        .mix2 = v8_xor(v8_high(three), v8_set1(call->key1[2])),
        .product = three,
    };
}

static philox_quad
philox_quad_of(const philox_call *call, uint32_t quad)
{
    const uint32_t word0 = (uint32_t)(call->head >> 32) ^ quad ^ call->key0[0];
    const uint64_t two = (uint64_t)PHILOX_0 * word0;

    return (philox_quad){.word2 = (uint32_t)(two >> 32), .word3 = (uint32_t)two};
}

/* The four words of eight pairs with one quad. */
static inline __attribute__((always_inline)) void
philox_combine(uint32_t to[4][PHILOX_PAIRS], const philox_call *call,
               const philox_pairs *pairs, philox_quad quad)
{
    const v8 three = v8_mul(v8_xor(pairs->word2, v8_set1(quad.word2)), PHILOX_2);
    v8 word0 = v8_xor(v8_high(three), pairs->mix0), word1 = three;
    v8 word2 = v8_xor(pairs->mix2, v8_set1(quad.word3)), word3 = pairs->product;

#pragma GCC unroll 10
    for (int i = 3; i < PHILOX_ROUNDS; i++) {
        const v8 first = v8_mul(word0, PHILOX_0), second = v8_mul(word2, PHILOX_2);

        word0 = v8_xor(v8_xor(v8_high(second), word1), v8_set1(call->key0[i]));
        word1 = second;
        word2 = v8_xor(v8_xor(v8_high(first), word3), v8_set1(call->key1[i]));
        word3 = first;
    }
    v8_store(to[0], word0);
    v8_store(to[1], word1);
    v8_store(to[2], word2);
    v8_store(to[3], word3);
}

static void
philox_store(uint32_t to[][4][PHILOX_PAIRS], philox_row row)
{
    const philox_call call = philox_open(row.seed, row.head);
    const philox_pairs pairs = philox_pairs_of(&call, row.first_pair);

    for (int i = 0; i < row.n_quads; i++) {
        philox_combine(to[i], &call, &pairs,
                       philox_quad_of(&call, row.first_quad + (uint32_t)i));
    }
}

#endif
