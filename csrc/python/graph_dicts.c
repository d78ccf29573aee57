/* GraphBatch.dicts(): a batch's arrays by name, for adapters that cannot afford a call
 * for each. */
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

PyObject *
py_graph_batch_array(py_graph_batch *batch, Py_ssize_t number)
{
    const tfast_graph_selection *selection = &batch->selection->selection;
    const int n_fields = selection->n_fields;
    const int n_ptrs = n_fields + py_graph_batch_counts(batch);

    if (number < 0 || number >= n_ptrs + selection->n_batch_of) {
        return no_array(number);
    }
    if (number < n_fields) {
        return py_graph_batch_field(batch, number);
    }
    if (number < n_ptrs) {
        return py_graph_batch_ptr(batch, number - n_fields);
    }
    return py_graph_batch_vector(batch, number - n_ptrs);
}

static PyObject *
find_array(const source *from, Py_ssize_t number)
{
    return py_graph_batch_array(from->batch, number);
}

PyObject *
py_graph_batch_sums_or(py_graph_batch *batch, Py_ssize_t number, int64_t n,
                       PyObject *constants)
{
    const int n_counts = py_graph_batch_counts(batch);

    if (number < 0) {
        return no_array(number);
    }
    return number < n_counts ? py_graph_batch_sums(batch, number, n)
                             : PySequence_GetItem(constants, number - n_counts);
}

/* The sums of a count, made once, or a constant. */
static PyObject *
find_sums(const source *from, Py_ssize_t number)
{
    PyObject *value;
    const bool is_sums = number >= 0 && number < py_graph_batch_counts(from->batch);

    if (is_sums && from->made[number] != NULL) {
        return Py_NewRef(from->made[number]);
    }
    value = py_graph_batch_sums_or(from->batch, number, from->length, from->constants);
    if (is_sums) {
        from->made[number] = Py_XNewRef(value);
    }
    return value;
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
