/* _core.neighbours: counts edges, asks the caller for arrays of that size, fills
 * them. */
#include "core.h"

enum {
    POINTS,
    CENTRES,
    PTR,
    CENTRES_PTR,
    MAKE,
    RADIUS,
    MOST,
    BELOW,
    FIRST,
    LOOP,
    UNIT,
    SHORT,
    SCRATCH,
    STREAM,
    /* What `make` returns, in this order: */
    NEIGHBOUR,
    CENTRE,
    DISTANCE,
    RELATIVE_POSITION,
    UNIT_VECTOR,
    SHORT_NEIGHBOUR, /* instead of the first two */
    SHORT_CENTRE,
    N_PARAMETERS
};

#define AT(field) PY_AT(tfast_neighbours_args, field)
#define IN(name_, dtype_) .name = name_, .kind = PY_ARRAY, .dtype = dtype_
#define MADE(name_, dtype_) IN(name_, dtype_), .written = true

static const py_parameter parameters[N_PARAMETERS] = {
    [POINTS] = {IN("points", PY_FLOATS), .required = true},
    [CENTRES] = {IN("centres", PY_FIRSTS)},
    [PTR] = {IN("ptr", PY_EXACTLY(PY_INT64)), .required = true, .on_cpu = true},
    [CENTRES_PTR] = {IN("centres_ptr", PY_EXACTLY(PY_INT64)), .on_cpu = true},
    [MAKE] = {.name = "make", .kind = PY_OBJECT, .required = true},
    [RADIUS] = {.name = "r", .kind = PY_REAL, .at = AT(radius)},
    [MOST] = {.name = "most", .kind = PY_INTEGER, .at = AT(most)},
    [BELOW] = {.name = "below", .kind = PY_FLAG, .at = AT(below)},
    [FIRST] = {.name = "first", .kind = PY_FLAG, .at = AT(first)},
    [SHORT] = {.name = "short_indices", .kind = PY_FLAG, .at = AT(short_indices)},
    [LOOP] = {.name = "loop", .kind = PY_FLAG, .at = AT(loop)},
    [UNIT] = {.name = "unit", .kind = PY_FLAG, .at = AT(unit)},
    [SCRATCH] = {.name = "scratch", .kind = PY_OBJECT},
    [STREAM] = {.name = "stream", .kind = PY_STREAM, .at = AT(stream)},
    [NEIGHBOUR] = {MADE("make's neighbour", PY_EXACTLY(PY_INT64))},
    [CENTRE] = {MADE("make's centre", PY_EXACTLY(PY_INT64))},
    [DISTANCE] = {MADE("make's distance", PY_FIRSTS)},
    [RELATIVE_POSITION] = {MADE("make's relative_position", PY_FIRSTS)},
    [UNIT_VECTOR] = {MADE("make's unit_vector", PY_FIRSTS)},
    [SHORT_NEIGHBOUR] = {MADE("make's neighbour", PY_EXACTLY(PY_INT32))},
    [SHORT_CENTRE] = {MADE("make's centre", PY_EXACTLY(PY_INT32))},
};

static const uint8_t order[] = {POINTS, CENTRES, PTR, CENTRES_PTR, MAKE};
static const py_operation operation = {.name = "neighbours",
                                       .parameters = parameters,
                                       .n_parameters = N_PARAMETERS,
                                       .order = order,
                                       .n_order = sizeof order,
                                       .needs = 1u << POINTS | 1u << PTR | 1u << MAKE};

static int
take_points(const py_call *call, int row, int ptr_row, int64_t dim, int64_t n_graphs,
            tfast_points *points)
{
    const py_array *array = call->found[row], *ptr = call->found[ptr_row];
    const char *name = parameters[row].name;

    if (array->ndim != 2 || array->shape[1] != dim) {
        return py_shape_error(PyExc_ValueError, name, array,
                              "must have shape (n, dimensions), with as many "
                              "dimensions as points");
    }
    if (ptr == NULL) {
        return py_argument_error(PyExc_TypeError, (py_argument){"centres_ptr", -1},
                                 "must be given with centres");
    }
    if (ptr->ndim != 1 || n_graphs < 0 || ptr->shape[0] != n_graphs + 1 ||
        (n_graphs > 0 && ptr->strides[0] != 1)) {
        return py_shape_error(PyExc_ValueError, parameters[ptr_row].name, ptr,
                              "must be dense and have shape (graphs + 1,)");
    }
    points->data = array->data == NULL ? "" : array->data; /* NULL: no centres */
    points->n = array->shape[0];
    points->row = array->strides[0];
    points->column = array->strides[1];
    points->ptr = ptr->data;
    return 0;
}

static int
take_arrays(const py_call *call, tfast_neighbours_args *args)
{
    const py_array *points = call->found[POINTS], *ptr = call->found[PTR];

    args->dim = points->ndim == 2 ? points->shape[1] : 0; /* else refused below */
    args->n_graphs = ptr->numel - 1;
    args->dtype = (uint8_t)points->dtype;
    args->device = points->device;
    if (take_points(call, POINTS, PTR, args->dim, args->n_graphs, &args->points) < 0) {
        return -1;
    }
    return call->found[CENTRES] == NULL
               ? 0
               : take_points(call, CENTRES, CENTRES_PTR, args->dim, args->n_graphs,
                             &args->centres);
}

/* Borrows one array that `make` returned; its address in *data. None: NULL. */
static int
take_made(py_call *call, int row, PyObject *object, int64_t n, int64_t columns,
          void **data)
{
    const py_array *array;

    *data = NULL;
    if (object == Py_None && row >= DISTANCE && row <= UNIT_VECTOR) {
        return 0;
    }
    array = py_borrow_argument(call, row, object, -1);
    if (array == NULL) {
        return -1;
    }
    if (array->numel != n * columns || array->ndim < 1 || array->ndim > 2 ||
        array->shape[0] != n || !py_is_dense(array) ||
        (n > 1 && array->strides[0] != columns)) {
        return py_shape_error(PyExc_ValueError, parameters[row].name, array,
                              "must be dense and have shape (%lld, %lld)", (long long)n,
                              (long long)columns);
    }
    *data = array->data;
    return 0;
}

/* Calls `make` with the number of edges, and borrows the arrays of the tuple that it
 * returns. */
static PyObject *
make_arrays(py_call *call, tfast_neighbours_args *args)
{
    PyObject *made =
        PyObject_CallFunction(call->given[MAKE], "L", (long long)args->n_edges);
    void **const places[] = {&args->neighbour, &args->centre, &args->distance,
                             &args->relative_position, &args->unit_vector};

    if (made == NULL) {
        return NULL;
    }
    if (!PyTuple_Check(made) || PyTuple_Size(made) != 5) {
        PyErr_SetString(PyExc_TypeError, "make must return a tuple of 5");
        goto fail;
    }
    for (int i = 0; i < 5; i++) {
        PyObject *item = PyTuple_GetItem(made, i);
        const bool is_vector = i + NEIGHBOUR >= RELATIVE_POSITION;
        int row = NEIGHBOUR + i;

        if (args->short_indices && row <= CENTRE) {
            row += SHORT_NEIGHBOUR - NEIGHBOUR;
        }
        if (take_made(call, row, item, args->n_edges, is_vector ? args->dim : 1,
                      places[i]) < 0) {
            goto fail;
        }
    }
    if (py_check_overlap(call) == 0) {
        return made;
    }

fail:
    Py_DECREF(made);
    return NULL;
}

static int
take_scratch(py_call *call, tfast_neighbours_args *args)
{
    int64_t bytes;
    const tfast_status status = tfast_neighbours_scratch(&bytes, args);

    return py_take_scratch(call, call->given[SCRATCH], status, bytes, &args->scratch,
                           &args->scratch_bytes);
}

PyObject *
py_neighbours(PyObject *module, PyObject *const *arguments, Py_ssize_t n,
              PyObject *names)
{
    tfast_neighbours_args args = {.radius = 0, .most = -1};
    tfast_neighbours_plan *plan = NULL;
    tfast_status status;
    PyObject *made = NULL;
    py_call call;

    call.state = PyModule_GetState(module);
    if (py_parse(&call, &operation, &args, arguments, n, names) < 0) {
        return NULL;
    }
    if (py_borrow_arrays(&call, &args) < 0 || take_arrays(&call, &args) < 0 ||
        take_scratch(&call, &args) < 0) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_neighbours_count(&plan, &args);
    Py_END_ALLOW_THREADS
    if (status != TFAST_OK) {
        py_result(status);
        goto done;
    }
    made = make_arrays(&call, &args);
    if (made == NULL) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_neighbours_fill(plan, &args);
    Py_END_ALLOW_THREADS
    if (status != TFAST_OK) {
        Py_CLEAR(made);
        py_result(status);
    }

done:
    tfast_neighbours_end(plan);
    py_release_arrays(&call);
    return made;
}
