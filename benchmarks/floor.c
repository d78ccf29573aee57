/* The floor of an optimizer step: a plain read-modify-write of the same bytes.
 *
 * Reads param, grad, exp_avg, exp_avg_sq and writes param, exp_avg, exp_avg_sq, with
 * one multiply and add each and nothing else. `factor` is 0 at run time, so the arrays
 * keep their values, but the compiler cannot know. All tensors are one range of
 * elements, cut into one piece a thread, in one parallel region of the OpenMP runtime
 * that torch uses: a second pool of threads would contend with torch's, whose idle
 * workers spin. Built by floor.py: cc -O3 -march=native -fopenmp -shared.
 */
#include <omp.h>
#include <stdint.h>

typedef struct {
    void *param, *grad, *exp_avg, *exp_avg_sq;
    int64_t numel;
} floor_slot;

/* One stretch of one tensor; P holds param and grad, S the two states. */
#define DEFINE_TOUCH(name, P, S)                                                       \
    static void name(const floor_slot *slot, int64_t begin, int64_t end, int factor)   \
    {                                                                                  \
        P *restrict p = slot->param;                                                   \
        const P *restrict g = slot->grad;                                              \
        S *restrict m = slot->exp_avg;                                                 \
        S *restrict v = slot->exp_avg_sq;                                              \
        const P c = (P)factor;                                                         \
        for (int64_t i = begin; i < end; i++) {                                        \
            P x = (P)(g[i] * c);                                                       \
            p[i] = (P)(p[i] + x);                                                      \
            m[i] = (S)(m[i] + x);                                                      \
            v[i] = (S)(v[i] + x);                                                      \
        }                                                                              \
    }

DEFINE_TOUCH(touch_4_4, float, float)
DEFINE_TOUCH(touch_8_8, double, double)
DEFINE_TOUCH(touch_2_2, uint16_t, uint16_t)
DEFINE_TOUCH(touch_2_4, uint16_t, uint32_t)

typedef void (*touch_function)(const floor_slot *, int64_t, int64_t, int);

static touch_function
choose(int param_size, int state_size)
{
    if (param_size == 4 && state_size == 4) {
        return touch_4_4;
    }
    if (param_size == 8 && state_size == 8) {
        return touch_8_8;
    }
    if (param_size == 2 && state_size == 2) {
        return touch_2_2;
    }
    return param_size == 2 && state_size == 4 ? touch_2_4 : 0;
}

/* Touches elements begin..end of the range that all slots form. */
static void
touch_range(touch_function touch, const floor_slot *slots, int64_t n_slots,
            int64_t begin, int64_t end, int factor)
{
    int64_t start = 0;
    for (int64_t i = 0; i < n_slots && start < end; i++) {
        int64_t numel = slots[i].numel;
        int64_t first = begin > start ? begin - start : 0;
        int64_t last = end - start < numel ? end - start : numel;
        if (first < last) {
            touch(&slots[i], first, last, factor);
        }
        start += numel;
    }
}

/* Returns how many threads took part, or -1 for sizes that it does not know. */
int
floor_run(const floor_slot *slots, int64_t n_slots, int param_size, int state_size,
          int threads, int factor)
{
    touch_function touch = choose(param_size, state_size);
    if (!touch) {
        return -1;
    }
    int64_t total = 0;
    for (int64_t i = 0; i < n_slots; i++) {
        total += slots[i].numel;
    }
    int used = 0;
#pragma omp parallel num_threads(threads)
    {
        int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        /* Cut at multiples of 64 elements: no two threads share a cache line, but at
         * a tensor's ends. */
        int64_t grain = (total / parts + 63) / 64 * 64;
        int64_t begin = part * grain;
        int64_t end = part + 1 == parts ? total : begin + grain;
        touch_range(touch, slots, n_slots, begin, end, factor);
        if (part == 0) {
            used = (int)parts;
        }
    }
    return used;
}

/* ---- The floor of AMP: a pass that reads the gradients, and one that updates ----- */

typedef struct {
    float *param, *grad, *exp_avg, *exp_avg_sq, *ema;
    uint16_t *copy;
    int64_t numel;
} floor_amp_slot;

static uint32_t
read_grad(const floor_amp_slot *slot, int64_t begin, int64_t end)
{
    const uint32_t *restrict bits = (const uint32_t *)slot->grad;
    uint32_t all = 0;
    for (int64_t i = begin; i < end; i++) {
        all |= bits[i];
    }
    return all;
}

/* The second pass; what a slot lacks is left out. Without a param it is clipping. */
static void
touch_amp(const floor_amp_slot *slot, int64_t begin, int64_t end, int factor, int zero)
{
    const float c = (float)factor;
    float *restrict p = slot->param, *restrict g = slot->grad, *restrict e = slot->ema;
    float *restrict m = slot->exp_avg, *restrict v = slot->exp_avg_sq;
    uint16_t *restrict copy = slot->copy;
    /* Blocks stay in the first-level cache between the loops. */
    for (int64_t start = begin; start < end; start += 512) {
        int64_t stop = end - start < 512 ? end : start + 512;
        for (int64_t i = start; p && i < stop; i++) {
            float x = g[i] * c;
            p[i] += x;
            m[i] += x;
            v[i] += x;
        }
        for (int64_t i = start; e && i < stop; i++) {
            e[i] += p[i] * c;
        }
        for (int64_t i = start; copy && i < stop; i++) {
            copy[i] = (uint16_t)(p[i] * c);
        }
        for (int64_t i = start; (zero || !p) && i < stop; i++) {
            g[i] = g[i] * (1 - c);
        }
    }
}

/* The part of a slot that lies in begin..end of the range that all slots form. */
static uint32_t
amp_range(const floor_amp_slot *slots, int64_t n_slots, int64_t begin, int64_t end,
          int factor, int zero, int second)
{
    uint32_t all = 0;
    int64_t start = 0;
    for (int64_t i = 0; i < n_slots && start < end; i++) {
        int64_t numel = slots[i].numel;
        int64_t first = begin > start ? begin - start : 0;
        int64_t last = end - start < numel ? end - start : numel;
        if (first < last && second) {
            touch_amp(&slots[i], first, last, factor, zero);
        } else if (first < last) {
            all |= read_grad(&slots[i], first, last);
        }
        start += numel;
    }
    return all;
}

/* The pass that reads, and the one that writes unless `read_only`. Returns how many
 * threads took part; *sink keeps the first pass from being removed. */
int
floor_amp_run(const floor_amp_slot *slots, int64_t n_slots, int threads, int factor,
              int zero, int read_only, uint32_t *sink)
{
    int64_t total = 0;
    int used = 0;
    uint32_t all = 0;
    for (int64_t i = 0; i < n_slots; i++) {
        total += slots[i].numel;
    }
#pragma omp parallel num_threads(threads) reduction(| : all)
    {
        int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        int64_t grain = (total / parts + 63) / 64 * 64;
        int64_t begin = part * grain;
        int64_t end = part + 1 == parts ? total : begin + grain;
        all |= amp_range(slots, n_slots, begin, end, factor, zero, 0);
#pragma omp barrier
        if (!read_only) {
            amp_range(slots, n_slots, begin, end, factor, zero, 1);
        }
        if (part == 0) {
            used = (int)parts;
        }
    }
    *sink = all;
    return used;
}
