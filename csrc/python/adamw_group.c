/* _core.adamw_groups: the AdamW step on all torch param groups of an optimizer, after
 * an optional pass over their gradients (pass 1: infinities, norm). Reads gradients and
 * state from the tensors and the state dict, so that Python builds no lists. */
#include "adamw_call.h"

/* One step of an optimizer: its groups and the arguments that they share. Objects are
 * borrowed from the caller. */
typedef struct step {
    PyObject *all;             /* the optimizer's state dict */
    PyObject *bump, *relayout; /* callables: see bump_versions() and py_table */
    py_wrapper wrapper;
    py_adamw_group *groups;
    Py_ssize_t n;
    bool only_prepare;              /* check and allocate, but step no group */
    bool measure_inf, measure_norm; /* pass 1 writes found_inf, the norms */
    bool wide; /* a tensor is float64: form norm and clip_coef in float64 */
    double max_norm;
    void *stream;
    tfast_amp_grads_args grads;
    float *grad_scale, *found_inf, *total_norm; /* data of the arrays */
    double *total_norm_f64, *clip_coef;
    py_call call;
} step;

enum {
    GROUPS,
    STATE,
    BUMP,
    RELAYOUT,
    WORKSPACE,
    MEASURE_INF,
    MEASURE_NORM,
    MAX_NORM,
    GRAD_SCALE,
    FOUND_INF,
    TOTAL_NORM,
    TOTAL_NORM_F64,
    CLIP_COEF,
    STREAM,
    ONLY_PREPARE,
    WRAPPER,
    N_PARAMETERS
};

#define AT(field) PY_AT(step, field)
#define NUMBER(kind_, field)                                                           \
    {                                                                                  \
        .name = #field, .kind = kind_, .at = AT(field)                                 \
    }
#define SCALAR(dtype_, field)                                                          \
    {                                                                                  \
        .name = #field, .kind = PY_SCALAR, .dtype = PY_EXACTLY(dtype_),                \
        .at = AT(field)                                                                \
    }

static const py_parameter parameters[N_PARAMETERS] = {
    [GROUPS] = {.name = "groups", .kind = PY_LIST, .required = true},
    [STATE] = {.name = "state", .kind = PY_OBJECT, .required = true},
    [BUMP] = {.name = "bump", .kind = PY_OBJECT, .required = true},
    [RELAYOUT] = {.name = "relayout", .kind = PY_OBJECT},
    [WORKSPACE] = {.name = "workspace", .kind = PY_OBJECT, .required = true},
    [MEASURE_INF] = NUMBER(PY_FLAG, measure_inf),
    [MEASURE_NORM] = NUMBER(PY_FLAG, measure_norm),
    [MAX_NORM] = NUMBER(PY_REAL, max_norm),
    [GRAD_SCALE] = SCALAR(TFAST_F32, grad_scale),
    [FOUND_INF] = SCALAR(TFAST_F32, found_inf),
    [TOTAL_NORM] = SCALAR(TFAST_F32, total_norm),
    [TOTAL_NORM_F64] = SCALAR(TFAST_F64, total_norm_f64),
    [CLIP_COEF] = SCALAR(TFAST_F64, clip_coef),
    [STREAM] = NUMBER(PY_STREAM, stream),
    [ONLY_PREPARE] = NUMBER(PY_FLAG, only_prepare),
    [WRAPPER] = {.name = "wrapper", .kind = PY_OBJECT},
};

static const uint8_t order[N_PARAMETERS] = {
    GROUPS,       STATE,    BUMP,         RELAYOUT,  WORKSPACE,  MEASURE_INF,
    MEASURE_NORM, MAX_NORM, GRAD_SCALE,   FOUND_INF, TOTAL_NORM, TOTAL_NORM_F64,
    CLIP_COEF,    STREAM,   ONLY_PREPARE, WRAPPER};
static const py_operation operation = {.name = "adamw_groups",
                                       .parameters = parameters,
                                       .n_parameters = N_PARAMETERS,
                                       .order = order,
                                       .n_order = N_PARAMETERS,
                                       .needs = ((uint64_t)1 << GRAD_SCALE) - 1 -
                                                ((uint64_t)1 << RELAYOUT)};

/* A list of the parameters that have rows, that is, gradients. A new reference. */
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

/* Calls bump(tensors written by the step), which increments autograd's versions. */
static int
bump_versions(PyObject *bump, const py_adamw_group *group)
{
    PyObject *written =
        group->written != NULL ? Py_NewRef(group->written) : stepped(group);
    PyObject *answer = NULL;

    if (written != NULL) {
        answer = PyObject_CallFunctionObjArgs(bump, written, NULL);
    }
    Py_XDECREF(written);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* ---- All groups ------------------------------------------------------------------ */

/* Parses a group: a tuple of arguments in the order of py_adamw_group_tuple. */
static int
parse_group(py_state *state, PyObject *tuple, py_adamw_group *group)
{
    enum { MOST = 20 };
    const Py_ssize_t n = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    py_adamw_call *adamw = &group->call;
    PyObject *arguments[MOST], *params;
    py_call call;

    for (Py_ssize_t i = 0; i < n && i < MOST; i++) {
        arguments[i] = PyTuple_GetItem(tuple, i);
    }
    call.state = state;
    if (py_parse(&call, &py_adamw_group_tuple, adamw, arguments, n, NULL) < 0) {
        return -1;
    }
    params = call.given[PARAM];
    if (!PyList_Check(params)) {
        PyErr_SetString(PyExc_TypeError, "params of a group must be a list");
        return -1;
    }
    adamw->lr = call.given[PY_ADAMW_LR];
    adamw->ema = (call.seen >> PY_ADAMW_EMA_DECAY & 1) != 0;
    if (py_adamw_take_rounding(adamw, call.given) < 0) {
        return -1;
    }
    adamw->extras = adamw->master || adamw->copy || adamw->ema || adamw->rounding != 0;
    group->workspace = call.given[PY_ADAMW_WORKSPACE];
    group->params = PyList_GetSlice(params, 0, PyList_Size(params));
    return group->params == NULL ? -1 : 0;
}

/* Adds and prepares the rows of all groups. Returns 0, -1 or 1 as py_adamw_add_group(),
 * 1 also where two groups are on different devices. The caller ends the calls that have
 * begun (call.workspace is not NULL), whatever the result. */
static int
add_groups(py_state *state, step *step)
{
    const tfast_device *device = NULL;

    for (Py_ssize_t g = 0; g < step->n; g++) {
        py_adamw_group *group = &step->groups[g];
        const py_table *table;
        int status;

        group->wrapper = &step->wrapper;
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
            device = &table->place.device;
        } else if (table->place.device.type != device->type ||
                   table->place.device.index != device->index) {
            return 1;
        }
        if (py_adamw_prepare(&group->call, state) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Refuses a gradient that two groups share if a group writes its gradients: the second
 * group would read it zeroed or unscaled. Skipped if no written array has moved. */
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

/* Fills the arguments of pass 1 over the gradients of all groups, `rows` in total. */
static int
prepare_pass(step *step, Py_ssize_t rows)
{
    py_workspace *workspace =
        py_workspace_of(step->call.state, step->call.given[WORKSPACE]);
    tfast_amp_tensor *end;

    if (workspace == NULL || py_workspace_reserve_tensors(workspace, rows) < 0) {
        return -1;
    }
    end = workspace->tensors;
    for (Py_ssize_t g = 0; g < step->n; g++) {
        end = py_amp_tensors(end, &step->groups[g].call.workspace->table, GRAD);
    }
    step->grads = (tfast_amp_grads_args){
        .tensors = workspace->tensors,
        .n_tensors = rows,
        .device = step->call.place.device,
        .workspace = &workspace->backend,
        .found_inf = step->measure_inf ? step->found_inf : NULL,
        .total_norm = step->measure_norm ? step->total_norm : NULL,
        .total_norm_f64 =
            step->measure_norm && step->wide ? step->total_norm_f64 : NULL,
        .clip_coef = step->measure_norm ? step->clip_coef : NULL,
        .norm_type = 2,
        .max_norm = step->max_norm,
        .grad_scale = step->grad_scale,
        .stream = step->stream,
    };
    return 0;
}

/* Runs pass 1 and the steps; called without the GIL. Everything that can be refused or
 * can lack memory happens before the first group is stepped. */
static tfast_status
run_passes(step *step)
{
    const bool passes = step->measure_inf || step->measure_norm;
    tfast_status status = TFAST_OK;

    for (Py_ssize_t g = 0; g < step->n && status == TFAST_OK; g++) {
        tfast_adamw_args *args = &step->groups[g].call.args;

        args->grad_scale = step->grad_scale;
        args->found_inf = step->found_inf;
        args->clip_coef = step->clip_coef;
        args->stream = step->stream;
        if (args->n_slots > 0 && (step->n > 1 || passes || step->only_prepare)) {
            status = tfast_adamw_prepare(args); /* else tfast_adamw() does it */
        }
    }
    if (step->only_prepare) {
        return status;
    }
    if (status == TFAST_OK && passes) {
        status = tfast_amp_grads(&step->grads);
    }
    for (Py_ssize_t g = 0; g < step->n && status == TFAST_OK; g++) {
        if (step->groups[g].call.args.n_slots > 0) {
            status = tfast_adamw(&step->groups[g].call.args);
        }
    }
    return status;
}

/* Whether some parameter or gradient of the group is float64. */
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

/* A bit for each shared scalar that pass 1 writes. */
static uint64_t
written_scalars(const step *step)
{
    const uint64_t norms = (uint64_t)1 << TOTAL_NORM | (uint64_t)1 << TOTAL_NORM_F64 |
                           (uint64_t)1 << CLIP_COEF;

    return (step->measure_inf ? (uint64_t)1 << FOUND_INF : 0) |
           (step->measure_norm ? norms : 0);
}

/* Steps the rows of add_groups(). Returns (number of rows, whether any is float64). */
static PyObject *
run_groups(step *step)
{
    tfast_status status;
    Py_ssize_t rows = 0;

    for (Py_ssize_t g = 0; g < step->n; g++) {
        const py_table *table = &step->groups[g].call.workspace->table;

        rows += table->n_rows;
        if (table->n_rows > 0) {
            step->call.place = table->place;
        }
        step->wide |= has_float64(&step->groups[g]);
    }
    if (rows == 0) {
        return Py_BuildValue("(nO)", rows, Py_False);
    }
    step->call.written = written_scalars(step);
    if (check_shared_grads(step->call.state, step) < 0 ||
        py_borrow_arrays(&step->call, step) < 0 ||
        ((step->measure_inf || step->measure_norm) && prepare_pass(step, rows) < 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = run_passes(step);
    Py_END_ALLOW_THREADS
    if (status != TFAST_OK) {
        return py_result(status);
    }
    for (Py_ssize_t g = 0; g < step->n && !step->only_prepare; g++) {
        if (step->groups[g].call.args.n_slots > 0 &&
            bump_versions(step->bump, &step->groups[g]) < 0) {
            return NULL;
        }
    }
    return Py_BuildValue("(nO)", rows, step->wide ? Py_True : Py_False);
}

static PyObject *
step_groups(step *step)
{
    const int status = add_groups(step->call.state, step);
    PyObject *result = NULL;

    if (status == 0) {
        result = run_groups(step);
    } else if (status > 0) {
        result = Py_NewRef(Py_None);
    }
    for (Py_ssize_t g = 0; g < step->n; g++) {
        py_adamw_call *call = &step->groups[g].call;

        Py_CLEAR(step->groups[g].written);
        if (call->workspace != NULL) {
            if (status != 0 || result == NULL) {
                /* or the next call could skip check_shared_grads() */
                call->workspace->table.n_checked = 0;
            }
            py_adamw_end(call);
        }
    }
    py_release_arrays(&step->call);
    return result;
}

/* Parses all groups. Even on failure the caller frees step->groups and their params. */
static int
parse_groups(step *step, PyObject *list)
{
    int parsed = 0;

    step->n = PyList_Size(list);
    step->groups = PyMem_Calloc((size_t)step->n + 1, sizeof *step->groups);
    if (step->groups == NULL) {
        PyErr_NoMemory();
        step->n = 0;
        return -1;
    }
    for (Py_ssize_t g = 0; g < step->n && parsed == 0; g++) {
        parsed =
            parse_group(step->call.state, PyList_GetItem(list, g), &step->groups[g]);
    }
    return parsed;
}

PyObject *
py_adamw_groups(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *result = NULL;
    step step;

    memset(&step, 0, offsetof(struct step, call));
    step.call.state = PyModule_GetState(module);
    if (py_parse(&step.call, &operation, &step, args, n, names) < 0) {
        return NULL;
    }
    step.all = step.call.given[STATE];
    step.bump = step.call.given[BUMP];
    step.relayout = step.call.given[RELAYOUT];
    if (!PyDict_Check(step.all)) {
        PyErr_SetString(PyExc_TypeError, "state must be a dict");
        return NULL;
    }
    if (py_wrapper_take(step.call.given[WRAPPER], &step.wrapper) < 0) {
        return NULL;
    }
    if (parse_groups(&step, step.call.given[GROUPS]) == 0) {
        result = step_groups(&step);
    }
    for (Py_ssize_t g = 0; g < step.n; g++) {
        Py_XDECREF(step.groups[g].params);
    }
    PyMem_Free(step.groups);
    return result;
}
