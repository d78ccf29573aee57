/* NumPy arrays, and objects with the buffer protocol. The only file that knows NumPy.
 */
#include "producers.h"

#include <stdio.h> /* NumPy names FILE */

#include <numpy/arrayobject.h>

/* Loads NumPy's C API once NumPy has been imported by somebody. */
static bool
load_numpy(py_state *state)
{
    if (!state->numpy_ready) {
        PyObject *modules = PyImport_GetModuleDict();

        if (PyDict_GetItemString(modules, "numpy") == NULL) {
            return false;
        }
        if (PyArray_ImportNumPyAPI() < 0) {
            PyErr_Clear();
            return false;
        }
        state->numpy_ready = true;
    }
    return true;
}

bool
py_is_numpy(py_state *state, PyObject *object)
{
    return load_numpy(state) && PyArray_Check(object);
}

/* The dtype, or -1 where it is none of ours. */
static int
numpy_dtype(py_state *state, PyArrayObject *array)
{
    const PyArray_Descr *descr = PyArray_DESCR(array);
    const int number = descr->type_num;

    if (number == NPY_FLOAT || number == NPY_DOUBLE || number == NPY_HALF) {
        return number == NPY_FLOAT    ? TFAST_F32
               : number == NPY_DOUBLE ? TFAST_F64
                                      : TFAST_F16;
    }
    if (number == NPY_BOOL || number == NPY_INT64 || number == NPY_LONGLONG) {
        return number == NPY_BOOL ? TFAST_BOOL : PY_INT64;
    }
    /* ml_dtypes registers bfloat16 at run time, under a number of its own. */
    if (number >= NPY_USERDEF && state->numpy_bfloat16 < 0 &&
        py_type_text_is(descr->typeobj, "__name__", "bfloat16", false)) {
        state->numpy_bfloat16 = number;
    }
    return number >= NPY_USERDEF && number == state->numpy_bfloat16 ? TFAST_BF16 : -1;
}

int
py_borrow_numpy(py_state *state, PyObject *object, py_argument argument, int how,
                py_array *array)
{
    PyArrayObject *numpy = (PyArrayObject *)object;
    int64_t size;

    array->dtype = numpy_dtype(state, numpy);
    if (!py_dtype_fits(array->dtype, how)) {
        PyObject *name = PyObject_Str((PyObject *)PyArray_DESCR(numpy));
        const char *text = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);

        py_dtype_error(argument, how, "%.100s", text == NULL ? "another dtype" : text);
        Py_XDECREF(name);
        return -1;
    }
    if (!PyArray_ISNOTSWAPPED(numpy)) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be in native byte order, got a swapped dtype");
    }
    if ((how & PY_WRITE) != 0 && !PyArray_ISWRITEABLE(numpy)) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be writable, got a read-only array");
    }
    size = py_dtype_size(array->dtype);
    array->device = (tfast_device){TFAST_CPU, 0};
    array->data = PyArray_DATA(numpy);
    array->numel = PyArray_SIZE(numpy);
    array->ndim = PyArray_NDIM(numpy);
    array->shape = array->buffer;
    array->strides = array->buffer + PY_MAX_DIMS;
    for (int d = 0; d < array->ndim; d++) {
        array->buffer[d] = PyArray_DIM(numpy, d);
        array->buffer[PY_MAX_DIMS + d] = PyArray_STRIDE(numpy, d) / size;
        if (PyArray_STRIDE(numpy, d) % size != 0 && PyArray_DIM(numpy, d) > 1) {
            return py_argument_error(
                PyExc_ValueError, argument,
                "must have strides of whole elements, got %lld bytes",
                (long long)PyArray_STRIDE(numpy, d));
        }
    }
    return 0;
}

/* ---- Buffers --------------------------------------------------------------------- */

static void
free_buffer(PyObject *capsule)
{
    Py_buffer *buffer = PyCapsule_GetPointer(capsule, "trainfast.buffer");

    PyBuffer_Release(buffer);
    PyMem_Free(buffer);
}

/* Takes the buffer and leaves it in array->owner. */
static Py_buffer *
take_buffer(PyObject *object, py_argument argument, int how, py_array *array)
{
    Py_buffer *buffer = PyMem_Calloc(1, sizeof *buffer);
    const int flags =
        PyBUF_FORMAT | PyBUF_STRIDES | ((how & PY_WRITE) != 0 ? PyBUF_WRITABLE : 0);

    if (buffer == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (PyObject_GetBuffer(object, buffer, flags) < 0) {
        PyMem_Free(buffer);
        if ((how & PY_WRITE) != 0 && PyErr_ExceptionMatches(PyExc_BufferError)) {
            PyErr_Clear();
            py_argument_error(PyExc_ValueError, argument,
                              "must be a writable, strided buffer");
        }
        return NULL;
    }
    array->owner = PyCapsule_New(buffer, "trainfast.buffer", free_buffer);
    if (array->owner == NULL) {
        PyBuffer_Release(buffer);
        PyMem_Free(buffer);
        return NULL;
    }
    return buffer;
}

/* The dtype of a native element, or -1 where it is none of ours. */
static int
buffer_dtype(const char *format, int64_t size)
{
    switch (format[0] == '\0' || format[1] != '\0' ? '\0' : format[0]) {
    case 'f':
        return TFAST_F32;
    case 'd':
        return TFAST_F64;
    case 'e':
        return TFAST_F16;
    case '?':
        return TFAST_BOOL;
    case 'l':
    case 'q':
        return size == 8 ? PY_INT64 : -1;
    default:
        return -1;
    }
}

int
py_borrow_buffer(PyObject *object, py_argument argument, int how, py_array *array)
{
    const Py_buffer *buffer = take_buffer(object, argument, how, array);
    const char *format;

    if (buffer == NULL) {
        return -1;
    }
    format = buffer->format == NULL ? "B" : buffer->format;
    format += *format == '@' || *format == '='; /* native order */
    array->dtype = buffer_dtype(format, buffer->itemsize);
    if (!py_dtype_fits(array->dtype, how)) {
        return py_dtype_error(argument, how, "buffer format '%.20s'", format);
    }
    array->device = (tfast_device){TFAST_CPU, 0};
    array->data = buffer->buf;
    array->numel = buffer->len / buffer->itemsize;
    array->ndim = buffer->ndim;
    array->shape = array->buffer;
    array->strides = array->buffer + PY_MAX_DIMS;
    for (int d = 0; d < buffer->ndim;
         d++) { /* at most 64 dimensions, by the protocol */
        array->buffer[d] = buffer->shape[d];
        array->buffer[PY_MAX_DIMS + d] = buffer->strides[d] / buffer->itemsize;
        if (buffer->strides[d] % buffer->itemsize != 0 && buffer->shape[d] > 1) {
            return py_argument_error(
                PyExc_ValueError, argument,
                "must have strides of whole elements, got %lld bytes",
                (long long)buffer->strides[d]);
        }
    }
    return 0;
}
