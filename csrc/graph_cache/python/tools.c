/* Functions of the module: adopt, schema, build, repair and the checksum. */
#include "../../backend.h"
#include "binding.h"

#include <string.h>

PyObject *
py_graph_adopt(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path = NULL;
    int64_t graphs = 0, lost = 0;
    tfast_status status;

    if (!PyArg_ParseTuple(args, "O&:graph_adopt", PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_adopt(PyBytes_AsString(path), &graphs, &lost);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return status == TFAST_OK
               ? Py_BuildValue("(LL)", (long long)graphs, (long long)lost)
               : py_result(status);
}

PyObject *
py_graph_schema(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path = NULL, *result;
    tfast_graph_schema *schema = NULL;
    tfast_status status;

    if (!PyArg_ParseTuple(args, "O&:graph_schema", PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_schema_find(PyBytes_AsString(path), &schema);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    if (status != TFAST_OK || schema == NULL) {
        return py_result(status);
    }
    result = PyBytes_FromStringAndSize((const char *)schema->bytes,
                                       (Py_ssize_t)schema->n_bytes);
    tfast_graph_schema_free(schema);
    return result;
}

/* Calls a function of the core that takes a path. format: of PyArg_ParseTuple(). */
static PyObject *
call_with_path(PyObject *args, const char *format,
               tfast_status (*function)(const char *path))
{
    PyObject *path = NULL;
    const char *text;
    tfast_status status;

    if (!PyArg_ParseTuple(args, format, PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    text = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    status = function(text);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return py_result(status);
}

PyObject *
py_graph_build_begin(PyObject *Py_UNUSED(module), PyObject *args)
{
    return call_with_path(args, "O&:graph_build_begin", tfast_graph_build_begin);
}

PyObject *
py_graph_build_anew(PyObject *Py_UNUSED(module), PyObject *args)
{
    return call_with_path(args, "O&:graph_build_anew", tfast_graph_build_anew);
}

PyObject *
py_graph_is_building(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path = NULL;
    bool building = false;
    tfast_status status;

    if (!PyArg_ParseTuple(args, "O&:graph_is_building", PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_is_building(PyBytes_AsString(path), &building);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return status == TFAST_OK ? PyBool_FromLong(building) : py_result(status);
}

/* Refuses negative numbers, because the core reads uint64_t. Returns 0, or -1 with
 * ValueError. */
static int
check_order(const py_int64s *order)
{
    for (int64_t i = 0; i < order->n; i++) {
        if (order->data[i] < 0) {
            PyErr_Format(PyExc_ValueError, "order[%lld] must be >= 0, got %lld",
                         (long long)i, (long long)order->data[i]);
            return -1;
        }
    }
    return 0;
}

PyObject *
py_graph_build_end(PyObject *module, PyObject *args)
{
    PyObject *path = NULL, *object, *result = NULL;
    py_int64s order = {NULL, 0};
    tfast_status status;

    if (!PyArg_ParseTuple(args, "O&O:graph_build_end", PyUnicode_FSConverter, &path,
                          &object)) {
        return NULL;
    }
    if (object != Py_None &&
        (py_take_int64s(PyModule_GetState(module), object, "order", &order) < 0 ||
         check_order(&order) < 0)) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_build_end(PyBytes_AsString(path), (const uint64_t *)order.data,
                                   order.n);
    Py_END_ALLOW_THREADS
    result = py_result(status);
done:
    PyMem_Free(order.data);
    Py_DECREF(path);
    return result;
}

/* ---- Repair ---------------------------------------------------------------------- */

/* The state of a repair that runs without the GIL. */
typedef struct {
    PyThreadState *thread; /* of PyEval_SaveThread(); say_line() takes the GIL */
    PyObject *line;        /* called with each line of the report; borrowed */
    bool failed;           /* an exception is set; py_graph_repair() returns with it */
} listener;

static void
say_line(void *context, const char *text)
{
    listener *l = context;
    PyObject *string, *said = NULL;

    PyEval_RestoreThread(l->thread);
    if (!l->failed && !PyErr_Occurred()) { /* no calls while an exception is set */
        string = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
        if (string != NULL) {
            said = PyObject_CallFunctionObjArgs(l->line, string, NULL);
        }
        l->failed = said == NULL || PyErr_CheckSignals() < 0;
        Py_XDECREF(said);
        Py_XDECREF(string);
    }
    l->thread = PyEval_SaveThread();
}

PyObject *
py_graph_repair(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *source = NULL, *target = NULL;
    listener l = {NULL, NULL, false};
    tfast_graph_repair_report report = {0};
    tfast_status status;

    if (!PyArg_ParseTuple(args, "O&O&O:graph_repair", PyUnicode_FSConverter, &source,
                          PyUnicode_FSConverter, &target, &l.line)) {
        return NULL;
    }
    l.thread = PyEval_SaveThread();
    status = tfast_graph_repair(PyBytes_AsString(source), PyBytes_AsString(target),
                                &report, say_line, &l);
    PyEval_RestoreThread(l.thread);
    Py_DECREF(source);
    Py_DECREF(target);
    if (l.failed) {
        return NULL;
    }
    return status != TFAST_OK
               ? py_result(status)
               : Py_BuildValue("{s:L,s:L,s:L,s:L}", "kept", (long long)report.kept,
                               "damaged", (long long)report.damaged, "uncommitted",
                               (long long)report.uncommitted, "bytes_skipped",
                               (long long)report.bytes_skipped);
}

/* ---- Checksums ------------------------------------------------------------------- */

PyObject *
py_crc32c(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"data", "crc", NULL};
    const tfast_graph_kernels *kernels = tfast_graph_kernels_in_use();
    Py_buffer data;
    unsigned int crc = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*|I:crc32c", names, &data, &crc)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    crc = kernels->crc32c(crc, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}
