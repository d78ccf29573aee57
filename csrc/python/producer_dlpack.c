/* Borrows arrays that export DLPack, and makes arrays that Python imports by DLPack. */
#include "made.h"
#include "producers.h"

#include <stdlib.h>
#include <string.h>

static void
fill_c_order_strides(py_array *array)
{
    int64_t *strides = array->buffer + PY_MAX_DIMS, step = 1;

    for (int d = array->ndim - 1; d >= 0; d--) {
        strides[d] = step;
        step *= array->shape[d];
    }
    array->strides = strides;
}

static const struct {
    uint8_t code, bits;
} dtype_codes[PY_N_DTYPES] = {
    [TFAST_F32] = {DLPACK_FLOAT, 32},
    [TFAST_F64] = {DLPACK_FLOAT, 64},
    [TFAST_F16] = {DLPACK_FLOAT, 16},
    [TFAST_BF16] = {DLPACK_BFLOAT, 16},
    [TFAST_BOOL] = {DLPACK_BOOL, 8},
    [PY_INT64] = {DLPACK_INT, 64},
    [PY_INT32] = {DLPACK_INT, 32},
    [PY_INT16] = {DLPACK_INT, 16},
    [PY_INT8] = {DLPACK_INT, 8},
    [PY_UINT64] = {DLPACK_UINT, 64},
    [PY_UINT32] = {DLPACK_UINT, 32},
    [PY_UINT16] = {DLPACK_UINT, 16},
    [PY_UINT8] = {DLPACK_UINT, 8},
    [PY_COMPLEX64] = {DLPACK_COMPLEX, 64},
    [PY_COMPLEX128] = {DLPACK_COMPLEX, 128},
    [PY_FLOAT8_E4M3FN] = {DLPACK_FLOAT8_E4M3FN, 8},
    [PY_FLOAT8_E5M2] = {DLPACK_FLOAT8_E5M2, 8},
};

/* The dtype as py_array has it, or -1 if it is unsupported. */
static int
dlpack_dtype(const dlpack_tensor *view)
{
    for (int i = 0; i < PY_N_DTYPES && view->dtype.lanes == 1; i++) {
        if (view->dtype.code == dtype_codes[i].code &&
            view->dtype.bits == dtype_codes[i].bits) {
            return i;
        }
    }
    return -1;
}

/* Fills a py_array from a DLPack tensor. Returns 0, or -1 with an exception. */
static int
from_dlpack(const dlpack_tensor *view, py_argument argument, int how, py_array *array)
{
    const int type = view->device.type;

    array->dtype = dlpack_dtype(view);
    if (array->dtype < 0) {
        return py_dtype_error(argument, how, "DLPack dtype code %d of %d bits",
                              view->dtype.code, view->dtype.bits);
    }
    if (type == DLPACK_CPU || type == DLPACK_CUDA_HOST) {
        array->device = (tfast_device){TFAST_CPU, 0};
    } else if (type == DLPACK_CUDA || type == DLPACK_CUDA_MANAGED) {
        array->device = (tfast_device){TFAST_CUDA, view->device.index};
    } else {
        return py_argument_error(
            PyExc_NotImplementedError, argument,
            "must be on the CPU or a CUDA device, got DLPack device %d", type);
    }
    if (view->ndim > PY_MAX_DIMS) {
        return py_argument_error(PyExc_NotImplementedError, argument,
                                 "must have at most %d dimensions, got %d", PY_MAX_DIMS,
                                 view->ndim);
    }
    array->data = view->data == NULL ? NULL : (char *)view->data + view->byte_offset;
    array->ndim = view->ndim;
    array->shape = view->shape;
    array->strides = view->strides;
    array->numel = 1;
    for (int d = 0; d < view->ndim; d++) {
        array->numel *= view->shape[d];
    }
    if (array->strides == NULL) {
        fill_c_order_strides(array);
    }
    return 0;
}

/* Replaces the exception of a producer that cannot export an array by
 * NotImplementedError with the producer's reason. Other exceptions stay. Returns -1. */
static int
cannot_export(py_argument argument)
{
    PyObject *type, *value, *traceback, *text;
    const char *reason;
    size_t line;

    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) &&
        !PyErr_ExceptionMatches(PyExc_BufferError) &&
        !PyErr_ExceptionMatches(PyExc_TypeError) &&
        !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return -1;
    }
    PyErr_Fetch(&type, &value, &traceback);
    text = value == NULL ? NULL : PyObject_Str(value);
    reason = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, NULL);
    if (reason == NULL) {
        PyErr_Clear();
        reason = "the producer gave no reason";
    }
    line = strcspn(reason, "\n"); /* torch appends a stack trace */
    py_argument_error(PyExc_NotImplementedError, argument,
                      "must be a dense array that DLPack can export: %.*s",
                      (int)(line < 200 ? line : 200), reason);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

static const dlpack_exchange *
find_exchange(PyTypeObject *type)
{
    PyObject *capsule =
        PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    const dlpack_exchange *exchange = NULL;

    if (capsule != NULL && PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    }
    PyErr_Clear();
    while (exchange != NULL && exchange->version.major != 1) {
        exchange = exchange->previous;
    }
    /* The producer owns the struct, which lives as long as the type. */
    Py_XDECREF(capsule);
    return exchange;
}

const dlpack_exchange *
py_find_exchange(PyTypeObject *type)
{
    const dlpack_exchange *exchange = find_exchange(type);

    return exchange != NULL && exchange->view_from_object != NULL ? exchange : NULL;
}

const dlpack_exchange *
py_find_maker(PyTypeObject *type)
{
    const dlpack_exchange *exchange = find_exchange(type);

    return exchange != NULL && exchange->managed_to_object != NULL ? exchange : NULL;
}

int
py_borrow_view(const dlpack_exchange *exchange, PyObject *object, py_argument argument,
               int how, py_array *array)
{
    dlpack_tensor view;

    if (exchange->view_from_object(object, &view) != 0) {
        return cannot_export(argument);
    }
    return from_dlpack(&view, argument, how, array);
}

/* Calls __dlpack__() for a versioned tensor, and without arguments if the producer is
 * older than DLPack 1.0 and refuses them. Returns a new reference. */
static PyObject *
call_dlpack(PyObject *object)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    PyObject *empty = PyTuple_New(0), *capsule = NULL;
    PyObject *options = Py_BuildValue("{s:(ii)}", "max_version", 1, 1);

    if (method != NULL && empty != NULL && options != NULL) {
        capsule = PyObject_Call(method, empty, options);
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            capsule = PyObject_CallNoArgs(method);
        }
    }
    Py_XDECREF(method);
    Py_XDECREF(empty);
    Py_XDECREF(options);
    return capsule;
}

/* The capsule is not consumed (renamed): the tensor lives while array->owner holds the
 * capsule, whose destructor frees it. A write to a copied tensor would be lost, so it
 * counts as read-only. */
int
py_borrow_capsule(PyObject *object, py_argument argument, int how, py_array *array)
{
    const bool jax = py_type_text_is(Py_TYPE(object), "__module__", "jax", true);
    PyObject *capsule = call_dlpack(object);
    const dlpack_tensor *view;
    bool read_only = jax; /* immutable, even without the flag */

    if (capsule == NULL) {
        return cannot_export(argument);
    }
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        const dlpack_versioned *versioned =
            PyCapsule_GetPointer(capsule, "dltensor_versioned");
        read_only |= (versioned->flags & (DLPACK_READ_ONLY | DLPACK_IS_COPIED)) != 0;
        view = versioned->version.major == 1 ? &versioned->tensor : NULL;
    } else {
        const dlpack_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        view = managed == NULL ? NULL : &managed->tensor;
    }
    array->owner = capsule;
    if (view == NULL) {
        PyErr_Clear();
        return py_argument_error(PyExc_TypeError, argument,
                                 "must export a DLPack tensor of version 1 or before");
    }
    if ((how & PY_WRITE) != 0 && read_only) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be writable, got a read-only array");
    }
    return from_dlpack(view, argument, how, array);
}

/* ---- Arrays made for Python ------------------------------------------------------ */

/* A tensor made for a consumer, in one block. delete_made() needs `managed` first. */
typedef struct {
    dlpack_versioned managed;
    dlpack_managed unversioned; /* the same tensor for DLPack before 1.0 */
    void (*release)(void *context);
    void *allocated; /* this block if malloc() made it; NULL: the caller's `note` */
    int64_t dims[];  /* shape, then strides */
} made_tensor;

static void
delete_made(dlpack_versioned *managed)
{
    const made_tensor *tensor = (made_tensor *)managed;
    void *allocated = tensor->allocated;

    tensor->release(managed->context);
    free(allocated);
}

size_t
py_dlpack_bytes(int ndim)
{
    return sizeof(made_tensor) + 2 * (size_t)ndim * sizeof(int64_t);
}

static dlpack_versioned *
new_tensor(const py_made *made, void (*release)(void *context), void *context,
           void *note)
{
    made_tensor *tensor = note == NULL ? malloc(py_dlpack_bytes(made->ndim)) : note;
    dlpack_tensor *view;
    int64_t step = 1;

    if (tensor == NULL) {
        return NULL;
    }
    tensor->managed = (dlpack_versioned){{1, 1}, context, delete_made, 0, {0}};
    tensor->release = release;
    tensor->allocated = note == NULL ? tensor : NULL;
    view = &tensor->managed.tensor;
    view->data = made->data;
    view->device.type = DLPACK_CPU;
    view->ndim = made->ndim;
    view->dtype.code = dtype_codes[made->dtype].code;
    view->dtype.bits = dtype_codes[made->dtype].bits;
    view->dtype.lanes = 1;
    view->shape = tensor->dims;
    view->strides = tensor->dims + made->ndim;
    for (int d = made->ndim - 1; d >= 0; d--) {
        view->shape[d] = made->shape[d];
        view->strides[d] = step;
        step *= made->shape[d] == 0 ? 1 : made->shape[d];
    }
    return &tensor->managed;
}

static void
delete_unversioned(dlpack_managed *managed)
{
    delete_made(managed->context);
}

/* Capsule destructor: frees the tensor unless a consumer took it and so renamed it. */
static void
free_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dlpack_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");

        managed->deleter(managed);
    }
}

PyObject *
py_make_dlpack(const dlpack_exchange *exchange, const py_made *made,
               void (*release)(void *context), void *context, void *note)
{
    dlpack_versioned *managed = new_tensor(made, release, context, note);
    void *object = NULL;

    if (managed == NULL) {
        release(context);
        return PyErr_NoMemory();
    }
    if (exchange != NULL) {
        return exchange->managed_to_object(managed, &object) == 0 ? object : NULL;
    }
    object = PyCapsule_New(managed, "dltensor_versioned", free_capsule);
    if (object == NULL) {
        delete_made(managed);
    }
    return object;
}

static void
free_unversioned(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        dlpack_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");

        managed->deleter(managed);
    }
}

PyObject *
py_make_dlpack_unversioned(const py_made *made, void (*release)(void *context),
                           void *context, void *note)
{
    dlpack_versioned *managed = new_tensor(made, release, context, note);
    dlpack_managed *unversioned;
    PyObject *capsule;

    if (managed == NULL) {
        release(context);
        return PyErr_NoMemory();
    }
    unversioned = &((made_tensor *)managed)->unversioned;
    *unversioned = (dlpack_managed){managed->tensor, managed, delete_unversioned};
    capsule = PyCapsule_New(unversioned, "dltensor", free_unversioned);
    if (capsule == NULL) {
        delete_made(managed);
    }
    return capsule;
}
