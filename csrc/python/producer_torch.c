/* Borrows tensors of torch before 2.10, whose type has no DLPack exchange API, through
 * their attributes: four times as fast as __dlpack__(). */
#include "producers.h"

_Static_assert((int)PY_N_TORCH_DTYPES >= (int)PY_N_DTYPES, "room for every dtype");

/* Dtypes that are borrowed through attributes; all others go through __dlpack__(),
 * which refuses conjugated complex tensors instead of resolving them. */
static const char *const dtype_names[PY_N_DTYPES] = {
    [TFAST_F32] = "float32",      [TFAST_F64] = "float64",
    [TFAST_F16] = "float16",      [TFAST_BF16] = "bfloat16",
    [TFAST_BOOL] = "bool",        [PY_INT64] = "int64",
    [PY_INT32] = "int32",         [PY_UINT8] = "uint8",
    [PY_COMPLEX64] = "complex64", [PY_COMPLEX128] = "complex128",
};

int
py_torch_load(py_state *state)
{
    static const char *const names[PY_N_TORCH_NAMES] = {
        [PY_TORCH_LAYOUT] = "layout",
        [PY_TORCH_DTYPE] = "dtype",
        [PY_TORCH_SHAPE] = "shape",
        [PY_TORCH_IS_CPU] = "is_cpu",
        [PY_TORCH_IS_CUDA] = "is_cuda",
        [PY_TORCH_GET_DEVICE] = "get_device",
        [PY_TORCH_DATA_PTR] = "data_ptr",
        [PY_TORCH_STRIDE] = "stride",
        [PY_TORCH_IS_CONTIGUOUS] = "is_contiguous",
    };
    PyObject *torch = PyImport_ImportModule("torch");

    for (int i = 0; i < PY_N_TORCH_NAMES && state->torch_names[i] == NULL; i++) {
        state->torch_names[i] = PyUnicode_InternFromString(names[i]);
    }
    for (int i = 0; torch != NULL && i < PY_N_DTYPES; i++) {
        if (dtype_names[i] != NULL && state->torch_dtypes[i] == NULL) {
            state->torch_dtypes[i] = PyObject_GetAttrString(torch, dtype_names[i]);
        }
    }
    if (torch != NULL && state->torch_strided == NULL) {
        state->torch_strided = PyObject_GetAttrString(torch, "strided");
    }
    Py_XDECREF(torch);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

/* Whether the attribute is the object `want`. */
static bool
is_attribute(PyObject *object, PyObject *name, const PyObject *want)
{
    PyObject *value = PyObject_GetAttr(object, name);

    Py_XDECREF(value); /* torch or the interpreter keeps it */
    return value != NULL && value == want;
}

/* Calls a method that returns an integer; -1 with an exception if it fails. */
static long long
ask(PyObject *object, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodObjArgs(object, name, NULL);
    const long long number = answer == NULL ? -1 : PyLong_AsLongLong(answer);

    Py_XDECREF(answer);
    return number;
}

/* Copies the integers of a tuple, which must have n of them, or with n < 0 at most
 * PY_MAX_DIMS. Returns how many, or -1. Steals the tuple, which may be NULL. */
static int
take_numbers(PyObject *tuple, int n, int64_t *numbers)
{
    const Py_ssize_t size = tuple == NULL ? -1 : PyTuple_Size(tuple);
    const bool fits = size >= 0 && size <= PY_MAX_DIMS && (n < 0 || size == n);

    for (Py_ssize_t i = 0; fits && i < size; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    }
    Py_XDECREF(tuple);
    return fits ? (int)size : -1;
}

/* Fills numel, shape and strides. Returns 0 or -1. */
static int
take_layout(const py_state *state, PyObject *object, py_array *array)
{
    int64_t *shape = array->buffer, *strides = array->buffer + PY_MAX_DIMS, step = 1;
    PyObject *contiguous;
    bool packed;

    array->ndim = take_numbers(
        PyObject_GetAttr(object, state->torch_names[PY_TORCH_SHAPE]), -1, shape);
    if (array->ndim < 0) {
        return -1;
    }
    contiguous = PyObject_CallMethodObjArgs(
        object, state->torch_names[PY_TORCH_IS_CONTIGUOUS], NULL);
    if (contiguous == NULL) {
        return -1;
    }
    packed = contiguous == Py_True;
    Py_DECREF(contiguous);
    for (int d = array->ndim - 1; d >= 0; d--) {
        strides[d] = step;
        step *= shape[d];
    }
    array->numel = step;
    array->shape = shape;
    array->strides = strides;
    return packed ||
                   take_numbers(PyObject_CallMethodObjArgs(
                                    object, state->torch_names[PY_TORCH_STRIDE], NULL),
                                array->ndim, strides) >= 0
               ? 0
               : -1;
}

static int
take_dtype(const py_state *state, PyObject *object, py_array *array)
{
    PyObject *dtype = PyObject_GetAttr(object, state->torch_names[PY_TORCH_DTYPE]);

    array->dtype = -1;
    for (int i = 0; dtype != NULL && i < PY_N_DTYPES; i++) {
        if (state->torch_dtypes[i] == dtype) {
            array->dtype = i;
        }
    }
    Py_XDECREF(dtype);
    return array->dtype < 0 ? -1 : 0;
}

static int
take_device(const py_state *state, PyObject *object, py_array *array)
{
    long long index;

    if (is_attribute(object, state->torch_names[PY_TORCH_IS_CPU], Py_True)) {
        array->device = (tfast_device){TFAST_CPU, 0};
        return 0;
    }
    if (!is_attribute(object, state->torch_names[PY_TORCH_IS_CUDA], Py_True)) {
        return -1;
    }
    index = ask(object, state->torch_names[PY_TORCH_GET_DEVICE]);
    array->device = (tfast_device){TFAST_CUDA, (int)index};
    return index < 0 ? -1 : 0;
}

int
py_borrow_torch(const py_state *state, PyObject *object, py_array *array)
{
    const bool fits = is_attribute(object, state->torch_names[PY_TORCH_LAYOUT],
                                   state->torch_strided) &&
                      take_dtype(state, object, array) == 0 &&
                      take_device(state, object, array) == 0 &&
                      take_layout(state, object, array) == 0;
    PyObject *address = fits ? PyObject_CallMethodObjArgs(
                                   object, state->torch_names[PY_TORCH_DATA_PTR], NULL)
                             : NULL;

    array->data = address == NULL ? NULL : (void *)PyLong_AsSize_t(address);
    Py_XDECREF(address);
    if (address != NULL && PyErr_Occurred() == NULL) {
        return 0;
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1; /* KeyboardInterrupt */
    }
    PyErr_Clear(); /* not plain memory: __dlpack__() raises the reason */
    return 1;
}
