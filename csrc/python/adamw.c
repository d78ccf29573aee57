/* _core.adamw: the AdamW step on lists of arrays; and what all AdamW calls share. */
#include "adamw_call.h"

#include "../adamw_codes.h"

#define OUTPUT(NAME) .name = NAME, .kind = PY_ARRAY, .written = true
#define COLUMNS(PARAMS, COPIES)                                                        \
    {                                                                                  \
        [PARAM] = {OUTPUT(PARAMS)},                                                    \
        [GRAD] = {.name = "grads",                                                     \
                  .kind = PY_ARRAY,                                                    \
                  .any_layout = true,                                                  \
                  .held = true},                                                       \
        [EXP_AVG] = {OUTPUT("exp_avgs"), .or_bytes = true},                            \
        [EXP_AVG_SQ] = {OUTPUT("exp_avg_sqs"), .or_bytes = true,                       \
                        .same_dtype = EXP_AVG},                                        \
        [MAX_EXP_AVG_SQ] = {OUTPUT("max_exp_avg_sqs"), .or_bytes = true,               \
                            .same_dtype = EXP_AVG},                                    \
        [STEP] = {.name = "step", .kind = PY_SCALAR, .written = true},                 \
        [SCALES] = {OUTPUT("scales"), .own_shape = true}, [EMA] = {OUTPUT("emas")},    \
        [COPY] = {OUTPUT(COPIES)}, [TAIL] = {OUTPUT("tails")},                         \
    }

/* columns[1] is for master weights: the step updates the master weights (PARAM) and
 * writes the model's parameters as their copies (COPY). */
static const py_parameter columns[2][N_COLUMNS] = {COLUMNS("params", "copies"),
                                                   COLUMNS("master_params", "params")};

/* ---- Options --------------------------------------------------------------------- */

#define AT(field) PY_AT(py_adamw_call, field)
#define NUMBER(kind_, name_, field)                                                    \
    {                                                                                  \
        .name = name_, .kind = kind_, .at = AT(field)                                  \
    }
#define COLUMN(name_)                                                                  \
    {                                                                                  \
        .name = name_, .kind = PY_OBJECT, .required = true                             \
    }
#define SCALAR(dtype_, name_, field)                                                   \
    {                                                                                  \
        .name = name_, .kind = PY_SCALAR, .dtype = PY_EXACTLY(dtype_), .at = AT(field) \
    }

static const py_parameter options[PY_ADAMW_PARAMETERS] = {
    [PARAM] = COLUMN("params"),
    [GRAD] = COLUMN("grads"),
    [EXP_AVG] = COLUMN("exp_avgs"),
    [EXP_AVG_SQ] = COLUMN("exp_avg_sqs"),
    [MAX_EXP_AVG_SQ] = {.name = "max_exp_avg_sqs", .kind = PY_OBJECT},
    [STEP] = COLUMN("step"),
    [SCALES] = {.name = "scales", .kind = PY_OBJECT},
    [EMA] = {.name = "emas", .kind = PY_OBJECT},
    [COPY] = {.name = "copies", .kind = PY_OBJECT},
    [TAIL] = {.name = "tails", .kind = PY_OBJECT},
    [PY_ADAMW_WORKSPACE] = {.name = "workspace", .kind = PY_OBJECT, .required = true},
    [PY_ADAMW_LR] = {.name = "lr",
                     .kind = PY_REAL,
                     .required = true,
                     .at = AT(args.lr),
                     .dtype = PY_EXACTLY(TFAST_F32),
                     .scalar_at = AT(args.lr_device)},
    [PY_ADAMW_BETA1] = NUMBER(PY_REAL, "beta1", args.beta1),
    [PY_ADAMW_BETA2] = NUMBER(PY_REAL, "beta2", args.beta2),
    [PY_ADAMW_EPS] = NUMBER(PY_REAL, "eps", args.eps),
    [PY_ADAMW_WEIGHT_DECAY] = NUMBER(PY_REAL, "weight_decay", args.weight_decay),
    [PY_ADAMW_MAXIMIZE] = NUMBER(PY_FLAG, "maximize", args.maximize),
    [PY_ADAMW_DECOUPLED] =
        NUMBER(PY_FLAG, "decoupled_weight_decay", args.decoupled_weight_decay),
    [PY_ADAMW_GRAD_SCALE] = SCALAR(TFAST_F32, "grad_scale", args.grad_scale),
    [PY_ADAMW_FOUND_INF] = SCALAR(TFAST_F32, "found_inf", args.found_inf),
    [PY_ADAMW_RELAYOUT] = {.name = "relayout", .kind = PY_OBJECT},
    [PY_ADAMW_STREAM] = NUMBER(PY_STREAM, "stream", args.stream),
    [PY_ADAMW_EMA_DECAY] = {.name = "ema_decay",
                            .kind = PY_REAL,
                            .or_none = true,
                            .at = AT(args.ema_decay)},
    [PY_ADAMW_CLIP_COEF] = SCALAR(TFAST_F64, "clip_coef", args.clip_coef),
    [PY_ADAMW_ZERO_GRAD] = NUMBER(PY_FLAG, "zero_grad", args.zero_grad),
    [PY_ADAMW_WRITE_BACK] = NUMBER(PY_FLAG, "write_back_grads", args.write_back_grads),
    [PY_ADAMW_AMSGRAD] = NUMBER(PY_FLAG, "amsgrad", amsgrad),
    [PY_ADAMW_MASTER] = NUMBER(PY_FLAG, "master", master),
    [PY_ADAMW_COPY] = NUMBER(PY_FLAG, "copy", copy),
    [PY_ADAMW_ROUNDING] = {.name = "rounding", .kind = PY_OBJECT},
    [PY_ADAMW_SEED] = NUMBER(PY_INTEGER, "seed", args.seed),
    [PY_ADAMW_ORIGINS] = {.name = "origins", .kind = PY_LIST},
};

static const uint8_t list_order[] = {
    PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, STEP, PY_ADAMW_WORKSPACE};
static const uint8_t group_order[] = {PARAM,
                                      PY_ADAMW_WORKSPACE,
                                      PY_ADAMW_LR,
                                      PY_ADAMW_BETA1,
                                      PY_ADAMW_BETA2,
                                      PY_ADAMW_EPS,
                                      PY_ADAMW_WEIGHT_DECAY,
                                      PY_ADAMW_AMSGRAD,
                                      PY_ADAMW_MAXIMIZE,
                                      PY_ADAMW_DECOUPLED,
                                      PY_ADAMW_EMA_DECAY,
                                      PY_ADAMW_MASTER,
                                      PY_ADAMW_COPY,
                                      PY_ADAMW_ZERO_GRAD,
                                      PY_ADAMW_WRITE_BACK,
                                      PY_ADAMW_ROUNDING,
                                      PY_ADAMW_SEED,
                                      PY_ADAMW_ORIGINS};
const py_operation py_adamw_lists = {
    .name = "adamw",
    .parameters = options,
    .n_parameters = PY_ADAMW_PARAMETERS,
    .order = list_order,
    .n_order = sizeof list_order,
    .all = true,
    .needs = (uint64_t)1 << PY_ADAMW_LR | (uint64_t)1 << PY_ADAMW_BETA1 |
             (uint64_t)1 << PY_ADAMW_BETA2 | (uint64_t)1 << PY_ADAMW_EPS |
             (uint64_t)1 << PY_ADAMW_WEIGHT_DECAY};
const py_operation py_adamw_group_tuple = {.name = "group",
                                           .parameters = options,
                                           .n_parameters = PY_ADAMW_PARAMETERS,
                                           .order = group_order,
                                           .n_order = sizeof group_order,
                                           .all = true};

/* ---- Shared ---------------------------------------------------------------------- */

static void
fill_slots(py_workspace *workspace)
{
    for (Py_ssize_t i = 0; i < workspace->table.n_rows; i++) {
        const py_row *row = &workspace->table.rows[i];
        const bool codes = row->dtype[EXP_AVG] == PY_UINT8;

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
            .state_dtype = codes ? TFAST_F32 : row->dtype[EXP_AVG],
            .scales = row->data[SCALES],
        };
    }
}

static bool
is_half(const py_row *row)
{
    return row->dtype[PARAM] == TFAST_F16 || row->dtype[PARAM] == TFAST_BF16;
}

/* Fills in where the parameter of a row stands: see py_adamw_call. Returns 0 or -1. */
static int
fill_origin(tfast_adamw_extra *extra, PyObject *origins, Py_ssize_t place)
{
    PyObject *origin;
    long long at[4] = {place};

    if (origins == NULL) {
        extra->index = (uint32_t)place;
        return 0;
    }
    if (place >= PyList_Size(origins)) {
        PyErr_SetString(PyExc_ValueError, "origins must be as many as params");
        return -1;
    }
    origin = PyList_GetItem(origins, place);
    if (PyTuple_Check(origin)) {
        if (!PyArg_ParseTuple(origin, "LLLL", &at[0], &at[1], &at[2], &at[3])) {
            return -1;
        }
    } else {
        at[0] = PyLong_AsLongLong(origin);
    }
    extra->index = (uint32_t)at[0];
    extra->place = at[1];
    extra->row = at[2];
    extra->row_stride = at[3];
    return PyErr_Occurred() ? -1 : 0;
}

static int
fill_extras(py_workspace *workspace, const py_adamw_call *call)
{
    for (Py_ssize_t i = 0; i < workspace->table.n_rows; i++) {
        const py_row *row = &workspace->table.rows[i];
        tfast_adamw_extra *extra = &workspace->extras[i];

        *extra = (tfast_adamw_extra){
            .ema = row->data[EMA],
            .copy = row->data[COPY],
            .tail = row->data[TAIL],
            .rounding = is_half(row) ? (uint8_t)call->rounding : TFAST_NEAREST,
            .ema_dtype = row->dtype[EMA],
            .copy_dtype = row->dtype[COPY],
        };
        if (extra->rounding == TFAST_STOCHASTIC &&
            fill_origin(extra, call->origins, row->place) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Half parameters with TFAST_KAHAN or TFAST_SPLIT have a tail, of their dtype. */
static int
check_tails(const py_table *table, int rounding)
{
    for (Py_ssize_t i = 0; i < table->n_rows; i++) {
        const py_row *row = &table->rows[i];
        const bool wanted =
            is_half(row) && (rounding == TFAST_KAHAN || rounding == TFAST_SPLIT);
        const bool given = row->data[TAIL] != NULL;

        if (row->numel > 0 &&
            (given != wanted || (given && row->dtype[TAIL] != row->dtype[PARAM]))) {
            return py_argument_error(PyExc_ValueError,
                                     (py_argument){"tails", row->place},
                                     "must be %s with this rounding of %s, got %s",
                                     wanted ? py_dtype_name(row->dtype[PARAM]) : "None",
                                     py_dtype_name(row->dtype[PARAM]),
                                     given ? py_dtype_name(row->dtype[TAIL]) : "None");
        }
    }
    return 0;
}

int
py_adamw_take_rounding(py_adamw_call *adamw, PyObject *const *given)
{
    static const char *const names[TFAST_N_ROUNDINGS] = {"nearest", "stochastic",
                                                         "kahan", "split"};

    adamw->origins = given[PY_ADAMW_ORIGINS];
    return py_take_choice(given[PY_ADAMW_ROUNDING], "rounding", names,
                          TFAST_N_ROUNDINGS, &adamw->rounding);
}

/* Codes need scales of the right number, and float state must have none. */
static int
check_scales(const py_table *table)
{
    for (Py_ssize_t i = 0; i < table->n_rows; i++) {
        const py_row *row = &table->rows[i];
        const int64_t blocks = (row->numel + TFAST_CODE_BLOCK - 1) / TFAST_CODE_BLOCK;
        const int columns = row->data[MAX_EXP_AVG_SQ] != NULL
                                ? TFAST_CODE_SCALES_AMSGRAD
                                : TFAST_CODE_SCALES;
        const bool codes = row->dtype[EXP_AVG] == PY_UINT8;
        const bool given = row->data[SCALES] != NULL;

        if (codes != given && row->numel > 0) {
            return py_argument_error(
                PyExc_ValueError, (py_argument){"exp_avgs", row->place},
                "must be %s, got %s", given ? "uint8 codes with scales" : "floats",
                py_dtype_name(row->dtype[EXP_AVG]));
        }
        if (given &&
            (row->dtype[SCALES] != TFAST_F32 || row->own_numel != blocks * columns)) {
            return py_argument_error(
                PyExc_ValueError, (py_argument){"scales", row->place},
                "must be %lld float32, %d a block of %d elements, got %lld %s",
                (long long)(blocks * columns), columns, TFAST_CODE_BLOCK,
                (long long)row->own_numel, py_dtype_name(row->dtype[SCALES]));
        }
    }
    return 0;
}

/* Borrows lr if it is an array: one float32 on the device of the parameters. */
static int
take_lr(py_adamw_call *call, py_state *state)
{
    const py_argument argument = {"lr", -1};
    const py_place *place = &call->workspace->table.place;

    if (call->lr == NULL) {
        return 0;
    }
    if (py_borrow(state, call->lr, argument, 0, &call->lr_array) < 0 ||
        py_check_scalar(&call->lr_array, argument, TFAST_F32) < 0) {
        return -1;
    }
    if (!py_is_at(&call->lr_array, place)) {
        return py_place_error(&call->lr_array, argument, place);
    }
    call->args.lr_device = call->lr_array.data;
    return 0;
}

int
py_adamw_begin(py_adamw_call *call, py_state *state, PyObject *workspace,
               PyObject *relayout, Py_ssize_t rows)
{
    const bool write = call->args.write_back_grads || call->args.zero_grad;

    call->workspace = py_workspace_of(state, workspace);
    if (call->workspace == NULL ||
        py_table_begin(&call->workspace->table, columns[call->master],
                       call->extras ? N_COLUMNS : N_PLAIN, write ? 1u << GRAD : 0,
                       rows) < 0) {
        return -1;
    }
    call->workspace->table.relayout = relayout;
    return 0;
}

int
py_adamw_prepare(py_adamw_call *call, py_state *state)
{
    py_workspace *workspace = call->workspace;
    tfast_adamw_args *args = &call->args;

    args->device = workspace->table.place.device;
    if (check_scales(&workspace->table) < 0 ||
        (call->extras && check_tails(&workspace->table, call->rounding) < 0) ||
        py_table_check(state, &workspace->table) < 0 || take_lr(call, state) < 0 ||
        py_workspace_reserve(workspace, workspace->table.n_rows, call->extras) < 0) {
        return -1;
    }
    fill_slots(workspace);
    if (call->extras) {
        if (fill_extras(workspace, call) < 0) {
            return -1;
        }
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

/* A new list of the sequence's items; refuses one array, and a length other than `want`
 * unless that is negative. */
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

/* Copies each given column to a new list. Column STEP may be an integer: then *step. */
static int
take_lists(PyObject *const *objects, PyObject **lists, int64_t *step)
{
    Py_ssize_t n = -1;

    for (int c = 0; c < N_COLUMNS; c++) {
        if (objects[c] == NULL) {
            continue;
        }
        if (c == STEP && PyLong_Check(objects[c])) {
            *step = PyLong_AsLongLong(objects[c]);
            if (*step == -1 && PyErr_Occurred()) {
                return -1;
            }
            continue;
        }
        lists[c] = as_list(objects[c], columns[0][c].name, n);
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
            if ((c == SCALES || c == EMA || c == COPY || c == TAIL) &&
                objects[c] == Py_None) {
                objects[c] = NULL; /* none for this parameter */
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

/* Borrows the scalars and runs the step on the rows of add_lists(). */
static PyObject *
run_lists(py_adamw_call *adamw, py_call *call)
{
    tfast_status status;

    if (py_adamw_prepare(adamw, call->state) < 0) {
        return NULL;
    }
    call->place = adamw->workspace->table.place;
    if (py_borrow_arrays(call, adamw) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_adamw(&adamw->args);
    Py_END_ALLOW_THREADS
    return py_result(status);
}

PyObject *
py_adamw(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *lists[N_COLUMNS] = {NULL}, *result = NULL;
    py_adamw_call adamw;
    py_call call;

    adamw.args = (tfast_adamw_args){.decoupled_weight_decay = true};
    adamw.amsgrad = adamw.ema = adamw.copy = adamw.master = false;
    adamw.rounding = TFAST_NEAREST;
    adamw.lr_array.owner = NULL;
    call.state = PyModule_GetState(module);
    if (py_parse(&call, &py_adamw_lists, &adamw, args, n, names) < 0) {
        return NULL;
    }
    adamw.lr = call.given[PY_ADAMW_LR];
    call.given[PY_ADAMW_LR] = NULL; /* borrowed by py_adamw_prepare() */
    if (py_adamw_take_rounding(&adamw, call.given) == 0 &&
        take_lists(call.given, lists, &adamw.args.step) == 0) {
        adamw.extras = lists[EMA] != NULL || lists[COPY] != NULL ||
                       lists[TAIL] != NULL || adamw.rounding != TFAST_NEAREST;
        if (py_adamw_begin(&adamw, call.state, call.given[PY_ADAMW_WORKSPACE],
                           call.given[PY_ADAMW_RELAYOUT],
                           PyList_Size(lists[PARAM])) == 0) {
            if (add_lists(call.state, &adamw.workspace->table, lists) == 0) {
                result = run_lists(&adamw, &call);
            }
            py_release_arrays(&call);
            py_adamw_end(&adamw);
        }
    }
    for (int c = 0; c < N_COLUMNS; c++) {
        Py_XDECREF(lists[c]);
    }
    return result;
}
