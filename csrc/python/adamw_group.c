/* _core.adamw_groups: the AdamW step on torch param groups, with no lists made, and the
 * pass over their gradients before it. */
#include "adamw_call.h"

#include <string.h>

enum { AT_ONCE = 32 }; /* tensors that the cache is asked for */

/* All of one optimizer. */
typedef struct {
    PyObject *all; /* the optimizer's state dict */
    PyObject *bump, *relayout;
    py_adamw_group *groups;
    Py_ssize_t n;
    int only_prepare; /* do all that may fail, and step with nothing */
} step;

/* The parameters of the group's rows: a new reference. */
static PyObject *
stepped(const py_adamw_group *group)
{
    const py_table *table = &group->call.workspace->table;
    PyObject *params;

    if (table->n_rows == PyList_Size(group->params)) {
        return Py_NewRef(group->params);
    }
    params = PyList_New(0);
    for (Py_ssize_t r = 0; r < table->n_rows && params != NULL; r++) {
        if (PyList_Append(params, PyList_GetItem(group->params, table->rows[r].place)) <
            0) {
            Py_CLEAR(params);
        }
    }
    return params;
}

/* Asks for tensors that the kernel has driven out of the cache. */
static void
hint_written(const py_state *state, PyObject *written)
{
    const Py_ssize_t n = PyList_Size(written);
    PyObject *tensors[AT_ONCE];

    for (Py_ssize_t i = 0; i < n;) {
        Py_ssize_t k = 0;

        while (k < AT_ONCE && i < n) {
            tensors[k++] = PyList_GetItem(written, i++);
        }
        py_hint_tensors(state, tensors, k);
    }
}

/* Tells autograd which tensors the group's step wrote. */
static int
bump_versions(const py_state *state, PyObject *bump, const py_adamw_group *group)
{
    PyObject *written =
        group->written != NULL ? Py_NewRef(group->written) : stepped(group);
    PyObject *answer = NULL;

    if (written != NULL) {
        hint_written(state, written);
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
parse_group(PyObject *tuple, py_adamw_group *group)
{
    tfast_adamw_args *args = &group->call.args;
    PyObject *params, *ema_decay;
    int maximize, decoupled, master, zero_grad, write_back;

    if (!PyArg_ParseTuple(tuple, "O!OOddddpppOpppp:group", &PyList_Type, &params,
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
    group->params = PyList_GetSlice(params, 0, PyList_Size(params));
    return group->params == NULL ? -1 : 0;
}

/* Adds all parameters. Returns 0, -1 or 1, as py_adamw_add_group(). On any but 0 the
 * calls that began still have to be ended. */
static int
add_groups(py_state *state, step *step)
{
    const tfast_device *device = NULL;

    for (Py_ssize_t g = 0; g < step->n; g++) {
        py_adamw_group *group = &step->groups[g];
        const py_table *table;
        int status;

        if (py_adamw_begin(&group->call, state, group->workspace, step->relayout,
                           PyList_Size(group->params)) < 0) {
            group->call.workspace = NULL;
            return -1;
        }
        status = py_adamw_add_group(state, group, step->all);
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
check_shared_grads(const py_state *state, const step *step)
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
    status = py_tables_check(state, tables, step->n, GRAD);
    PyMem_Free(tables);
    return status;
}

/* What the groups share. */
typedef struct {
    PyObject *workspace, *grad_scale, *found_inf, *total_norm, *total_norm_f64,
        *clip_coef;
    int measure_inf, measure_norm; /* the pass over gradients writes them */
    double max_norm;
    bool
        wide; /* a float64 is among the tensors: the norm and clip_coef are float64's */
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
        .total_norm_f64 =
            shared->measure_norm && shared->wide ? shared->norm_f64 : NULL,
        .clip_coef = shared->measure_norm ? shared->coef : NULL,
        .norm_type = 2,
        .max_norm = shared->max_norm,
        .grad_scale = shared->scale,
        .stream = (void *)(uintptr_t)shared->stream,
    };
    return 0;
}

/* Both passes, without the interpreter's lock. All that may be refused, or find no
 * memory, comes before the first group is stepped. */
static tfast_status
run_passes(step *step, const shared *shared)
{
    const bool passes = shared->measure_inf || shared->measure_norm;
    tfast_status status = TFAST_OK;

    for (Py_ssize_t g = 0; g < step->n && status == TFAST_OK; g++) {
        tfast_adamw_args *args = &step->groups[g].call.args;

        args->grad_scale = shared->scale;
        args->found_inf = shared->inf;
        args->clip_coef = shared->coef;
        args->stream = (void *)(uintptr_t)shared->stream;
        if (args->n_slots > 0 && (step->n > 1 || passes || step->only_prepare)) {
            status = tfast_adamw_prepare(args); /* else the call does it */
        }
    }
    if (step->only_prepare) {
        return status;
    }
    if (status == TFAST_OK && passes) {
        status = tfast_amp_grads(&shared->grads);
    }
    for (Py_ssize_t g = 0; g < step->n && status == TFAST_OK; g++) {
        if (step->groups[g].call.args.n_slots > 0) {
            status = tfast_adamw(&step->groups[g].call.args);
        }
    }
    return status;
}

/* Whether a float64 is among a group's parameters or gradients. */
static bool
has_float64(const py_adamw_group *group)
{
    const py_table *table = &group->call.workspace->table;
    bool found = false;

    for (Py_ssize_t r = 0; r < table->n_rows; r++) {
        const uint8_t *dtype = table->rows[r].dtype;

        found |= dtype[PARAM] == TFAST_F64 || dtype[GRAD] == TFAST_F64;
    }
    return found;
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
        shared->wide |= has_float64(&step->groups[g]);
    }
    if (rows == 0) {
        return Py_BuildValue("(nO)", rows, Py_False);
    }
    if (check_shared_grads(state, step) < 0 || take_shared(state, shared, device) < 0 ||
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
    for (Py_ssize_t g = 0; g < step->n && !step->only_prepare; g++) {
        if (step->groups[g].call.args.n_slots > 0 &&
            bump_versions(state, step->bump, &step->groups[g]) < 0) {
            return NULL;
        }
    }
    return Py_BuildValue("(nO)", rows, shared->wide ? Py_True : Py_False);
}

static PyObject *
step_groups(py_state *state, step *step, shared *shared)
{
    const int status = add_groups(state, step);
    PyObject *result = NULL;

    if (status == 0) {
        result = run_groups(state, step, shared);
    } else if (status > 0) {
        result = Py_NewRef(Py_None);
    }
    for (Py_ssize_t g = 0; g < step->n; g++) {
        py_adamw_call *call = &step->groups[g].call;

        Py_CLEAR(step->groups[g].written);
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
        "groups",     "state",       "bump",         "relayout",
        "workspace",  "measure_inf", "measure_norm", "max_norm",
        "grad_scale", "found_inf",   "total_norm",   "total_norm_f64",
        "clip_coef",  "stream",      "only_prepare", NULL};
    py_state *state = PyModule_GetState(module);
    PyObject *list, *result = NULL;
    shared shared = {.grad_scale = Py_None,
                     .found_inf = Py_None,
                     .total_norm = Py_None,
                     .total_norm_f64 = Py_None,
                     .clip_coef = Py_None};
    step step = {0};
    int parsed = 0;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!OOOppd|OOOOOKp:adamw_groups", names, &PyList_Type, &list,
            &PyDict_Type, &step.all, &step.bump, &step.relayout, &shared.workspace,
            &shared.measure_inf, &shared.measure_norm, &shared.max_norm,
            &shared.grad_scale, &shared.found_inf, &shared.total_norm,
            &shared.total_norm_f64, &shared.clip_coef, &shared.stream,
            &step.only_prepare)) {
        return NULL;
    }
    step.n = PyList_Size(list);
    step.groups = PyMem_Calloc((size_t)step.n + 1, sizeof *step.groups);
    if (step.groups == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t g = 0; g < step.n && parsed == 0; g++) {
        parsed = parse_group(PyList_GetItem(list, g), &step.groups[g]);
    }
    if (parsed == 0) {
        result = step_groups(state, &step, &shared);
    }
    for (Py_ssize_t g = 0; g < step.n; g++) {
        Py_XDECREF(step.groups[g].params);
    }
    PyMem_Free(step.groups);
    return result;
}
