/* Finds the gradient and the state of each parameter of a param group and adds them to
 * the table. With many small tensors this takes most of a step's time. */
#include "adamw_call.h"

/* The parameter's state dict: borrowed, or NULL, without an exception if it has none.
 * `all` was filled in the order of the parameters, so the entry is usually one of the
 * next after *position; a lookup by key would call the tensor's __hash__. */
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

/* The position for PyDict_Next() at which it yields a group's first parameter; 0 if the
 * parameter has no entry. `guess`: the position in the previous call. */
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

/* Whether the state is in 8 bits: then `exp_avg_q8` is the entry after `step`. */
static bool
has_codes(const py_state *state, PyObject *dict)
{
    PyObject *key;
    Py_ssize_t next = 0;

    if (PyDict_Next(dict, &next, &key, NULL) && key == state->names[PY_STEP] &&
        PyDict_Next(dict, &next, &key, NULL) && key == state->names[PY_EXP_AVG]) {
        return false; /* float state, without a lookup */
    }
    return PyDict_GetItemWithError(dict, state->names[PY_EXP_AVG]) == NULL &&
           PyDict_GetItemWithError(dict, state->names[PY_EXP_AVG_CODES]) != NULL;
}

static bool
has_tails(const py_adamw_group *group)
{
    return group->call.rounding == TFAST_KAHAN || group->call.rounding == TFAST_SPLIT;
}

/* Stores the state arrays of one parameter in objects[column]. Returns 0, 1 if one is
 * missing, or -1 with an exception. */
static int
take_state(py_state *state, PyObject *dict, const py_adamw_group *group,
           PyObject **objects)
{
    const bool codes = PyDict_Check(dict) && has_codes(state, dict);
    /* in the order of insertion, so that PyDict_Next() meets each without a lookup */
    const struct {
        int column;
        bool wanted;
        int name;
    } entries[] = {{STEP, true, PY_STEP},
                   {EXP_AVG, true, codes ? PY_EXP_AVG_CODES : PY_EXP_AVG},
                   {EXP_AVG_SQ, true, codes ? PY_EXP_AVG_SQ_CODES : PY_EXP_AVG_SQ},
                   {MAX_EXP_AVG_SQ, group->call.amsgrad,
                    codes ? PY_MAX_EXP_AVG_SQ_CODES : PY_MAX_EXP_AVG_SQ},
                   {SCALES, codes, PY_SCALES},
                   {PARAM, group->call.master, PY_MASTER_PARAM},
                   {COPY, group->call.copy, PY_WEIGHT_COPY},
                   {TAIL, group->call.rounding == TFAST_KAHAN, PY_COMPENSATION},
                   {TAIL, group->call.rounding == TFAST_SPLIT, PY_MASTER_REMAINDER},
                   {EMA, group->call.ema, PY_EMA}};
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
        PyObject *name = state->names[entries[i].name];
        if (!PyDict_Next(dict, &next, &key, &value) || key != name) {
            value = PyDict_GetItemWithError(dict, name);
        }
        if (value == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (value != NULL) {
            objects[entries[i].column] = value;
        } else if (entries[i].column == PARAM) {
            objects[COPY] = NULL; /* no master: the step updates the parameter itself */
        } else if (entries[i].column != TAIL) {
            return 1;
        }
    }
    return 0;
}

/* Adds one parameter that has a gradient as a row. Returns as py_adamw_add_group(). */
static int
add_param(py_state *state, py_adamw_group *group, PyObject *all, Py_ssize_t place,
          PyObject *param, PyObject *grad)
{
    PyObject *objects[N_COLUMNS] = {[PARAM] = param, [GRAD] = grad}, *dict;
    py_table *table = &group->call.workspace->table;
    int status;

    status = py_adamw_check_placement(group, param, grad);
    if (status != 0) {
        return status;
    }
    dict = state_of(all, param, &group->call.workspace->next);
    if (dict == NULL) {
        return PyErr_Occurred() ? -1 : 1;
    }
    if (group->call.master) {
        objects[COPY] = param;
    }
    status = take_state(state, dict, group, objects);
    if (status == 0) {
        status = py_adamw_unwrap(group, objects);
    }
    if (status == 0) {
        status = py_table_add(state, table, objects, place);
    }
    if (status == 0 && ((group->call.master && objects[COPY] == NULL) ||
                        (has_tails(group) && objects[TAIL] == NULL))) {
        const int dtype = table->rows[table->n_rows - 1].dtype[PARAM];
        return dtype == TFAST_F16 || dtype == TFAST_BF16; /* these need it */
    }
    return status;
}

/* Reads the attribute `grad` of objects of one type. A plain attribute read would look
 * up the descriptor type.grad for each object; this looks it up once a group. */
typedef struct {
    PyTypeObject *type;
    PyObject *descriptor;
    descrgetfunc get; /* NULL: use a plain read */
} grad_reader;

/* reader.descriptor is a new reference, or NULL if the type has none. The shortcut
 * needs a C-level property and a type that does not override attribute access. */
static grad_reader
find_reader(const py_state *state, PyObject *param)
{
    grad_reader reader = {.type = Py_TYPE(param)};

    reader.descriptor =
        PyObject_GetAttr((PyObject *)reader.type, state->names[PY_GRAD]);
    if (reader.descriptor == NULL) {
        PyErr_Clear();
    } else if (Py_TYPE(reader.descriptor) == &PyGetSetDescr_Type &&
               PyType_GetSlot(reader.type, Py_tp_getattro) == PyObject_GenericGetAttr) {
        reader.get = (descrgetfunc)PyType_GetSlot(&PyGetSetDescr_Type, Py_tp_descr_get);
    }
    return reader;
}

/* Reads param.grad into *grad (NULL for None); the table holds it. Returns 0 or -1. */
static int
read_grad(py_state *state, const grad_reader *reader, py_table *table, PyObject *param,
          PyObject **grad)
{
    PyTypeObject *type = Py_TYPE(param);

    *grad = reader->get != NULL && type == reader->type
                ? reader->get(reader->descriptor, param, (PyObject *)type)
                : PyObject_GetAttr(param, state->names[PY_GRAD]);
    if (*grad == NULL || py_table_hold(table, *grad) < 0) {
        return -1;
    }
    if (*grad == Py_None) {
        *grad = NULL;
    }
    return 0;
}

static int
add_rows(py_state *state, py_adamw_group *group, const grad_reader *reader,
         PyObject *all)
{
    PyObject *params = group->params;
    const Py_ssize_t n = PyList_Size(params);
    int status = 0;

    for (Py_ssize_t i = 0; i < n && status == 0; i++) {
        PyObject *param = PyList_GetItem(params, i), *grad;

        if (read_grad(state, reader, &group->call.workspace->table, param, &grad) < 0) {
            return -1;
        }
        if (grad == NULL) {
            continue;
        }
        if (group->written != NULL && (PyList_Append(group->written, param) < 0 ||
                                       PyList_Append(group->written, grad) < 0)) {
            return -1;
        }
        status = add_param(state, group, all, i, param, grad);
    }
    return status;
}

int
py_adamw_add_group(py_state *state, py_adamw_group *group, PyObject *all)
{
    py_workspace *workspace = group->call.workspace;
    grad_reader reader;
    PyObject *param;
    int status;

    if (PyList_Size(group->params) == 0) {
        return 0;
    }
    if (group->call.args.write_back_grads || group->call.args.zero_grad) {
        /* Collected in the loop that reads .grad: a second loop would cost as much. */
        group->written = PyList_New(0);
        if (group->written == NULL) {
            return -1;
        }
    }
    if (group->wrapper->type != NULL &&
        py_workspace_reserve_specs(workspace, PyList_Size(group->params)) < 0) {
        return -1;
    }
    param = PyList_GetItem(group->params, 0);
    workspace->first = find_position(all, param, workspace->first);
    workspace->next = workspace->first;
    reader = find_reader(state, param);
    status = add_rows(state, group, &reader, all);
    Py_XDECREF(reader.descriptor);
    return status;
}
