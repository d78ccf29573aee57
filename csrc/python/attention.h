/* One call of attention, forward or backward: its parameters and its state. */
#ifndef PY_ATTENTION_H
#define PY_ATTENTION_H

#include "core.h"

/* Rows of the table of parameters, which both operations share. */
enum {
    Q,
    K,
    V,
    OUT,
    LSE,
    DOUT,
    DLSE,
    DQ,
    DK,
    DV,
    DBIAS,
    DALIBI,
    DSINKS,
    CU_SEQLENS_Q,
    CU_SEQLENS_K,
    KV_LENS,
    MASK,
    BIAS,
    ALIBI_SLOPES,
    SINKS,
    SEED,
    SCALE,
    IS_CAUSAL,
    SCRATCH,
    STREAM,
    BOTTOM_RIGHT,
    WINDOW_LEFT,
    WINDOW_RIGHT,
    SOFTCAP,
    DROPOUT_P,
    MAX_SEQLEN_Q,
    MAX_SEQLEN_K,
    BNHD,
    N_PARAMETERS
};

/* The indices of the dimensions of q, k, v, out and their gradients: batch (-1 with
 * cu_seqlens, where there is none), head and row. The last dimension is dim. */
typedef struct {
    int ndim, batch, head, row;
} py_attention_layout;

typedef struct {
    tfast_attention_args args;
    /* bnhd: q is [batch, rows, heads, dim], not [batch, heads, rows, dim] */
    bool bnhd, backward;
    py_attention_layout at;
    py_call call;
} py_attention_call;

/* Checks the shapes and strides of the arrays in `call` against each other, and fills
 * `args` from them. Returns 0, or -1 with an exception: NotImplementedError if a copy
 * with other strides would be accepted, else ValueError. */
int py_attention_take_arrays(py_attention_call *a);

#endif
