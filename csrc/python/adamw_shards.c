/* Param groups of sharded tensors (torch's DTensor): finds the local tensor of each,
 * and asks Python whether a gradient is placed as its parameter only if one of the two
 * has another spec, which holds the placements, than in the previous step. */
#include "adamw_call.h"

int
py_wrapper_take(PyObject *tuple, py_wrapper *wrapper)
{
    memset(wrapper, 0, sizeof *wrapper);
    if (tuple == NULL) {
        return 0;
    }
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 4) {
        PyErr_SetString(PyExc_TypeError, "wrapper must be a tuple of four");
        return -1;
    }
    wrapper->type = (PyTypeObject *)PyTuple_GetItem(tuple, 0);
    wrapper->local = PyTuple_GetItem(tuple, 1);
    wrapper->spec = PyTuple_GetItem(tuple, 2);
    wrapper->agree = PyTuple_GetItem(tuple, 3);
    wrapper->get = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
    return 0;
}

/* What `reader` reads of the object: a new reference, or NULL with an exception. The
 * descriptor of a slot is called without a lookup. */
static PyObject *
read_by(const py_wrapper *wrapper, PyObject *reader, PyObject *object)
{
    return Py_TYPE(reader) == &PyMemberDescr_Type
               ? wrapper->get(reader, object, (PyObject *)wrapper->type)
               : PyObject_CallFunctionObjArgs(reader, object, NULL);
}

/* Stores the reference in *kept, and returns whether it was there already. */
static bool
keep(PyObject **kept, PyObject *object)
{
    PyObject *before = *kept;

    *kept = object;
    Py_XDECREF(before);
    return object == before;
}

int
py_adamw_check_placement(const py_adamw_group *group, PyObject *param, PyObject *grad)
{
    py_workspace *workspace = group->call.workspace;
    PyObject **kept, *ours, *theirs = NULL, *answer;
    bool ours_known, theirs_known;
    int agreed;

    if (Py_TYPE(param) != group->wrapper->type) {
        return 0;
    }
    kept = &workspace->specs[2 * workspace->table.n_rows];
    ours = read_by(group->wrapper, group->wrapper->spec, param);
    if (ours != NULL && Py_TYPE(grad) == group->wrapper->type) {
        theirs = read_by(group->wrapper, group->wrapper->spec, grad);
    }
    if (PyErr_Occurred()) {
        Py_XDECREF(ours);
        return -1;
    }
    ours_known = keep(&kept[0], ours);
    theirs_known = keep(&kept[1], theirs) && theirs != NULL;
    if (ours_known && (theirs_known || kept[0] == kept[1])) {
        return 0;
    }
    answer = PyObject_CallFunctionObjArgs(group->wrapper->agree, param, grad, NULL);
    agreed = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (agreed <= 0) {
        keep(&kept[0], NULL); /* asked again in the next call */
    }
    return agreed < 0 ? -1 : !agreed;
}

/* Holds all objects of a row, if reading one may run Python code, which may drop the
 * caller's references to the others. */
static int
hold_all(const py_adamw_group *group, PyObject *const *objects)
{
    if (Py_TYPE(group->wrapper->local) == &PyMemberDescr_Type) {
        return 0;
    }
    for (int c = 0; c < N_COLUMNS; c++) {
        if (objects[c] != NULL &&
            py_table_hold(&group->call.workspace->table, Py_NewRef(objects[c])) < 0) {
            return -1;
        }
    }
    return 0;
}

int
py_adamw_unwrap(const py_adamw_group *group, PyObject **objects)
{
    const py_wrapper *wrapper = group->wrapper;

    if (wrapper->type == NULL) {
        return 0;
    }
    if (hold_all(group, objects) < 0) {
        return -1;
    }
    for (int c = 0; c < N_COLUMNS; c++) {
        if (objects[c] != NULL && Py_TYPE(objects[c]) == wrapper->type) {
            objects[c] = read_by(wrapper, wrapper->local, objects[c]);
            if (objects[c] == NULL ||
                py_table_hold(&group->call.workspace->table, objects[c]) < 0) {
                return -1;
            }
        }
    }
    return 0;
}
