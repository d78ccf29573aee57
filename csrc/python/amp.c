/* _core.amp_grads and _core.amp_update. */
#include "core.h"

#include <math.h>
#include <string.h>

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

/* A copy of a list, which Python code that runs during the borrowing cannot change. */
static PyObject *
copy_of(PyObject *list)
{
    return PyList_GetSlice(list, 0, PyList_Size(list));
}

/* ---- The pass over gradients ----------------------------------------------------- */

enum {
    GRADS,
    WORKSPACE,
    FOUND_INF,
    TOTAL_NORM,
    TOTAL_NORM_F64,
    CLIP_COEF,
    NORM_TYPE,
    MAX_NORM,
    REWRITE,
    CLIP_VALUE,
    GRAD_SCALE,
    FACTOR,
    PASS_STREAM,
    N_PASS
};

#define AT(field) PY_AT(tfast_amp_grads_args, field)
#define SCALAR(dtype_, field)                                                          \
    .name = #field, .kind = PY_SCALAR, .dtype = PY_EXACTLY(dtype_), .at = AT(field)
#define REAL(field)                                                                    \
    {                                                                                  \
        .name = #field, .kind = PY_REAL, .at = AT(field)                               \
    }

static const py_parameter pass_parameters[N_PASS] = {
    [GRADS] = {.name = "grads", .kind = PY_LIST, .required = true},
    [WORKSPACE] = {.name = "workspace", .kind = PY_OBJECT, .required = true},
    [FOUND_INF] = {SCALAR(TFAST_F32, found_inf), .written = true},
    [TOTAL_NORM] = {SCALAR(TFAST_F32, total_norm), .written = true},
    [TOTAL_NORM_F64] = {SCALAR(TFAST_F64, total_norm_f64), .written = true},
    [CLIP_COEF] = {SCALAR(TFAST_F64, clip_coef), .written = true},
    [NORM_TYPE] = REAL(norm_type),
    [MAX_NORM] = REAL(max_norm),
    [REWRITE] = {.name = "rewrite", .kind = PY_OBJECT},
    [CLIP_VALUE] = REAL(clip_value),
    [GRAD_SCALE] = {SCALAR(TFAST_F32, grad_scale)},
    [FACTOR] = {SCALAR(TFAST_F64, factor)},
    [PASS_STREAM] = {.name = "stream", .kind = PY_STREAM, .at = AT(stream)},
};
#undef AT

static const uint8_t pass_order[] = {GRADS, WORKSPACE};
static const py_operation pass = {.name = "amp_grads",
                                  .parameters = pass_parameters,
                                  .n_parameters = N_PASS,
                                  .order = pass_order,
                                  .n_order = 2,
                                  .all = true};

static int
take_rewrite(PyObject *object, tfast_amp_rewrite *rewrite)
{
    static const char *const names[] = {[TFAST_AMP_READ] = "read",
                                        [TFAST_AMP_MULTIPLY] = "multiply",
                                        [TFAST_AMP_CLAMP] = "clamp"};
    int choice = (int)*rewrite;

    if (py_take_choice(object, "rewrite", names, (int)(sizeof names / sizeof *names),
                       &choice) < 0) {
        return -1;
    }
    *rewrite = (tfast_amp_rewrite)choice;
    return 0;
}

static int
add_grads(py_state *state, py_table *table, PyObject *list)
{
    const Py_ssize_t n = PyList_Size(list);
    int status = 0;

    for (Py_ssize_t i = 0; i < n && status == 0; i++) {
        PyObject *objects[] = {PyList_GetItem(list, i)};

        status = py_table_add(state, table, objects, i);
        if (status > 0) {
            return py_argument_error(PyExc_ValueError, (py_argument){"grads", i},
                                     "must be on the device of grads[0]");
        }
    }
    return status < 0 ? -1 : py_table_check(state, table);
}

/* Borrows the gradients, then the scalars, which must be on the same device. */
static int
take_grads(py_call *call, py_workspace *workspace, PyObject *list,
           tfast_amp_grads_args *args)
{
    py_table *table = &workspace->table;

    if (add_grads(call->state, table, list) < 0 ||
        py_workspace_reserve_tensors(workspace, table->n_rows) < 0) {
        return -1;
    }
    py_amp_tensors(workspace->tensors, table, 0);
    args->tensors = workspace->tensors;
    args->n_tensors = table->n_rows;
    args->device = table->place.device;
    args->workspace = &workspace->backend;
    call->place = table->place;
    return py_borrow_arrays(call, args);
}

PyObject *
py_amp_grads(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    tfast_amp_grads_args fields = {.norm_type = 2, .max_norm = INFINITY};
    py_workspace *workspace;
    PyObject *list;
    py_call call;
    tfast_status status = TFAST_OK;
    bool ready = false;

    call.state = PyModule_GetState(module);
    if (py_parse(&call, &pass, &fields, args, n, names) < 0 ||
        take_rewrite(call.given[REWRITE], &fields.rewrite) < 0) {
        return NULL;
    }
    workspace = py_workspace_of(call.state, call.given[WORKSPACE]);
    list = workspace == NULL ? NULL : copy_of(call.given[GRADS]);
    if (list != NULL &&
        py_table_begin(&workspace->table, pass_parameters, 1,
                       fields.rewrite == TFAST_AMP_READ ? 0 : 1u << GRADS,
                       PyList_Size(list)) == 0) {
        ready = take_grads(&call, workspace, list, &fields) == 0;
        if (ready) {
            Py_BEGIN_ALLOW_THREADS
            status = tfast_amp_grads(&fields);
            Py_END_ALLOW_THREADS
        }
        py_release_arrays(&call);
        py_table_end(&workspace->table);
    }
    Py_XDECREF(list);
    return ready ? py_result(status) : NULL;
}

/* ---- The loss scale -------------------------------------------------------------- */

enum {
    SCALE,
    GROWTH_TRACKER,
    FOUND_INFS,
    GROWTH_FACTOR,
    BACKOFF_FACTOR,
    GROWTH_INTERVAL,
    MIN_SCALE,
    MAX_SCALE,
    HYSTERESIS,
    HYSTERESIS_TRACKER,
    UPDATE_STREAM,
    N_UPDATE
};

#define AT(field) PY_AT(tfast_amp_update_args, field)
#define SHORT(field)                                                                   \
    {                                                                                  \
        .name = #field, .kind = PY_SHORT_INTEGER, .at = AT(field)                      \
    }

static const py_parameter update_parameters[N_UPDATE] = {
    [SCALE] = {SCALAR(TFAST_F32, scale), .written = true, .required = true},
    [GROWTH_TRACKER] = {SCALAR(PY_INT32, growth_tracker), .written = true,
                        .required = true},
    [FOUND_INFS] = {.name = "found_infs",
                    .kind = PY_LIST,
                    .dtype = PY_EXACTLY(TFAST_F32),
                    .required = true},
    [GROWTH_FACTOR] = REAL(growth_factor),
    [BACKOFF_FACTOR] = REAL(backoff_factor),
    [GROWTH_INTERVAL] = SHORT(growth_interval),
    [MIN_SCALE] = REAL(min_scale),
    [MAX_SCALE] = REAL(max_scale),
    [HYSTERESIS] = SHORT(hysteresis),
    [HYSTERESIS_TRACKER] = {SCALAR(PY_INT32, hysteresis_tracker), .written = true},
    [UPDATE_STREAM] = {.name = "stream", .kind = PY_STREAM, .at = AT(stream)},
};

static const uint8_t update_order[] = {SCALE, GROWTH_TRACKER, FOUND_INFS};
static const py_operation update = {.name = "amp_update",
                                    .parameters = update_parameters,
                                    .n_parameters = N_UPDATE,
                                    .order = update_order,
                                    .n_order = 3,
                                    .all = true};

/* Borrows the list found_infs. Returns 0, or -1 with an exception. */
static int
take_founds(py_call *call, PyObject *list, tfast_amp_update_args *args)
{
    const Py_ssize_t n = PyList_Size(list);

    if (n < 1 || n > TFAST_AMP_MAX_FOUND) {
        PyErr_Format(PyExc_ValueError, "found_infs must hold 1 to %d arrays, got %zd",
                     TFAST_AMP_MAX_FOUND, n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        const py_array *array =
            py_borrow_argument(call, FOUND_INFS, PyList_GetItem(list, i), i);

        if (array == NULL) {
            return -1;
        }
        args->found_infs[i] = array->data;
    }
    args->n_found_infs = (int32_t)n;
    return 0;
}

PyObject *
py_amp_update(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    tfast_amp_update_args fields = {.max_scale = INFINITY, .hysteresis = 1};
    tfast_status status = TFAST_OK;
    PyObject *list;
    py_call call;
    bool ready;

    call.state = PyModule_GetState(module);
    if (py_parse(&call, &update, &fields, args, n, names) < 0) {
        return NULL;
    }
    list = copy_of(call.given[FOUND_INFS]);
    ready = list != NULL && py_borrow_arrays(&call, &fields) == 0 &&
            take_founds(&call, list, &fields) == 0 && py_check_overlap(&call) == 0;
    if (ready) {
        fields.device = call.place.device;
        Py_BEGIN_ALLOW_THREADS
        status = tfast_amp_update(&fields);
        Py_END_ALLOW_THREADS
    }
    py_release_arrays(&call);
    Py_XDECREF(list);
    return ready ? py_result(status) : NULL;
}
