/* What adamw.c (lists), adamw_group.c (torch param groups) and adamw_rows.c (one such
 * group) share: a call of the step on the rows of a workspace's table. */
#ifndef PY_ADAMW_CALL_H
#define PY_ADAMW_CALL_H

#include "core.h"

enum {
    PARAM,
    GRAD,
    EXP_AVG,
    EXP_AVG_SQ,
    MAX_EXP_AVG_SQ,
    STEP,
    N_PLAIN, /* columns of a step without extras */
    EMA = N_PLAIN,
    COPY,
    N_COLUMNS
};

/* The step of one list of parameters. */
typedef struct {
    tfast_adamw_args args;
    PyObject *lr; /* a number, or an array of one float32 */
    py_array lr_array;
    py_workspace *workspace;
    bool master; /* column PARAM is the master weights, and COPY the parameters */
    bool extras; /* there is an EMA or a COPY */
} py_adamw_call;

/* Starts a call of up to `rows` rows; `relayout` as in the table, NULL or None: none.
 * Returns 0 or -1. */
int py_adamw_begin(py_adamw_call *call, py_state *state, PyObject *workspace,
                   PyObject *relayout, Py_ssize_t rows);

/* Makes the arguments of the rows added since, but for the scalars that groups share.
 * Returns 0 or -1 with an exception. */
int py_adamw_prepare(py_adamw_call *call, py_state *state);

/* Ends a call that began. */
void py_adamw_end(py_adamw_call *call);

/* One param group. */
typedef struct {
    py_adamw_call call;
    PyObject *params;    /* owned: a copy of the group's list, which code that runs
                            during the call can change */
    PyObject *workspace; /* borrowed */
    PyObject *written;   /* owned; where gradients are written: a list of them and their
                          parameters, for autograd's versions. Else NULL */
    int amsgrad, ema, copy;
} py_adamw_group;

/* Adds the group's parameters that have gradients. Returns 0, -1 with an exception, or
 * 1 where a parameter's state must be made or a parameter is on another device than
 * those before. */
int py_adamw_add_group(py_state *state, py_adamw_group *group, PyObject *all);

#endif
