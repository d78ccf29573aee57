/* What the lanes of a warp do together: shuffles, votes, and the matrix instructions.
 * Built without the sanitizers' instrumentation, like fibers.cpp: lanes hand each other
 * values on their stacks, which is the instruction's work and no race of the kernel's.
 */
#include "simt.h"

#include "half.h"

namespace simt {

/* ---- Shuffles and votes ---------------------------------------------------------- */

struct word_in_out {
    uint32_t in, out;
    int from;
};

static word_in_out *
word_of(void **arguments, int lane)
{
    return static_cast<word_in_out *>(arguments[lane]);
}

static void
exchange_words(void **arguments, uint32_t mask)
{
    for (int lane = 0; lane < 32; lane++) {
        if ((mask >> lane & 1) == 0) {
            continue;
        }
        word_in_out *word = word_of(arguments, lane);
        if (word->from < 0 || word->from > 31) {
            continue; /* __shfl_up and __shfl_down past the warp's end: one's own */
        }
        require((mask >> word->from & 1) != 0,
                "a shuffle reads a lane outside its mask");
        word->out = word_of(arguments, word->from)->in;
    }
}

uint32_t
exchange(const char *what, uint32_t mask, uint32_t word, int from)
{
    word_in_out argument = {word, word, from};

    collective(what, mask, &argument, exchange_words);
    return argument.out;
}

static void
collect_votes(void **arguments, uint32_t mask)
{
    uint32_t votes = 0;

    for (int lane = 0; lane < 32; lane++) {
        if ((mask >> lane & 1) != 0) {
            votes |= word_of(arguments, lane)->in << lane;
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        if ((mask >> lane & 1) != 0) {
            word_of(arguments, lane)->out = votes;
        }
    }
}

uint32_t
ballot(uint32_t mask, bool vote)
{
    word_in_out argument = {vote, 0, 0};

    collective("__ballot_sync", mask, &argument, collect_votes);
    return argument.out;
}

/* ---- ldmatrix -------------------------------------------------------------------- */

static uint32_t
half_of(void **arguments, int lane, int column)
{
    const ldmatrix_lane *from = static_cast<ldmatrix_lane *>(arguments[lane]);

    return from->row[column >> 1] >> 16 * (column & 1) & 0xFFFF;
}

/* One wavefront for each row that shares a group of banks, 16 bytes wide. */
static void
count_wavefronts(void **arguments, int matrix)
{
    int hits[8] = {}, worst = 0;

    for (int i = 0; i < 8; i++) {
        const ldmatrix_lane *from =
            static_cast<ldmatrix_lane *>(arguments[matrix * 8 + i]);
        const int count = ++hits[from->address >> 4 & 7];
        worst = count > worst ? count : worst;
    }
    stats.wavefronts += uint64_t(worst);
    stats.ldmatrix++;
}

/* Lane 4 g + t gets row g, columns 2 t and 2 t + 1, of each matrix or of its transpose.
 */
template <bool TRANSPOSED>
static void
deal_rows(void **arguments, uint32_t)
{
    const int matrices = static_cast<ldmatrix_lane *>(arguments[0])->matrices;

    for (int m = 0; m < matrices; m++) {
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane >> 2, t = 2 * (lane & 3), first = m * 8;
            static_cast<ldmatrix_lane *>(arguments[lane])->out[m] =
                TRANSPOSED ? half_of(arguments, first + t, g) |
                                 half_of(arguments, first + t + 1, g) << 16
                           : half_of(arguments, first + g, t) |
                                 half_of(arguments, first + g, t + 1) << 16;
        }
        count_wavefronts(arguments, m);
    }
}

void
ldmatrix_deal(ldmatrix_lane *lane, bool transposed)
{
    if (transposed) {
        collective("ldmatrix.trans", ~0u, lane, deal_rows<true>);
    } else {
        collective("ldmatrix", ~0u, lane, deal_rows<false>);
    }
}

/* ---- mma ------------------------------------------------------------------------- */

/* How many products are summed at a time: 0 for float32's own way. Cards take several
 * at once, which they do not document (Fasi et al., PeerJ Computer Science 7:e330;
 * Khattak and Mikaitis, arXiv:2512.07004): they cut the products and the sum so far off
 * at a number of bits behind the largest one's float32, add them up, and cut the sum
 * off to float32. Few products and no bits behind are the coarsest. */
static int products_at_once, bits_behind;

static float
cut_sum(float c, const float *products, int n)
{
    float largest = std::fabs(c), sum = c;

    for (int i = 0; i < n; i++) {
        largest = std::fmax(largest, std::fabs(products[i]));
        sum += products[i];
    }
    if (sum - sum != 0 || largest == 0) { /* NaN, infinity, zeros */
        return sum;
    }
    const double unit = std::ldexp(1.0, std::ilogb(largest) - 23 - bits_behind);
    int64_t units = int64_t(double(c) / unit), lowest = 1;
    for (int i = 0; i < n; i++) {
        units += int64_t(double(products[i]) / unit);
    }
    while (std::abs(units / lowest) >= 1 << 24) {
        lowest *= 2;
    }
    return float(double(units / lowest * lowest) * unit);
}

/* c += a b for a row of each, of K products. */
template <int K>
static float
sum_products(float c, const float *a, const float (*B)[8], int column)
{
    float products[K];

    for (int k = 0; k < K; k++) {
        products[k] = a[k] * B[k][column];
    }
    for (int k = 0; k < K; k += products_at_once) {
        c = cut_sum(c, products + k, products_at_once);
    }
    return c;
}

/* A is 16 x K: rows g and g + 8 in alternating registers, columns 2 t and 2 t + 1, then
 * + 8. B is K x 8, C is 16 x 8. Products are exact in float32; the order of the sums is
 * ours. */
template <int K, bool BF16>
static void
multiply(void **arguments, uint32_t)
{
    float A[16][K], B[K][8], C[16][8];
    const auto widen = [](uint32_t half) {
        return BF16 ? tfast_from_bf16(uint16_t(half)) : tfast_from_f16(uint16_t(half));
    };

    for (int lane = 0; lane < 32; lane++) {
        const mma_lane *from = static_cast<mma_lane *>(arguments[lane]);
        const int g = lane >> 2, t = 2 * (lane & 3);
        for (int r = 0; r < K / 4; r++) {
            for (int e = 0; e < 2; e++) {
                A[g + (r & 1) * 8][(r >> 1) * 8 + t + e] =
                    widen(from->a[r] >> 16 * e & 0xFFFF);
            }
        }
        for (int r = 0; r < K / 8; r++) {
            for (int e = 0; e < 2; e++) {
                B[r * 8 + t + e][g] = widen(from->b[r] >> 16 * e & 0xFFFF);
            }
        }
        for (int r = 0; r < 4; r++) {
            C[g + (r >> 1) * 8][t + (r & 1)] = from->c[r];
        }
    }
    for (int i = 0; i < 128 && products_at_once > 0; i++) {
        C[i / 8][i % 8] = sum_products<K>(C[i / 8][i % 8], A[i / 8], B, i % 8);
    }
    for (int i = 0; i < 16 && products_at_once == 0; i++) {
        for (int k = 0; k < K; k++) {
            for (int j = 0; j < 8; j++) {
                C[i][j] += A[i][k] * B[k][j];
            }
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int r = 0; r < 4; r++) {
            static_cast<mma_lane *>(arguments[lane])->c[r] =
                C[(lane >> 2) + (r >> 1) * 8][2 * (lane & 3) + (r & 1)];
        }
    }
    stats.mma++;
}

void
mma(mma_lane *lane, int k, bool bf16)
{
    if (k == 8) {
        collective("mma.m16n8k8.f16", ~0u, lane, multiply<8, false>);
    } else if (bf16) {
        collective("mma.m16n8k16.bf16", ~0u, lane, multiply<16, true>);
    } else {
        collective("mma.m16n8k16.f16", ~0u, lane, multiply<16, false>);
    }
}

/* ---- cp.async -------------------------------------------------------------------- */

struct async_copy {
    void *to;
    const void *from;
    int group;
};

/* Copies in flight, oldest first, in a ring: memory that is moved or freed would be
 * seen by the race check, and is no business of the kernel's. */
enum { MOST_COPIES = 128 };
struct async_state {
    async_copy copies[MOST_COPIES];
    unsigned begin, end; /* modulo MOST_COPIES */
    int group;
};

static async_state async_states[1024];

static async_state &
async_of_self()
{
    const dim3 &i = self->index;

    return async_states[(i.z * block_size.y + i.y) * block_size.x + i.x];
}

void
async_issue(void *to, const void *from)
{
    async_state &state = async_of_self();

    require(state.end - state.begin < MOST_COPIES, "too many cp.async copies at once");
    state.copies[state.end++ % MOST_COPIES] = {to, from, state.group};
    stats.async_copies++;
}

void
async_commit()
{
    async_of_self().group++;
}

bool
async_next(int may_remain, void **to, const void **from)
{
    async_state &state = async_of_self();

    const async_copy &oldest = state.copies[state.begin % MOST_COPIES];

    if (state.begin == state.end || oldest.group >= state.group - may_remain) {
        return false;
    }
    *to = oldest.to;
    *from = oldest.from;
    state.begin++;
    return true;
}

void
async_end()
{
    async_state &state = async_of_self();

    require(state.begin == state.end,
            "a thread ends with cp.async copies it never waited for");
    state.group = 0;
}

} // namespace simt

extern "C" __attribute__((visibility("default"))) void
tfast_simt_matrices(uint64_t counts[2])
{
    counts[0] = simt::stats.ldmatrix;
    counts[1] = simt::stats.wavefronts;
}

/* See cut_sum(); 0 products at once for float32's way. */
extern "C" __attribute__((visibility("default"))) void
tfast_simt_sums(int products, int bits)
{
    simt::products_at_once = products;
    simt::bits_behind = bits;
}
