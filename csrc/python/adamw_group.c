/* _core.adamw_groups: the AdamW step on torch param groups, with no lists made, and the
 * pass over their gradients before it. */
#include "adamw_call.h"

#include <string.h>

enum { AHEAD = 8 }; /* rows between two looks ahead */

/* One param group. */
typedef struct {
    py_adamw_call call;
    PyObject *params, *workspace; /* borrowed */
    int amsgrad, ema, copy;
} group;

/* All of one optimizer. */
typedef struct {
    PyObject *all; /* the optimizer's state dict */
    PyObject *bump, *relayout;
    group *groups;
    Py_ssize_t n;
    Py_ssize_t stopped_group, stopped_place;
} step;

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
take_state(py_state *state, PyObject *dict, const group *group, PyObject **objects)
{
    /* in the order in which they are made, so that walking the dict finds them all */
    const struct {
        int column;
        bool wanted;
        PyObject *name;
    } entries[] = {{STEP, true, state->s_step},
                   {EXP_AVG, true, state->s_exp_avg},
                   {EXP_AVG_SQ, true, state->s_exp_avg_sq},
                   {MAX_EXP_AVG_SQ, group->amsgrad, state->s_max_exp_avg_sq},
                   {PARAM, group->call.master, state->s_master_param},
                   {COPY, group->copy, state->s_weight_copy},
                   {EMA, group->ema, state->s_ema}};
    PyObject *key, *value;
    Py_ssize_t next = 0;

    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "state of a parameter must be a dict");
        return -1;
    }
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (!entries[i].wanted) {
            continue;
        }
        if (!PyDict_Next(dict, &next, &key, &value) || key != entries[i].name) {
            value = PyDict_GetItemWithError(dict, entries[i].name);
        }
        if (value == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (value != NULL) {
            objects[entries[i].column] = value;
        } else if (entries[i].column == PARAM) {
            objects[COPY] = NULL; /* the parameter is its own master, see add_param() */
        } else {
            return 1;
        }
    }
    return 0;
}

/* Adds one parameter that has a gradient. Returns 0, 1 if its state must be made or it
 * is on another device than those before, or -1 with an exception. */
static int
add_param(py_state *state, group *group, PyObject *all, Py_ssize_t place,
          PyObject *param, PyObject *grad)
{
    PyObject *objects[N_COLUMNS] = {[PARAM] = param, [GRAD] = grad}, *dict;
    py_table *table = &group->call.workspace->table;
    int status;

    dict = state_of(all, param, &group->call.workspace->next);
    if (dict == NULL) {
        return PyErr_Occurred() ? -1 : 1;
    }
    if (group->call.master) {
        objects[COPY] = param;
    }
    status = take_state(state, dict, group, objects);
    if (status == 0) {
        status = py_table_add(state, table, objects, place);
    }
    if (status == 0 && group->call.master && objects[COPY] == NULL) {
        const int dtype = table->rows[table->n_rows - 1].dtype[PARAM];
        return dtype == TFAST_F16 || dtype == TFAST_BF16; /* these need a master */
    }
    return status;
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

/* Asks the cache for what the rows from `i` on will read: each look ahead finds in the
 * cache what the one before asked for. */
static void
look_ahead(const py_state *state, py_workspace *workspace, PyObject *params,
           PyObject *all, Py_ssize_t i)
{
    const py_memories *memories = &workspace->table.memories;
    const Py_ssize_t n = PyList_Size(params);
    PyObject *key, *dict;

    if (i + 4 * AHEAD < n) {
        __builtin_prefetch(PyList_GetItem(params, i + 4 * AHEAD));
    }
    if (i + 3 * AHEAD >= 0 && i + 3 * AHEAD < n) {
        py_memory_hint(memories, i + 3 * AHEAD);
        py_memory_hint_kept(memories, i + 3 * AHEAD, state, PY_HINT_OBJECTS);
        py_hint_body(state, PyList_GetItem(params, i + 3 * AHEAD));
        if (PyDict_Next(all, &workspace->far, &key, &dict)) {
            __builtin_prefetch(dict);
        }
    }
    if (i + 2 * AHEAD >= 0 && i + 2 * AHEAD < n) {
        py_memory_hint_kept(memories, i + 2 * AHEAD, state, PY_HINT_BODIES);
        py_hint_parts(state, PyList_GetItem(params, i + 2 * AHEAD));
        if (PyDict_Next(all, &workspace->near, &key, &dict)) {
            py_hint_dict(dict);
        }
    }
    if (i + AHEAD >= 0 && i + AHEAD < n) {
        py_memory_hint_kept(memories, i + AHEAD, state, PY_HINT_PARTS);
    }
}

/* Adds the group's parameters that have gradients. Returns 0, -1 with an exception, or
 * 1 with the place of the parameter that stopped it, see add_param(). */
static int
add_group(py_state *state, group *group, PyObject *all, Py_ssize_t *stopped)
{
    py_workspace *workspace = group->call.workspace;
    PyObject *grads[AHEAD], *params = group->params;
    const Py_ssize_t n = PyList_Size(params);
    int status = 0;

    if (n > 0) {
        workspace->first =
            find_position(all, PyList_GetItem(params, 0), workspace->first);
    }
    workspace->next = workspace->far = workspace->near = workspace->first;
    for (Py_ssize_t i = -4 * AHEAD; i < n && status == 0; i++) {
        PyObject *grad = i >= 0 ? grads[i % AHEAD] : NULL; /* read AHEAD rounds ago */

        if (PyList_Size(params) != n) { /* reading .grad may run Python code */
            PyErr_SetString(PyExc_RuntimeError, "params changed during the step");
            return -1;
        }
        look_ahead(state, workspace, params, all, i);
        if (i + AHEAD >= 0 && i + AHEAD < n &&
            read_grad(state, &workspace->table, PyList_GetItem(params, i + AHEAD),
                      &grads[(i + AHEAD) % AHEAD]) < 0) {
            return -1;
        }
        if (grad != NULL) {
            *stopped = i;
            status = add_param(state, group, all, i, PyList_GetItem(params, i), grad);
        }
    }
    return status;
}

/* Appends the parameters of the group's rows, and their gradients if written. */
static int
append_written(PyObject *written, const group *group, bool grads)
{
    const py_table *table = &group->call.workspace->table;

    for (Py_ssize_t r = 0; r < table->n_rows; r++) {
        PyObject *param = PyList_GetItem(group->params, table->rows[r].place);

        if (PyList_Append(written, param) < 0) {
            return -1;
        }
        if (grads) {
            PyObject *grad = PyObject_GetAttrString(param, "grad");
            const int status = grad == NULL ? -1 : PyList_Append(written, grad);

            Py_XDECREF(grad);
            if (status < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Tells autograd which tensors the group's step wrote. */
static int
bump_versions(PyObject *bump, const group *group)
{
    const bool grads = group->call.args.write_back_grads || group->call.args.zero_grad;
    const py_table *table = &group->call.workspace->table;
    PyObject *written, *answer = NULL;

    if (table->n_rows == PyList_Size(group->params) && !grads) {
        written = Py_NewRef(group->params);
    } else {
        written = PyList_New(0);
        if (written != NULL && append_written(written, group, grads) < 0) {
            Py_CLEAR(written);
        }
    }
    if (written != NULL) {
        answer = PyObject_CallFunctionObjArgs(bump, written, NULL);
    }
    Py_XDECREF(written);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* ---- All groups ------------------------------------------------------------------ */

/* (params, workspace, lr, beta1, beta2, eps, weight_decay, amsgrad, maximize,
 * decoupled_weight_decay, ema_decay or None, master, copy, zero_grad, write_back) */
static int
parse_group(PyObject *tuple, group *group)
{
    tfast_adamw_args *args = &group->call.args;
    PyObject *ema_decay;
    int maximize, decoupled, master, zero_grad, write_back;

    if (!PyArg_ParseTuple(tuple, "O!OOddddpppOpppp:group", &PyList_Type, &group->params,
                          &group->workspace, &group->call.lr, &args->beta1,
                          &args->beta2, &args->eps, &args->weight_decay,
                          &group->amsgrad, &maximize, &decoupled, &ema_decay, &master,
                          &group->copy, &zero_grad, &write_back)) {
        return -1;
    }
    if (ema_decay != Py_None) {
        args->ema_decay = PyFloat_AsDouble(ema_decay);
        if (args->ema_decay == -1.0 && PyErr_Occurred()) {
            return -1;
        }
        group->ema = 1;
    }
    args->maximize = maximize != 0;
    args->decoupled_weight_decay = decoupled != 0;
    args->zero_grad = zero_grad != 0;
    args->write_back_grads = write_back != 0;
    group->call.master = master != 0;
    group->call.extras = master != 0 || group->copy != 0 || group->ema != 0;
    return 0;
}

/* Adds all parameters. Returns 0, -1, or 1 with where it stopped. On any but 0 the
 * calls that began still have to be ended. */
static int
add_groups(py_state *state, step *step)
{
    const tfast_device *device = NULL;

    for (Py_ssize_t g = 0; g < step->n; g++) {
        group *group = &step->groups[g];
        const py_table *table;
        int status;

        if (py_adamw_begin(&group->call, state, group->workspace, step->relayout,
                           PyList_Size(group->params), true) < 0) {
            group->call.workspace = NULL;
            return -1;
        }
        step->stopped_group = g;
        status = add_group(state, group, step->all, &step->stopped_place);
        if (status != 0) {
            return status;
        }
        table = &group->call.workspace->table;
        if (table->n_rows == 0) {
            continue;
        }
        if (device == NULL) {
            device = &table->device;
        } else if (table->device.type != device->type ||
                   table->device.index != device->index) {
            step->stopped_place = table->rows[0].place;
            return 1;
        }
        if (py_adamw_prepare(&group->call, state) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Refuses a gradient that two groups share and one of them writes: the second would
 * find it zeroed or unscaled. */
static int
check_shared_grads(const step *step)
{
    bool writes = false, changed = false;
    py_table **tables;
    int status;

    for (Py_ssize_t g = 0; g < step->n; g++) {
        const py_adamw_call *call = &step->groups[g].call;

        writes |= call->args.zero_grad || call->args.write_back_grads;
        changed |= py_table_changed(&call->workspace->table);
    }
    if (!writes || !changed || step->n < 2) {
        return 0;
    }
    tables = PyMem_Malloc((size_t)step->n * sizeof(py_table *));
    if (tables == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t g = 0; g < step->n; g++) {
        tables[g] = &step->groups[g].call.workspace->table;
    }
    status = py_tables_check(tables, step->n, GRAD);
    PyMem_Free(tables);
    return status;
}

/* What the groups share. */
typedef struct {
    PyObject *workspace, *grad_scale, *found_inf, *total_norm, *total_norm_f64,
        *clip_coef;
    int measure_inf, measure_norm; /* the pass over gradients writes them */
    double max_norm;
    unsigned long long stream;
    py_array arrays[5];
    tfast_amp_grads_args grads;
    float *scale, *inf, *norm; /* what is in the objects of these names */
    double *norm_f64, *coef;
} shared;

static int
take_shared(py_state *state, shared *shared, tfast_device device)
{
    const bool inf = shared->measure_inf != 0, norm = shared->measure_norm != 0;
    const struct {
        PyObject *object;
        const char *name;
        tfast_dtype dtype;
        bool write;
        void *value;
    } wanted[] = {
        {shared->grad_scale, "grad_scale", TFAST_F32, false, &shared->scale},
        {shared->found_inf, "found_inf", TFAST_F32, inf, &shared->inf},
        {shared->total_norm, "total_norm", TFAST_F32, norm, &shared->norm},
        {shared->total_norm_f64, "total_norm_f64", TFAST_F64, norm, &shared->norm_f64},
        {shared->clip_coef, "clip_coef", TFAST_F64, norm, &shared->coef},
    };

    for (int i = 0; i < 5; i++) {
        void *data = NULL;

        if (wanted[i].object == Py_None) {
            continue;
        }
        if (py_borrow_scalar(state, wanted[i].object, wanted[i].name, wanted[i].dtype,
                             device, wanted[i].write, &shared->arrays[i], &data) < 0) {
            return -1;
        }
        memcpy(wanted[i].value, &data, sizeof data);
    }
    return 0;
}

/* Fills the arguments of the pass over all gradients. */
static int
prepare_pass(py_state *state, const step *step, shared *shared, Py_ssize_t rows,
             tfast_device device)
{
    py_workspace *workspace = py_workspace_of(state, shared->workspace);
    tfast_amp_tensor *end;

    if (workspace == NULL || py_workspace_reserve_tensors(workspace, rows) < 0) {
        return -1;
    }
    end = workspace->tensors;
    for (Py_ssize_t g = 0; g < step->n; g++) {
        end = py_amp_tensors(end, &step->groups[g].call.workspace->table, GRAD);
    }
    shared->grads = (tfast_amp_grads_args){
        .tensors = workspace->tensors,
        .n_tensors = rows,
        .device = device,
        .workspace = &workspace->backend,
        .found_inf = shared->measure_inf ? shared->inf : NULL,
        .total_norm = shared->measure_norm ? shared->norm : NULL,
        .total_norm_f64 = shared->measure_norm ? shared->norm_f64 : NULL,
        .clip_coef = shared->measure_norm ? shared->coef : NULL,
        .norm_type = 2,
        .max_norm = shared->max_norm,
        .grad_scale = shared->scale,
        .stream = (void *)(uintptr_t)shared->stream,
    };
    return 0;
}

/* Both passes, without the interpreter's lock. */
static tfast_status
run_passes(step *step, const shared *shared)
{
    tfast_status status = TFAST_OK;

    for (Py_ssize_t g = 0; g < step->n && status == TFAST_OK; g++) {
        tfast_adamw_args *args = &step->groups[g].call.args;

        args->grad_scale = shared->scale;
        args->found_inf = shared->inf;
        args->clip_coef = shared->coef;
        args->stream = (void *)(uintptr_t)shared->stream;
        status = args->n_slots > 0 ? tfast_adamw_check(args) : TFAST_OK;
    }
    if (status == TFAST_OK && (shared->measure_inf || shared->measure_norm)) {
        status = tfast_amp_grads(&shared->grads);
    }
    for (Py_ssize_t g = 0; g < step->n && status == TFAST_OK; g++) {
        if (step->groups[g].call.args.n_slots > 0) {
            status = tfast_adamw(&step->groups[g].call.args);
        }
    }
    return status;
}

/* Steps what add_groups() has added. */
static PyObject *
run_groups(py_state *state, step *step, shared *shared)
{
    tfast_device device = {TFAST_CPU, 0};
    tfast_status status;
    Py_ssize_t rows = 0;

    for (Py_ssize_t g = 0; g < step->n; g++) {
        const py_table *table = &step->groups[g].call.workspace->table;

        rows += table->n_rows;
        device = table->n_rows > 0 ? table->device : device;
    }
    if (rows == 0) {
        return PyLong_FromLong(0);
    }
    if (check_shared_grads(step) < 0 || take_shared(state, shared, device) < 0 ||
        ((shared->measure_inf || shared->measure_norm) &&
         prepare_pass(state, step, shared, rows, device) < 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = run_passes(step, shared);
    Py_END_ALLOW_THREADS
    if (status != TFAST_OK) {
        return py_result(status);
    }
    for (Py_ssize_t g = 0; g < step->n; g++) {
        if (step->groups[g].call.args.n_slots > 0 &&
            bump_versions(step->bump, &step->groups[g]) < 0) {
            return NULL;
        }
    }
    return PyLong_FromSsize_t(rows);
}

static PyObject *
step_groups(py_state *state, step *step, shared *shared)
{
    const int status = add_groups(state, step);
    PyObject *result = NULL;

    if (status == 0) {
        result = run_groups(state, step, shared);
    } else if (status > 0) {
        result = Py_BuildValue("(nn)", step->stopped_group, step->stopped_place);
    }
    for (Py_ssize_t g = 0; g < step->n; g++) {
        py_adamw_call *call = &step->groups[g].call;

        if (call->workspace != NULL) {
            if (status != 0 || result == NULL) {
                call->workspace->table.n_checked = 0; /* not against other groups */
            }
            py_adamw_end(call);
        }
    }
    for (int i = 0; i < 5; i++) {
        py_release(&shared->arrays[i]);
    }
    return result;
}

PyObject *
py_adamw_groups(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "groups",      "state",          "bump",      "relayout",   "workspace",
        "measure_inf", "measure_norm",   "max_norm",  "grad_scale", "found_inf",
        "total_norm",  "total_norm_f64", "clip_coef", "stream",     NULL};
    py_state *state = PyModule_GetState(module);
    PyObject *list, *result = NULL;
    shared shared = {.grad_scale = Py_None,
                     .found_inf = Py_None,
                     .total_norm = Py_None,
                     .total_norm_f64 = Py_None,
                     .clip_coef = Py_None};
    step step = {0};

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!OOOppd|OOOOOK:adamw_groups", names, &PyList_Type, &list,
            &PyDict_Type, &step.all, &step.bump, &step.relayout, &shared.workspace,
            &shared.measure_inf, &shared.measure_norm, &shared.max_norm,
            &shared.grad_scale, &shared.found_inf, &shared.total_norm,
            &shared.total_norm_f64, &shared.clip_coef, &shared.stream)) {
        return NULL;
    }
    step.n = PyList_Size(list);
    step.groups = PyMem_Calloc((size_t)step.n + 1, sizeof *step.groups);
    if (step.groups == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t g = 0; g < step.n; g++) {
        if (parse_group(PyList_GetItem(list, g), &step.groups[g]) < 0) {
            PyMem_Free(step.groups);
            return NULL;
        }
    }
    result = step_groups(state, &step, &shared);
    PyMem_Free(step.groups);
    return result;
}
