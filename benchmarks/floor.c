/* The floor of an optimizer step: the same bytes, moved as plainly as possible.
 *
 * A tensor has several arrays: parameter, gradient, state. Blocks of its elements are
 * taken from one array after the other, and read, added 0 to, or overwritten with 0.
 * `zero` is 0 at run time, so arrays that are updated keep their values, but the
 * compiler cannot know. All tensors are one range of elements, cut into one piece a
 * thread, in one parallel region of the OpenMP runtime that torch uses: a second pool
 * of threads would contend with torch's, whose idle workers spin. Built by floor.py.
 */
#include <omp.h>
#include <stdint.h>

enum { READ, UPDATE, WRITE };
enum {
    BLOCK = 512, /* elements: all arrays' bytes fit into the first-level cache */
    MOST_ARRAYS = 8
};

typedef struct {
    uint8_t *data;
    int64_t bytes;
    int64_t how;
} floor_array;

/* Touches bytes begin .. end - 1 of an array; returns what it has read. */
static uint8_t
touch(const floor_array *array, int64_t begin, int64_t end, uint8_t zero)
{
    uint8_t *bytes = array->data, all = 0;

    if (array->how == READ) {
        for (int64_t i = begin; i < end; i++) {
            all |= bytes[i];
        }
    } else if (array->how == UPDATE) {
        for (int64_t i = begin; i < end; i++) {
            bytes[i] = (uint8_t)(bytes[i] + zero);
        }
    } else {
        for (int64_t i = begin; i < end; i++) {
            bytes[i] = zero;
        }
    }
    return all;
}

/* Touches elements first .. last - 1 of a tensor's arrays. */
static uint8_t
touch_tensor(const floor_array *arrays, int64_t n_arrays, int64_t numel, int64_t first,
             int64_t last, uint8_t zero)
{
    int64_t at[MOST_ARRAYS], end[MOST_ARRAYS], step[MOST_ARRAYS];
    uint8_t all = 0;

    for (int64_t k = 0; k < n_arrays; k++) {
        at[k] = arrays[k].bytes * first / numel;
        end[k] = arrays[k].bytes * last / numel;
        step[k] = arrays[k].bytes * BLOCK / numel;
    }
    for (; first < last; first += BLOCK) {
        for (int64_t k = 0; k < n_arrays; k++) {
            const int64_t to = last - first <= BLOCK ? end[k] : at[k] + step[k];

            all |= touch(&arrays[k], at[k], to, zero);
            at[k] = to;
        }
    }
    return all;
}

/* Touches elements begin .. end - 1 of the range that all tensors form. */
static uint8_t
touch_range(const floor_array *arrays, const int64_t *numels, int64_t n_tensors,
            int64_t n_arrays, int64_t begin, int64_t end, uint8_t zero)
{
    uint8_t all = 0;
    int64_t start = 0;

    for (int64_t t = 0; t < n_tensors && start < end; start += numels[t], t++) {
        const int64_t first = begin > start ? begin - start : 0;
        const int64_t last = end - start < numels[t] ? end - start : numels[t];

        if (first < last) {
            all |= touch_tensor(arrays + t * n_arrays, n_arrays, numels[t], first, last,
                                zero);
        }
    }
    return all;
}

/* Touches arrays[t * n_arrays + k], the k-th of tensor t. Returns how many threads took
 * part, or -1 for too many arrays; *sink keeps what is read from being left out. */
int
floor_run(const floor_array *arrays, const int64_t *numels, int64_t n_tensors,
          int64_t n_arrays, int threads, int zero, uint8_t *sink)
{
    int64_t total = 0;
    int used = 0;
    uint8_t all = 0;

    if (n_arrays > MOST_ARRAYS) {
        return -1;
    }
    for (int64_t t = 0; t < n_tensors; t++) {
        total += numels[t];
    }
#pragma omp parallel num_threads(threads) reduction(| : all)
    {
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        /* Cut at multiples of 64 elements: no two threads share a cache line, but at
         * a tensor's ends. */
        const int64_t grain = (total / parts + 63) / 64 * 64;
        const int64_t begin = part * grain;
        const int64_t end = part + 1 == parts ? total : begin + grain;

        all |=
            touch_range(arrays, numels, n_tensors, n_arrays, begin, end, (uint8_t)zero);
        if (part == 0) {
            used = (int)parts;
        }
    }
    *sink = all;
    return used;
}
