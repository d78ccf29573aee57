/* A call of the AdamW step, and _core.adamw: lists of any arrays. */
#include "adamw_call.h"

#define STATE_COLUMNS                                                                  \
    [EXP_AVG] = {.name = "exp_avgs", .write = true, .keep = true},                     \
    [EXP_AVG_SQ] = {.name = "exp_avg_sqs",                                             \
                    .write = true,                                                     \
                    .keep = true,                                                      \
                    .same_dtype = EXP_AVG},                                            \
    [MAX_EXP_AVG_SQ] = {.name = "max_exp_avg_sqs",                                     \
                        .write = true,                                                 \
                        .keep = true,                                                  \
                        .same_dtype = EXP_AVG},                                        \
    [STEP] = {.name = "step", .write = true, .scalar = true, .keep = true}

static const py_column read_grads[N_COLUMNS] = {
    [PARAM] = {.name = "params", .write = true},
    [GRAD] = {.name = "grads", .any_layout = true},
    STATE_COLUMNS,
};

static const py_column write_grads[N_COLUMNS] = {
    [PARAM] = {.name = "params", .write = true},
    [GRAD] = {.name = "grads", .write = true, .any_layout = true},
    STATE_COLUMNS,
};

/* ---- Shared ---------------------------------------------------------------------- */

static int
borrow_scalar(py_state *state, PyObject *object, const char *name, tfast_device device,
              py_array *array, const float **value)
{
    const py_argument argument = {name, -1};

    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (py_borrow(state, object, argument, false, array) < 0) {
        return -1;
    }
    if (array->numel != 1 || array->dtype != TFAST_F32) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must hold one float32, got %lld elements of %s",
                                 (long long)array->numel,
                                 tfast_dtype_name(array->dtype));
    }
    if (array->device.type != device.type || array->device.index != device.index) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must be on the parameters' device");
    }
    *value = array->data;
    return 0;
}

/* lr is a number, or an array of one float32 where the parameters are. */
static int
take_scalars(py_state *state, py_adamw_call *call)
{
    tfast_adamw_args *args = &call->args;

    args->maximize = call->maximize != 0;
    args->decoupled_weight_decay = call->decoupled != 0;
    args->stream = (void *)(uintptr_t)call->stream;
    args->device = call->workspace->table.device;
    if (PyFloat_Check(call->lr) || PyLong_Check(call->lr)) {
        args->lr = PyFloat_AsDouble(call->lr);
        if (args->lr == -1.0 && PyErr_Occurred()) {
            return -1;
        }
    } else if (borrow_scalar(state, call->lr, "lr", args->device, &call->scalars[0],
                             &args->lr_device) < 0) {
        return -1;
    }
    if (borrow_scalar(state, call->grad_scale, "grad_scale", args->device,
                      &call->scalars[1], &args->grad_scale) < 0) {
        return -1;
    }
    return borrow_scalar(state, call->found_inf, "found_inf", args->device,
                         &call->scalars[2], &args->found_inf);
}

static void
fill_slots(py_workspace *workspace)
{
    for (Py_ssize_t i = 0; i < workspace->table.n_rows; i++) {
        const py_row *row = &workspace->table.rows[i];

        workspace->slots[i] = (tfast_adamw_slot){
            .param = row->data[PARAM],
            .grad = row->data[GRAD],
            .exp_avg = row->data[EXP_AVG],
            .exp_avg_sq = row->data[EXP_AVG_SQ],
            .max_exp_avg_sq = row->data[MAX_EXP_AVG_SQ],
            .step = row->data[STEP],
            .numel = row->numel,
            .param_dtype = row->dtype[PARAM],
            .grad_dtype = row->dtype[GRAD],
            .state_dtype = row->dtype[EXP_AVG],
        };
    }
}

int
py_adamw_begin(py_adamw_call *call, py_state *state, PyObject *workspace,
               Py_ssize_t rows, bool keep)
{
    const bool write_back = call->grad_scale != NULL && call->grad_scale != Py_None;

    if (Py_TYPE(workspace) != state->workspace_type) {
        PyErr_SetString(PyExc_TypeError, "workspace must be a Workspace");
        return -1;
    }
    call->workspace = (py_workspace *)workspace;
    if (py_table_begin(&call->workspace->table, write_back ? write_grads : read_grads,
                       N_COLUMNS, rows, keep) < 0) {
        return -1;
    }
    call->args.write_back_grads = write_back;
    call->workspace->table.relayout = call->relayout == Py_None ? NULL : call->relayout;
    return 0;
}

PyObject *
py_adamw_run(py_adamw_call *call, py_state *state)
{
    py_workspace *workspace = call->workspace;
    tfast_adamw_args *args = &call->args;
    tfast_status status;

    if (py_table_check(&workspace->table) < 0 || take_scalars(state, call) < 0 ||
        py_workspace_reserve(workspace, workspace->table.n_rows) < 0) {
        return NULL;
    }
    fill_slots(workspace);
    args->slots = workspace->slots;
    args->n_slots = workspace->table.n_rows;
    args->workspace = &workspace->backend;

    Py_BEGIN_ALLOW_THREADS
    status = tfast_adamw(args);
    Py_END_ALLOW_THREADS
    return py_result(status);
}

void
py_adamw_end(py_adamw_call *call)
{
    for (int i = 0; i < 3; i++) {
        py_release(&call->scalars[i]);
    }
    py_table_end(&call->workspace->table);
}

/* ---- Lists ----------------------------------------------------------------------- */

/* A list or tuple of the wanted length as a list. Returns a new reference. */
static PyObject *
as_list(PyObject *object, const char *name, Py_ssize_t want)
{
    PyObject *list;

    if (PyObject_HasAttrString(object, "__dlpack__") || PyObject_CheckBuffer(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a list of arrays, got one array",
                     name);
        return NULL;
    }
    list = PySequence_List(object);
    if (list != NULL && want >= 0 && PyList_Size(list) != want) {
        PyErr_Format(PyExc_ValueError, "%s must hold %zd arrays as params, got %zd",
                     name, want, PyList_Size(list));
        Py_CLEAR(list);
    }
    return list;
}

/* Reads the six columns as lists; `step` may be a number. */
static int
take_lists(PyObject *const *columns, PyObject **lists, int64_t *step)
{
    Py_ssize_t n = -1;

    for (int c = 0; c < N_COLUMNS; c++) {
        if (c == STEP && PyLong_Check(columns[c])) {
            *step = PyLong_AsLongLong(columns[c]);
            if (*step == -1 && PyErr_Occurred()) {
                return -1;
            }
            continue;
        }
        if (c == MAX_EXP_AVG_SQ && columns[c] == Py_None) {
            continue;
        }
        lists[c] = as_list(columns[c], read_grads[c].name, n);
        if (lists[c] == NULL) {
            return -1;
        }
        n = PyList_Size(lists[PARAM]);
    }
    return 0;
}

static int
add_lists(py_state *state, py_table *table, PyObject *const *lists)
{
    const Py_ssize_t n = PyList_Size(lists[PARAM]);

    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *objects[N_COLUMNS] = {NULL};
        int status;

        for (int c = 0; c < N_COLUMNS; c++) {
            objects[c] = lists[c] == NULL ? NULL : PyList_GetItem(lists[c], i);
        }
        status = py_table_add(state, table, objects, i);
        if (status > 0) {
            return py_argument_error(PyExc_ValueError, (py_argument){"params", i},
                                     "must be on the device of params[0]");
        }
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *
py_adamw(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"params",
                            "grads",
                            "exp_avgs",
                            "exp_avg_sqs",
                            "max_exp_avg_sqs",
                            "step",
                            "workspace",
                            "lr",
                            "beta1",
                            "beta2",
                            "eps",
                            "weight_decay",
                            "maximize",
                            "decoupled_weight_decay",
                            "grad_scale",
                            "found_inf",
                            "relayout",
                            "stream",
                            NULL};
    PyObject *columns[N_COLUMNS], *lists[N_COLUMNS] = {NULL}, *result = NULL,
                                  *workspace;
    py_state *state = PyModule_GetState(module);
    py_adamw_call call = {.decoupled = 1};

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOO|$OddddppOOOK:adamw", names, &columns[PARAM],
            &columns[GRAD], &columns[EXP_AVG], &columns[EXP_AVG_SQ],
            &columns[MAX_EXP_AVG_SQ], &columns[STEP], &workspace, &call.lr,
            &call.args.beta1, &call.args.beta2, &call.args.eps, &call.args.weight_decay,
            &call.maximize, &call.decoupled, &call.grad_scale, &call.found_inf,
            &call.relayout, &call.stream)) {
        return NULL;
    }
    if (take_lists(columns, lists, &call.args.step) == 0 &&
        py_adamw_begin(&call, state, workspace, PyList_Size(lists[PARAM]), false) ==
            0) {
        if (add_lists(state, &call.workspace->table, lists) == 0) {
            result = py_adamw_run(&call, state);
        }
        py_adamw_end(&call);
    }
    for (int c = 0; c < N_COLUMNS; c++) {
        Py_XDECREF(lists[c]);
    }
    return result;
}
