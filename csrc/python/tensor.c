/* Borrowing arrays: who produced one, and whether its data will do. */
#include "tensor.h"

#include "producers.h"

#include <string.h>

/* ---- Types ----------------------------------------------------------------------- */

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

/* Returns 0, -1, or 1 where another way has to say what the object is. */
static int
borrow_fast(const py_state *state, const dlpack_exchange *exchange, PyObject *object,
            py_argument argument, int how, py_array *array)
{
    int status = exchange != NULL
                     ? py_borrow_view(exchange, object, argument, how, array)
                     : py_borrow_torch(state, object, how, array);
    PyObject *once;

    if (status != 0 || !may_be_lazy(array, how) ||
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
               : borrow_fast(state, exchange, array->owner, argument, how, array);
}

/* Remembers how arrays of a type are borrowed. */
static void
remember(py_state *state, PyTypeObject *type, const dlpack_exchange *exchange,
         int body_word)
{
    if (state->n_fast < (int)(sizeof state->fast / sizeof *state->fast)) {
        Py_INCREF((PyObject *)type);
        state->fast[state->n_fast].type = type;
        state->fast[state->n_fast].exchange = exchange;
        state->fast[state->n_fast++].body_word = body_word;
    }
}

static bool
is_remembered(const py_state *state, const PyTypeObject *type)
{
    bool found = false;

    for (int i = 0; i < state->n_fast; i++) {
        found |= state->fast[i].type == type;
    }
    return found;
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
        if (borrow_fast(state, exchange, object, argument, how, array) < 0) {
            return -1;
        }
        remember(state, type, exchange,
                 is_torch ? py_find_body_word(object, array) : 0);
        return 0;
    }
    if (is_torch && !is_remembered(state, type)) {
        if (py_torch_load(state) < 0) {
            return -1;
        }
        remember(state, type, NULL, 0);
        if (py_borrow_torch(state, object, how, array) == 0 &&
            !may_be_lazy(array, how)) {
            return 0;
        }
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
check_data(const py_state *state, PyObject *object, py_argument argument,
           const py_array *array)
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
    if (!py_is_aligned(array)) {
        return py_argument_error(
            state->placement_error, argument,
            "must be aligned to its %d-byte elements, got address %p",
            (int)py_dtype_size(array->dtype), array->data);
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
            status = borrow_fast(state, state->fast[i].exchange, object, argument, how,
                                 array);
        }
    }
    if (status > 0 && Py_TYPE(object) == state->numpy_type) {
        status = py_borrow_numpy(state, object, argument, how, array);
    }
    if (status > 0) {
        status = borrow_unknown(state, object, argument, how, array);
    }
    if (status == 0) {
        status = check_data(state, object, argument, array);
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
    const int how = (write ? PY_WRITE : 0) | (dtype == PY_INT64   ? PY_ONLY_INT64
                                              : dtype == PY_INT32 ? PY_ONLY_INT32
                                                                  : 0);

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
