/* The type GraphOrder: iterates over the batches of an epoch, as graph indices. */
#include "binding.h"

#include <string.h>

typedef struct {
    PyObject_HEAD
    tfast_graph_order order; /* its pointers refer to the members below */
    int64_t position;        /* of the next batch, for tfast_graph_order_next() */
    int64_t *next;           /* buffer for the indices of one batch */
    py_int64s subset, budgets;
    py_int64s sizes[TFAST_GRAPH_MAX_BUDGETS];
    const int64_t *size_data[TFAST_GRAPH_MAX_BUDGETS];
} graph_order;

/* ---- Arguments ------------------------------------------------------------------- */

/* The constructor's arguments as parsed; objects are borrowed. */
typedef struct {
    long long n, rank, world_size, batch_size;
    PyObject *subset, *seed, *epoch, *sizes, *budgets;
    int shuffle, drop_last, oversize_alone;
} given;

static int
take_subset(graph_order *self, py_state *state, const given *g)
{
    if (g->subset == Py_None) {
        return 0;
    }
    if (py_take_int64s(state, g->subset, "subset", &self->subset) < 0) {
        return -1;
    }
    if (self->subset.n != g->n) {
        PyErr_Format(PyExc_ValueError, "n must be subset's length %lld, got %lld",
                     (long long)self->subset.n, g->n);
        return -1;
    }
    self->order.subset = self->subset.data;
    for (int64_t i = 0; i < self->subset.n; i++) {
        if (self->subset.data[i] < 0) {
            PyErr_Format(PyExc_ValueError, "subset[%lld] must be >= 0, got %lld",
                         (long long)i, (long long)self->subset.data[i]);
            return -1;
        }
    }
    return 0;
}

/* Refuses `sizes` that is too short for the largest graph index of the order. */
static int
check_sizes(const graph_order *self, const py_int64s *sizes)
{
    int64_t last = self->order.n - 1;

    for (int64_t i = 0; i < self->subset.n; i++) {
        last = i == 0 || self->subset.data[i] > last ? self->subset.data[i] : last;
    }
    if (last >= sizes->n) {
        PyErr_Format(
            PyExc_ValueError,
            "sizes must have a number for each graph, got %lld, and graph %lld",
            (long long)sizes->n, (long long)last);
        return -1;
    }
    return 0;
}

static int
take_sizes(graph_order *self, py_state *state, const given *g)
{
    PyObject *list;
    Py_ssize_t n;

    if (py_take_int64s(state, g->budgets, "budgets", &self->budgets) < 0) {
        return -1;
    }
    list = PySequence_List(g->sizes);
    if (list == NULL) {
        return -1;
    }
    n = PyList_Size(list);
    if (n != self->budgets.n || n > TFAST_GRAPH_MAX_BUDGETS) {
        PyErr_Format(PyExc_ValueError,
                     "sizes and budgets must be as many, at most %d, got %zd and %lld",
                     (int)TFAST_GRAPH_MAX_BUDGETS, n, (long long)self->budgets.n);
        goto fail;
    }
    for (Py_ssize_t b = 0; b < n; b++) {
        py_int64s *sizes = &self->sizes[b];

        if (py_take_int64s(state, PyList_GetItem(list, b), "sizes", sizes) < 0 ||
            check_sizes(self, sizes) < 0) {
            goto fail;
        }
        self->size_data[b] = sizes->data;
    }
    Py_DECREF(list);
    self->order.n_budgets = (int)n;
    self->order.sizes = self->size_data;
    self->order.budgets = self->budgets.data;
    return 0;
fail:
    Py_DECREF(list);
    return -1;
}

/* Lets the core validate the arguments now, so that the constructor raises and not the
 * first batch. */
static int
check(const graph_order *self)
{
    tfast_graph_order order = self->order;
    tfast_status status;
    int64_t n;

    order.n_budgets = 0; /* with budgets the call would plan the whole epoch */
    status = tfast_graph_order_batches(&order, &n);
    if (status != TFAST_OK) {
        py_result(status);
        return -1;
    }
    return 0;
}

static int
take_numbers(graph_order *self, const given *g)
{
    self->order.n = g->n;
    self->order.rank = g->rank;
    self->order.world_size = g->world_size;
    self->order.batch_size = g->batch_size;
    self->order.shuffle = g->shuffle != 0;
    self->order.drop_last = g->drop_last != 0;
    self->order.oversize_alone = g->oversize_alone != 0;
    if (g->seed != NULL) {
        self->order.seed = PyLong_AsUnsignedLongLongMask(g->seed);
    }
    if (g->epoch != NULL && !PyErr_Occurred()) {
        self->order.epoch = PyLong_AsUnsignedLongLongMask(g->epoch);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int
make_room(graph_order *self)
{
    const int64_t n = self->order.n, room = self->order.batch_size;

    self->next = PyMem_Calloc((size_t)(room < n ? room : n) + 1, sizeof *self->next);
    if (self->next == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *
order_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"n",         "subset", "seed",       "epoch",
                            "shuffle",   "rank",   "world_size", "batch_size",
                            "drop_last", "sizes",  "budgets",    "oversize_alone",
                            NULL};
    py_state *state = PyType_GetModuleState(type);
    PyObject *empty = PyTuple_New(0);
    given g = {.world_size = 1, .subset = Py_None, .sizes = empty, .budgets = empty};
    graph_order *self = NULL;

    if (empty == NULL ||
        !PyArg_ParseTupleAndKeywords(
            args, kwargs, "L|$OOOpLLLpOOp:GraphOrder", names, &g.n, &g.subset, &g.seed,
            &g.epoch, &g.shuffle, &g.rank, &g.world_size, &g.batch_size, &g.drop_last,
            &g.sizes, &g.budgets, &g.oversize_alone)) {
        goto done;
    }
    self = (graph_order *)py_graph_alloc(type);
    if (self != NULL &&
        (take_numbers(self, &g) < 0 || take_subset(self, state, &g) < 0 ||
         check(self) < 0 || take_sizes(self, state, &g) < 0 || make_room(self) < 0)) {
        Py_CLEAR(self);
    }
done:
    Py_XDECREF(empty);
    return (PyObject *)self;
}

/* ---- Methods --------------------------------------------------------------------- */

static PyObject *
order_next(graph_order *self)
{
    int64_t n = 0;
    py_made made = {NULL, PY_INT64, 1, &n};
    PyObject *indices;
    const tfast_status status =
        tfast_graph_order_next(&self->order, &self->position, self->next, &n);

    if (status != TFAST_OK) {
        return py_result(status);
    }
    if (n == 0) {
        return NULL; /* NULL without an exception ends the iteration */
    }
    indices = py_new_numpy(py_graph_state((PyObject *)self), &made);
    if (indices != NULL) {
        memcpy(made.data, self->next, (size_t)n * sizeof *self->next);
    }
    return indices;
}

static PyObject *
order_batches(graph_order *self, PyObject *Py_UNUSED(unused))
{
    tfast_status status;
    int64_t n;

    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_order_batches(&self->order, &n);
    Py_END_ALLOW_THREADS
    return status == TFAST_OK ? PyLong_FromLongLong(n) : py_result(status);
}

static PyObject *
order_position(graph_order *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->position);
}

static int
order_set_position(graph_order *self, PyObject *number, void *Py_UNUSED(closure))
{
    const long long position = number == NULL ? -1 : PyLong_AsLongLong(number);

    if (number == NULL) {
        PyErr_SetString(PyExc_TypeError, "position must not be deleted");
        return -1;
    }
    if (position < 0) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError, "position must be >= 0, got %lld", position);
        }
        return -1;
    }
    self->position = position;
    return 0;
}

/* ---- The type -------------------------------------------------------------------- */

static int
order_traverse(graph_order *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    return 0;
}

static void
order_dealloc(graph_order *self)
{
    PyObject_GC_UnTrack(self);
    PyMem_Free(self->next);
    PyMem_Free(self->subset.data);
    PyMem_Free(self->budgets.data);
    for (int b = 0; b < TFAST_GRAPH_MAX_BUDGETS; b++) {
        PyMem_Free(self->sizes[b].data);
    }
    py_graph_free((PyObject *)self);
}

static PyMethodDef order_methods[] = {
    {"batches", (PyCFunction)order_batches, METH_NOARGS,
     "batches($self, /)\n--\n\n"
     "Number of batches of each rank; O(n) time with budgets."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef order_attributes[] = {
    {"position", (getter)order_position, (setter)order_set_position,
     "Start of the next batch: 0, or a saved value to resume from.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot order_slots[] = {
    {Py_tp_doc,
     "Iterates over a rank's batches of an epoch: int64 arrays of graph indices; see\n"
     "csrc/graph_cache/order.c."},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, order_next},
    {Py_tp_new, order_new},
    {Py_tp_traverse, order_traverse},
    {Py_tp_dealloc, order_dealloc},
    {Py_tp_methods, order_methods},
    {Py_tp_getset, order_attributes},
    {0, NULL},
};

PyType_Spec py_graph_order_spec = {
    .name = "trainfast._core.GraphOrder",
    .basicsize = sizeof(graph_order),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = order_slots,
};
