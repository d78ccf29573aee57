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
