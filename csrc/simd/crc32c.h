/* CRC-32C (Castagnoli). As usual, callers hold the complement of the CRC register, and
 * bits are reflected: the lowest bit of a byte, word or the register is the coefficient
 * of the highest power of x. */
#ifndef CRC32C_H
#define CRC32C_H

#if defined(__AVX512F__)
#    include "crc_avx512.h"
#endif

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE4_2__) && defined(__x86_64__)

static inline uint64_t
crc_word(uint64_t crc, const uint8_t *p)
{
    uint64_t word;

    memcpy(&word, p, sizeof word);
    return __builtin_ia32_crc32di(crc, word);
}

static inline uint64_t
crc_byte(uint64_t crc, const uint8_t *p)
{
    return __builtin_ia32_crc32qi((uint32_t)crc, *p);
}

#else

/* Without a CRC instruction (slicing by 8): crc_table[k][b] is what byte b contributes
 * to the register if k bytes of the 8-byte word follow it. An entry is the exclusive or
 * of the entries of its bits; the macros expand them from the entries of 1, 2 .. 128.
 */
#    define CRC_1(x) x
#    define CRC_2(x, a) CRC_1(x), CRC_1((x) ^ a)
#    define CRC_4(x, a, b) CRC_2(x, a), CRC_2((x) ^ b, a)
#    define CRC_8(x, a, b, c) CRC_4(x, a, b), CRC_4((x) ^ c, a, b)
#    define CRC_16(x, a, b, c, d) CRC_8(x, a, b, c), CRC_8((x) ^ d, a, b, c)
#    define CRC_32(x, a, b, c, d, e) CRC_16(x, a, b, c, d), CRC_16((x) ^ e, a, b, c, d)
#    define CRC_64(x, a, b, c, d, e, f)                                                \
        CRC_32(x, a, b, c, d, e), CRC_32((x) ^ f, a, b, c, d, e)
#    define CRC_128(x, a, b, c, d, e, f, g)                                            \
        CRC_64(x, a, b, c, d, e, f), CRC_64((x) ^ g, a, b, c, d, e, f)
#    define CRC_TABLE(a, b, c, d, e, f, g, h)                                          \
        {                                                                              \
            CRC_128(0u, a, b, c, d, e, f, g), CRC_128(0u ^ h, a, b, c, d, e, f, g)     \
        }

static const uint32_t crc_table[8][256] = {
    CRC_TABLE(0xf26b8303, 0xe13b70f7, 0xc79a971f, 0x8ad958cf, 0x105ec76f, 0x20bd8ede,
              0x417b1dbc, 0x82f63b78),
    CRC_TABLE(0x13a29877, 0x274530ee, 0x4e8a61dc, 0x9d14c3b8, 0x3fc5f181, 0x7f8be302,
              0xff17c604, 0xfbc3faf9),
    CRC_TABLE(0xa541927e, 0x4f6f520d, 0x9edea41a, 0x38513ec5, 0x70a27d8a, 0xe144fb14,
              0xc76580d9, 0x8b277743),
    CRC_TABLE(0xdd45aab8, 0xbf672381, 0x7b2231f3, 0xf64463e6, 0xe964b13d, 0xd725148b,
              0xaba65fe7, 0x52a0c93f),
    CRC_TABLE(0x38116fac, 0x7022df58, 0xe045beb0, 0xc5670b91, 0x8f2261d3, 0x1ba8b557,
              0x37516aae, 0x6ea2d55c),
    CRC_TABLE(0xef306b19, 0xdb8ca0c3, 0xb2f53777, 0x6006181f, 0xc00c303e, 0x85f4168d,
              0x0e045beb, 0x1c08b7d6),
    CRC_TABLE(0x68032cc8, 0xd0065990, 0xa5e0c5d1, 0x4e2dfd53, 0x9c5bfaa6, 0x3d5b83bd,
              0x7ab7077a, 0xf56e0ef4),
    CRC_TABLE(0x493c7d27, 0x9278fa4e, 0x211d826d, 0x423b04da, 0x847609b4, 0x0d006599,
              0x1a00cb32, 0x34019664),
};

static inline uint64_t
crc_word(uint64_t crc, const uint8_t *p)
{
    uint32_t sum = 0;

    for (int k = 0; k < 8; k++) {
        const uint32_t mixed = k < 4 ? (uint32_t)crc >> 8 * k : 0;
        sum ^= crc_table[7 - k][(mixed ^ p[k]) & 255];
    }
    return sum;
}

static inline uint64_t
crc_byte(uint64_t crc, const uint8_t *p)
{
    return crc >> 8 ^ crc_table[0][(crc ^ *p) & 255];
}

#endif

#if defined(__SSE4_2__) && defined(__x86_64__) && defined(__PCLMUL__)

typedef long long crc_pair __attribute__((vector_size(16)));

/* The word to xor into the next 8 bytes of the message so that they add crc * x^n to
 * the register, for power = x^(n - 33): a product of reflected numbers has an extra
 * factor x, and the crc32 instruction multiplies its word by x^32. */
static inline uint64_t
crc_times(uint64_t crc, uint64_t power)
{
    const crc_pair a = {(long long)crc, 0}, b = {(long long)power, 0};

    return (uint64_t)__builtin_ia32_pclmulqdq128(a, b, 0)[0];
}

/* Three adjacent blocks of `words` words at once: three independent chains hide the
 * latency of the crc32 instruction (3 cycles, one may start per cycle). `one_block` and
 * `two_blocks` are the powers (see crc_times()) that move a CRC one or two blocks on.
 */
static inline uint64_t
crc_three(uint64_t crc, const uint8_t *p, int words, uint64_t one_block,
          uint64_t two_blocks)
{
    const uint8_t *second = p + 8 * words, *third = second + 8 * words;
    uint64_t crc2 = 0, crc3 = 0, last;
    int at = 0;

    for (; at < 8 * words - 8; at += 8) {
        crc = crc_word(crc, p + at);
        crc2 = crc_word(crc2, second + at);
        crc3 = crc_word(crc3, third + at);
    }
    crc = crc_word(crc, p + at);
    crc2 = crc_word(crc2, second + at);
    memcpy(&last, third + at, sizeof last);
    last ^= crc_times(crc, two_blocks) ^ crc_times(crc2, one_block);
    return __builtin_ia32_crc32di(crc3, last);
}

enum { CRC_LEAST_WORDS = 8, CRC_MOST_WORDS = 256 };

/* Processes triples of blocks, large ones first; advances *p, and sets *bytes to the
 * rest. */
static inline uint64_t
crc_blocks(uint64_t crc, const uint8_t **p, size_t *bytes)
{
    /* x^(64 * words - 33) for 8, 16 .. 512 words; powers[5] is that of 256 */
    static const uint32_t powers[] = {0x9e4addf8, 0x0d3b6092, 0xb9e02b86, 0xdd7e3b0c,
                                      0x170076fa, 0xa51b6135, 0x82f89c77};
    int i = 5;

    for (int words = CRC_MOST_WORDS; words >= CRC_LEAST_WORDS; words /= 2, i--) {
        const size_t length = (size_t)words * 24;

        for (; *bytes >= length; *bytes -= length, *p += length) {
            crc = crc_three(crc, *p, words, powers[i], powers[i + 1]);
        }
    }
    return crc;
}

#else

static inline uint64_t
crc_blocks(uint64_t crc, const uint8_t **p, size_t *bytes)
{
    (void)p;
    (void)bytes;
    return crc;
}

#endif

static uint32_t
graph_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    uint64_t state = crc ^ 0xffffffffu;

#if defined(__AVX512F__)
    state = crc_fold(state, &p, &bytes);
#endif
    state = crc_blocks(state, &p, &bytes);
    for (; bytes >= 8; bytes -= 8, p += 8) {
        state = crc_word(state, p);
    }
    for (; bytes > 0; bytes--, p++) {
        state = crc_byte(state, p);
    }
    return (uint32_t)state ^ 0xffffffffu;
}

#endif
