/* Two bounds of attention on the CPU: multiply-adds in registers, and a plain read.
 *
 * Built by peak.py like floor.c, on the OpenMP runtime that torch uses. The multiply-
 * adds are written out, since a compiler may split a chain, spill it or, told by
 * -std=c11, not contract it. 12 chains cover the latency of two units (4 or 5 cycles)
 * and fit the 16 registers of AVX2 with the two factors.
 */
#include <omp.h>
#include <stdint.h>

enum { CHAINS = 12 };

#define EACH_CHAIN(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define DECLARE(i) a##i = factor + (float)i,
#define STEP(i) MULTIPLY_ADD(a##i, factor, addend);
#define SUM(i) sum += a##i;

/* `rounds` multiply-adds in each of the chains; returns a value so that they are used.
 * A chain tends to 1, far from overflow and denormal numbers. */
#define DEFINE_CHAINS(name, lanes, attributes)                                         \
    attributes static float name(int64_t rounds)                                       \
    {                                                                                  \
        typedef float vector __attribute__((vector_size(4 * lanes)));                  \
        vector addend = (vector){0} + 0.001f, factor = (vector){0} + 0.999f;           \
        vector EACH_CHAIN(DECLARE) sum = {0};                                          \
        for (int64_t i = 0; i < rounds; i++) {                                         \
            EACH_CHAIN(STEP)                                                           \
        }                                                                              \
        EACH_CHAIN(SUM)                                                                \
        return sum[0];                                                                 \
    }

/* clang-format off */
#ifdef __x86_64__
#define MULTIPLY_ADD(a, b, c)                                                          \
    __asm__("vfmadd213ps %2, %1, %0" : "+v"(a) : "v"(b), "v"(c))
DEFINE_CHAINS(chains_16, 16, __attribute__((target("avx512f"))))
DEFINE_CHAINS(chains_8, 8, __attribute__((target("avx2,fma"))))
#undef MULTIPLY_ADD
/* Of pairs of bfloat16, as which the factors' halves are taken: two in each lane. */
#define MULTIPLY_ADD(a, b, c)                                                          \
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(a) : "v"(b), "v"(c))
DEFINE_CHAINS(chains_pairs, 16, __attribute__((target("avx512f"))))
#undef MULTIPLY_ADD
#define PIN(a) __asm__("" : "+x"(a))
#elif defined(__aarch64__)
#define PIN(a) __asm__("" : "+w"(a))
#else
#define PIN(a) (void)(a)
#endif
/* What every machine has: 4 lanes, a multiplication and an addition. */
#define MULTIPLY_ADD(a, b, c) do { a = a * b + c; PIN(a); } while (0)
DEFINE_CHAINS(chains_4, 4, )
/* clang-format on */

typedef float (*chains_function)(int64_t);

static chains_function
choose(int lanes)
{
#ifdef __x86_64__
    if (lanes == 32 && __builtin_cpu_supports("avx512bf16")) {
        return chains_pairs;
    }
    if (lanes == 16 && __builtin_cpu_supports("avx512f")) {
        return chains_16;
    }
    if (lanes == 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return chains_8;
    }
#endif
    return lanes == 4 ? chains_4 : 0;
}

/* At least `multiply_adds` of them on `lanes` lanes, 32 of them in pairs. Returns how
 * many threads took part, or -1 for lanes that this machine lacks. */
int
peak_multiply_adds(int64_t multiply_adds, int lanes, int threads, float *sink)
{
    chains_function chains = choose(lanes);
    if (!chains) {
        return -1;
    }
    int used = 0;
    float sum = 0;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
    {
        int64_t parts = omp_get_num_threads(), at_once = parts * lanes * CHAINS;
        sum += chains((multiply_adds + at_once - 1) / at_once);
        if (omp_get_thread_num() == 0) {
            used = (int)parts;
        }
    }
    *sink = sum;
    return used;
}

enum { STREAMS = 4 };

/* The machine fetches ahead in each stream by itself, so a core that reads several at
 * once has more on its way. The last words of all follow one by one. */
static uint64_t
read_words(const uint64_t *words, int64_t n)
{
    int64_t stretch = n / STREAMS / 8 * 8;
    uint64_t all[8] = {0};
    for (int64_t i = 0; i < stretch; i += 8) {
        for (int stream = 0; stream < STREAMS; stream++) {
            const uint64_t *line = words + stream * stretch + i;
            for (int k = 0; k < 8; k++) {
                all[k] |= line[k];
            }
        }
    }
    for (int64_t i = stretch * STREAMS; i < n; i++) {
        all[0] |= words[i];
    }
    return all[0] | all[1] | all[2] | all[3] | all[4] | all[5] | all[6] | all[7];
}

/* Reads all of `n_arrays` arrays of `words[i]` 64-bit words, every thread a piece of
 * each. Returns how many threads took part. */
int
peak_read(const uint64_t *const *arrays, const int64_t *words, int64_t n_arrays,
          int threads, uint64_t *sink)
{
    int used = 0;
    uint64_t all = 0;
#pragma omp parallel num_threads(threads) reduction(| : all)
    {
        int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        for (int64_t k = 0; k < n_arrays; k++) {
            int64_t begin = words[k] * part / parts;
            all |= read_words(arrays[k] + begin, words[k] * (part + 1) / parts - begin);
        }
        if (part == 0) {
            used = (int)parts;
        }
    }
    *sink = all;
    return used;
}
