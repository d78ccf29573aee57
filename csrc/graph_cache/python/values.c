/* Helpers of the graph cache's types: dtypes, integers from Python, allocation. */
#include "../io.h"
#include "binding.h"

#include <string.h>

/* ---- Dtypes ---------------------------------------------------------------------- */

static const uint8_t graph_dtypes[PY_N_DTYPES] = {
    [TFAST_F32] = GRAPH_F32,
    [TFAST_F64] = GRAPH_F64,
    [TFAST_F16] = GRAPH_F16,
    [TFAST_BF16] = GRAPH_BF16,
    [TFAST_BOOL] = GRAPH_BOOL,
    [PY_INT64] = GRAPH_I64,
    [PY_INT32] = GRAPH_I32,
    [PY_INT16] = GRAPH_I16,
    [PY_INT8] = GRAPH_I8,
    [PY_UINT64] = GRAPH_U64,
    [PY_UINT32] = GRAPH_U32,
    [PY_UINT16] = GRAPH_U16,
    [PY_UINT8] = GRAPH_U8,
    [PY_COMPLEX64] = GRAPH_C64,
    [PY_COMPLEX128] = GRAPH_C128,
    [PY_FLOAT8_E4M3FN] = GRAPH_F8_E4M3FN,
    [PY_FLOAT8_E5M2] = GRAPH_F8_E5M2,
};

int
py_graph_dtype(int dtype)
{
    return graph_dtypes[dtype];
}

int
py_dtype_of_graph(int graph_dtype)
{
    for (int i = 0; i < PY_N_DTYPES; i++) {
        if (graph_dtypes[i] == graph_dtype) {
            return i;
        }
    }
    return PY_UINT8; /* GRAPH_STRING, GRAPH_BYTES */
}

/* ---- Integers from Python -------------------------------------------------------- */

/* Copies an int64 array with one dimension and any stride. */
static int
copy_array(const py_array *array, py_argument argument, py_int64s *out)
{
    const int64_t *data = array->data;

    if (array->ndim != 1 || array->device.type != TFAST_CPU) {
        return py_argument_error(
            PyExc_ValueError, argument, "must have one dimension, on the CPU, got %d%s",
            array->ndim, array->device.type == TFAST_CPU ? "" : " on a GPU");
    }
    out->n = array->numel;
    out->data = PyMem_Malloc((size_t)(out->n + 1) * sizeof *out->data);
    if (out->data == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (array->strides[0] == 1 && out->n > 0) {
        memcpy(out->data, data, (size_t)out->n * sizeof *data);
        return 0;
    }
    for (int64_t i = 0; i < out->n; i++) {
        out->data[i] = data[i * array->strides[0]];
    }
    return 0;
}

/* Converts one integer. Returns 0, or -1 with an exception that names the argument. */
static int
take_integer(PyObject *object, py_argument argument, int64_t *value)
{
    PyObject *number = PyNumber_Index(object);

    if (number == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            py_argument_error(PyExc_TypeError, argument, "must be an integer");
        }
        return -1;
    }
    *value = PyLong_AsLongLong(number);
    Py_DECREF(number);
    if (*value == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return py_argument_error(PyExc_ValueError, argument, "must fit int64");
    }
    return 0;
}

static int
copy_sequence(PyObject *object, const char *name, py_int64s *out)
{
    PyObject *list = PySequence_List(object);

    if (list == NULL) {
        const py_argument argument = {name, -1};

        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            py_argument_error(PyExc_TypeError, argument,
                              "must be an int64 array or a sequence of integers");
        }
        return -1;
    }
    out->n = PyList_Size(list);
    out->data = PyMem_Malloc((size_t)(out->n + 1) * sizeof *out->data);
    if (out->data == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; out->data != NULL && i < out->n; i++) {
        const py_argument argument = {name, i};

        if (take_integer(PyList_GetItem(list, i), argument, &out->data[i]) < 0) {
            PyMem_Free(out->data);
            out->data = NULL;
        }
    }
    Py_DECREF(list);
    return out->data == NULL ? -1 : 0;
}

int
py_take_int64s(py_state *state, PyObject *object, const char *name, py_int64s *out)
{
    const py_argument argument = {name, -1};
    py_array array;
    int status;

    out->data = NULL;
    if (PyList_Check(object) || PyTuple_Check(object) || PyRange_Check(object)) {
        return copy_sequence(object, name, out);
    }
    if (py_borrow(state, object, argument, PY_ONLY_INT64, &array) == 0) {
        status = copy_array(&array, argument, out);
        py_release(&array);
        return status;
    }
    if (!PyErr_ExceptionMatches(PyExc_NotImplementedError) &&
        !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1;
    }
    PyErr_Clear(); /* not an int64 array: convert element by element */
    return copy_sequence(object, name, out);
}

int
py_take_uint16s(PyObject *object, const char *name, int64_t end, uint16_t **out, int *n)
{
    py_int64s numbers;

    if (copy_sequence(object, name, &numbers) < 0) {
        return -1;
    }
    *n = (int)numbers.n;
    *out = PyMem_Calloc((size_t)numbers.n + 1, sizeof **out);
    if (*out == NULL || numbers.n > UINT16_MAX) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < numbers.n; i++) {
        const py_argument argument = {name, i};

        if (numbers.data[i] < 0 || numbers.data[i] >= end) {
            py_argument_error(PyExc_ValueError, argument,
                              "must be in 0 .. %lld, got %lld", (long long)end - 1,
                              (long long)numbers.data[i]);
            goto fail;
        }
        (*out)[i] = (uint16_t)numbers.data[i];
    }
    PyMem_Free(numbers.data);
    return 0;
fail:
    PyMem_Free(numbers.data);
    PyMem_Free(*out);
    *out = NULL;
    return -1;
}

/* ---- Objects --------------------------------------------------------------------- */

PyObject *
py_graph_alloc(PyTypeObject *type)
{
    return PyType_GenericAlloc(type, 0);
}

void
py_graph_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    release(self);
    Py_DECREF(type);
}

py_state *
py_graph_state(PyObject *self)
{
    return PyType_GetModuleState(Py_TYPE(self));
}

static PyType_Spec *const specs[PY_N_GRAPH_TYPES] = {
    [PY_GRAPH_WRITER] = &py_graph_writer_spec,
    [PY_GRAPH_CACHE] = &py_graph_cache_spec,
    [PY_GRAPH_SELECTION] = &py_graph_selection_spec,
    [PY_GRAPH_BATCH] = &py_graph_batch_spec,
    [PY_GRAPH_PREFETCH] = &py_graph_prefetch_spec,
    [PY_GRAPH_ORDER] = &py_graph_order_spec,
};

int
py_graph_add_types(PyObject *module, py_state *state)
{
    graph_interrupted = py_signal_raised;
    for (int i = 0; i < PY_N_GRAPH_TYPES; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);

        state->graph_types[i] = (PyTypeObject *)type;
        if (type == NULL || PyModule_AddType(module, state->graph_types[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

void *
py_graph_object(py_state *state, PyObject *object, int type, const char *name)
{
    if (Py_TYPE(object) != state->graph_types[type]) {
        PyErr_Format(PyExc_TypeError, "%s must be a %s", name,
                     strrchr(specs[type]->name, '.') + 1);
        return NULL;
    }
    return object;
}
