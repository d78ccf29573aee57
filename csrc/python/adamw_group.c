/* _core.adamw_group: the AdamW step on a torch param group, with no lists made. */
#include "adamw_call.h"

enum { AHEAD = 8 }; /* rows between two looks ahead */

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

/* Asks the cache for what the rows from `i` on will read: each look ahead finds in the
 * cache what the one before asked for. */
static void
look_ahead(const py_state *state, py_workspace *workspace, PyObject *params,
           PyObject *all, Py_ssize_t i)
{
    const Py_ssize_t n = PyList_Size(params);
    PyObject *key, *dict;

    if (i + 4 * AHEAD < n) {
        __builtin_prefetch(PyList_GetItem(params, i + 4 * AHEAD));
    }
    if (i + 3 * AHEAD >= 0 && i + 3 * AHEAD < n) {
        py_memory_hint(&workspace->table.memories, i + 3 * AHEAD);
        py_hint_body(state, PyList_GetItem(params, i + 3 * AHEAD));
        if (PyDict_Next(all, &workspace->far, &key, &dict)) {
            __builtin_prefetch(dict);
        }
    }
    if (i + 2 * AHEAD >= 0 && i + 2 * AHEAD < n) {
        py_hint_parts(state, PyList_GetItem(params, i + 2 * AHEAD));
        if (PyDict_Next(all, &workspace->near, &key, &dict)) {
            py_hint_dict(dict);
        }
    }
}

/* Adds the group's parameters that have gradients. Returns 0, -1 with an exception, or
 * 1 with the place of the parameter that stopped it, see add_param(). */
static int
add_group(py_state *state, py_workspace *workspace, PyObject *params, PyObject *all,
          bool amsgrad, Py_ssize_t *stopped)
{
    PyObject *grads[AHEAD];
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
step_group(py_state *state, py_adamw_call *call, PyObject *params, PyObject *all,
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
    result = py_adamw_run(call, state);
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
    py_adamw_call call = {.decoupled = 1};
    int amsgrad = 0;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOddddppp|OOK:adamw_group", names, &params, &all,
            &workspace, &bump, &call.relayout, &call.lr, &call.args.beta1,
            &call.args.beta2, &call.args.eps, &call.args.weight_decay, &amsgrad,
            &call.maximize, &call.decoupled, &call.grad_scale, &call.found_inf,
            &call.stream)) {
        return NULL;
    }
    if (!PyList_Check(params) || !PyDict_Check(all)) {
        PyErr_SetString(PyExc_TypeError, "params must be a list, and state a dict");
        return NULL;
    }
    if (py_adamw_begin(&call, state, workspace, PyList_Size(params), true) < 0) {
        return NULL;
    }
    result = step_group(state, &call, params, all, amsgrad != 0, bump);
    py_adamw_end(&call);
    return result;
}
