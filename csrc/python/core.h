/* Declarations that the files of the Python module share. */
#ifndef PY_CORE_H
#define PY_CORE_H

#include "table.h"

/* Returns None for TFAST_OK; otherwise sets the status's exception with the thread's
 * message and returns NULL. */
PyObject *py_result(tfast_status status);

/* Runs the handlers of pending signals. True if one has raised an exception, which is
 * then set. May be called with or without the GIL. */
bool py_signal_raised(void);

/* The Python object Workspace: what one optimizer keeps between its steps, so that a
 * warm step allocates nothing. */
typedef struct {
    PyObject_HEAD
    py_table table;
    tfast_adamw_slot *slots;
    tfast_adamw_extra *extras;
    tfast_amp_tensor *tensors;
    PyObject *
        *specs; /* owned: two for each row, see adamw_shards.c; each may be NULL */
    /* capacities of the arrays above */
    Py_ssize_t n_slots, n_extras, n_tensors, n_specs;
    tfast_workspace backend;
    /* PyDict_Next() positions in the optimizer's state dict: that of the group's first
     * parameter, and during a call that of the next parameter to look up */
    Py_ssize_t first, next;
    long process; /* its creator's pid: a forked child must not free CUDA memory */
} py_workspace;

extern PyType_Spec py_workspace_spec;
extern PyType_Spec py_small_calls_spec; /* see small_calls.c */

/* The object as a workspace, or NULL with TypeError. Borrowed. */
py_workspace *py_workspace_of(const py_state *state, PyObject *object);

/* Grows the array `slots`, and if `extras` is true the array `extras`, to at least n
 * elements. Returns 0, or -1 with MemoryError. */
int py_workspace_reserve(py_workspace *workspace, Py_ssize_t n, bool extras);

/* Grows `tensors` to at least n elements. Returns 0, or -1 with MemoryError. */
int py_workspace_reserve_tensors(py_workspace *workspace, Py_ssize_t n);

/* Grows `specs` to at least `rows` rows. Returns 0, or -1 with MemoryError. */
int py_workspace_reserve_specs(py_workspace *workspace, Py_ssize_t rows);

/* Writes the arrays of one column of a table to `tensors`, and returns their end. */
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
PyObject *py_neighbours(PyObject *module, PyObject *const *args, Py_ssize_t n,
                        PyObject *names);
PyObject *py_trajectory(PyObject *module, PyObject *const *args, Py_ssize_t n,
                        PyObject *names);

#endif
