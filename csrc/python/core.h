/* What the files of the Python module share. */
#ifndef PY_CORE_H
#define PY_CORE_H

#include "table.h"

/* Turns a status into None, or into its exception with the thread's message. */
PyObject *py_result(tfast_status status);

/* Runs the handlers of signals that have come, with or without the GIL; whether one has
 * raised an exception. */
bool py_signal_raised(void);

/* Workspace: what one optimizer keeps between its steps. */
typedef struct {
    PyObject_HEAD
    py_table table;
    tfast_adamw_slot *slots;
    tfast_adamw_extra *extras;
    tfast_amp_tensor *tensors;
    Py_ssize_t n_slots, n_extras, n_tensors; /* room for */
    tfast_workspace backend;
    /* positions in the optimizer's state dict: of a group's first parameter, and during
     * a call of its next one */
    Py_ssize_t first, next;
    long process; /* that made it: CUDA memory is not freed in a forked child */
} py_workspace;

extern PyType_Spec py_workspace_spec;
extern PyType_Spec py_small_calls_spec; /* see small_calls.c */

/* The object as a workspace, or NULL with TypeError. Borrowed. */
py_workspace *py_workspace_of(const py_state *state, PyObject *object);

/* Room for n slots, and their extras. Returns 0, or -1 with MemoryError. */
int py_workspace_reserve(py_workspace *workspace, Py_ssize_t n, bool extras);

/* Room for n tensors of a pass over gradients. Returns 0, or -1 with MemoryError. */
int py_workspace_reserve_tensors(py_workspace *workspace, Py_ssize_t n);

/* Appends the arrays in one column of a table to `tensors`, and returns the end. */
tfast_amp_tensor *py_amp_tensors(tfast_amp_tensor *tensors, const py_table *table,
                                 int column);

PyObject *py_adamw(PyObject *module, PyObject *const *args, Py_ssize_t n,
                   PyObject *names);
PyObject *py_adamw_groups(PyObject *module, PyObject *const *args, Py_ssize_t n,
                          PyObject *names);
PyObject *py_amp_grads(PyObject *module, PyObject *const *args, Py_ssize_t n,
                       PyObject *names);
PyObject *py_amp_update(PyObject *module, PyObject *const *args, Py_ssize_t n,
                        PyObject *names);
PyObject *py_attention(PyObject *module, PyObject *const *args, Py_ssize_t n,
                       PyObject *names);
PyObject *py_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t n,
                                PyObject *names);
PyObject *py_gemm(PyObject *module, PyObject *const *args, Py_ssize_t n,
                  PyObject *names);

#endif
