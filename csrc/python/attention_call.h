/* One call of attention: what Python gave, borrowed, and what the core gets. */
#ifndef PY_ATTENTION_CALL_H
#define PY_ATTENTION_CALL_H

#include "core.h"

enum { PY_ATTENTION_ARRAYS = 24 }; /* that one call borrows, at most */

/* NULL or None where an argument is not given. */
typedef struct {
    PyObject *q, *k, *v, *out, *lse;
    PyObject *dout, *dlse, *dq, *dk, *dv, *dbias, *dalibi, *dsinks;
    PyObject *mask, *bias, *alibi_slopes, *sinks, *seed, *cu_seqlens_q, *cu_seqlens_k,
        *kv_lens, *scratch;
    int bnhd;
} py_attention_given;

typedef struct {
    py_state *state;
    py_attention_given given;
    tfast_attention_args args;
    bool backward;
    PyObject *scratch; /* what given.scratch made: a reference, or NULL */
    int n;             /* arrays borrowed so far; the first is q */
    const char *names[PY_ATTENTION_ARRAYS];
    bool written[PY_ATTENTION_ARRAYS];
    py_array arrays[PY_ATTENTION_ARRAYS];
} py_attention_call;

/* Borrows the arrays in `given` and fills `args` from them. Returns 0, or -1 with an
 * exception: ValueError, or NotImplementedError where a copy with other strides would
 * do. Either way py_attention_release() is due. */
int py_attention_take(py_attention_call *call);

/* Gets the call's scratch from given.scratch, if any is needed; as above. */
int py_attention_take_scratch(py_attention_call *call);

void py_attention_release(py_attention_call *call);

/* Its steps, and what they share. */

static inline bool
py_is_given(const PyObject *object)
{
    return object != NULL && object != Py_None;
}

/* Mask, bias, ALiBi slopes, sinks and the seed; after sizes and lengths. */
int py_attention_take_options(py_attention_call *call);
int py_attention_take_option_gradients(py_attention_call *call);

/* Borrows one more array, which must be where q is. */
py_array *py_attention_borrow(py_attention_call *call, PyObject *object,
                              const char *name, int how);

/* What lse, slopes, sinks and gradients of options have. */
int py_attention_lse_dtype(const py_attention_call *call);

int py_attention_check_dtype(const py_array *array, const char *name, int dtype);
int py_attention_check_shape(const py_array *array, const char *name, int ndim,
                             const int64_t *want);

/* Sets an exception "*name* *rule*, got shape *shape*" and returns -1. */
int py_attention_wrong(PyObject *type, const char *name, const char *rule,
                       const py_array *array);

/* Returns -1 with ValueError where an array that is written overlaps another or itself.
 */
int py_attention_check_overlap(const py_attention_call *call);

#endif
