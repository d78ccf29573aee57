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
    bool amsgrad, ema, copy; /* whether there are these columns */
    bool master; /* column PARAM is the master weights, and COPY the parameters */
    bool extras; /* there is an EMA or a COPY */
    PyObject
        *lr; /* an array of one float32, borrowed from the caller; NULL: a number */
    py_array lr_array;
    py_workspace *workspace;
} py_adamw_call;

/* Both forms of the step take their options from one table: lists of arrays with
 * keywords, and a param group as a tuple. */
extern const py_operation py_adamw_lists, py_adamw_group_tuple;
enum {
    PY_ADAMW_WORKSPACE = N_COLUMNS,
    PY_ADAMW_LR,
    PY_ADAMW_BETA1,
    PY_ADAMW_BETA2,
    PY_ADAMW_EPS,
    PY_ADAMW_WEIGHT_DECAY,
    PY_ADAMW_MAXIMIZE,
    PY_ADAMW_DECOUPLED,
    PY_ADAMW_GRAD_SCALE,
    PY_ADAMW_FOUND_INF,
    PY_ADAMW_RELAYOUT,
    PY_ADAMW_STREAM,
    PY_ADAMW_EMA_DECAY,
    PY_ADAMW_CLIP_COEF,
    PY_ADAMW_ZERO_GRAD,
    PY_ADAMW_WRITE_BACK,
    PY_ADAMW_AMSGRAD,
    PY_ADAMW_MASTER,
    PY_ADAMW_COPY,
    PY_ADAMW_PARAMETERS
};

/* Starts a call of up to `rows` rows; `relayout` as in the table, or NULL. Returns 0 or
 * -1. */
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
} py_adamw_group;

/* Adds the group's parameters that have gradients. Returns 0, -1 with an exception, or
 * 1 where a parameter's state must be made or a parameter is on another device than
 * those before. */
int py_adamw_add_group(py_state *state, py_adamw_group *group, PyObject *all);

#endif
