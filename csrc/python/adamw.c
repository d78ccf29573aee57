/* _core.adamw (lists of any arrays) and _core.adamw_group (a torch param group). */
#include "core.h"

enum { PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, STEP, N_COLUMNS };

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

/* The scalars that both entries take; device scalars are borrowed for the call. */
typedef struct {
    tfast_adamw_args args;
    PyObject *lr, *grad_scale, *found_inf, *relayout;
    py_workspace *workspace;
    py_array scalars[3];
    unsigned long long stream;
    int maximize, decoupled;
} step_call;

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
take_scalars(py_state *state, step_call *call)
{
    tfast_adamw_args *args = &call->args;

    args->maximize = call->maximize != 0;
    args->decoupled_weight_decay = call->decoupled != 0;
    args->stream = (void *)(uintptr_t)call->stream;
    args->device = call->workspace->table.device;
    args->write_back_grads = call->grad_scale != NULL && call->grad_scale != Py_None;
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

/* Runs the step on the rows of the workspace's table. Returns None or NULL. */
static PyObject *
run(py_state *state, step_call *call)
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

static void
finish(step_call *call)
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
    step_call call = {.decoupled = 1};

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOO|$OddddppOOOK:adamw", names, &columns[PARAM],
            &columns[GRAD], &columns[EXP_AVG], &columns[EXP_AVG_SQ],
            &columns[MAX_EXP_AVG_SQ], &columns[STEP], &workspace, &call.lr,
            &call.args.beta1, &call.args.beta2, &call.args.eps, &call.args.weight_decay,
            &call.maximize, &call.decoupled, &call.grad_scale, &call.found_inf,
            &call.relayout, &call.stream)) {
        return NULL;
    }
    if (Py_TYPE(workspace) != state->workspace_type) {
        PyErr_SetString(PyExc_TypeError, "workspace must be a Workspace");
        return NULL;
    }
    call.workspace = (py_workspace *)workspace;
    if (take_lists(columns, lists, &call.args.step) == 0 &&
        py_table_begin(&call.workspace->table,
                       call.grad_scale == NULL || call.grad_scale == Py_None
                           ? read_grads
                           : write_grads,
                       N_COLUMNS, PyList_Size(lists[PARAM]), false) == 0) {
        call.workspace->table.relayout =
            call.relayout == Py_None ? NULL : call.relayout;
        if (add_lists(state, &call.workspace->table, lists) == 0) {
            result = run(state, &call);
        }
        finish(&call);
    }
    for (int c = 0; c < N_COLUMNS; c++) {
        Py_XDECREF(lists[c]);
    }
    return result;
}

/* ---- A torch param group --------------------------------------------------------- */

/* The parameter's state dict. Both dicts were made in the order of the parameters, so
 * it is one of the next entries; asking by key would call the tensor's __hash__.
 * Borrowed; NULL without an exception where there is none. */
static PyObject *
state_of(PyObject *all, PyObject *param, Py_ssize_t *position)
{
    PyObject *key, *value;
    Py_ssize_t next = *position;

    for (int ahead = 0; ahead < 8 && PyDict_Next(all, &next, &key, &value); ahead++) {
        if (key == param) {
            *position = next;
            return value;
        }
    }
    return PyDict_GetItemWithError(all, param);
}

/* Where in the optimizer's state a group's first parameter stands, for state_of(). */
static Py_ssize_t
find_position(PyObject *all, PyObject *param, Py_ssize_t guess)
{
    PyObject *key;
    Py_ssize_t next = guess, before;

    if (PyDict_Next(all, &next, &key, NULL) && key == param) {
        return guess;
    }
    for (before = next = 0; PyDict_Next(all, &next, &key, NULL); before = next) {
        if (key == param) {
            return before;
        }
    }
    return 0;
}

/* The state arrays of one parameter. Returns 0, 1 if some are missing, or -1. */
static int
take_state(py_state *state, PyObject *dict, bool amsgrad, PyObject **objects)
{
    /* in the order in which torch makes them, so that walking the dict finds them all
     */
    const struct {
        int column;
        PyObject *name;
    } wanted[] = {{STEP, state->s_step},
                  {EXP_AVG, state->s_exp_avg},
                  {EXP_AVG_SQ, state->s_exp_avg_sq},
                  {MAX_EXP_AVG_SQ, state->s_max_exp_avg_sq}};
    PyObject *key, *value;
    Py_ssize_t next = 0;

    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "state of a parameter must be a dict");
        return -1;
    }
    for (int i = 0; i < (amsgrad ? 4 : 3); i++) {
        if (!PyDict_Next(dict, &next, &key, &value) || key != wanted[i].name) {
            value = PyDict_GetItemWithError(dict, wanted[i].name);
        }
        if (value == NULL) {
            return PyErr_Occurred() ? -1 : 1;
        }
        objects[wanted[i].column] = value;
    }
    return 0;
}

/* Adds one parameter that has a gradient. Returns 0, 1 if its state must be made or it
 * is on another device than those before, or -1 with an exception. */
static int
add_param(py_state *state, py_workspace *workspace, PyObject *all, bool amsgrad,
          Py_ssize_t place, PyObject *param, PyObject *grad)
{
    PyObject *objects[N_COLUMNS] = {[PARAM] = param, [GRAD] = grad}, *dict;
    int status;

    if (workspace->table.n_rows == 0) {
        workspace->position = find_position(all, param, workspace->position);
        workspace->next = workspace->position;
    }
    dict = state_of(all, param, &workspace->next);
    if (dict == NULL) {
        return PyErr_Occurred() ? -1 : 1;
    }
    status = take_state(state, dict, amsgrad, objects);
    return status != 0 ? status
                       : py_table_add(state, &workspace->table, objects, place);
}

/* Reads param.grad, which the table then holds; NULL for None. Returns 0 or -1. */
static int
read_grad(py_state *state, py_table *table, PyObject *param, PyObject **grad)
{
    *grad = PyObject_GetAttr(param, state->s_grad);
    if (*grad == NULL || py_table_hold(table, *grad) < 0) {
        return -1;
    }
    if (*grad == Py_None) {
        *grad = NULL;
    } else {
        py_hint_parts(state, *grad);
    }
    return 0;
}

/* Adds the group's parameters that have gradients. Returns 0, -1 with an exception, or
 * 1 with the place of the parameter that stopped it, see add_param(). A parameter
 * passes four stages, AHEAD places apart, so that each finds in the cache what the one
 * before asked for: its body, the body's parts, its gradient, its row. */
static int
add_group(py_state *state, py_workspace *workspace, PyObject *params, PyObject *all,
          bool amsgrad, Py_ssize_t *stopped)
{
    enum { AHEAD = 8 };
    PyObject *grads[AHEAD];
    const Py_ssize_t n = PyList_Size(params);
    int status = 0;

    for (Py_ssize_t i = -4 * AHEAD; i < n && status == 0; i++) {
        if (PyList_Size(params) != n) { /* reading .grad may run Python code */
            PyErr_SetString(PyExc_RuntimeError, "params changed during the step");
            return -1;
        }
        if (i + 4 * AHEAD < n) {
            __builtin_prefetch(PyList_GetItem(params, i + 4 * AHEAD));
        }
        if (i + 3 * AHEAD >= 0 && i + 3 * AHEAD < n) {
            py_table_hint(&workspace->table, i + 3 * AHEAD);
            py_hint_body(state, PyList_GetItem(params, i + 3 * AHEAD));
        }
        if (i + 2 * AHEAD >= 0 && i + 2 * AHEAD < n) {
            py_hint_parts(state, PyList_GetItem(params, i + 2 * AHEAD));
        }
        /* the slot that row i leaves */
        PyObject *grad = i >= 0 ? grads[i % AHEAD] : NULL;
        if (i + AHEAD >= 0 && i + AHEAD < n &&
            read_grad(state, &workspace->table, PyList_GetItem(params, i + AHEAD),
                      &grads[(i + AHEAD) % AHEAD]) < 0) {
            return -1;
        }
        if (grad != NULL) {
            *stopped = i;
            status = add_param(state, workspace, all, amsgrad, i,
                               PyList_GetItem(params, i), grad);
        }
    }
    return status;
}

/* Tells autograd which tensors were written. */
static int
bump_versions(PyObject *bump, const py_table *table, PyObject *params, bool write_back)
{
    PyObject *written, *answer = NULL;
    int status = 0;

    if (table->n_rows == PyList_Size(params) && !write_back) {
        written = Py_NewRef(params);
    } else {
        written = PyList_New(0);
        for (Py_ssize_t r = 0; written != NULL && r < table->n_rows && status == 0;
             r++) {
            PyObject *param = PyList_GetItem(params, table->rows[r].place);
            PyObject *grad = NULL;

            status = PyList_Append(written, param);
            if (status == 0 && write_back) {
                grad = PyObject_GetAttrString(param, "grad");
                status = grad == NULL ? -1 : PyList_Append(written, grad);
                Py_XDECREF(grad);
            }
        }
    }
    if (written != NULL && status == 0) {
        answer = PyObject_CallFunctionObjArgs(bump, written, NULL);
    }
    Py_XDECREF(written);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* The group's step. Returns None, or the place of the parameter that stopped it. */
static PyObject *
step_group(py_state *state, step_call *call, PyObject *params, PyObject *all,
           bool amsgrad, PyObject *bump)
{
    py_table *table = &call->workspace->table;
    Py_ssize_t stopped = 0;
    PyObject *result;
    const int status =
        add_group(state, call->workspace, params, all, amsgrad, &stopped);

    if (status != 0) {
        return status < 0 ? NULL : PyLong_FromSsize_t(stopped);
    }
    if (table->n_rows == 0) {
        Py_RETURN_NONE;
    }
    result = run(state, call);
    if (result != NULL &&
        bump_versions(bump, table, params, call->args.write_back_grads) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

PyObject *
py_adamw_group(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"params",
                            "state",
                            "workspace",
                            "bump",
                            "relayout",
                            "lr",
                            "beta1",
                            "beta2",
                            "eps",
                            "weight_decay",
                            "amsgrad",
                            "maximize",
                            "decoupled_weight_decay",
                            "grad_scale",
                            "found_inf",
                            "stream",
                            NULL};
    PyObject *params, *all, *workspace, *bump, *result;
    py_state *state = PyModule_GetState(module);
    step_call call = {.decoupled = 1};
    int amsgrad = 0;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOddddppp|OOK:adamw_group", names, &params, &all,
            &workspace, &bump, &call.relayout, &call.lr, &call.args.beta1,
            &call.args.beta2, &call.args.eps, &call.args.weight_decay, &amsgrad,
            &call.maximize, &call.decoupled, &call.grad_scale, &call.found_inf,
            &call.stream)) {
        return NULL;
    }
    if (!PyList_Check(params) || !PyDict_Check(all) ||
        Py_TYPE(workspace) != state->workspace_type) {
        PyErr_SetString(
            PyExc_TypeError,
            "params must be a list, state a dict and workspace a Workspace");
        return NULL;
    }
    call.workspace = (py_workspace *)workspace;
    if (py_table_begin(&call.workspace->table,
                       call.grad_scale == NULL || call.grad_scale == Py_None
                           ? read_grads
                           : write_grads,
                       N_COLUMNS, PyList_Size(params), true) < 0) {
        return NULL;
    }
    call.workspace->table.relayout = call.relayout;
    result = step_group(state, &call, params, all, amsgrad != 0, bump);
    finish(&call);
    return result;
}
