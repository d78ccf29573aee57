/* Attention: dropout's random words (see attention_dropout.h), those of eight
 * neighbouring pairs of queries at once.
 *
 * The counter is (pair of queries, quad of keys, head, 0). After two rounds each word
 * is a number of the pair, a number of the quad, or the exclusive or of two such, and
 * one of the third round's products is of the pair alone. So pairs and quads are gone
 * through once each, and of the 20 products 15 are left for every one with every
 * other. */
#define PHILOX_0 0xD2511F53u
#define PHILOX_2 0xCD9E8D57u
enum { PHILOX_ROUNDS = 10, PHILOX_PAIRS = 8 };

typedef struct {
    uint32_t key0[PHILOX_ROUNDS], key1[PHILOX_ROUNDS];
    uint64_t head; /* the first round's product of it */
} philox_call;

/* Of eight pairs: what the third round begins with or makes of it. Below, `high` is a
 * product's high half and the low half of a word is all of it that counts. */
typedef struct {
    v8 word2;   /* to be combined with the quad's */
    v8 mix0;    /* word 0 is this and the high half of the product of word 2 */
    v8 mix2;    /* word 2, but for the quad's */
    v8 product; /* word 3 */
} philox_pairs;

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
philox_words(uint32_t to[4][PHILOX_PAIRS], const philox_call *call,
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
