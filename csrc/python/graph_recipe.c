/* The type GraphRecipe: how a batch becomes an object, attributes and all, for adapters
 * that cannot afford a call for each. What can be checked or looked up once is. */
#include "graph.h"

/* A dict that each batch gets one of. A copy whose values change takes less time than
 * a dict that grows. */
typedef struct {
    PyObject *dict; /* with these names, which it keeps */
    Py_ssize_t n;
    struct {
        PyObject *name;
        PyObject *same; /* an earlier name that has the same number, or NULL */
        Py_ssize_t number;
    } * each;
} named_numbers;

enum { N_INSIDE = 5 };

typedef struct {
    PyObject_HEAD
    PyTypeObject *kind, *store_kind; /* these are references */
    PyObject *names, *inside;        /* dicts */
    PyObject *store_name;            /* the last of names */
    PyObject *last[N_INSIDE];        /* of inside */
    named_numbers arrays, slices, starts;
    PyObject *constants_of, *other;
    PyObject *constants; /* of n_slots graphs; NULL: not yet */
    int64_t n_slots;
    PyObject *attributes; /* "__dict__" */
} graph_recipe;

/* ---- Making objects -------------------------------------------------------------- */

/* As object.__new__ makes it, which is all there may be to it. */
static int
check_kind(PyTypeObject *type)
{
    const void *plain = PyType_GetSlot(&PyBaseObject_Type, Py_tp_new);

    if (PyType_GetSlot(type, Py_tp_new) != plain ||
        (PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE) == 0) {
        PyErr_Format(PyExc_TypeError, "kind must be a class without __new__, got %R",
                     (PyObject *)type);
        return -1;
    }
    return 0;
}

/* The object's attributes become this dict. Takes it. By the type's own `__dict__`,
 * whatever __setattr__ the class has: PyObject_GenericSetDict() refuses the objects of
 * Python 3.13, which have no dict before they need one. */
static int
set_attributes(const graph_recipe *self, PyObject *object, PyObject *dict)
{
    const int status =
        dict == NULL ? -1 : PyObject_GenericSetAttr(object, self->attributes, dict);

    Py_XDECREF(dict);
    return status;
}

static PyObject *
make_arrays(const graph_recipe *self, py_graph_batch *batch)
{
    const named_numbers *arrays = &self->arrays;
    PyObject *dict = PyDict_Copy(arrays->dict);

    for (Py_ssize_t i = 0; i < arrays->n && dict != NULL; i++) {
        PyObject *array = py_graph_batch_array(batch, arrays->each[i].number);

        if (array == NULL || PyDict_SetItem(dict, arrays->each[i].name, array) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(array);
    }
    return dict;
}

/* Sums of `n` graphs, each made once, and constants. */
static PyObject *
make_sums(const named_numbers *sums, py_graph_batch *batch, int64_t n,
          PyObject *constants)
{
    PyObject *dict = PyDict_Copy(sums->dict), *value;

    for (Py_ssize_t i = 0; i < sums->n && dict != NULL; i++) {
        if (sums->each[i].same != NULL) {
            value = Py_XNewRef(PyDict_GetItemWithError(dict, sums->each[i].same));
        } else {
            value = py_graph_batch_sums_or(batch, sums->each[i].number, n, constants);
        }
        if (value == NULL || PyDict_SetItem(dict, sums->each[i].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

/* The attributes of the store: what is the same in all, and these values. */
static PyObject *
make_inside(const graph_recipe *self, PyObject *const values[N_INSIDE])
{
    PyObject *dict = PyDict_Copy(self->inside);

    for (int i = 0; i < N_INSIDE && dict != NULL; i++) {
        if (values[i] == NULL || PyDict_SetItem(dict, self->last[i], values[i]) < 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

/* Gives a graph and its store what they have. */
static int
fill(const graph_recipe *self, PyObject *graph, PyObject *store, py_graph_batch *batch,
     PyObject *constants)
{
    const int64_t n = batch->batch->n_slots;
    PyObject *names, *values[N_INSIDE] = {NULL};
    int status = -1;

    values[0] = make_arrays(self, batch);
    values[1] = values[0] == NULL ? NULL : PyWeakref_NewRef(graph, NULL);
    values[2] = values[1] == NULL ? NULL : PyLong_FromLongLong(n);
    values[3] =
        values[2] == NULL ? NULL : make_sums(&self->slices, batch, n + 1, constants);
    values[4] =
        values[3] == NULL ? NULL : make_sums(&self->starts, batch, n, constants);
    if (values[4] != NULL &&
        set_attributes(self, store, make_inside(self, values)) == 0) {
        names = PyDict_Copy(self->names);
        if (names != NULL && PyDict_SetItem(names, self->store_name, store) < 0) {
            Py_CLEAR(names);
        }
        status = set_attributes(self, graph, names);
    }
    for (int i = 0; i < N_INSIDE; i++) {
        Py_XDECREF(values[i]);
    }
    return status;
}

/* A new reference. */
static PyObject *
find_constants(graph_recipe *self, int64_t n)
{
    PyObject *made, *old = self->constants;

    if (old != NULL && self->n_slots == n) {
        return Py_NewRef(old);
    }
    made = PyObject_CallFunction(self->constants_of, "L", (long long)n);
    if (made == NULL) {
        return NULL;
    }
    Py_INCREF(made);
    old = self->constants; /* the call may have changed them */
    self->constants = made;
    self->n_slots = n;
    Py_XDECREF(old); /* may run Python code, which may come back here */
    return made;
}

static PyObject *
make(graph_recipe *self, py_graph_batch *batch, PyObject *constants)
{
    PyObject *graph = PyType_GenericAlloc(self->kind, 0), *store = NULL;

    if (graph != NULL) {
        store = PyType_GenericAlloc(self->store_kind, 0);
    }
    if (store == NULL || fill(self, graph, store, batch, constants) < 0) {
        Py_CLEAR(graph);
    }
    Py_XDECREF(store);
    return graph;
}

PyObject *
py_graph_recipe_make(PyObject *recipe, py_graph_batch *batch)
{
    graph_recipe *self = (graph_recipe *)recipe;
    PyObject *constants = find_constants(self, batch->batch->n_slots), *made = NULL;

    if (constants != NULL) {
        made = make(self, batch, constants);
        Py_DECREF(constants);
    }
    return made;
}

static PyObject *
recipe_call(graph_recipe *self, PyObject *args, PyObject *names)
{
    const py_state *state = py_graph_state((PyObject *)self);
    PyObject *batch, *constants = NULL;

    if (names != NULL && PyDict_Size(names) > 0) {
        PyErr_SetString(PyExc_TypeError, "a recipe takes no arguments by name");
        return NULL;
    }
    if (!PyArg_UnpackTuple(args, "recipe", 1, 2, &batch, &constants)) {
        return NULL;
    }
    if (Py_TYPE(batch) != state->graph_types[PY_GRAPH_BATCH]) {
        return PyObject_CallFunctionObjArgs(self->other, batch, NULL);
    }
    return constants == NULL ? py_graph_recipe_make((PyObject *)self, (void *)batch)
                             : make(self, (py_graph_batch *)batch, constants);
}

/* ---- Making and freeing ---------------------------------------------------------- */

/* Keeps a copy of {name: number}. */
static int
take_numbers(named_numbers *out, PyObject *numbers)
{
    PyObject *name, *number;
    Py_ssize_t at = 0;

    out->dict = PyDict_Copy(numbers); /* may run Python code, which may change them */
    if (out->dict == NULL) {
        return -1;
    }
    out->each = PyMem_Calloc((size_t)PyDict_Size(out->dict) + 1, sizeof *out->each);
    if (out->each == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; PyDict_Next(out->dict, &at, &name, &number); out->n++) {
        out->each[out->n].name = name;
        out->each[out->n].number = PyLong_AsSsize_t(number);
        if (PyErr_Occurred() != NULL) {
            return -1;
        }
        for (Py_ssize_t i = out->n - 1; i >= 0; i--) {
            if (out->each[i].number == out->each[out->n].number) {
                out->each[out->n].same = out->each[i].name;
            }
        }
    }
    return 0;
}

/* Keeps a copy of a dict, and its last n names. */
static int
take_names(PyObject **out, PyObject **last, Py_ssize_t n, PyObject *names)
{
    Py_ssize_t at = 0, left;
    PyObject *name;

    *out = PyDict_Copy(names);
    if (*out == NULL) {
        return -1;
    }
    left = PyDict_Size(*out);
    if (left < n) {
        PyErr_Format(PyExc_ValueError, "names must be at least %zd, got %zd", n, left);
        return -1;
    }
    for (; PyDict_Next(*out, &at, &name, NULL); left--) {
        if (left <= n) {
            last[n - left] = Py_NewRef(name);
        }
    }
    return 0;
}

static PyObject *
recipe_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"kind",   "names",  "store_kind",   "inside", "arrays",
                               "slices", "starts", "constants_of", "other",  NULL};
    PyObject *kind, *names, *store_kind, *inside, *arrays, *slices, *starts;
    PyObject *constants_of, *other;
    graph_recipe *self;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!O!O!O!O!O!OO:GraphRecipe", keywords, &PyType_Type, &kind,
            &PyDict_Type, &names, &PyType_Type, &store_kind, &PyDict_Type, &inside,
            &PyDict_Type, &arrays, &PyDict_Type, &slices, &PyDict_Type, &starts,
            &constants_of, &other) ||
        check_kind((PyTypeObject *)kind) < 0 ||
        check_kind((PyTypeObject *)store_kind) < 0) {
        return NULL;
    }
    self = (graph_recipe *)py_graph_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    self->kind = (PyTypeObject *)Py_NewRef(kind);
    self->store_kind = (PyTypeObject *)Py_NewRef(store_kind);
    self->constants_of = Py_NewRef(constants_of);
    self->other = Py_NewRef(other);
    self->attributes = PyUnicode_InternFromString("__dict__");
    if (self->attributes == NULL ||
        take_names(&self->names, &self->store_name, 1, names) < 0 ||
        take_names(&self->inside, self->last, N_INSIDE, inside) < 0 ||
        take_numbers(&self->arrays, arrays) < 0 ||
        take_numbers(&self->slices, slices) < 0 ||
        take_numbers(&self->starts, starts) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int
recipe_traverse(graph_recipe *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT((PyObject *)self->kind);
    Py_VISIT((PyObject *)self->store_kind);
    Py_VISIT(self->names);
    Py_VISIT(self->inside);
    Py_VISIT(self->arrays.dict);
    Py_VISIT(self->slices.dict);
    Py_VISIT(self->starts.dict);
    Py_VISIT(self->constants_of);
    Py_VISIT(self->other);
    Py_VISIT(self->constants);
    return 0;
}

/* Only these can be part of a cycle that has nothing else to clear: whatever else this
 * keeps is older than it. */
static int
recipe_clear(graph_recipe *self)
{
    Py_CLEAR(self->constants);
    return 0;
}

static void
free_numbers(named_numbers *numbers)
{
    Py_XDECREF(numbers->dict);
    PyMem_Free(numbers->each);
}

static void
recipe_dealloc(graph_recipe *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF((PyObject *)self->kind);
    Py_XDECREF((PyObject *)self->store_kind);
    Py_XDECREF(self->names);
    Py_XDECREF(self->inside);
    Py_XDECREF(self->store_name);
    for (int i = 0; i < N_INSIDE; i++) {
        Py_XDECREF(self->last[i]);
    }
    free_numbers(&self->arrays);
    free_numbers(&self->slices);
    free_numbers(&self->starts);
    Py_XDECREF(self->constants_of);
    Py_XDECREF(self->other);
    Py_XDECREF(self->constants);
    Py_XDECREF(self->attributes);
    py_graph_free((PyObject *)self);
}

static PyType_Slot recipe_slots[] = {
    {Py_tp_doc,
     "Called with a GraphBatch it makes an object of `kind`, as object.__new__ makes\n"
     "it. Its attributes are a copy of `names`, of which the last is its store: an\n"
     "object of store_kind, whose attributes are a copy of `inside`, of which the "
     "last\n"
     "five are the arrays of dicts(), a weak reference to the first object, n_slots,\n"
     "and the slices and starts of dicts(). Their constants are "
     "constants_of(n_slots),\n"
     "which is kept for the next batch of as many, or a second argument. Anything but\n"
     "a GraphBatch becomes what other() makes of it."},
    {Py_tp_new, recipe_new},
    {Py_tp_call, recipe_call},
    {Py_tp_traverse, recipe_traverse},
    {Py_tp_clear, recipe_clear},
    {Py_tp_dealloc, recipe_dealloc},
    {0, NULL},
};

PyType_Spec py_graph_recipe_spec = {
    .name = "trainfast._core.GraphRecipe",
    .basicsize = sizeof(graph_recipe),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = recipe_slots,
};
