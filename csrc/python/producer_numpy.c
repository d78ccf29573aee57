/* Borrows NumPy arrays and objects with the buffer protocol, and makes NumPy arrays.
 * The only file that uses NumPy's C API. */
#include "made.h"
#include "producers.h"

#include <stdio.h> /* NumPy's headers use FILE */
#include <string.h>

#include <numpy/arrayobject.h>

/* Loads NumPy's C API if the process has imported NumPy; never imports it itself. */
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
        state->numpy_type = &PyArray_Type;
        state->numpy_ready = true;
    }
    return true;
}

bool
py_is_numpy(py_state *state, PyObject *object)
{
    return load_numpy(state) && PyArray_Check(object);
}

/* Dtypes that ml_dtypes registers at run time; their type numbers vary by process. */
static const struct {
    const char *name;
    int dtype, plain; /* plain: holds the bits if ml_dtypes is missing */
} user_dtypes[] = {
    {"bfloat16", TFAST_BF16, NPY_UINT16},
    {"float8_e4m3fn", PY_FLOAT8_E4M3FN, NPY_UINT8},
    {"float8_e5m2", PY_FLOAT8_E5M2, NPY_UINT8},
};

enum { N_USER_DTYPES = sizeof user_dtypes / sizeof *user_dtypes };

/* The dtype of a user-defined NumPy dtype, or -1; remembers its type number. */
static int
user_dtype(py_state *state, const PyArray_Descr *descr)
{
    for (int i = 0; i < N_USER_DTYPES; i++) {
        if (state->numpy_numbers[i] < 0 &&
            py_type_text_is(descr->typeobj, "__name__", user_dtypes[i].name, false)) {
            state->numpy_numbers[i] = descr->type_num;
        }
        if (state->numpy_numbers[i] == descr->type_num) {
            return user_dtypes[i].dtype;
        }
    }
    return -1;
}

/* NumPy's type numbers by dtype; not set for the dtypes of ml_dtypes. */
static const int numpy_numbers[PY_N_DTYPES] = {
    [TFAST_F32] = NPY_FLOAT,     [TFAST_F64] = NPY_DOUBLE,
    [TFAST_F16] = NPY_HALF,      [TFAST_BOOL] = NPY_BOOL,
    [PY_INT64] = NPY_INT64,      [PY_INT32] = NPY_INT32,
    [PY_INT16] = NPY_INT16,      [PY_INT8] = NPY_INT8,
    [PY_UINT64] = NPY_UINT64,    [PY_UINT32] = NPY_UINT32,
    [PY_UINT16] = NPY_UINT16,    [PY_UINT8] = NPY_UINT8,
    [PY_COMPLEX64] = NPY_CFLOAT, [PY_COMPLEX128] = NPY_CDOUBLE,
};

/* The dtype as py_array has it, or -1 if it is unsupported. */
static int
numpy_dtype(py_state *state, PyArrayObject *array)
{
    const PyArray_Descr *descr = PyArray_DESCR(array);

    switch (descr->type_num) {
    case NPY_FLOAT:
        return TFAST_F32;
    case NPY_DOUBLE:
        return TFAST_F64;
    case NPY_HALF:
        return TFAST_F16;
    case NPY_BOOL:
        return TFAST_BOOL;
    case NPY_LONGLONG:
        return PY_INT64;
    case NPY_ULONGLONG:
        return PY_UINT64;
    default:
        break;
    }
    if (descr->type_num >= NPY_USERDEF) {
        return user_dtype(state, descr);
    }
    for (int i = PY_INT64; i < PY_FLOAT8_E4M3FN; i++) {
        if (numpy_numbers[i] == descr->type_num) {
            return i;
        }
    }
    return -1;
}

/* Fills data, shape and strides. Returns 0, or -1 if a stride is not a multiple of the
 * element size; *stride is then that stride in bytes. */
static int
take_layout(PyArrayObject *numpy, py_array *array, npy_intp *stride)
{
    const int64_t size = py_dtype_size(array->dtype);

    array->device = (tfast_device){TFAST_CPU, 0};
    array->data = PyArray_DATA(numpy);
    array->numel = 1;
    array->ndim = PyArray_NDIM(numpy);
    array->shape = array->buffer;
    array->strides = array->buffer + PY_MAX_DIMS;
    for (int d = 0; d < array->ndim; d++) {
        const int shift = __builtin_ctzll((unsigned long long)size);

        *stride = PyArray_STRIDE(numpy, d);
        array->buffer[d] = PyArray_DIM(numpy, d);
        array->buffer[PY_MAX_DIMS + d] = *stride >> shift;
        array->numel *= array->buffer[d];
        if ((*stride & (size - 1)) != 0 && array->buffer[d] > 1) {
            return -1;
        }
    }
    return 0;
}

/* Borrows a copy in native byte order and C order, which array->owner holds. */
static int
borrow_copy(PyObject *object, py_array *array)
{
    npy_intp stride;

    array->owner = PyArray_CheckFromAny(
        object, NULL, 0, 0,
        NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED, NULL);
    return array->owner == NULL
               ? -1
               : take_layout((PyArrayObject *)array->owner, array, &stride);
}

int
py_borrow_numpy(py_state *state, PyObject *object, py_argument argument, int how,
                py_array *array)
{
    PyArrayObject *numpy = (PyArrayObject *)object;
    npy_intp stride;

    array->dtype = numpy_dtype(state, numpy);
    if (array->dtype < 0) {
        PyObject *name = PyObject_Str((PyObject *)PyArray_DESCR(numpy));
        const char *text = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);

        py_dtype_error(argument, how, "%.100s", text == NULL ? "another dtype" : text);
        Py_XDECREF(name);
        return -1;
    }
    if ((how & PY_ANY_DTYPE) != 0 && !PyArray_ISBEHAVED_RO(numpy)) {
        return borrow_copy(object, array);
    }
    if (!PyArray_ISNOTSWAPPED(numpy)) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be in native byte order, got a swapped dtype");
    }
    if ((how & PY_WRITE) != 0 && !PyArray_ISWRITEABLE(numpy)) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be writable, got a read-only array");
    }
    if (take_layout(numpy, array, &stride) == 0) {
        return 0;
    }
    if ((how & PY_ANY_DTYPE) != 0) {
        return borrow_copy(object, array);
    }
    return py_argument_error(PyExc_ValueError, argument,
                             "must have strides of whole elements, got %lld bytes",
                             (long long)stride);
}

bool
py_is_numpy_scalar(py_state *state, PyObject *object)
{
    return load_numpy(state) && PyArray_IsScalar(object, Generic);
}

int
py_borrow_numpy_scalar(py_state *state, PyObject *object, py_argument argument, int how,
                       py_array *array)
{
    PyObject *owner = PyArray_FromScalar(object, NULL);
    int status = owner == NULL ? -1 : 0;

    if (status == 0) {
        status = py_borrow_numpy(state, owner, argument, how, array);
        if (array->owner == NULL) {
            array->owner = owner; /* otherwise a copy owns the data */
        } else {
            Py_DECREF(owner);
        }
    }
    return status;
}

/* ---- Buffers --------------------------------------------------------------------- */

static void
free_buffer(PyObject *capsule)
{
    Py_buffer *buffer = PyCapsule_GetPointer(capsule, "trainfast.buffer");

    PyBuffer_Release(buffer);
    PyMem_Free(buffer);
}

/* Requests the object's buffer. A capsule in array->owner releases it. */
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
        } else if (PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear(); /* raised by a released memoryview or a closed mmap */
            py_argument_error(PyExc_ValueError, argument,
                              "must have data, got a buffer that was released");
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

/* The integer dtype of `size` bytes, or -1. */
static int
integer_dtype(int64_t size, bool is_signed)
{
    for (int i = is_signed ? PY_INT64 : PY_UINT64;
         i <= (is_signed ? PY_INT8 : PY_UINT8); i++) {
        if (py_dtype_size(i) == size) {
            return i;
        }
    }
    return -1;
}

/* The dtype of a struct format in native byte order, or -1 if it is unsupported. */
static int
buffer_dtype(const char *format, int64_t size)
{
    if (format[0] == 'Z') {
        return strcmp(format, "Zf") == 0   ? PY_COMPLEX64
               : strcmp(format, "Zd") == 0 ? PY_COMPLEX128
                                           : -1;
    }
    if (format[0] == '\0' || format[1] != '\0') {
        return -1;
    }
    switch (format[0]) {
    case 'f':
        return TFAST_F32;
    case 'd':
        return TFAST_F64;
    case 'e':
        return TFAST_F16;
    case '?':
        return TFAST_BOOL;
    default:
        return strchr("bhilq", format[0]) != NULL   ? integer_dtype(size, true)
               : strchr("BHILQ", format[0]) != NULL ? integer_dtype(size, false)
                                                    : -1;
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
    format += *format == '@' || *format == '='; /* both: native byte order */
    array->dtype = buffer_dtype(format, buffer->itemsize);
    if (array->dtype < 0) {
        return py_dtype_error(argument, how, "buffer format '%.20s'", format);
    }
    array->device = (tfast_device){TFAST_CPU, 0};
    array->data = buffer->buf;
    array->numel = buffer->len / buffer->itemsize;
    array->ndim = buffer->ndim;
    array->shape = array->buffer;
    array->strides = array->buffer + PY_MAX_DIMS;
    /* The protocol allows at most 64 dimensions, PY_MAX_DIMS. */
    for (int d = 0; d < buffer->ndim; d++) {
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

/* ---- Arrays made for Python ------------------------------------------------------ */

/* NumPy's descriptor of user_dtypes[which]. Borrowed: the module's state keeps it. */
static PyArray_Descr *
user_descr(py_state *state, int which)
{
    PyObject *module = NULL, *type = NULL;

    if (state->numpy_descrs[which] == NULL) {
        module = PyImport_ImportModule("ml_dtypes");
        if (module != NULL) {
            type = PyObject_GetAttrString(module, user_dtypes[which].name);
        }
        if (type != NULL) {
            state->numpy_descrs[which] = (PyObject *)PyArray_DescrFromTypeObject(type);
        }
        if (state->numpy_descrs[which] == NULL &&
            PyErr_ExceptionMatches(PyExc_Exception) &&
            !PyErr_ExceptionMatches(PyExc_MemoryError)) { /* no ml_dtypes */
            PyErr_Clear();
            state->numpy_descrs[which] =
                (PyObject *)PyArray_DescrFromType(user_dtypes[which].plain);
        }
        Py_XDECREF(type);
        Py_XDECREF(module);
    }
    return (PyArray_Descr *)state->numpy_descrs[which];
}

/* NumPy's descriptor of a dtype, a new reference. */
static PyArray_Descr *
descr_of(py_state *state, int dtype)
{
    for (int i = 0; i < N_USER_DTYPES; i++) {
        if (user_dtypes[i].dtype == dtype) {
            PyArray_Descr *descr = user_descr(state, i);

            Py_XINCREF((PyObject *)descr);
            return descr;
        }
    }
    return PyArray_DescrFromType(numpy_numbers[dtype]);
}

/* Imports NumPy if necessary. Returns 0, or -1 with an exception. */
static int
need_numpy(py_state *state)
{
    if (!state->numpy_ready) {
        PyObject *numpy = PyImport_ImportModule("numpy");

        Py_XDECREF(numpy);
        if (numpy == NULL || !load_numpy(state)) {
            if (numpy != NULL) {
                PyErr_SetString(PyExc_ImportError, "NumPy's C API cannot be loaded");
            }
            return -1;
        }
    }
    return 0;
}

/* An array over made->data. If that is NULL, NumPy allocates memory; `flags` must then
 * be 0, because any other value would select Fortran order. */
static PyObject *
make_array(py_state *state, const py_made *made, int flags)
{
    PyArray_Descr *descr = need_numpy(state) < 0 ? NULL : descr_of(state, made->dtype);
    npy_intp shape[PY_MAX_DIMS];

    for (int d = 0; d < made->ndim; d++) {
        shape[d] = made->shape[d];
    }
    return descr == NULL ? NULL
                         : PyArray_NewFromDescr(&PyArray_Type, descr, made->ndim, shape,
                                                NULL, made->data, flags, NULL);
}

PyObject *
py_make_numpy(py_state *state, const py_made *made, bool writable, PyObject *base)
{
    PyObject *array =
        make_array(state, made, writable ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO);

    if (array != NULL &&
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(base)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

PyObject *
py_new_numpy(py_state *state, py_made *made)
{
    PyObject *array;

    made->data = NULL;
    array = make_array(state, made, 0);
    if (array != NULL) {
        made->data = PyArray_DATA((PyArrayObject *)array);
    }
    return array;
}
