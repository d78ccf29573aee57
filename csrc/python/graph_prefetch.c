/* The type GraphPrefetch: batches that native threads collate ahead. */
#include "graph.h"

typedef struct {
    PyObject_HEAD
    py_graph_selection *selection;  /* a reference */
    tfast_graph_prefetch *prefetch; /* NULL: closed */
    tfast_graph_batch *held; /* a reference: came when a signal's handler raised */
    int64_t held_tag;
    int64_t largest; /* number of graphs that was submitted */
    bool busy;
} graph_prefetch;

/* Seconds: how long a small batch is waited for with the GIL, and how long between two
 * looks at signals without it. */
static const double SHORT = 0.0002, SLICE = 0.05;

static int
begin(graph_prefetch *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "prefetch must not be used by two threads at once");
        return -1;
    }
    if (self->prefetch == NULL) {
        PyErr_SetString(PyExc_ValueError, "prefetch must be open, got a closed one");
        return -1;
    }
    self->busy = true;
    return 0;
}

int
py_graph_prefetch_take(PyObject *prefetch, PyObject *indices, int64_t tag)
{
    graph_prefetch *self = (graph_prefetch *)prefetch;
    tfast_status status;
    py_int64s numbers;

    if (begin(self) < 0) {
        return -1;
    }
    if (py_take_int64s(py_graph_state(prefetch), indices, "indices", &numbers) < 0) {
        self->busy = false;
        return -1;
    }
    self->largest = numbers.n > self->largest ? numbers.n : self->largest;
    status = tfast_graph_prefetch_submit(self->prefetch, numbers.data, numbers.n, tag);
    PyMem_Free(numbers.data);
    self->busy = false;
    if (status != TFAST_OK) {
        py_result(status);
        return -1;
    }
    return 0;
}

static PyObject *
prefetch_submit(PyObject *self, PyObject *indices)
{
    if (py_graph_prefetch_take(self, indices, 0) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

int
py_graph_prefetch_submit(PyObject *prefetch, PyObject *order)
{
    graph_prefetch *self = (graph_prefetch *)prefetch;
    const int64_t *indices;
    tfast_status status;
    int64_t n = 0;

    if (begin(self) < 0) {
        return -1;
    }
    self->busy = false; /* no Python code runs from here on */
    if (py_graph_order_next(order, &indices, &n) < 0) {
        return -1;
    }
    if (n == 0) {
        return 0;
    }
    self->largest = n > self->largest ? n : self->largest;
    status = tfast_graph_prefetch_submit(self->prefetch, indices, n,
                                         py_graph_order_position(order));
    if (status != TFAST_OK) {
        py_result(status);
        return -1;
    }
    return 1;
}

/* Waits for a batch or an error. Returns 0, or -1 with an exception. A signal that came
 * meanwhile is looked at here, where the batch can be kept for the next call. */
static int
wait_for_batch(graph_prefetch *self, tfast_graph_batch **batch, int64_t *tag)
{
    tfast_status status = TFAST_OK;
    bool waited = false;

    *batch = self->held;
    *tag = self->held_tag;
    self->held = NULL;
    if (*batch != NULL) {
        return 0;
    }
    if (tfast_graph_prefetch_pending(self->prefetch) == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "next() must follow a submit(), got none pending");
        return -1;
    }
    if (!py_graph_takes_long(self->selection->cache, self->largest)) {
        status = tfast_graph_prefetch_next(self->prefetch, SHORT, batch, tag);
    }
    while (status == TFAST_OK && *batch == NULL) {
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        Py_BEGIN_ALLOW_THREADS
        status = tfast_graph_prefetch_next(self->prefetch, SLICE, batch, tag);
        Py_END_ALLOW_THREADS
        waited = true;
    }
    if (status != TFAST_OK) {
        py_result(status);
        return -1;
    }
    if (waited && PyErr_CheckSignals() < 0) {
        self->held = *batch;
        self->held_tag = *tag;
        return -1;
    }
    return 0;
}

PyObject *
py_graph_prefetch_next(PyObject *prefetch, int64_t *tag)
{
    graph_prefetch *self = (graph_prefetch *)prefetch;
    tfast_graph_batch *batch;
    PyObject *result = NULL;

    if (begin(self) < 0) {
        return NULL;
    }
    if (wait_for_batch(self, &batch, tag) == 0) {
        result = py_graph_batch_new(self->selection, batch);
    }
    self->busy = false;
    return result;
}

static PyObject *
prefetch_next(PyObject *self, PyObject *Py_UNUSED(unused))
{
    int64_t tag;

    return py_graph_prefetch_next(self, &tag);
}

static PyObject *
prefetch_close(graph_prefetch *self, PyObject *Py_UNUSED(unused))
{
    tfast_graph_prefetch *prefetch = self->prefetch;

    if (prefetch == NULL) {
        Py_RETURN_NONE;
    }
    if (begin(self) < 0) {
        return NULL;
    }
    self->prefetch = NULL;
    self->busy = false;
    tfast_graph_batch_release(self->held);
    self->held = NULL;
    Py_BEGIN_ALLOW_THREADS
    tfast_graph_prefetch_free(prefetch);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

int64_t
py_graph_prefetch_pending(PyObject *prefetch)
{
    const graph_prefetch *self = (graph_prefetch *)prefetch;

    return self->prefetch == NULL
               ? 0
               : tfast_graph_prefetch_pending(self->prefetch) + (self->held != NULL);
}

static PyObject *
prefetch_pending(graph_prefetch *self, void *Py_UNUSED(closure))
{
    if (self->prefetch != NULL) {
        if (begin(self) < 0) {
            return NULL;
        }
        self->busy = false;
    }
    return PyLong_FromLongLong(py_graph_prefetch_pending((PyObject *)self));
}

static PyObject *
prefetch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"selection", "threads", NULL};
    py_state *state = PyType_GetModuleState(type);
    PyObject *object;
    py_graph_selection *selection;
    graph_prefetch *self;
    tfast_status status;
    int threads;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oi:GraphPrefetch", names, &object,
                                     &threads)) {
        return NULL;
    }
    selection = py_graph_object(state, object, PY_GRAPH_SELECTION, "selection");
    if (selection == NULL) {
        return NULL;
    }
    self = (graph_prefetch *)py_graph_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    self->selection = (py_graph_selection *)Py_NewRef(object);
    status = tfast_graph_prefetch_new(&self->prefetch, selection->cache->cache,
                                      &selection->selection, threads);
    if (status != TFAST_OK) {
        self->prefetch = NULL;
        py_result(status);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int
prefetch_traverse(graph_prefetch *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT((PyObject *)self->selection);
    return 0;
}

static void
prefetch_dealloc(graph_prefetch *self)
{
    PyObject_GC_UnTrack(self);
    tfast_graph_batch_release(self->held);
    if (self->prefetch != NULL) {
        tfast_graph_prefetch_free(self->prefetch); /* its threads need no GIL */
    }
    Py_XDECREF((PyObject *)self->selection);
    py_graph_free((PyObject *)self);
}

static PyMethodDef prefetch_methods[] = {
    {"submit", (PyCFunction)prefetch_submit, METH_O,
     "submit($self, indices, /)\n--\n\nAsks for a batch of these graphs."},
    {"next", prefetch_next, METH_NOARGS,
     "next($self, /)\n--\n\n"
     "Waits for the batch that was asked for first; raises its error."},
    {"close", (PyCFunction)prefetch_close, METH_NOARGS,
     "close($self, /)\n--\n\nStops the threads; batches live on."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef prefetch_attributes[] = {
    {"pending", (getter)prefetch_pending, NULL, "Batches asked for and not taken.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot prefetch_slots[] = {
    {Py_tp_doc, "Collates ahead on native threads; 0 threads: in next()."},
    {Py_tp_new, prefetch_new},
    {Py_tp_traverse, prefetch_traverse},
    {Py_tp_dealloc, prefetch_dealloc},
    {Py_tp_methods, prefetch_methods},
    {Py_tp_getset, prefetch_attributes},
    {0, NULL},
};

PyType_Spec py_graph_prefetch_spec = {
    .name = "trainfast._core.GraphPrefetch",
    .basicsize = sizeof(graph_prefetch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = prefetch_slots,
};
