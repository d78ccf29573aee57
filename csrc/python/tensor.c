/* Borrowing arrays: who produced one, and whether its layout will do. */
#include "producers.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int
py_argument_error(PyObject *type, py_argument argument, const char *format, ...)
{
    char rule[384];
    va_list values;

    va_start(values, format);
    vsnprintf(rule, sizeof rule, format, values);
    va_end(values);
    if (argument.index < 0) {
        PyErr_Format(type, "%s %s", argument.name, rule);
    } else {
        PyErr_Format(type, "%s[%zd] %s", argument.name, argument.index, rule);
    }
    return -1;
}

/* ---- Dtypes ---------------------------------------------------------------------- */

static const struct {
    const char *name;
    int size, alignment; /* bytes */
} dtypes[PY_N_DTYPES] = {
    [TFAST_F32] = {"float32", 4, 4},
    [TFAST_F64] = {"float64", 8, 8},
    [TFAST_F16] = {"float16", 2, 2},
    [TFAST_BF16] = {"bfloat16", 2, 2},
    [TFAST_BOOL] = {"bool", 1, 1},
    [PY_INT64] = {"int64", 8, 8},
    [PY_INT32] = {"int32", 4, 4},
    [PY_INT16] = {"int16", 2, 2},
    [PY_INT8] = {"int8", 1, 1},
    [PY_UINT64] = {"uint64", 8, 8},
    [PY_UINT32] = {"uint32", 4, 4},
    [PY_UINT16] = {"uint16", 2, 2},
    [PY_UINT8] = {"uint8", 1, 1},
    [PY_COMPLEX64] = {"complex64", 8, 4},
    [PY_COMPLEX128] = {"complex128", 16, 8},
    [PY_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1, 1},
    [PY_FLOAT8_E5M2] = {"float8_e5m2", 1, 1},
};

int64_t
py_dtype_size(int dtype)
{
    return dtypes[dtype].size;
}

const char *
py_dtype_name(int dtype)
{
    return dtypes[dtype].name;
}

bool
py_dtype_fits(int dtype, int how)
{
    if ((how & PY_ONLY_INT64) != 0) {
        return dtype == PY_INT64;
    }
    return dtype >= 0 && (dtype < TFAST_N_DTYPES || (how & PY_ANY_DTYPE) != 0 ||
                          (dtype == TFAST_BOOL && (how & PY_OR_BOOL) != 0));
}

int
py_dtype_error(py_argument argument, int how, const char *format, ...)
{
    char got[160];
    va_list values;

    va_start(values, format);
    vsnprintf(got, sizeof got, format, values);
    va_end(values);
    return py_argument_error(
        PyExc_NotImplementedError, argument, "must be %s, got %s",
        (how & PY_ONLY_INT64) != 0  ? "int64"
        : (how & PY_ANY_DTYPE) != 0 ? "of bool, an integer, a float or a complex dtype"
        : (how & PY_OR_BOOL) != 0   ? "bool, float64, float32, float16 or bfloat16"
                                    : "float64, float32, float16 or bfloat16",
        got);
}

/* ---- Layouts --------------------------------------------------------------------- */

bool
py_is_dense(const py_array *array)
{
    int64_t expected = 1;
    bool c_order = true, used[PY_MAX_DIMS] = {false};

    for (int d = array->ndim - 1; d >= 0 && c_order; d--) {
        c_order = array->shape[d] == 1 || array->strides[d] == expected;
        expected *= array->shape[d];
    }
    if (c_order || array->numel == 0) {
        return true;
    }
    /* Any order: find the dimension of each next stride. */
    for (expected = 1; expected < array->numel;) {
        int d = 0;
        while (d < array->ndim &&
               (used[d] || array->shape[d] == 1 || array->strides[d] != expected)) {
            d++;
        }
        if (d == array->ndim) {
            return false;
        }
        used[d] = true;
        expected *= array->shape[d];
    }
    return true;
}

bool
py_same_shape(const py_array *a, const py_array *b)
{
    bool same = a->ndim == b->ndim;

    for (int d = 0; d < a->ndim && same; d++) {
        same = a->shape[d] == b->shape[d];
    }
    return same;
}

bool
py_same_layout(const py_array *a, const py_array *b)
{
    for (int d = 0; d < a->ndim; d++) {
        if (a->strides[d] != b->strides[d] && a->shape[d] != 1) {
            return a->numel == 0;
        }
    }
    return true;
}

void
py_shape_text(int ndim, const int64_t *shape, char *text, size_t bytes)
{
    size_t used = (size_t)snprintf(text, bytes, "(");

    for (int d = 0; d < ndim && used + 32 < bytes; d++) {
        used += (size_t)snprintf(text + used, bytes - used,
                                 d + 1 < ndim ? "%lld, " : "%lld", (long long)shape[d]);
    }
    snprintf(text + used, bytes - used, ndim == 1 ? ",)" : ")");
}

/* ---- Types ----------------------------------------------------------------------- */

/* A type's attribute as UTF-8 text compared with `want` (or its beginning). */
bool
py_type_text_is(PyTypeObject *type, const char *attribute, const char *want,
                bool prefix)
{
    PyObject *value = PyObject_GetAttrString((PyObject *)type, attribute);
    const char *text = value == NULL ? NULL : PyUnicode_AsUTF8AndSize(value, NULL);
    const bool is = text != NULL && (prefix ? strncmp(text, want, strlen(want)) == 0
                                            : strcmp(text, want) == 0);

    if (text == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(value);
    return is;
}

/* Subclasses of torch.Tensor inherit its export but mean something else by their data
 * (fake, distributed, masked): only Tensor and Parameter themselves are taken. Sets
 * *is_torch for the whole family. */
static bool
is_plain_type(PyTypeObject *type, bool *is_torch)
{
    PyObject *bases = PyObject_GetAttrString((PyObject *)type, "__mro__");
    const Py_ssize_t n = bases == NULL ? 0 : PyTuple_Size(bases);

    *is_torch = false;
    for (Py_ssize_t i = 0; i < n && !*is_torch; i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GetItem(bases, i);
        *is_torch = py_type_text_is(base, "__name__", "Tensor", false) &&
                    py_type_text_is(base, "__module__", "torch", false);
    }
    if (bases == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(bases);
    return !*is_torch ||
           (py_type_text_is(type, "__name__", "Tensor", false) &&
            py_type_text_is(type, "__module__", "torch", false)) ||
           (py_type_text_is(type, "__name__", "Parameter", false) &&
            py_type_text_is(type, "__module__", "torch.nn.parameter", false));
}

/* ---- Views that are computed when they are read ---------------------------------- */

/* Torch's conj() and the imaginary part of what it gives are such, and the exchange API
 * does not say so. They are complex, or floats whose strides are twice those of complex
 * numbers; of single floats, whose strides say nothing, only PY_ANY_DTYPE asks. */
static bool
may_be_lazy(const py_array *array, int how)
{
    if (array->dtype == PY_COMPLEX64 || array->dtype == PY_COMPLEX128) {
        return true;
    }
    if (array->dtype != TFAST_F32 && array->dtype != TFAST_F64 &&
        array->dtype != TFAST_F16) {
        return false;
    }
    for (int d = array->ndim - 1; d >= 0 && array->numel > 1; d--) {
        if (array->strides[d] % 2 != 0) {
            return false;
        }
    }
    return array->numel > 1 || (how & PY_ANY_DTYPE) != 0;
}

/* What a method answers; false where there is none. */
static bool
says(PyObject *object, const char *method)
{
    PyObject *answer = PyObject_CallMethod(object, method, NULL);
    const bool yes = answer != NULL && PyObject_IsTrue(answer) == 1;

    PyErr_Clear();
    Py_XDECREF(answer);
    return yes;
}

static int
borrow_exchanged(const dlpack_exchange *exchange, PyObject *object,
                 py_argument argument, int how, py_array *array)
{
    int status = py_borrow_view(exchange, object, argument, how, array);
    PyObject *once;

    if (status < 0 || !may_be_lazy(array, how) ||
        !(says(object, "is_neg") || says(object, "is_conj"))) {
        return status;
    }
    if ((how & PY_ANY_DTYPE) == 0) {
        return py_argument_error(PyExc_NotImplementedError, argument,
                                 "must not be a lazily negated view (resolve_neg() "
                                 "makes a tensor of it)");
    }
    once = PyObject_CallMethod(object, "resolve_conj", NULL);
    array->owner = once == NULL ? NULL : PyObject_CallMethod(once, "resolve_neg", NULL);
    Py_XDECREF(once);
    return array->owner == NULL
               ? -1
               : py_borrow_view(exchange, array->owner, argument, how, array);
}

/* ---- All of them ----------------------------------------------------------------- */

/* The first array of a type: find out how it exports, and remember the fast way. */
static int
borrow_unknown(py_state *state, PyObject *object, py_argument argument, int how,
               py_array *array)
{
    PyTypeObject *type = Py_TYPE(object);
    const dlpack_exchange *exchange;
    bool is_torch, plain;

    if (py_is_numpy(state, object)) {
        if (py_type_text_is(type, "__name__", "MaskedArray", false)) {
            return py_argument_error(
                PyExc_TypeError, argument,
                "must not be a masked array: its mask would be ignored");
        }
        return py_borrow_numpy(state, object, argument, how, array);
    }
    if ((how & PY_ANY_DTYPE) != 0 && py_is_numpy_scalar(state, object)) {
        return py_borrow_numpy_scalar(state, object, argument, how, array);
    }
    plain = is_plain_type(type, &is_torch);
    if (!plain) {
        PyObject *name = PyType_GetName(type);
        const char *text = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);

        py_argument_error(
            PyExc_NotImplementedError, argument,
            "must be a torch.Tensor or Parameter itself, got its subclass %.100s",
            text == NULL ? "of no name" : text);
        Py_XDECREF(name);
        return -1;
    }
    exchange = py_find_exchange(type);
    if (exchange != NULL) {
        if (borrow_exchanged(exchange, object, argument, how, array) < 0) {
            return -1;
        }
        if (state->n_fast < (int)(sizeof state->fast / sizeof *state->fast)) {
            Py_INCREF((PyObject *)type);
            state->fast[state->n_fast].type = type;
            state->fast[state->n_fast].exchange = exchange;
            state->fast[state->n_fast++].body_word =
                is_torch ? py_find_body_word(object, array) : 0;
        }
        return 0;
    }
    if (PyObject_HasAttrString(object, "__dlpack__")) {
        PyObject *detached =
            is_torch ? PyObject_CallMethod(object, "detach", NULL) : Py_NewRef(object);
        const int status =
            detached == NULL ? -1 : py_borrow_capsule(detached, argument, how, array);
        Py_XDECREF(detached);
        return status;
    }
    if (PyObject_CheckBuffer(object)) {
        return py_borrow_buffer(object, argument, how, array);
    }
    return py_argument_error(PyExc_TypeError, argument,
                             "must be an array (NumPy, torch, DLPack or a buffer)");
}

/* Whether a torch tensor's storage was resized to nothing, as sharding libraries free
 * memory. Torch's own kernels read it all the same, so they must not be tried. */
static bool
is_freed(PyObject *object)
{
    PyObject *storage = PyObject_CallMethod(object, "untyped_storage", NULL);
    PyObject *bytes =
        storage == NULL ? NULL : PyObject_CallMethod(storage, "nbytes", NULL);
    const bool freed = bytes != NULL && PyLong_AsLongLong(bytes) == 0;

    PyErr_Clear();
    Py_XDECREF(bytes);
    Py_XDECREF(storage);
    return freed;
}

static int
check_data(PyObject *object, py_argument argument, const py_array *array)
{
    if (array->numel == 0) {
        return 0;
    }
    if (array->data == NULL && is_freed(object)) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must have data, got a tensor whose memory was freed");
    }
    if (array->data == NULL) {
        return py_argument_error(
            PyExc_NotImplementedError, argument,
            "must have data, got a null pointer (a fake or meta tensor)");
    }
    if (((uintptr_t)array->data & (uintptr_t)(dtypes[array->dtype].alignment - 1)) !=
        0) { /* a power of two, and a division would cost ten times as much */
        return py_argument_error(
            PyExc_ValueError, argument,
            "must be aligned to its %d-byte elements, got address %p",
            dtypes[array->dtype].size, array->data);
    }
    return 0;
}

int
py_borrow(py_state *state, PyObject *object, py_argument argument, int how,
          py_array *array)
{
    int status = 1; /* not done yet */

    array->owner = NULL;
    for (int i = 0; i < state->n_fast && status > 0; i++) {
        if (state->fast[i].type == Py_TYPE(object)) {
            status =
                borrow_exchanged(state->fast[i].exchange, object, argument, how, array);
        }
    }
    if (status > 0 && Py_TYPE(object) == state->numpy_type) {
        status = py_borrow_numpy(state, object, argument, how, array);
    }
    if (status > 0) {
        status = borrow_unknown(state, object, argument, how, array);
    }
    if (status == 0) {
        status = check_data(object, argument, array);
    }
    if (status < 0) {
        py_release(array);
    }
    return status;
}

int
py_borrow_scalar(py_state *state, PyObject *object, const char *name, int dtype,
                 tfast_device device, bool write, py_array *array, void **value)
{
    const py_argument argument = {name, -1};
    const int how = (write ? PY_WRITE : 0) | (dtype == PY_INT64 ? PY_ONLY_INT64 : 0);

    if (py_borrow(state, object, argument, how, array) < 0) {
        return -1;
    }
    if (array->numel != 1 || array->dtype != dtype) {
        py_argument_error(
            PyExc_ValueError, argument, "must hold one %s, got %lld elements of %s",
            py_dtype_name(dtype), (long long)array->numel, py_dtype_name(array->dtype));
    } else if (array->device.type != device.type ||
               array->device.index != device.index) {
        py_argument_error(PyExc_ValueError, argument,
                          "must be on the parameters' device");
    } else {
        *value = array->data;
        return 0;
    }
    py_release(array);
    return -1;
}

void
py_release(py_array *array)
{
    Py_CLEAR(array->owner);
}
