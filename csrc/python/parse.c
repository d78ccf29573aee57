/* py_parse(): matches the arguments of a call to the table of its operation. */
#include "borrow.h"

#include <stdio.h>
#include <string.h>

/* ---- Numbers --------------------------------------------------------------------- */

/* Words for error messages: the type and the range of each kind of number. */
static const struct {
    const char *what, *range;
} numbers[] = {
    [PY_REAL] = {"a number", "float64"},
    [PY_INTEGER] = {"an integer", "64 bits with sign"},
    [PY_SHORT_INTEGER] = {"an integer", "32 bits with sign"},
    [PY_FLAG] = {"True or False", "bool"},
    [PY_STREAM] = {"an integer", "64 bits without sign"},
};

/* Replaces the exception of Python's conversion, which does not name the argument, by
 * ValueError or TypeError. KeyboardInterrupt and the like stay. Returns -1. */
static int
number_error(const py_parameter *parameter, PyObject *object, bool too_large)
{
    const char *what = numbers[parameter->kind].what;
    const char *range = numbers[parameter->kind].range;

    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear();
    if (too_large) {
        PyErr_Format(PyExc_ValueError, "%s must fit into %s, got %S", parameter->name,
                     range, object);
    } else {
        PyErr_Format(PyExc_TypeError, "%s must be %s, got %R", parameter->name, what,
                     object);
    }
    return -1;
}

static int
store_integer(const py_parameter *parameter, PyObject *object, void *field)
{
    const bool is_short = parameter->kind == PY_SHORT_INTEGER;
    const long long number = PyLong_AsLongLong(object);

    if (number == -1 && PyErr_Occurred()) {
        return number_error(parameter, object,
                            PyErr_ExceptionMatches(PyExc_OverflowError));
    }
    if (is_short && (number < INT32_MIN || number > INT32_MAX)) {
        return number_error(parameter, object, true);
    }
    if (is_short) {
        *(int32_t *)field = (int32_t)number;
    } else {
        *(int64_t *)field = number;
    }
    return 0;
}

/* Stores a stream, which Python passes as the integer of its address (cudaStream_t). */
static int
store_stream(const py_parameter *parameter, PyObject *object, void *field)
{
    PyObject *integer = PyNumber_Index(object);
    unsigned long long number = 0;

    if (integer != NULL) {
        number = PyLong_AsUnsignedLongLong(integer);
        Py_DECREF(integer);
    }
    if (PyErr_Occurred()) {
        return number_error(parameter, object,
                            PyErr_ExceptionMatches(PyExc_OverflowError));
    }
    *(void **)field = (void *)(uintptr_t)number;
    return 0;
}

static int
store_number(const py_parameter *parameter, PyObject *object, void *fields)
{
    void *field = (char *)fields + parameter->at - 1;
    double real;
    int flag;

    switch (parameter->kind) {
    case PY_REAL:
        real = PyFloat_AsDouble(object);
        if (real == -1.0 && PyErr_Occurred()) {
            return number_error(parameter, object,
                                PyErr_ExceptionMatches(PyExc_OverflowError));
        }
        *(double *)field = real;
        return 0;
    case PY_FLAG:
        flag = PyObject_IsTrue(object);
        if (flag < 0) {
            return number_error(parameter, object, false);
        }
        *(bool *)field = flag != 0;
        return 0;
    case PY_STREAM:
        return store_stream(parameter, object, field);
    default:
        return store_integer(parameter, object, field);
    }
}

int
py_take_choice(PyObject *object, const char *name, const char *const *names, int n,
               int *choice)
{
    char text[PY_SHAPE_TEXT];
    size_t used = 0;

    for (int i = 0; object != NULL && i < n; i++) {
        if (PyUnicode_Check(object) &&
            PyUnicode_CompareWithASCIIString(object, names[i]) == 0) {
            *choice = i;
            return 0;
        }
    }
    if (object == NULL) {
        return 0;
    }
    for (int i = 0; i < n && used < sizeof text; i++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s'%s'",
                                 i == 0       ? ""
                                 : i == n - 1 ? " or "
                                              : ", ",
                                 names[i]);
    }
    PyErr_Format(PyExc_ValueError, "%s must be %s, got %R", name, text, object);
    return -1;
}

/* ---- Arguments ------------------------------------------------------------------- */

/* Whether a number was given for a parameter that takes a number or an array. */
static bool
is_number(const py_parameter *parameter, PyObject *object)
{
    return PyLong_Check(object) ||
           (parameter->kind == PY_REAL && PyFloat_Check(object));
}

/* Stores a number in `fields`, and any other argument in given[p]. None counts as not
 * given if the parameter allows it. */
static int
take_argument(py_call *call, int p, PyObject *object, void *fields)
{
    const py_parameter *parameter = &call->operation->parameters[p];
    const bool is_kept = parameter->kind < PY_REAL || parameter->scalar_at != 0;

    if (object == Py_None && (is_kept ? !parameter->required : parameter->or_none)) {
        return 0;
    }
    call->seen |= (uint64_t)1 << p;
    if (parameter->kind == PY_LIST && !PyList_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a list", parameter->name);
        return -1;
    }
    if (parameter->kind < PY_REAL ||
        (parameter->scalar_at != 0 && !is_number(parameter, object))) {
        call->given[p] = object;
        return 0;
    }
    return store_number(parameter, object, fields);
}

/* The row of a keyword, or -1 with TypeError. Callers tend to pass keywords in the
 * order of the table, so the search starts after `last`, the previous keyword's row. */
static int
find_keyword(const py_operation *operation, PyObject *keyword, int last)
{
    const char *text = PyUnicode_AsUTF8AndSize(keyword, NULL);
    const int n = operation->n_parameters;

    for (int i = 1; text != NULL && i <= n; i++) {
        const int p = (last + i) % n;
        const char *name = operation->parameters[p].name;

        if (name[0] == text[0] && strcmp(name, text) == 0) {
            return p;
        }
    }
    if (text != NULL) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%s'",
                     operation->name, text);
    }
    return -1;
}

static int
check_needs(const py_operation *operation, uint64_t seen)
{
    const uint64_t missing = operation->needs & ~seen;

    if (missing == 0) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s() requires the argument '%s'", operation->name,
                 operation->parameters[__builtin_ctzll(missing)].name);
    return -1;
}

static void
begin(py_call *call, const py_operation *operation)
{
    const size_t rows = (size_t)operation->n_parameters;

    call->operation = operation;
    memset(call->given, 0, rows * sizeof *call->given);
    memset(call->found, 0, rows * sizeof *call->found);
    call->seen = call->written = 0;
    call->place.device.type = 0;
    call->scratch = NULL;
    call->n = 0;
}

int
py_parse(py_call *call, const py_operation *operation, void *fields,
         PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    const Py_ssize_t n_names = names == NULL ? 0 : PyTuple_Size(names);
    uint64_t seen = 0;
    int p = operation->n_parameters - 1;

    begin(call, operation);
    if (n > operation->n_order || (operation->all && n < operation->n_order)) {
        PyErr_Format(PyExc_TypeError, "%s() takes %s %d arguments (%zd given)",
                     operation->name, operation->all ? "exactly" : "at most",
                     operation->n_order, n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        seen |= (uint64_t)1 << operation->order[i];
        if (take_argument(call, operation->order[i], args[i], fields) < 0) {
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < n_names; i++) {
        p = find_keyword(operation, PyTuple_GetItem(names, i), p);
        if (p < 0) {
            return -1;
        }
        if ((seen >> p & 1) != 0) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'",
                         operation->name, operation->parameters[p].name);
            return -1;
        }
        seen |= (uint64_t)1 << p;
        if (take_argument(call, p, args[n + i], fields) < 0) {
            return -1;
        }
    }
    return check_needs(operation, seen);
}
