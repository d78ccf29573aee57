/* The type GraphWriter: appends graphs from Python to a segment. */
#include "fields.h"

#include <string.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    tfast_graph_writer *writer; /* NULL: closed */
    tfast_graph_schema *schema;
    py_graph_fields fields;
    Py_ssize_t n_counts;
    int64_t *counts;             /* [n_counts], of one append(); -1: from the shapes */
    int64_t appended, committed; /* numbers of graphs, once `writer` is NULL */
    bool busy;                   /* a method runs, perhaps without the GIL */
    long process;                /* the id of the process that made it */
} graph_writer;

/* ---- Methods --------------------------------------------------------------------- */

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

/* Marks the writer as busy. Returns -1 with an exception if it is closed, if another
 * thread uses it, or in a forked child, which shares the open file with its parent. */
static int
begin(graph_writer *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "writer must not be used by two threads at once; give each "
                        "thread a writer of its own");
        return -1;
    }
    if (self->writer == NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "writer must be open, got a closed one; make a new writer to "
                        "append");
        return -1;
    }
    if (self->process != getpid()) {
        PyErr_SetString(PyExc_RuntimeError,
                        "writer must be used by the process that made it, got a "
                        "forked child; make a writer in each process");
        return -1;
    }
    self->busy = true;
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
writer_append(graph_writer *self, PyObject *const *args, Py_ssize_t n)
{
    py_state *state = py_graph_state((PyObject *)self);
    PyObject *result = NULL;
    const uint8_t *key;
    tfast_status status;
    int misfit = -1;

    if (n < 1 || n > 3) {
        PyErr_Format(PyExc_TypeError, "append() takes 1 to 3 arguments, got %zd", n);
        return NULL;
    }
    if (begin(self) < 0) {
        return NULL;
    }
    if (take_key(n > 1 ? args[1] : Py_None, &key) < 0 ||
        take_counts(self, n > 2 ? args[2] : Py_None) < 0 ||
        py_graph_fields_take(&self->fields, state, args[0]) < 0) {
        goto done;
    }
    status = tfast_graph_writer_append(self->writer, self->fields.values, self->counts,
                                       key, &misfit);
    result = status == TFAST_EINVAL && misfit >= 0 ? PyLong_FromLong(misfit)
                                                   : py_result(status);
done:
    py_graph_fields_drop(&self->fields);
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

/* Frees the core's writer; keeps what the attributes `appended` and `committed` report.
 */
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
    if (status != TFAST_EINTR) {
        drop_writer(self);
    }
    self->busy = false;
    return result;
}

static PyObject *
writer_abandon(graph_writer *self, PyObject *Py_UNUSED(unused))
{
    if (self->writer != NULL && self->busy) {
        begin(self); /* fails and sets the exception */
        return NULL;
    }
    if (self->writer != NULL) {
        drop_writer(self);
    }
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
take_schema(graph_writer *self, const char *bytes, Py_ssize_t n)
{
    const tfast_status status =
        tfast_graph_schema_parse(&self->schema, bytes, (size_t)n);

    if (status != TFAST_OK) {
        py_result(status);
        return -1;
    }
    self->n_counts = self->schema->header.n_counts;
    self->counts = PyMem_Calloc((size_t)self->n_counts + 1, sizeof *self->counts);
    if (self->counts == NULL) {
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
                                     &keys, &durable)) {
        goto fail;
    }
    self->process = getpid();
    if (take_schema(self, schema, bytes) < 0 ||
        py_graph_fields_init(&self->fields, self->schema, keys) < 0) {
        goto fail;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_writer_open(&self->writer, PyBytes_AsString(path), schema,
                                     (size_t)bytes, durable != 0);
    Py_END_ALLOW_THREADS
    if (status != TFAST_OK) {
        self->writer = NULL;
        py_result(status);
        goto fail;
    }
    Py_DECREF(path);
    return (PyObject *)self;
fail:
    Py_XDECREF(path);
    Py_XDECREF((PyObject *)self);
    return NULL;
}

static int
writer_traverse(graph_writer *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    return py_graph_fields_traverse(&self->fields, visit, arg);
}

static void
writer_dealloc(graph_writer *self)
{
    PyObject_GC_UnTrack(self);
    if (self->writer != NULL) {
        tfast_graph_writer_free(self->writer);
    }
    py_graph_fields_free(&self->fields);
    PyMem_Free(self->counts);
    if (self->schema != NULL) {
        tfast_graph_schema_free(self->schema);
    }
    py_graph_free((PyObject *)self);
}

static PyMethodDef writer_methods[] = {
    {"append", (PyCFunction)(void (*)(void))writer_append, METH_FASTCALL,
     "append($self, graph, key=None, counts=None, /)\n--\n\n"
     "Appends a graph, a mapping from keys to fields. Returns None, or the index of a\n"
     "field whose size does not fit the schema; then nothing was appended."},
    {"commit", (PyCFunction)writer_commit, METH_NOARGS,
     "commit($self, /)\n--\n\n"
     "Commits all appended graphs, synced to disk if `durable`; returns `committed`."},
    {"close", (PyCFunction)writer_close, METH_NOARGS,
     "close($self, /)\n--\n\nCommits, and adds the segment to the cache."},
    {"abandon", (PyCFunction)writer_abandon, METH_NOARGS,
     "abandon($self, /)\n--\n\n"
     "Closes the file without a commit; graph_adopt() can keep committed graphs."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef writer_attributes[] = {
    {"appended", (getter)writer_appended, NULL, "Graphs appended.", NULL},
    {"committed", (getter)writer_committed, NULL, "Graphs committed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "Writes one segment of a graph cache, from one thread at a time."},
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
