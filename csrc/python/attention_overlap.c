/* Whether the arrays of one call share elements. Exact for arrays that lie apart or in
 * the same regular pattern, as q, k and v in one packed array do; what cannot be told
 * counts as shared. */
#include "attention_call.h"

/* An array's places in bytes, without dimensions of size 1; strides are positive. */
typedef struct {
    uintptr_t first, end; /* end: one past the last byte */
    uintptr_t size;       /* of an element */
    int ndim;
    uintptr_t strides[PY_MAX_DIMS], steps[PY_MAX_DIMS]; /* steps: size - 1 */
} places;

static void
find_places(const py_array *array, places *found)
{
    const int64_t size = py_dtype_size(array->dtype);

    found->size = (uintptr_t)size;
    found->first = (uintptr_t)array->data;
    found->end = found->first + found->size;
    found->ndim = 0;
    for (int d = 0; d < array->ndim; d++) {
        const int64_t stride = array->strides[d] * size;
        const uintptr_t step = (uintptr_t)(stride < 0 ? -stride : stride);
        const uintptr_t steps = (uintptr_t)(array->shape[d] - 1);

        if (steps == 0) {
            continue;
        }
        if (stride < 0) {
            found->first -= step * steps;
        } else {
            found->end += step * steps;
        }
        found->strides[found->ndim] = step;
        found->steps[found->ndim++] = steps;
    }
}

/* How many bytes, from its first on, an array takes up of each `period`. */
static uintptr_t
width_in(const places *array, uintptr_t period)
{
    uintptr_t width = array->size;

    for (int d = 0; d < array->ndim; d++) {
        if (array->strides[d] % period != 0) {
            width += array->strides[d] * array->steps[d];
        }
    }
    return width;
}

static bool
apart_in(const places *a, const places *b, uintptr_t period)
{
    const uintptr_t width_a = width_in(a, period), width_b = width_in(b, period);
    const uintptr_t ahead = (b->first % period + period - a->first % period) % period;

    return ahead >= width_a && ahead + width_b <= period;
}

static bool
share(const places *a, const places *b)
{
    if (a->end <= b->first || b->end <= a->first) {
        return false;
    }
    for (int d = 0; d < a->ndim; d++) {
        if (a->strides[d] > 0 && apart_in(a, b, a->strides[d])) {
            return false;
        }
    }
    return true;
}

/* Whether two indices may mean one element: each stride must reach past all that the
 * smaller ones cover. */
static bool
shares_with_itself(const places *array)
{
    for (int d = 0; d < array->ndim; d++) {
        uintptr_t covered = array->size;

        for (int smaller = 0; smaller < array->ndim; smaller++) {
            if (array->strides[smaller] < array->strides[d] ||
                (array->strides[smaller] == array->strides[d] && smaller < d)) {
                covered += array->strides[smaller] * array->steps[smaller];
            }
        }
        if (array->strides[d] < covered) {
            return true;
        }
    }
    return false;
}

int
py_attention_check_overlap(const py_attention_call *call)
{
    places written, other;

    for (int i = 0; i < call->n; i++) {
        const py_argument argument = {call->names[i], -1};

        if (!call->written[i] || call->arrays[i].numel == 0) {
            continue;
        }
        find_places(&call->arrays[i], &written);
        if (shares_with_itself(&written)) {
            return py_argument_error(PyExc_ValueError, argument,
                                     "must not overlap itself");
        }
        for (int j = 0; j < call->n; j++) {
            if (j == i || call->arrays[j].numel == 0) {
                continue;
            }
            find_places(&call->arrays[j], &other);
            if (share(&written, &other)) {
                return py_argument_error(PyExc_ValueError, argument,
                                         "must not overlap %s", call->names[j]);
            }
        }
    }
    return 0;
}
