/* _core.amp_grads and _core.amp_update: lists of any arrays. */
#include "core.h"

#include <math.h>
#include <string.h>

static const py_column read_grads[] = {{.name = "grads"}};
static const py_column write_grads[] = {{.name = "grads", .write = true}};

tfast_amp_tensor *
py_amp_tensors(tfast_amp_tensor *tensors, const py_table *table, int column)
{
    for (Py_ssize_t i = 0; i < table->n_rows; i++) {
        const py_row *row = &table->rows[i];

        *tensors++ = (tfast_amp_tensor){
            .data = row->data[column],
            .numel = row->numel,
            .dtype = row->dtype[column],
        };
    }
    return tensors;
}

/* A copy of a list: no code that runs while its arrays are borrowed can change it. */
static PyObject *
own_list(PyObject *list)
{
    return PyList_GetSlice(list, 0, PyList_Size(list));
}

/* ---- One array of one element after another -------------------------------------- */

enum { MAX_SCALARS = TFAST_AMP_MAX_FOUND + 3 };

/* Those of one call, borrowed until its end. */
typedef struct {
    tfast_device device;
    py_array arrays[MAX_SCALARS];
    int n;
} scalars;

/* Sets *value, of any pointer type, to the object's element; None leaves it. */
static int
take_scalar(py_state *state, scalars *taken, PyObject *object, const char *name,
            int dtype, bool write, void *value)
{
    void *data = NULL;

    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (py_borrow_scalar(state, object, name, dtype, taken->device, write,
                         &taken->arrays[taken->n], &data) < 0) {
        return -1;
    }
    taken->n++;
    memcpy(value, &data, sizeof data);
    return 0;
}

static void
release_scalars(scalars *taken)
{
    while (taken->n > 0) {
        py_release(&taken->arrays[--taken->n]);
    }
}

/* ---- The pass over gradients ----------------------------------------------------- */

static int
parse_rewrite(const char *text, tfast_amp_rewrite *rewrite)
{
    static const char *const names[] = {[TFAST_AMP_READ] = "read",
                                        [TFAST_AMP_MULTIPLY] = "multiply",
                                        [TFAST_AMP_CLAMP] = "clamp"};

    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        if (text == NULL || strcmp(text, names[i]) == 0) {
            *rewrite = (tfast_amp_rewrite)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "rewrite must be 'read', 'multiply' or 'clamp', got '%.100s'", text);
    return -1;
}

static int
add_grads(py_state *state, py_table *table, PyObject *list)
{
    const Py_ssize_t n = PyList_Size(list);

    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *objects[] = {PyList_GetItem(list, i)};
        const int status = py_table_add(state, table, objects, i);

        if (status > 0) {
            return py_argument_error(PyExc_ValueError, (py_argument){"grads", i},
                                     "must be on the device of grads[0]");
        }
        if (status < 0) {
            return -1;
        }
    }
    return py_table_check(state, table);
}

typedef struct {
    PyObject *found_inf, *total_norm, *total_norm_f64, *clip_coef, *grad_scale, *factor;
} grads_scalars;

/* On the device of the tensors, or where there are none on that of a result. */
static int
take_grads_scalars(py_state *state, scalars *taken, const grads_scalars *given,
                   tfast_amp_grads_args *args)
{
    const struct {
        PyObject *object;
        const char *name;
        tfast_dtype dtype;
        bool write;
        void *value;
    } wanted[] = {
        {given->found_inf, "found_inf", TFAST_F32, true, &args->found_inf},
        {given->total_norm, "total_norm", TFAST_F32, true, &args->total_norm},
        {given->total_norm_f64, "total_norm_f64", TFAST_F64, true,
         &args->total_norm_f64},
        {given->clip_coef, "clip_coef", TFAST_F64, true, &args->clip_coef},
        {given->grad_scale, "grad_scale", TFAST_F32, false, &args->grad_scale},
        {given->factor, "factor", TFAST_F64, false, &args->factor},
    };

    taken->device = args->device;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        if (take_scalar(state, taken, wanted[i].object, wanted[i].name, wanted[i].dtype,
                        wanted[i].write, wanted[i].value) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
run_grads(py_state *state, py_workspace *workspace, const grads_scalars *given,
          tfast_amp_grads_args *args)
{
    scalars taken = {.n = 0};
    tfast_status status = TFAST_OK;
    int ready;

    args->device = workspace->table.device;
    args->workspace = &workspace->backend;
    args->n_tensors = workspace->table.n_rows;
    ready = py_workspace_reserve_tensors(workspace, args->n_tensors);
    if (ready == 0) {
        py_amp_tensors(workspace->tensors, &workspace->table, 0);
        args->tensors = workspace->tensors;
        ready = take_grads_scalars(state, &taken, given, args);
    }
    if (ready == 0) {
        Py_BEGIN_ALLOW_THREADS
        status = tfast_amp_grads(args);
        Py_END_ALLOW_THREADS
    }
    release_scalars(&taken);
    return ready < 0 ? NULL : py_result(status);
}

PyObject *
py_amp_grads(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"grads",          "workspace",  "found_inf",  "total_norm",
                            "total_norm_f64", "clip_coef",  "norm_type",  "max_norm",
                            "rewrite",        "clip_value", "grad_scale", "factor",
                            "stream",         NULL};
    py_state *state = PyModule_GetState(module);
    tfast_amp_grads_args call = {.norm_type = 2, .max_norm = INFINITY};
    grads_scalars given = {NULL};
    PyObject *list, *mine, *object, *result = NULL;
    py_workspace *workspace;
    unsigned long long stream = 0;
    const char *rewrite = NULL;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O|$OOOOddsdOOK:amp_grads", names, &PyList_Type, &list,
            &object, &given.found_inf, &given.total_norm, &given.total_norm_f64,
            &given.clip_coef, &call.norm_type, &call.max_norm, &rewrite,
            &call.clip_value, &given.grad_scale, &given.factor, &stream) ||
        parse_rewrite(rewrite, &call.rewrite) < 0) {
        return NULL;
    }
    call.stream = (void *)(uintptr_t)stream;
    workspace = py_workspace_of(state, object);
    mine = workspace == NULL ? NULL : own_list(list);
    if (mine != NULL &&
        py_table_begin(&workspace->table,
                       call.rewrite == TFAST_AMP_READ ? read_grads : write_grads, 1,
                       PyList_Size(mine)) == 0) {
        if (add_grads(state, &workspace->table, mine) == 0) {
            result = run_grads(state, workspace, &given, &call);
        }
        py_table_end(&workspace->table);
    }
    Py_XDECREF(mine);
    return result;
}

/* ---- The loss scale -------------------------------------------------------------- */

static int
take_founds(py_state *state, scalars *taken, PyObject *list,
            tfast_amp_update_args *args)
{
    const Py_ssize_t n = PyList_Size(list);

    if (n < 1 || n > TFAST_AMP_MAX_FOUND) {
        PyErr_Format(PyExc_ValueError, "found_infs must hold 1 to %d arrays, got %zd",
                     TFAST_AMP_MAX_FOUND, n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (take_scalar(state, taken, PyList_GetItem(list, i), "found_infs", TFAST_F32,
                        false, &args->found_infs[i]) < 0) {
            return -1;
        }
    }
    args->n_found_infs = (int32_t)n;
    return 0;
}

/* The scale is borrowed for its device first. */
static int
take_state(py_state *state, scalars *taken, PyObject *scale, PyObject *growth,
           PyObject *hysteresis, tfast_amp_update_args *args)
{
    py_array *first = &taken->arrays[0];

    if (py_borrow(state, scale, (py_argument){"scale", -1}, PY_WRITE, first) < 0) {
        return -1;
    }
    taken->device = args->device = first->device;
    py_release(first);
    if (take_scalar(state, taken, scale, "scale", TFAST_F32, true, &args->scale) < 0 ||
        take_scalar(state, taken, growth, "growth_tracker", PY_INT32, true,
                    &args->growth_tracker) < 0) {
        return -1;
    }
    return take_scalar(state, taken, hysteresis, "hysteresis_tracker", PY_INT32, true,
                       &args->hysteresis_tracker);
}

PyObject *
py_amp_update(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "scale",          "growth_tracker",     "found_infs", "growth_factor",
        "backoff_factor", "growth_interval",    "min_scale",  "max_scale",
        "hysteresis",     "hysteresis_tracker", "stream",     NULL};
    py_state *state = PyModule_GetState(module);
    tfast_amp_update_args call = {.max_scale = INFINITY, .hysteresis = 1};
    PyObject *scale, *growth, *founds, *mine, *hysteresis = NULL;
    scalars taken = {.n = 0};
    unsigned long long stream = 0;
    tfast_status status = TFAST_OK;
    bool ready;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOO!|$ddiddiOK:amp_update", names, &scale, &growth,
            &PyList_Type, &founds, &call.growth_factor, &call.backoff_factor,
            &call.growth_interval, &call.min_scale, &call.max_scale, &call.hysteresis,
            &hysteresis, &stream)) {
        return NULL;
    }
    call.stream = (void *)(uintptr_t)stream;
    mine = own_list(founds);
    ready = mine != NULL &&
            take_state(state, &taken, scale, growth, hysteresis, &call) == 0 &&
            take_founds(state, &taken, mine, &call) == 0;
    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        status = tfast_amp_update(&call);
        Py_END_ALLOW_THREADS
    }
    release_scalars(&taken);
    Py_XDECREF(mine);
    return ready ? py_result(status) : NULL;
}
