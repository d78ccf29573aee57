/* _core.gemm: dense row-major matrices of any framework. */
#include "core.h"

enum { OUT, A, B, ALLOW_TF32, STREAM, N_PARAMETERS };

#define AT(field) PY_AT(tfast_gemm_args, field)
#define MATRIX(name_)                                                                  \
    .name = name_, .kind = PY_ARRAY, .dtype = PY_FIRSTS, .required = true

static const py_parameter parameters[N_PARAMETERS] = {
    [OUT] = {.name = "out",
             .kind = PY_ARRAY,
             .dtype = PY_FLOATS,
             .required = true,
             .written = true},
    [A] = {MATRIX("a")},
    [B] = {MATRIX("b")},
    [ALLOW_TF32] = {.name = "allow_tf32", .kind = PY_FLAG, .at = AT(allow_tf32)},
    [STREAM] = {.name = "stream", .kind = PY_STREAM, .at = AT(stream)},
};

static const uint8_t order[] = {A, B, OUT};
static const py_operation operation = {.name = "gemm",
                                       .parameters = parameters,
                                       .n_parameters = N_PARAMETERS,
                                       .order = order,
                                       .n_order = sizeof order,
                                       .needs = 1u << OUT | 1u << A | 1u << B};

/* Checks that an array is a dense row-major matrix of the given shape. */
static int
check_matrix(const py_array *array, const char *name, int64_t rows, int64_t columns)
{
    if (array->ndim != 2) {
        return py_shape_error(PyExc_ValueError, name, array,
                              "must have two dimensions");
    }
    if (array->shape[0] != rows || array->shape[1] != columns) {
        return py_shape_error(PyExc_ValueError, name, array,
                              "must have shape (%lld, %lld), so that a is (m, k), b "
                              "(k, n) and out (m, n)",
                              (long long)rows, (long long)columns);
    }
    if (array->numel > 0 && ((columns > 1 && array->strides[1] != 1) ||
                             (rows > 1 && array->strides[0] != columns))) {
        return py_argument_error(PyExc_ValueError, (py_argument){name, -1},
                                 "must be dense and row-major, got strides (%lld, "
                                 "%lld); call .contiguous() on it",
                                 (long long)array->strides[0],
                                 (long long)array->strides[1]);
    }
    return 0;
}

/* Fills the struct from the arrays: a is (m, k), b is (k, n), out must be (m, n). */
static int
take_matrices(const py_call *call, tfast_gemm_args *args)
{
    const py_array *out = call->found[OUT], *a = call->found[A], *b = call->found[B];

    if (a->ndim == 2 && b->ndim == 2) { /* otherwise check_matrix() refuses one */
        args->m = a->shape[0];
        args->k = a->shape[1];
        args->n = b->shape[1];
    }
    if (check_matrix(a, "a", args->m, args->k) < 0 ||
        check_matrix(b, "b", args->k, args->n) < 0 ||
        check_matrix(out, "out", args->m, args->n) < 0) {
        return -1;
    }
    args->out = out->data;
    args->a = a->data;
    args->b = b->data;
    args->dtype = (uint8_t)out->dtype;
    args->device = out->device;
    return 0;
}

PyObject *
py_gemm(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    tfast_gemm_args gemm = {.m = 0};
    tfast_status status = TFAST_OK;
    bool ready;
    py_call call;

    call.state = PyModule_GetState(module);
    if (py_parse(&call, &operation, &gemm, args, n, names) < 0) {
        return NULL;
    }
    ready = py_borrow_arrays(&call, &gemm) == 0 && take_matrices(&call, &gemm) == 0 &&
            py_check_overlap(&call) == 0;
    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        status = tfast_gemm(&gemm);
        Py_END_ALLOW_THREADS
    }
    py_release_arrays(&call);
    return ready ? py_result(status) : NULL;
}
