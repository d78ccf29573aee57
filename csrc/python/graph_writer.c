/* The type GraphWriter: graphs from Python into a segment. */
#include "graph.h"

#include <string.h>

/* One field: where its values are found in a graph, and during an append the value. */
typedef struct {
    PyObject *key;
    PyObject *text;   /* "graph['x']" */
    const char *name; /* the same */
    const graph_schema_field *field;
    PyObject *object; /* a reference during an append */
    py_array array;
    union {
        bool truth;
        int64_t integer;
        double number;
    } scalar;
} place;

typedef struct {
    PyObject_HEAD
    tfast_graph_writer *writer; /* NULL: closed */
    tfast_graph_schema *schema;
    Py_ssize_t n_fields, n_counts;
    place *places;
    tfast_graph_value *values;
    int64_t *counts;
    int64_t appended, committed; /* when it was closed */
    bool busy;
} graph_writer;

/* ---- Values ---------------------------------------------------------------------- */

static const int64_t no_dims[1] = {0};

static int
take_number(place *at, tfast_graph_value *value)
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
                                     "must fit int64, got an integer that does not");
        }
    } else if (dtype == GRAPH_F64) {
        at->scalar.number = PyFloat_AsDouble(at->object);
        if (at->scalar.number == -1.0 && PyErr_Occurred()) {
            return -1;
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
take_text(place *at, tfast_graph_value *value)
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
        return -1;
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
take_array(py_state *state, place *at, tfast_graph_value *value)
{
    const py_argument argument = {at->name, -1};
    py_array *array = &at->array;

    if (py_borrow(state, at->object, argument, PY_ANY_DTYPE, array) < 0) {
        return -1;
    }
    if (array->device.type != TFAST_CPU) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be on the CPU, got an array on a GPU");
    }
    *value = (tfast_graph_value){
        array->data, true,         py_graph_dtype(array->dtype),
        array->ndim, array->shape, array->strides,
    };
    return 0;
}

static int
take_value(py_state *state, place *at, tfast_graph_value *value)
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

/* The value of a key, a new reference; NULL without an exception where there is none.
 */
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

/* What the graph has besides the schema's fields is named in a ValueError. */
static int
unknown_keys(const graph_writer *self, PyObject *graph)
{
    PyObject *keys = PyMapping_Keys(graph), *unknown = PyList_New(0);
    const Py_ssize_t n = keys == NULL ? 0 : PyList_Size(keys);

    for (Py_ssize_t i = 0; i < n && unknown != NULL; i++) {
        PyObject *key = PyList_GetItem(keys, i);
        int known = 0;

        for (Py_ssize_t f = 0; f < self->n_fields && known == 0; f++) {
            known = PyObject_RichCompareBool(self->places[f].key, key, Py_EQ);
        }
        if (known < 0 || (known == 0 && PyList_Append(unknown, key) < 0)) {
            Py_CLEAR(unknown);
        }
    }
    if (keys != NULL && unknown != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "graph must have no keys but the schema's, got %R besides",
                     unknown);
    }
    Py_XDECREF(keys);
    Py_XDECREF(unknown);
    return -1;
}

/* The values of all fields. */
static int
take_graph(graph_writer *self, py_state *state, PyObject *graph)
{
    Py_ssize_t found = 0, size;

    for (Py_ssize_t i = 0; i < self->n_fields; i++) {
        place *at = &self->places[i];

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
                         "%s must be there (it is not optional), got %s", at->name,
                         at->object == NULL ? "no such key" : "None");
            return -1;
        }
    }
    size = PyDict_Check(graph) ? PyDict_Size(graph) : PyObject_Size(graph);
    if (size < 0) { /* a mapping that cannot tell */
        PyErr_Clear();
        return 0;
    }
    return size == found ? 0 : unknown_keys(self, graph);
}

static void
drop_values(graph_writer *self)
{
    for (Py_ssize_t i = 0; i < self->n_fields; i++) {
        py_release(&self->places[i].array);
        Py_CLEAR(self->places[i].object);
    }
}

static int
take_counts(graph_writer *self, PyObject *counts)
{
    const Py_ssize_t n = counts == Py_None ? 0 : PySequence_Size(counts);

    memset(self->counts, -1, (size_t)self->n_counts * sizeof *self->counts);
    if (counts == Py_None) {
        return 0;
    }
    if (n != self->n_counts) {
        if (n >= 0) {
            PyErr_Format(PyExc_ValueError, "counts must have %zd numbers, got %zd",
                         self->n_counts, n);
        }
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *number = PySequence_GetItem(counts, i);

        self->counts[i] = number == NULL ? -1 : PyLong_AsLongLong(number);
        Py_XDECREF(number);
        if (self->counts[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (self->counts[i] < -1) {
            PyErr_Format(PyExc_ValueError, "counts[%zd] must be >= -1, got %lld", i,
                         (long long)self->counts[i]);
            return -1;
        }
    }
    return 0;
}

/* ---- Methods --------------------------------------------------------------------- */

/* Refuses a closed writer and a second thread. */
static int
begin(graph_writer *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "writer must not be used by two threads at once");
        return -1;
    }
    if (self->writer == NULL) {
        PyErr_SetString(PyExc_ValueError, "writer must be open, got a closed one");
        return -1;
    }
    self->busy = true;
    return 0;
}

/* The arguments of append(), which is called too often for a parser. */
static int
append_arguments(PyObject *const *args, Py_ssize_t n, PyObject *names,
                 PyObject *values[3])
{
    static const char *const known[3] = {"graph", "key", "counts"};
    const Py_ssize_t n_names = names == NULL ? 0 : PyTuple_Size(names);

    values[0] = NULL;
    values[1] = values[2] = Py_None;
    if (n > 3) {
        PyErr_Format(PyExc_TypeError, "append() takes 1 to 3 arguments, got %zd", n);
        return -1;
    }
    memcpy(values, args, (size_t)n * sizeof *values);
    for (Py_ssize_t i = 0; i < n_names; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        int k = 0;

        while (k < 3 && PyUnicode_CompareWithASCIIString(name, known[k]) != 0) {
            k++;
        }
        if (k == 3 || k < n) {
            PyErr_Format(PyExc_TypeError, "append() got %s argument %R",
                         k == 3 ? "an unexpected" : "two values for", name);
            return -1;
        }
        values[k] = args[n + i];
    }
    if (values[0] == NULL) {
        PyErr_SetString(PyExc_TypeError, "append() needs a graph");
        return -1;
    }
    return 0;
}

static int
take_key(PyObject *key, const uint8_t **bytes)
{
    *bytes = NULL;
    if (key == Py_None) {
        return 0;
    }
    if (!PyBytes_Check(key) || PyBytes_Size(key) != 16) {
        PyErr_SetString(PyExc_ValueError, "key must be 16 bytes");
        return -1;
    }
    *bytes = (const uint8_t *)PyBytes_AsString(key);
    return 0;
}

static PyObject *
writer_append(graph_writer *self, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    py_state *state = py_graph_state((PyObject *)self);
    PyObject *given[3], *result = NULL;
    const uint8_t *key;
    int misfit = -1;

    if (append_arguments(args, n, names, given) < 0 || begin(self) < 0) {
        return NULL;
    }
    if (take_key(given[1], &key) == 0 && take_counts(self, given[2]) == 0 &&
        take_graph(self, state, given[0]) == 0) {
        const tfast_status status = tfast_graph_writer_append(
            self->writer, self->values, self->counts, key, &misfit);

        result = status == TFAST_EINVAL && misfit >= 0 ? PyLong_FromLong(misfit)
                                                       : py_result(status);
    }
    drop_values(self);
    self->busy = false;
    return result;
}

static PyObject *
writer_commit(graph_writer *self, PyObject *Py_UNUSED(unused))
{
    tfast_status status;

    if (begin(self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_writer_commit(self->writer);
    Py_END_ALLOW_THREADS
    self->busy = false;
    return status != TFAST_OK
               ? py_result(status)
               : PyLong_FromLongLong(tfast_graph_writer_committed(self->writer));
}

/* Gives the writer back; what it has counted stays. */
static void
drop_writer(graph_writer *self)
{
    self->appended = tfast_graph_writer_appended(self->writer);
    self->committed = tfast_graph_writer_committed(self->writer);
    tfast_graph_writer_free(self->writer);
    self->writer = NULL;
}

static PyObject *
writer_close(graph_writer *self, PyObject *Py_UNUSED(unused))
{
    tfast_status status;
    PyObject *result;

    if (self->writer == NULL) {
        Py_RETURN_NONE;
    }
    if (begin(self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_writer_close(self->writer);
    Py_END_ALLOW_THREADS
    result = py_result(status);
    drop_writer(self);
    self->busy = false;
    return result;
}

static PyObject *
writer_abandon(graph_writer *self, PyObject *Py_UNUSED(unused))
{
    if (self->writer == NULL) {
        Py_RETURN_NONE;
    }
    if (begin(self) < 0) {
        return NULL;
    }
    drop_writer(self);
    self->busy = false;
    Py_RETURN_NONE;
}

static PyObject *
writer_appended(graph_writer *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->writer == NULL
                                   ? self->appended
                                   : tfast_graph_writer_appended(self->writer));
}

static PyObject *
writer_committed(graph_writer *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->writer == NULL
                                   ? self->committed
                                   : tfast_graph_writer_committed(self->writer));
}

/* ---- The type -------------------------------------------------------------------- */

static int
take_keys(graph_writer *self, PyObject *keys)
{
    PyObject *list = PySequence_List(keys);

    if (list == NULL) {
        return -1;
    }
    if (PyList_Size(list) != self->n_fields) {
        PyErr_Format(PyExc_ValueError,
                     "keys must be one for each of the schema's %zd fields, got %zd",
                     self->n_fields, PyList_Size(list));
        Py_DECREF(list);
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->n_fields; i++) {
        place *at = &self->places[i];

        at->field = &self->schema->fields[i];
        at->key = Py_NewRef(PyList_GetItem(list, i));
        if (PyUnicode_CheckExact(at->key)) {
            PyUnicode_InternInPlace(&at->key);
        }
        at->text = PyUnicode_FromFormat("graph[%R]", at->key);
        at->name = at->text == NULL ? NULL : PyUnicode_AsUTF8AndSize(at->text, NULL);
        if (at->name == NULL) {
            break;
        }
    }
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

static int
take_schema(graph_writer *self, const char *bytes, Py_ssize_t n)
{
    const tfast_status status =
        tfast_graph_schema_parse(&self->schema, bytes, (size_t)n);

    if (status != TFAST_OK) {
        py_result(status);
        return -1;
    }
    self->n_counts = self->schema->header.n_counts;
    self->n_fields = self->schema->header.n_fields;
    self->places = PyMem_Calloc((size_t)self->n_fields + 1, sizeof *self->places);
    self->values = PyMem_Calloc((size_t)self->n_fields + 1, sizeof *self->values);
    self->counts = PyMem_Calloc((size_t)self->n_counts + 1, sizeof *self->counts);
    if (self->places == NULL || self->values == NULL || self->counts == NULL) {
        self->n_fields = self->places == NULL ? 0 : self->n_fields;
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *
writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", "schema", "keys", "durable", NULL};
    graph_writer *self = (graph_writer *)py_graph_alloc(type);
    PyObject *path = NULL, *keys;
    const char *schema;
    Py_ssize_t bytes;
    int durable = 1;
    tfast_status status;

    if (self == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O&y#O|$p:GraphWriter", names,
                                     PyUnicode_FSConverter, &path, &schema, &bytes,
                                     &keys, &durable) ||
        take_schema(self, schema, bytes) < 0 || take_keys(self, keys) < 0) {
        Py_XDECREF(path);
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_writer_open(&self->writer, PyBytes_AsString(path), schema,
                                     (size_t)bytes, durable != 0);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    if (status != TFAST_OK) {
        self->writer = NULL;
        py_result(status);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
writer_traverse(graph_writer *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (Py_ssize_t i = 0; i < self->n_fields; i++) {
        Py_VISIT(self->places[i].key);
        Py_VISIT(self->places[i].object);
    }
    return 0;
}

static void
writer_dealloc(graph_writer *self)
{
    PyObject_GC_UnTrack(self);
    if (self->writer != NULL) {
        tfast_graph_writer_free(self->writer);
    }
    for (Py_ssize_t i = 0; i < self->n_fields; i++) {
        Py_XDECREF(self->places[i].key);
        Py_XDECREF(self->places[i].text);
    }
    PyMem_Free(self->places);
    PyMem_Free(self->values);
    PyMem_Free(self->counts);
    if (self->schema != NULL) {
        tfast_graph_schema_free(self->schema);
    }
    py_graph_free((PyObject *)self);
}

static PyMethodDef writer_methods[] = {
    {"append", (PyCFunction)(void (*)(void))writer_append,
     METH_FASTCALL | METH_KEYWORDS,
     "append($self, /, graph, key=None, counts=None)\n--\n\n"
     "Appends a graph, a dict of its fields. Returns None, or the number of a field\n"
     "whose size does not fit the schema (nothing has been appended then)."},
    {"commit", (PyCFunction)writer_commit, METH_NOARGS,
     "commit($self, /)\n--\n\n"
     "Makes what was appended durable, and returns how many graphs are."},
    {"close", (PyCFunction)writer_close, METH_NOARGS,
     "close($self, /)\n--\n\nCommits, and enters the segment into the cache."},
    {"abandon", (PyCFunction)writer_abandon, METH_NOARGS,
     "abandon($self, /)\n--\n\n"
     "Ends without that; what was committed is left for graph_adopt()."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef writer_attributes[] = {
    {"appended", (getter)writer_appended, NULL, "Graphs so far.", NULL},
    {"committed", (getter)writer_committed, NULL, "Graphs that are durable.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "One segment of a graph cache that is being written; see\n"
                "csrc/graph_cache/. Not for two threads at once."},
    {Py_tp_new, writer_new},
    {Py_tp_traverse, writer_traverse},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_getset, writer_attributes},
    {0, NULL},
};

PyType_Spec py_graph_writer_spec = {
    .name = "trainfast._core.GraphWriter",
    .basicsize = sizeof(graph_writer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = writer_slots,
};
