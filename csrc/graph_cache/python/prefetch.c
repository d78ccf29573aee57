/* The type GraphPrefetch: native threads collate batches before they are needed. */
#include "binding.h"

typedef struct {
    PyObject_HEAD
    py_graph_selection *selection; /* a reference */
    tfast_graph_prefetch *prefetch;
    tfast_graph_batch *first; /* a reference: what next() returned last; or NULL */
    int64_t first_number;     /* the caller's number of `first` */
    int64_t last_number;      /* the last number that was submitted; -1: none */
    int64_t failed_number; /* of the last batch whose error next() raised; -1: none */
    int64_t largest;       /* most graphs in a submitted batch */
    bool busy;             /* a method runs, perhaps without the GIL */
} graph_prefetch;

/* In seconds: SHORT is how long next() waits for a small batch with the GIL held, SLICE
 * how long it then waits without the GIL between two checks for signals. */
static const double SHORT = 0.0002, SLICE = 0.05;

/* Marks the object as in use by this thread. Returns 0, or -1 with RuntimeError. */
static int
begin(graph_prefetch *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a prefetch must not be used by two threads at once; give each "
                        "thread a loader of its own");
        return -1;
    }
    self->busy = true;
    return 0;
}

static PyObject *
prefetch_submit(graph_prefetch *self, PyObject *args)
{
    py_int64s numbers = {NULL, 0};
    PyObject *indices, *result = NULL;
    tfast_status status;
    long long number;

    if (!PyArg_ParseTuple(args, "LO:submit", &number, &indices) || begin(self) < 0) {
        return NULL;
    }
    if (number <= self->last_number) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if (py_take_int64s(py_graph_state((PyObject *)self), indices, "indices", &numbers) <
        0) {
        goto done;
    }
    status = tfast_graph_prefetch_submit(self->prefetch, numbers.data, numbers.n, 0);
    result = py_result(status);
    if (status == TFAST_OK) {
        self->last_number = number;
        self->largest = numbers.n > self->largest ? numbers.n : self->largest;
    }
done:
    PyMem_Free(numbers.data);
    self->busy = false;
    return result;
}

/* Waits for batch `number`, the next one, and stores it in self->first. Returns 0, or
 * -1 with an exception. An error of the batch sets self->failed_number; after one of a
 * signal handler, a further call waits for the same batch. */
static int
wait_for_next(graph_prefetch *self, int64_t number)
{
    tfast_graph_batch *batch = NULL;
    tfast_status status = TFAST_OK;
    int64_t tag;

    if (tfast_graph_prefetch_pending(self->prefetch) == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "no batch is being made; call submit() before next()");
        return -1;
    }
    if (!py_graph_takes_long(self->selection->cache, self->largest)) {
        status = tfast_graph_prefetch_next(self->prefetch, SHORT, &batch, &tag);
    }
    while (status == TFAST_OK && batch == NULL) {
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        Py_BEGIN_ALLOW_THREADS
        status = tfast_graph_prefetch_next(self->prefetch, SLICE, &batch, &tag);
        Py_END_ALLOW_THREADS
    }
    if (status != TFAST_OK) {
        self->failed_number = number;
        py_result(status);
        return -1;
    }
    self->first = batch;
    return 0;
}

static PyObject *
prefetch_next(graph_prefetch *self, PyObject *object)
{
    const long long number = PyLong_AsLongLong(object);
    PyObject *result = NULL;

    if ((number == -1 && PyErr_Occurred()) || begin(self) < 0) {
        return NULL;
    }
    if (self->first != NULL && self->first_number != number) {
        tfast_graph_batch_release(self->first);
        self->first = NULL;
    }
    if (self->first == NULL && wait_for_next(self, number) < 0) {
        goto done;
    }
    self->first_number = number;
    tfast_graph_batch_retain(self->first);
    result = py_graph_batch_new(self->selection, self->first);
done:
    self->busy = false;
    return result;
}

static PyObject *
prefetch_failed_number(graph_prefetch *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->failed_number);
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
    self->last_number = self->failed_number = -1;
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
    tfast_graph_batch_release(self->first);
    if (self->prefetch != NULL) {
        Py_BEGIN_ALLOW_THREADS /* waits for the batches that its threads are making */
        tfast_graph_prefetch_free(self->prefetch);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF((PyObject *)self->selection);
    py_graph_free((PyObject *)self);
}

static PyMethodDef prefetch_methods[] = {
    {"submit", (PyCFunction)prefetch_submit, METH_VARARGS,
     "submit($self, number, indices, /)\n--\n\n"
     "Submits a batch of graphs. Numbers are >= 0 and increase; a number that is not\n"
     "larger is ignored, so an interrupted submit() can be repeated."},
    {"next", (PyCFunction)prefetch_next, METH_O,
     "next($self, number, /)\n--\n\n"
     "Waits for the next submitted batch and returns it, or raises its error.\n"
     "next() with the number of the last returned batch returns that batch again."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef prefetch_attributes[] = {
    {"failed_number", (getter)prefetch_failed_number, NULL,
     "The number of the last batch whose error next() raised, or -1.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot prefetch_slots[] = {
    {Py_tp_doc, "Collates ahead on native threads, or with 0 threads in next()."},
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
