/* Converts a graph's fields from Python values to tfast_graph_value, for an append. */
#include "fields.h"

/* ---- Values ---------------------------------------------------------------------- */

static const int64_t no_dims[1] = {0}; /* shape and strides of scalars */

static int
take_number(py_graph_field *at, tfast_graph_value *value)
{
    const py_argument argument = {at->name, -1};
    const int dtype = at->field->dtype;

    if (dtype == GRAPH_BOOL && PyBool_Check(at->object)) {
        at->scalar.truth = at->object == Py_True;
    } else if (dtype == GRAPH_I64 && PyLong_Check(at->object)) {
        int overflow;

        at->scalar.integer = PyLong_AsLongLongAndOverflow(at->object, &overflow);
        if (overflow != 0) {
            return py_argument_error(PyExc_ValueError, argument,
                                     "must fit int64, got a larger integer; "
                                     "store a str or a float instead");
        }
    } else if (dtype == GRAPH_F64) {
        at->scalar.number = PyFloat_AsDouble(at->object);
        if (at->scalar.number == -1.0 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
                return -1;
            }
            PyErr_Clear();
            return py_argument_error(PyExc_ValueError, argument,
                                     "must fit float64, got a larger integer; "
                                     "store a str instead");
        }
    } else {
        PyObject *type = PyType_GetName(Py_TYPE(at->object));
        const char *text = type == NULL ? NULL : PyUnicode_AsUTF8AndSize(type, NULL);

        py_argument_error(PyExc_TypeError, argument, "must be %s, got %.80s",
                          dtype == GRAPH_BOOL ? "a bool" : "an int",
                          text == NULL ? "something else" : text);
        Py_XDECREF(type);
        return -1;
    }
    *value = (tfast_graph_value){&at->scalar, true, dtype, 0, no_dims, no_dims};
    return 0;
}

static int
take_text(py_graph_field *at, tfast_graph_value *value)
{
    const bool is_string = at->field->dtype == GRAPH_STRING;
    const py_argument argument = {at->name, -1};
    Py_ssize_t bytes = 0;

    if (is_string && PyUnicode_Check(at->object)) {
        value->data = PyUnicode_AsUTF8AndSize(at->object, &bytes);
    } else if (!is_string && PyBytes_Check(at->object)) {
        bytes = PyBytes_Size(at->object);
        value->data = PyBytes_AsString(at->object);
    } else {
        return py_argument_error(PyExc_TypeError, argument, "must be a %s object",
                                 is_string ? "str" : "bytes");
    }
    if (value->data == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            return -1;
        }
        PyErr_Clear();
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be a str that UTF-8 can encode; "
                                 "store bytes instead");
    }
    at->array.buffer[0] = bytes;
    at->array.buffer[1] = 1;
    value->present = true;
    value->dtype = at->field->dtype;
    value->rank = 1;
    value->shape = at->array.buffer;
    value->strides = at->array.buffer + 1;
    return 0;
}

static int
take_array(py_state *state, py_graph_field *at, tfast_graph_value *value)
{
    const py_argument argument = {at->name, -1};
    py_array *array = &at->array;

    if (py_borrow(state, at->object, argument, PY_ANY_DTYPE, array) < 0) {
        return -1;
    }
    if (array->device.type != TFAST_CPU) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be on the CPU, got an array on a GPU; "
                                 "copy it to the CPU first");
    }
    *value = (tfast_graph_value){
        array->data, true,         py_graph_dtype(array->dtype),
        array->ndim, array->shape, array->strides,
    };
    return 0;
}

static int
take_value(py_state *state, py_graph_field *at, tfast_graph_value *value)
{
    const int dtype = at->field->dtype;
    PyObject *object = at->object;

    if (dtype >= GRAPH_STRING) {
        return take_text(at, value);
    }
    if ((at->field->flags & GRAPH_SCALAR) != 0 &&
        (PyLong_Check(object) || PyFloat_Check(object))) {
        return take_number(at, value);
    }
    return take_array(state, at, value);
}

/* A new reference to graph[key]; NULL without an exception if there is no such key. */
static PyObject *
look_up(PyObject *graph, PyObject *key)
{
    PyObject *value;

    if (PyDict_Check(graph)) {
        value = PyDict_GetItemWithError(graph, key);
        return Py_XNewRef(value);
    }
    value = PyObject_GetItem(graph, key);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
    }
    return value;
}

/* Returns -1 with a ValueError that names the graph's keys that the schema lacks. */
static int
unknown_keys(const py_graph_fields *self, PyObject *graph)
{
    PyObject *keys = PyMapping_Keys(graph), *unknown = PyList_New(0);
    const Py_ssize_t n = keys == NULL ? 0 : PyList_Size(keys);

    for (Py_ssize_t i = 0; i < n && unknown != NULL; i++) {
        PyObject *key = PyList_GetItem(keys, i);
        int known = 0;

        for (Py_ssize_t f = 0; f < self->n && known == 0; f++) {
            known = PyObject_RichCompareBool(self->each[f].key, key, Py_EQ);
        }
        if (known < 0 || (known == 0 && PyList_Append(unknown, key) < 0)) {
            Py_CLEAR(unknown);
        }
    }
    if (keys != NULL && unknown != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "keys must be those of the schema, got %R besides; leave "
                     "these out, or write a cache with another schema",
                     unknown);
    }
    Py_XDECREF(keys);
    Py_XDECREF(unknown);
    return -1;
}

int
py_graph_fields_take(py_graph_fields *self, py_state *state, PyObject *graph)
{
    Py_ssize_t found = 0, size;

    for (Py_ssize_t i = 0; i < self->n; i++) {
        py_graph_field *at = &self->each[i];

        at->object = look_up(graph, at->key);
        if (at->object == NULL && PyErr_Occurred()) {
            return -1;
        }
        found += at->object != NULL;
        if (at->object != NULL && at->object != Py_None) {
            if (take_value(state, at, &self->values[i]) < 0) {
                return -1;
            }
        } else if ((at->field->flags & GRAPH_OPTIONAL) != 0) {
            self->values[i].present = false;
        } else {
            PyErr_Format(PyExc_ValueError,
                         "%s must be there (it is not optional), got %s; give every "
                         "graph a value, or make the field optional",
                         at->name, at->object == NULL ? "no such key" : "None");
            return -1;
        }
    }
    size = PyDict_Check(graph) ? PyDict_Size(graph) : PyObject_Size(graph);
    if (size < 0) { /* no len(): the search for unknown keys is skipped */
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1; /* KeyboardInterrupt */
        }
        PyErr_Clear();
        return 0;
    }
    return size == found ? 0 : unknown_keys(self, graph);
}

void
py_graph_fields_drop(py_graph_fields *self)
{
    for (Py_ssize_t i = 0; i < self->n; i++) {
        py_release(&self->each[i].array);
        Py_CLEAR(self->each[i].object);
    }
}

/* ---- Making and freeing ---------------------------------------------------------- */

static int
take_key(py_graph_field *at, const graph_schema_field *field, PyObject *key)
{
    at->field = field;
    at->key = Py_NewRef(key);
    if (PyUnicode_CheckExact(at->key)) {
        PyUnicode_InternInPlace(&at->key);
    }
    at->text = PyUnicode_FromFormat("graph[%R]", at->key);
    at->name = at->text == NULL ? NULL : PyUnicode_AsUTF8AndSize(at->text, NULL);
    return at->name == NULL ? -1 : 0;
}

int
py_graph_fields_init(py_graph_fields *self, const tfast_graph_schema *schema,
                     PyObject *keys)
{
    const Py_ssize_t n = schema->header.n_fields;
    PyObject *list = PySequence_List(keys);

    if (list == NULL) {
        return -1;
    }
    if (PyList_Size(list) != n) {
        PyErr_Format(PyExc_ValueError,
                     "keys must be one for each of the schema's %zd fields, got %zd", n,
                     PyList_Size(list));
        goto fail;
    }
    self->each = PyMem_Calloc((size_t)n + 1, sizeof *self->each);
    self->values = PyMem_Calloc((size_t)n + 1, sizeof *self->values);
    if (self->each == NULL || self->values == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    while (self->n < n) {
        const Py_ssize_t i = self->n++; /* counted before it can fail, to be freed */

        if (take_key(&self->each[i], &schema->fields[i], PyList_GetItem(list, i)) < 0) {
            goto fail;
        }
    }
    Py_DECREF(list);
    return 0;
fail:
    Py_DECREF(list);
    return -1;
}

int
py_graph_fields_traverse(py_graph_fields *self, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < self->n; i++) {
        Py_VISIT(self->each[i].key);
        Py_VISIT(self->each[i].object);
    }
    return 0;
}

void
py_graph_fields_free(py_graph_fields *self)
{
    for (Py_ssize_t i = 0; i < self->n; i++) {
        Py_XDECREF(self->each[i].key);
        Py_XDECREF(self->each[i].text);
    }
    PyMem_Free(self->each);
    PyMem_Free(self->values);
}
