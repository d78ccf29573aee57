/* _core.gemm: any arrays of at least two dimensions. */
#include "core.h"

#include <stdint.h>

/* Of one call: out, a, b and the scratch, borrowed until its end. */
enum { OUT, A, B, SCRATCH, N_ARRAYS };
static const char *const names[N_ARRAYS] = {"out", "a", "b", "scratch's array"};

typedef struct {
    py_state *state;
    py_array arrays[N_ARRAYS];
    int n;
    PyObject *scratch; /* what the caller's function made: a reference, or NULL */
} borrowed;

/* Sets the exception "*name* must *rule*, got shape *shape*" and returns -1. */
static int
wrong(const borrowed *of, int which, const char *rule)
{
    char text[PY_SHAPE_TEXT];

    py_shape_text(of->arrays[which].ndim, of->arrays[which].shape, text, sizeof text);
    return py_argument_error(PyExc_ValueError, (py_argument){names[which], -1},
                             "must %s, got shape %s", rule, text);
}

static int
borrow(borrowed *of, PyObject *object, int which, int how)
{
    const py_argument argument = {names[which], -1};

    if (py_borrow(of->state, object, argument, how, &of->arrays[which]) < 0) {
        return -1;
    }
    of->n++;
    return 0;
}

static void
release(borrowed *of)
{
    while (of->n > 0) {
        py_release(&of->arrays[--of->n]);
    }
    Py_CLEAR(of->scratch);
}

/* ---- Shapes and strides ---------------------------------------------------------- */

/* The dimensions ahead of the last two, as one: its stride, 0 where there is none. */
static int
take_batch(const borrowed *of, int which, int64_t *stride)
{
    const py_array *array = &of->arrays[which];
    int64_t next = -1;

    *stride = 0;
    for (int d = array->ndim - 3; d >= 0; d--) {
        if (array->shape[d] == 1) {
            continue;
        }
        if (next >= 0 && array->strides[d] != next) {
            return wrong(of, which, "have one stride for all items of the batch");
        }
        if (next < 0) {
            *stride = array->strides[d];
        }
        next = array->strides[d] * array->shape[d];
    }
    return 0;
}

static int
take_matrix(const borrowed *of, int which, tfast_gemm_matrix *matrix)
{
    const py_array *array = &of->arrays[which];
    const int64_t rows = array->shape[array->ndim - 2];
    const int64_t columns = array->shape[array->ndim - 1];

    matrix->data = array->data;
    matrix->row = columns > 1 ? columns : 1; /* where there is no next row to find */
    matrix->batch = 0;
    if (array->numel == 0) {
        return 0;
    }
    if (rows > 1) {
        matrix->row = array->strides[array->ndim - 2];
    }
    if (columns > 1 && array->strides[array->ndim - 1] != 1) {
        return wrong(of, which, "have rows without gaps between elements");
    }
    return take_batch(of, which, &matrix->batch);
}

/* a and b have out's items, or one matrix for all of them. */
static int
check_items(const borrowed *of, int which)
{
    const py_array *out = &of->arrays[OUT], *array = &of->arrays[which];

    if (array->ndim == 2) {
        return 0;
    }
    for (int d = 0; array->ndim == out->ndim && d < out->ndim - 2; d++) {
        if (array->shape[d] != out->shape[d]) {
            return wrong(of, which, "have out's batch, or two dimensions");
        }
    }
    return array->ndim == out->ndim
               ? 0
               : wrong(of, which, "have out's batch, or two dimensions");
}

static int
take_sizes(const borrowed *of, tfast_gemm_args *args)
{
    const py_array *out = &of->arrays[OUT], *a = &of->arrays[A], *b = &of->arrays[B];
    const int64_t *shape_a = a->shape + a->ndim - 2, *shape_b = b->shape + b->ndim - 2;

    args->m = out->shape[out->ndim - 2];
    args->n = out->shape[out->ndim - 1];
    args->k = shape_a[!args->transpose_a];
    args->batch = 1;
    for (int d = 0; d < out->ndim - 2; d++) {
        args->batch *= out->shape[d];
    }
    if (shape_a[args->transpose_a] != args->m) {
        return wrong(of, A, "have out's rows");
    }
    if (shape_b[!args->transpose_b] != args->n) {
        return wrong(of, B, "have out's columns");
    }
    if (shape_b[args->transpose_b] != args->k) {
        return wrong(of, B, "have as many rows as a has columns");
    }
    return 0;
}

/* ---- What is shared -------------------------------------------------------------- */

/* One past the last byte. Strides are not negative. */
static uintptr_t
end_of(const py_array *array)
{
    int64_t last = 0;

    for (int d = 0; d < array->ndim; d++) {
        last += (array->shape[d] - 1) * array->strides[d];
    }
    return (uintptr_t)array->data +
           (uintptr_t)((last + 1) * py_dtype_size(array->dtype));
}

/* Arrays that interleave count as shared. */
static int
check_apart(const borrowed *of, int written, int which)
{
    const py_array *out = &of->arrays[written], *array = &of->arrays[which];
    const py_argument argument = {names[written], -1};

    if (out->numel == 0 || array->numel == 0 || end_of(out) <= (uintptr_t)array->data ||
        end_of(array) <= (uintptr_t)out->data) {
        return 0;
    }
    return py_argument_error(PyExc_ValueError, argument, "must not overlap %s",
                             names[which]);
}

static int
check_kind(const borrowed *of, int which, int dtype)
{
    const py_array *out = &of->arrays[OUT], *array = &of->arrays[which];
    const py_argument argument = {names[which], -1};

    if (array->dtype != dtype) {
        return py_argument_error(PyExc_TypeError, argument, "must be %s, got %s",
                                 py_dtype_name(dtype), py_dtype_name(array->dtype));
    }
    if (array->device.type != out->device.type ||
        array->device.index != out->device.index) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be on the device of out");
    }
    return 0;
}

/* ---- The call -------------------------------------------------------------------- */

static int
take(borrowed *of, tfast_gemm_args *args)
{
    tfast_gemm_matrix *matrices[] = {&args->out, &args->a, &args->b};

    for (int i = OUT; i <= B; i++) {
        if (of->arrays[i].ndim < 2) {
            return wrong(of, i, "have at least two dimensions");
        }
        for (int d = 0; d < of->arrays[i].ndim; d++) {
            if (of->arrays[i].strides[d] < 0) {
                return wrong(of, i, "not have negative strides");
            }
        }
    }
    for (int i = OUT; i <= B; i++) {
        if (check_kind(of, i, of->arrays[OUT].dtype) < 0 || check_items(of, i) < 0 ||
            take_matrix(of, i, matrices[i]) < 0) {
            return -1;
        }
    }
    args->dtype = (uint8_t)of->arrays[OUT].dtype;
    args->device = of->arrays[OUT].device;
    if (take_sizes(of, args) < 0 || check_apart(of, OUT, A) < 0) {
        return -1;
    }
    return check_apart(of, OUT, B);
}

/* The memory that `function` gives for so many float32. */
static int
take_scratch(borrowed *of, PyObject *function, tfast_gemm_args *args)
{
    const int64_t n = TFAST_GEMM_SCRATCH / 4;
    const py_array *array = &of->arrays[SCRATCH];

    of->scratch = PyObject_CallFunction(function, "L", (long long)n);
    if (of->scratch == NULL || borrow(of, of->scratch, SCRATCH, PY_WRITE) < 0 ||
        check_kind(of, SCRATCH, TFAST_F32) < 0) {
        return -1;
    }
    if (array->ndim != 1 || array->numel != n || array->strides[0] != 1) {
        return wrong(of, SCRATCH, "be dense and of the length asked for");
    }
    for (int i = OUT; i <= B; i++) {
        if (check_apart(of, SCRATCH, i) < 0) {
            return -1;
        }
    }
    args->scratch = array->data;
    return 0;
}

PyObject *
py_gemm(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"a",      "b",           "out",         "alpha",
                               "beta",   "transpose_a", "transpose_b", "allow_tf32",
                               "stream", "scratch",     NULL};
    borrowed of = {.state = PyModule_GetState(module)};
    tfast_gemm_args call = {.alpha = 1};
    PyObject *a, *b, *out, *scratch = NULL;
    int transpose_a = 0, transpose_b = 0, allow_tf32 = 0;
    unsigned long long stream = 0;
    tfast_status status = TFAST_OK;
    bool ready;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$ddpppKO:gemm", keywords, &a,
                                     &b, &out, &call.alpha, &call.beta, &transpose_a,
                                     &transpose_b, &allow_tf32, &stream, &scratch)) {
        return NULL;
    }
    call.transpose_a = transpose_a != 0;
    call.transpose_b = transpose_b != 0;
    call.allow_tf32 = allow_tf32 != 0;
    call.stream = (void *)(uintptr_t)stream;
    ready = borrow(&of, out, OUT, PY_WRITE) == 0 && borrow(&of, a, A, 0) == 0 &&
            borrow(&of, b, B, 0) == 0 && take(&of, &call) == 0;
    if (ready && scratch != NULL && scratch != Py_None && of.arrays[OUT].numel > 0) {
        ready = take_scratch(&of, scratch, &call) == 0;
    }
    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        status = tfast_gemm(&call);
        Py_END_ALLOW_THREADS
    }
    release(&of);
    return ready ? py_result(status) : NULL;
}
