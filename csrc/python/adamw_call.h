/* What adamw.c (lists) and adamw_group.c (torch param groups) share: a call of the step
 * on the rows of a workspace's table. */
#ifndef PY_ADAMW_CALL_H
#define PY_ADAMW_CALL_H

#include "core.h"

enum { PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, STEP, N_COLUMNS };

/* The scalars of a call; those in arrays are borrowed until it ends. */
typedef struct {
    tfast_adamw_args args;
    PyObject *lr, *grad_scale, *found_inf, *relayout;
    py_workspace *workspace;
    py_array scalars[3];
    unsigned long long stream;
    int maximize, decoupled;
} py_adamw_call;

/* Starts a call of up to `rows` rows; see py_table_begin(). Returns 0 or -1. */
int py_adamw_begin(py_adamw_call *call, py_state *state, PyObject *workspace,
                   Py_ssize_t rows, bool keep);

/* Runs the step on the rows added since. Returns None, or NULL with an exception. */
PyObject *py_adamw_run(py_adamw_call *call, py_state *state);

/* Ends a call that began. */
void py_adamw_end(py_adamw_call *call);

#endif
