/* GraphBatch.dicts() and graph(): a batch's arrays by name, and an object that has
 * them, for adapters that cannot afford a call for each. */
#include "graph.h"

typedef struct {
    py_graph_batch *batch;
    PyObject *constants;
    PyObject **made; /* of each count the array that was made, or NULL */
    int64_t length;  /* of these arrays */
} source;

static PyObject *
no_array(Py_ssize_t number)
{
    PyErr_Format(PyExc_ValueError, "recipe must have numbers of arrays, got %zd",
                 number);
    return NULL;
}

/* Array `number` of the fields, ptrs and batch vectors. */
static PyObject *
find_array(const source *from, Py_ssize_t number)
{
    const tfast_graph_selection *selection = &from->batch->selection->selection;
    const int n_fields = selection->n_fields;
    const int n_ptrs = n_fields + py_graph_batch_counts(from->batch);

    if (number < 0 || number >= n_ptrs + selection->n_batch_of) {
        return no_array(number);
    }
    if (number < n_fields) {
        return py_graph_batch_field(from->batch, number);
    }
    if (number < n_ptrs) {
        return py_graph_batch_ptr(from->batch, number - n_fields);
    }
    return py_graph_batch_vector(from->batch, number - n_ptrs);
}

/* The sums of a count, made once, or a constant. */
static PyObject *
find_sums(const source *from, Py_ssize_t number)
{
    const int n_counts = py_graph_batch_counts(from->batch);

    if (number >= n_counts) {
        return PySequence_GetItem(from->constants, number - n_counts);
    }
    if (number < 0) {
        return no_array(number);
    }
    if (from->made[number] == NULL) {
        from->made[number] = py_graph_batch_sums(from->batch, number, from->length);
    }
    return Py_XNewRef(from->made[number]);
}

/* {name: find(numbers[name])}, in its order. A copy whose values change takes less than
 * a dict that grows. */
static PyObject *
make_dict(PyObject *numbers, const source *from,
          PyObject *(*find)(const source *from, Py_ssize_t number))
{
    PyObject *dict = PyDict_Copy(numbers), *name, *given;
    Py_ssize_t at = 0;

    while (dict != NULL && PyDict_Next(numbers, &at, &name, &given)) {
        const Py_ssize_t number = PyLong_AsSsize_t(given);
        PyObject *value = NULL;

        if (number != -1 || PyErr_Occurred() == NULL) {
            value = find(from, number);
        }
        if (value == NULL || PyDict_SetItem(dict, name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

/* The same for sums, of which `length` are in each array. */
static PyObject *
make_sums_dict(source *from, PyObject *numbers, int64_t length)
{
    const int n_counts = py_graph_batch_counts(from->batch);
    PyObject *dict = NULL;

    from->length = length;
    from->made = PyMem_Calloc((size_t)n_counts + 1, sizeof *from->made);
    if (from->made == NULL) {
        return PyErr_NoMemory();
    }
    dict = make_dict(numbers, from, find_sums);
    for (int k = 0; k < n_counts; k++) {
        Py_XDECREF(from->made[k]);
    }
    PyMem_Free(from->made);
    return dict;
}

/* The arrays, slices and starts of a batch. Returns 0, or -1 with an exception. */
static int
make_dicts(PyObject *made[3], source *from, PyObject *arrays, PyObject *slices,
           PyObject *starts)
{
    const int64_t n_slots = from->batch->batch->n_slots;

    made[1] = made[2] = NULL;
    made[0] = make_dict(arrays, from, find_array);
    if (made[0] != NULL) {
        made[1] = make_sums_dict(from, slices, n_slots + 1);
    }
    if (made[1] != NULL) {
        made[2] = make_sums_dict(from, starts, n_slots);
    }
    if (made[2] == NULL) {
        Py_CLEAR(made[0]);
        Py_CLEAR(made[1]);
        return -1;
    }
    return 0;
}

PyObject *
py_graph_batch_dicts(PyObject *self, PyObject *args)
{
    source from = {.batch = (py_graph_batch *)self};
    PyObject *arrays, *slices, *starts, *made[3], *all;

    if (!PyArg_ParseTuple(args, "O!O!O!O:dicts", &PyDict_Type, &arrays, &PyDict_Type,
                          &slices, &PyDict_Type, &starts, &from.constants) ||
        make_dicts(made, &from, arrays, slices, starts) < 0) {
        return NULL;
    }
    all = PyTuple_Pack(3, made[0], made[1], made[2]);
    for (int i = 0; i < 3; i++) {
        Py_DECREF(made[i]);
    }
    return all;
}

/* ---- Objects --------------------------------------------------------------------- */

/* A copy of a dict, whose last n names get these values. */
static PyObject *
with_last(PyObject *names, PyObject *const *values, Py_ssize_t n)
{
    PyObject *dict, *name, *before;
    Py_ssize_t at = 0, left = PyDict_Size(names);

    if (left < n) {
        PyErr_Format(PyExc_ValueError, "names must be at least %zd, got %zd", n, left);
        return NULL;
    }
    dict = PyDict_Copy(names);
    while (dict != NULL && PyDict_Next(names, &at, &name, &before)) {
        if (left <= n && PyDict_SetItem(dict, name, values[n - left]) < 0) {
            Py_CLEAR(dict);
        }
        left--;
    }
    return dict;
}

/* As object.__new__ makes it, which is all there may be to it. */
static PyObject *
new_object(PyObject *type)
{
    const void *plain = PyType_GetSlot(&PyBaseObject_Type, Py_tp_new);

    if (PyType_GetSlot((PyTypeObject *)type, Py_tp_new) != plain ||
        (PyType_GetFlags((PyTypeObject *)type) & Py_TPFLAGS_HEAPTYPE) == 0) {
        PyErr_Format(PyExc_TypeError, "kind must be a class without __new__, got %R",
                     type);
        return NULL;
    }
    return PyType_GenericAlloc((PyTypeObject *)type, 0);
}

/* The object's attributes become this dict. Takes it. By the type's own `__dict__`,
 * whatever __setattr__ the class has: PyObject_GenericSetDict() refuses the objects of
 * Python 3.13, which have no dict before they need one. */
static int
set_attributes(PyObject *object, PyObject *dict)
{
    PyObject *name = dict == NULL ? NULL : PyUnicode_InternFromString("__dict__");
    const int status = name == NULL ? -1 : PyObject_GenericSetAttr(object, name, dict);

    Py_XDECREF(name);
    Py_XDECREF(dict);
    return status;
}

/* Gives a graph and its store what they have. */
static int
fill_graph(PyObject *graph, PyObject *store, PyObject *names, PyObject *inside,
           PyObject *made[3], int64_t n_slots)
{
    PyObject *values[] = {made[0], PyWeakref_NewRef(graph, NULL),
                          PyLong_FromLongLong(n_slots), made[1], made[2]};
    int status = -1;

    if (values[1] != NULL && values[2] != NULL &&
        set_attributes(store, with_last(inside, values, 5)) == 0) {
        status = set_attributes(graph, with_last(names, &store, 1));
    }
    Py_XDECREF(values[1]);
    Py_XDECREF(values[2]);
    return status;
}

/* Borrows the parts of a recipe. PyArg_ParseTuple() takes as long for them as a tenth
 * of all that graph() does. */
static int
take_recipe(PyObject *recipe, PyObject *parts[7])
{
    static const char kinds[] = "tdtdddd"; /* types and dicts */
    bool fits = PyTuple_Check(recipe) && PyTuple_Size(recipe) == 7;

    for (int i = 0; i < 7 && fits; i++) {
        parts[i] = PyTuple_GetItem(recipe, i);
        fits = kinds[i] == 't' ? PyType_Check(parts[i]) : PyDict_Check(parts[i]);
    }
    if (!fits) {
        PyErr_Format(PyExc_TypeError,
                     "recipe must be (type, dict, type, dict, dict, dict, dict), got "
                     "%R",
                     recipe);
        return -1;
    }
    return 0;
}

PyObject *
py_graph_batch_graph(PyObject *self, PyObject *args)
{
    source from = {.batch = (py_graph_batch *)self};
    PyObject *recipe, *parts[7], *made[3], *graph, *store;
    int status = -1;

    if (!PyArg_UnpackTuple(args, "graph", 2, 2, &recipe, &from.constants) ||
        take_recipe(recipe, parts) < 0 ||
        make_dicts(made, &from, parts[4], parts[5], parts[6]) < 0) {
        return NULL;
    }
    graph = new_object(parts[0]);
    store = graph == NULL ? NULL : new_object(parts[2]);
    if (store != NULL) {
        status = fill_graph(graph, store, parts[1], parts[3], made,
                            from.batch->batch->n_slots);
    }
    for (int i = 0; i < 3; i++) {
        Py_DECREF(made[i]);
    }
    Py_XDECREF(store);
    if (status < 0) {
        Py_CLEAR(graph);
    }
    return graph;
}
