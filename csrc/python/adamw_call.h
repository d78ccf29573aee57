/* One AdamW call on a workspace's table: each row is one parameter with its gradient
 * and state. Used by adamw.c (lists of arrays), adamw_group.c (all param groups of a
 * torch optimizer) and adamw_rows.c (adds the rows of one param group). */
#ifndef PY_ADAMW_CALL_H
#define PY_ADAMW_CALL_H

#include "../adamw_half.h"
#include "core.h"

#include <string.h>

/* Columns of the table. */
enum {
    PARAM,
    GRAD,
    EXP_AVG,
    EXP_AVG_SQ,
    MAX_EXP_AVG_SQ,
    STEP,
    SCALES,  /* of 8-bit state; absent where the state is float */
    N_PLAIN, /* number of columns without extras */
    EMA = N_PLAIN,
    COPY,
    TAIL, /* of half parameters with TFAST_KAHAN or TFAST_SPLIT */
    N_COLUMNS
};

/* One AdamW call: a list of parameters on one device. */
typedef struct {
    tfast_adamw_args args;
    bool amsgrad, ema, copy; /* of a param group: the state has these arrays */
    bool master;      /* PARAM holds the master weights, COPY the model's parameters */
    bool extras;      /* columns EMA, COPY and TAIL are in use, or a rounding */
    int32_t rounding; /* a tfast_rounding, of the half parameters */
    PyObject
        *origins; /* a list, borrowed: of each parameter its index in the optimizer,
                          or of a shard (index, place, row, row_stride) as in
                          tfast_adamw_extra; NULL: none is a shard, and the index is the
                          place in the lists */
    /* lr if it is an array of one float32, borrowed from the caller; else NULL */
    PyObject *lr;
    py_array lr_array;       /* lr, while the call runs */
    py_workspace *workspace; /* borrowed from the caller */
} py_adamw_call;

/* Two operations on one table of parameters: lists of arrays with keywords, and a param
 * group as a tuple. The rows before PY_ADAMW_WORKSPACE are the columns above. */
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
    PY_ADAMW_ROUNDING,
    PY_ADAMW_SEED,
    PY_ADAMW_ORIGINS,
    PY_ADAMW_PARAMETERS
};

/* Takes the rounding and the origins from the arguments of a call. Returns 0 or -1. */
int py_adamw_take_rounding(py_adamw_call *call, PyObject *const *given);

/* Starts a call of up to `rows` rows; `relayout`: see py_table, may be NULL. Returns 0,
 * or -1 with an exception; then py_adamw_end() must not be called. */
int py_adamw_begin(py_adamw_call *call, py_state *state, PyObject *workspace,
                   PyObject *relayout, Py_ssize_t rows);

/* Checks the rows that were added for overlap and fills call->args from them, except
 * for grad_scale, found_inf, clip_coef and stream, which groups share. Returns 0, or -1
 * with an exception. */
int py_adamw_prepare(py_adamw_call *call, py_state *state);

/* Ends a call that py_adamw_begin() has started. */
void py_adamw_end(py_adamw_call *call);

/* The class of tensors that hold a shard in a local tensor, and how to read one. All is
 * borrowed from the caller of _core.adamw_groups. */
typedef struct {
    PyTypeObject *type;     /* NULL: there is no such tensor */
    PyObject *local, *spec; /* a descriptor of the type, or a callable, that reads the
                               local tensor, and the object that holds placements */
    PyObject *agree;        /* callable(param, grad) -> whether both are placed alike */
    descrgetfunc get;       /* of descriptors of slots */
} py_wrapper;

/* Reads (type, local, spec, agree); NULL: there is no such class. Returns 0 or -1. */
int py_wrapper_take(PyObject *tuple, py_wrapper *wrapper);

/* One param group. */
typedef struct {
    py_adamw_call call;
    const py_wrapper *wrapper;
    PyObject *params;    /* owned: a copy of the group's list, because Python code that
                            runs during the call may change the list */
    PyObject *workspace; /* borrowed */
    PyObject *written;   /* owned: if gradients are written, a list of them and their
                            parameters, for autograd's version counters; else NULL */
} py_adamw_group;

/* Whether the gradient of the next row is placed as its parameter: 0, 1 if it must be
 * redistributed, or -1 with an exception. May run Python code. */
int py_adamw_check_placement(const py_adamw_group *group, PyObject *param,
                             PyObject *grad);

/* Replaces wrapped tensors among the N_COLUMNS objects of the next row by their local
 * tensors, which the table holds. Returns 0, or -1 with an exception. */
int py_adamw_unwrap(const py_adamw_group *group, PyObject **objects);

/* Adds a row for each parameter that has a gradient; `all` is the optimizer's state
 * dict. Returns 0, -1 with an exception, or 1 if a parameter's state must be made, a
 * gradient must be redistributed or a parameter is on another device than those
 * before. */
int py_adamw_add_group(py_state *state, py_adamw_group *group, PyObject *all);

#endif
