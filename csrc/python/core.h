/* What the files of the Python module share. */
#ifndef PY_CORE_H
#define PY_CORE_H

#include "table.h"

/* Turns a status into None, or into its exception with the thread's message. */
PyObject *py_result(tfast_status status);

/* Workspace: what one optimizer keeps between its steps. */
typedef struct {
    PyObject_HEAD
    py_table table;
    tfast_adamw_slot *slots;
    Py_ssize_t n_slots;
    tfast_workspace backend;
    /* positions in the optimizer's state dict: of a group's first parameter, and during
     * a call of its next one and of two looks ahead */
    Py_ssize_t first, next, far, near;
    long process; /* that made it: CUDA memory is not freed in a forked child */
} py_workspace;

extern PyType_Spec py_workspace_spec;

/* Room for n slots. Returns 0, or -1 with MemoryError. */
int py_workspace_reserve(py_workspace *workspace, Py_ssize_t n);

PyObject *py_adamw(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *py_adamw_group(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
