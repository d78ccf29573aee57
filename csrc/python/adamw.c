/* A call of the AdamW step, and _core.adamw: lists of any arrays. */
#include "adamw_call.h"

#define COLUMNS(PARAMS, COPIES, write_grads)                                           \
    {                                                                                  \
        [PARAM] = {.name = PARAMS, .write = true},                                     \
        [GRAD] = {.name = "grads",                                                     \
                  .write = write_grads,                                                \
                  .any_layout = true,                                                  \
                  .held = true},                                                       \
        [EXP_AVG] = {.name = "exp_avgs", .write = true},                               \
        [EXP_AVG_SQ] = {.name = "exp_avg_sqs", .write = true, .same_dtype = EXP_AVG},  \
        [MAX_EXP_AVG_SQ] = {.name = "max_exp_avg_sqs",                                 \
                            .write = true,                                             \
                            .same_dtype = EXP_AVG},                                    \
        [STEP] = {.name = "step", .write = true, .scalar = true},                      \
        [EMA] = {.name = "emas", .write = true},                                       \
        [COPY] = {.name = COPIES, .write = true},                                      \
    }

/* By whether the gradients are written, and whether there are master weights. */
static const py_column columns[2][2][N_COLUMNS] = {
    {COLUMNS("params", "copies", false), COLUMNS("master_params", "params", false)},
    {COLUMNS("params", "copies", true), COLUMNS("master_params", "params", true)},
};

/* ---- Shared ---------------------------------------------------------------------- */

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

static void
fill_extras(py_workspace *workspace)
{
    for (Py_ssize_t i = 0; i < workspace->table.n_rows; i++) {
        const py_row *row = &workspace->table.rows[i];

        workspace->extras[i] = (tfast_adamw_extra){
            .ema = row->data[EMA],
            .copy = row->data[COPY],
            .ema_dtype = row->dtype[EMA],
            .copy_dtype = row->dtype[COPY],
        };
    }
}

/* lr is a number, or an array of one float32 where the parameters are. */
static int
take_lr(py_adamw_call *call, py_state *state)
{
    void *value = NULL;

    if (PyFloat_Check(call->lr) || PyLong_Check(call->lr)) {
        call->args.lr = PyFloat_AsDouble(call->lr);
        return call->args.lr == -1.0 && PyErr_Occurred() ? -1 : 0;
    }
    if (py_borrow_scalar(state, call->lr, "lr", TFAST_F32, call->args.device, false,
                         &call->lr_array, &value) < 0) {
        return -1;
    }
    call->args.lr_device = value;
    return 0;
}

int
py_adamw_begin(py_adamw_call *call, py_state *state, PyObject *workspace,
               PyObject *relayout, Py_ssize_t rows)
{
    const bool write = call->args.write_back_grads || call->args.zero_grad;

    call->workspace = py_workspace_of(state, workspace);
    if (call->workspace == NULL ||
        py_table_begin(&call->workspace->table, columns[write][call->master],
                       call->extras ? N_COLUMNS : N_PLAIN, rows) < 0) {
        return -1;
    }
    call->workspace->table.relayout = relayout == Py_None ? NULL : relayout;
    return 0;
}

int
py_adamw_prepare(py_adamw_call *call, py_state *state)
{
    py_workspace *workspace = call->workspace;
    tfast_adamw_args *args = &call->args;

    args->device = workspace->table.device;
    if (py_table_check(state, &workspace->table) < 0 || take_lr(call, state) < 0 ||
        py_workspace_reserve(workspace, workspace->table.n_rows, call->extras) < 0) {
        return -1;
    }
    fill_slots(workspace);
    if (call->extras) {
        fill_extras(workspace);
        args->extras = workspace->extras;
    }
    args->slots = workspace->slots;
    args->n_slots = workspace->table.n_rows;
    args->workspace = &workspace->backend;
    return 0;
}

void
py_adamw_end(py_adamw_call *call)
{
    py_release(&call->lr_array);
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

/* Reads the columns as lists; `step` may be a number, and some may be None. */
static int
take_lists(PyObject *const *objects, PyObject **lists, int64_t *step)
{
    Py_ssize_t n = -1;

    for (int c = 0; c < N_COLUMNS; c++) {
        const bool optional = c == MAX_EXP_AVG_SQ || c == EMA || c == COPY;

        if (c == STEP && PyLong_Check(objects[c])) {
            *step = PyLong_AsLongLong(objects[c]);
            if (*step == -1 && PyErr_Occurred()) {
                return -1;
            }
            continue;
        }
        if (optional && objects[c] == Py_None) {
            continue;
        }
        lists[c] = as_list(objects[c], columns[0][0][c].name, n);
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
            if ((c == EMA || c == COPY) && objects[c] == Py_None) {
                objects[c] = NULL; /* not wanted for this parameter */
            }
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

/* Borrows the scalars in arrays and runs the step on the rows that were added. */
static PyObject *
run_lists(py_state *state, py_adamw_call *call, PyObject *const *scalars)
{
    tfast_adamw_args *args = &call->args;
    const struct {
        const char *name;
        tfast_dtype dtype;
    } wanted[] = {
        {"grad_scale", TFAST_F32}, {"found_inf", TFAST_F32}, {"clip_coef", TFAST_F64}};
    py_array arrays[3] = {0};
    void *values[3] = {NULL};
    tfast_status status = TFAST_OK;
    int ready = py_adamw_prepare(call, state);

    for (int i = 0; i < 3 && ready == 0; i++) {
        if (scalars[i] != NULL && scalars[i] != Py_None) {
            ready = py_borrow_scalar(state, scalars[i], wanted[i].name, wanted[i].dtype,
                                     args->device, false, &arrays[i], &values[i]);
        }
    }
    if (ready == 0) {
        args->grad_scale = values[0];
        args->found_inf = values[1];
        args->clip_coef = values[2];
        Py_BEGIN_ALLOW_THREADS
        status = tfast_adamw(args);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < 3; i++) {
        py_release(&arrays[i]);
    }
    return ready < 0 ? NULL : py_result(status);
}

static char *adamw_names[] = {"params",
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
                              "emas",
                              "copies",
                              "ema_decay",
                              "clip_coef",
                              "zero_grad",
                              "write_back_grads",
                              NULL};

PyObject *
py_adamw(PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *objects[N_COLUMNS], *lists[N_COLUMNS] = {NULL}, *result = NULL;
    PyObject *workspace, *relayout = NULL, *scalars[3] = {NULL};
    py_state *state = PyModule_GetState(module);
    int maximize = 0, decoupled = 1, zero_grad = 0, write_back = 0;
    unsigned long long stream = 0;
    py_adamw_call call = {0};

    objects[EMA] = objects[COPY] = Py_None;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOO|$OddddppOOOKOOdOpp:adamw", adamw_names,
            &objects[PARAM], &objects[GRAD], &objects[EXP_AVG], &objects[EXP_AVG_SQ],
            &objects[MAX_EXP_AVG_SQ], &objects[STEP], &workspace, &call.lr,
            &call.args.beta1, &call.args.beta2, &call.args.eps, &call.args.weight_decay,
            &maximize, &decoupled, &scalars[0], &scalars[1], &relayout, &stream,
            &objects[EMA], &objects[COPY], &call.args.ema_decay, &scalars[2],
            &zero_grad, &write_back)) {
        return NULL;
    }
    call.args.maximize = maximize != 0;
    call.args.decoupled_weight_decay = decoupled != 0;
    call.args.zero_grad = zero_grad != 0;
    call.args.write_back_grads = write_back != 0;
    call.args.stream = (void *)(uintptr_t)stream;
    if (take_lists(objects, lists, &call.args.step) == 0) {
        call.extras = lists[EMA] != NULL || lists[COPY] != NULL;
        if (py_adamw_begin(&call, state, workspace, relayout,
                           PyList_Size(lists[PARAM])) == 0) {
            if (add_lists(state, &call.workspace->table, lists) == 0) {
                result = run_lists(state, &call, scalars);
            }
            py_adamw_end(&call);
        }
    }
    for (int c = 0; c < N_COLUMNS; c++) {
        Py_XDECREF(lists[c]);
    }
    return result;
}
