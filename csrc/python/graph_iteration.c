/* The type GraphIteration: what hands out a loader's batches. Where one GraphPrefetch
 * makes them all, no Python code runs for a batch but that of the user's sampler: it
 * took a sixteenth of a small one's time, and where a training step has put it out of
 * the processor's caches, a quarter. The beginning, the end and every other case are
 * methods of a subclass. */
#include "graph.h"

#include <string.h>

typedef struct {
    PyObject_HEAD
    PyObject *prefetch; /* these are references. NULL: _other() knows */
    PyObject *order;    /* a GraphOrder, or an iterator of indices; NULL: at its end */
    int64_t taken;      /* batches that came of such an iterator, in this epoch */
    PyObject *assemble; /* makes of a GraphBatch what is handed out */
    PyObject *place;    /* its attribute position: after what was handed out */
    PyObject *position; /* that name */
    PyObject *error[3]; /* of the order, as it was fetched; NULL: none */
    PyObject *held;     /* a batch that was ready when Ctrl-C came */
    int64_t held_position;
    bool sampled, begun, busy;
} graph_iteration;

/* What a sampler gave: most often a list of ints. _indices() knows all the rest. */
static bool
is_list_of_ints(PyObject *indices)
{
    if (!PyList_Check(indices)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(indices); i++) {
        if (!PyLong_CheckExact(PyList_GetItem(indices, i))) {
            return false;
        }
    }
    return true;
}

/* Returns 1, 0 at the end or -1. Runs Python code. */
static int
submit_sampled(graph_iteration *self, PyObject *prefetch, PyObject *sampler)
{
    PyObject *indices = PyIter_Next(sampler), *given;
    int status = -1;

    if (indices == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (!is_list_of_ints(indices)) {
        given = indices;
        indices = PyObject_CallMethod((PyObject *)self, "_indices", "(O)", given);
        Py_DECREF(given);
    }
    if (indices != NULL) {
        self->taken++;
        status = py_graph_prefetch_take(prefetch, indices, self->taken) < 0 ? -1 : 1;
        Py_DECREF(indices);
    }
    return status;
}

/* Asks for the next batch. Returns 1 where there is one, 0 where not. An error waits
 * until the batches before it are out: kept as it is, since noting it may need memory
 * that there is none of. -1: what is not an Exception, as Ctrl-C, does not wait. */
static int
submit(graph_iteration *self)
{
    PyObject *prefetch, *order;
    int more;

    if (self->prefetch == NULL || self->order == NULL) {
        return 0;
    }
    prefetch = Py_NewRef(self->prefetch);
    order = Py_NewRef(self->order);
    more = self->sampled ? submit_sampled(self, prefetch, order)
                         : py_graph_prefetch_submit(prefetch, order);
    Py_DECREF(prefetch);
    Py_DECREF(order);
    if (more > 0 || (more < 0 && !PyErr_ExceptionMatches(PyExc_Exception))) {
        return more;
    }
    if (more < 0) {
        PyErr_Fetch(&self->error[0], &self->error[1], &self->error[2]);
    }
    Py_CLEAR(self->order);
    return 0;
}

/* Raises what submit() has kept. Returns 0 where there is nothing. */
static int
raise_kept(graph_iteration *self)
{
    PyObject *error[3];

    memcpy(error, self->error, sizeof error);
    memset(self->error, 0, sizeof self->error);
    if (error[0] == NULL) {
        return 0;
    }
    PyErr_Restore(error[0], error[1], error[2]);
    return -1;
}

/* After an error: a batch's own has had its turn, an interrupted wait has not. */
static void
go_on(graph_iteration *self, int64_t pending)
{
    PyObject *type, *error, *traceback;

    if (py_graph_prefetch_pending(self->prefetch) < pending) {
        PyErr_Fetch(&type, &error, &traceback);
        if (submit(self) >= 0) {
            PyErr_Restore(type, error, traceback);
        } else { /* Ctrl-C is more than the error of a batch */
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(traceback);
        }
    }
}

static PyObject *
assemble(const graph_iteration *self, PyObject *batch)
{
    const py_state *state = py_graph_state(batch);

    if (Py_TYPE(self->assemble) == state->graph_types[PY_GRAPH_RECIPE]) {
        return py_graph_recipe_make(self->assemble, (py_graph_batch *)batch);
    }
    return PyObject_CallFunctionObjArgs(self->assemble, batch, NULL);
}

static int
set_position(graph_iteration *self, int64_t position)
{
    PyObject *number = PyLong_FromLongLong(position);
    int status = -1;

    if (number != NULL) {
        status = PyObject_SetAttr(self->place, self->position, number);
        Py_DECREF(number);
    }
    return status;
}

/* The next batch of the prefetch, of which some are pending. */
static PyObject *
hand_out(graph_iteration *self, int64_t pending)
{
    PyObject *batch = self->held, *made;
    int64_t position = self->held_position;

    self->held = NULL;
    if (batch == NULL) {
        batch = py_graph_prefetch_next(self->prefetch, &position);
    }
    if (batch == NULL) {
        go_on(self, pending);
        return NULL;
    }
    if (submit(self) < 0) {
        self->held = batch;
        self->held_position = position;
        return NULL;
    }
    made = assemble(self, batch);
    Py_DECREF(batch);
    if (made != NULL && set_position(self, position) < 0) {
        Py_CLEAR(made);
    }
    return made;
}

static int
call(graph_iteration *self, const char *method)
{
    PyObject *none = PyObject_CallMethod((PyObject *)self, method, NULL);

    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Once begun, what interrupts the filling has taken nothing away. */
static int
begin(graph_iteration *self)
{
    if (call(self, "_begin") < 0) {
        return -1;
    }
    self->begun = true;
    return call(self, "_fill");
}

static PyObject *
next(graph_iteration *self)
{
    int64_t pending;

    if (!self->begun && begin(self) < 0) {
        return NULL;
    }
    if (self->prefetch != NULL) {
        pending = py_graph_prefetch_pending(self->prefetch);
        if (pending == 0 && self->held == NULL) { /* at the end, or after Ctrl-C */
            pending = submit(self);
        }
        if (pending < 0) {
            return NULL;
        }
        if (pending > 0 || self->held != NULL) {
            return hand_out(self, pending);
        }
        Py_CLEAR(self->prefetch);
        if (raise_kept(self) < 0) {
            return NULL;
        }
    }
    return PyObject_CallMethod((PyObject *)self, "_other", NULL);
}

static PyObject *
iteration_next(graph_iteration *self)
{
    PyObject *made;

    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "an iteration must not be used by two threads at once, nor by "
                        "what it calls itself");
        return NULL;
    }
    self->busy = true;
    made = next(self);
    self->busy = false;
    return made;
}

static int
iteration_clear(graph_iteration *self)
{
    Py_CLEAR(self->prefetch);
    Py_CLEAR(self->order);
    Py_CLEAR(self->assemble);
    Py_CLEAR(self->place);
    Py_CLEAR(self->held);
    for (int i = 0; i < 3; i++) {
        Py_CLEAR(self->error[i]);
    }
    return 0;
}

/* A subclass has no module: the state is that of the class that defines this. */
static PyObject *
iteration_follow(graph_iteration *self, PyTypeObject *defining, PyObject *const *given,
                 Py_ssize_t n, PyObject *names)
{
    py_state *state = PyType_GetModuleState(defining);
    PyObject *position;

    if (n != 4 || names != NULL) {
        PyErr_Format(PyExc_TypeError, "_follow() takes 4 arguments, got %zd", n);
        return NULL;
    }
    if (self->prefetch != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "an iteration follows one order");
        return NULL;
    }
    if (py_graph_object(state, given[0], PY_GRAPH_PREFETCH, "prefetch") == NULL) {
        return NULL;
    }
    self->sampled = PyIter_Check(given[1]);
    if (!self->sampled &&
        py_graph_object(state, given[1], PY_GRAPH_ORDER, "order") == NULL) {
        return NULL;
    }
    position = PyObject_GetAttr(given[3], self->position);
    self->taken = position == NULL ? -1 : PyLong_AsLongLong(position);
    Py_XDECREF(position);
    if (self->taken < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "place.position must be >= 0");
        }
        return NULL;
    }
    iteration_clear(self);
    self->prefetch = Py_NewRef(given[0]);
    self->order = Py_NewRef(given[1]);
    self->assemble = Py_NewRef(given[2]);
    self->place = Py_NewRef(given[3]);
    Py_RETURN_NONE;
}

static PyObject *
iteration_submit(graph_iteration *self, PyObject *Py_UNUSED(unused))
{
    const int more = submit(self);

    return more < 0 ? NULL : PyBool_FromLong(more);
}

/* ---- The type -------------------------------------------------------------------- */

static PyObject *
iteration_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(names))
{
    graph_iteration *self = (graph_iteration *)py_graph_alloc(type);

    if (self != NULL) {
        self->position = PyUnicode_InternFromString("position");
        if (self->position == NULL) {
            Py_CLEAR(self);
        }
    }
    return (PyObject *)self;
}

static int
iteration_traverse(graph_iteration *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->prefetch);
    Py_VISIT(self->order);
    Py_VISIT(self->assemble);
    Py_VISIT(self->place);
    Py_VISIT(self->held);
    for (int i = 0; i < 3; i++) {
        Py_VISIT(self->error[i]);
    }
    return 0;
}

static void
iteration_dealloc(graph_iteration *self)
{
    PyObject_GC_UnTrack(self);
    iteration_clear(self);
    Py_XDECREF(self->position);
    py_graph_free((PyObject *)self);
}

static PyMethodDef iteration_methods[] = {
    {"_follow", (PyCFunction)(void (*)(void))iteration_follow,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     "_follow($self, prefetch, order, assemble, place, /)\n--\n\n"
     "From now on batches of this GraphPrefetch are handed out, as assemble makes "
     "them\n"
     "of a GraphBatch, and for each one more is asked for, of this GraphOrder, or of\n"
     "this iterator of batches' indices: what are no lists of ints goes through\n"
     "_indices(). place's attribute position becomes the order's after what was "
     "handed\n"
     "out, or the number of batches. When all is out, an error of the order is "
     "raised;\n"
     "after that _other() goes on."},
    {"_submit", (PyCFunction)iteration_submit, METH_NOARGS,
     "_submit($self, /)\n--\n\n"
     "Asks for one more batch of the order; False at its end."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot iteration_slots[] = {
    {Py_tp_doc,
     "An iterator: _begin() is called first, _other() where there is nothing\n"
     "to follow, and what that returns is handed out."},
    {Py_tp_new, iteration_new},
    {Py_tp_traverse, iteration_traverse},
    {Py_tp_clear, iteration_clear},
    {Py_tp_dealloc, iteration_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, iteration_next},
    {Py_tp_methods, iteration_methods},
    {0, NULL},
};

PyType_Spec py_graph_iteration_spec = {
    .name = "trainfast._core.GraphIteration",
    .basicsize = sizeof(graph_iteration),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = iteration_slots,
};
