/* _core.attention and _core.attention_backward: any arrays. */
#include "attention_call.h"

#include <math.h>
#include <stdint.h>

/* ---- Numbers --------------------------------------------------------------------- */

/* In place of the error that Python's conversion left, which names no argument. Ctrl-C
 * and the like pass. */
static int
no_number(PyObject *object, const char *name, const char *what, const char *range)
{
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);

    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear();
    if (too_large) {
        PyErr_Format(PyExc_ValueError, "%s must fit into %s, got %S", name, range,
                     object);
    } else {
        PyErr_Format(PyExc_TypeError, "%s must be %s, got %R", name, what, object);
    }
    return -1;
}

/* Leaves *number where nothing is given. */
static int
take_number(PyObject *object, const char *name, double *number)
{
    if (object == NULL) {
        return 0;
    }
    *number = PyFloat_AsDouble(object);
    return *number == -1.0 && PyErr_Occurred()
               ? no_number(object, name, "a number", "float64")
               : 0;
}

static int
take_integer(PyObject *object, const char *name, int64_t *integer)
{
    if (object == NULL) {
        return 0;
    }
    *integer = PyLong_AsLongLong(object);
    return *integer == -1 && PyErr_Occurred()
               ? no_number(object, name, "an integer", "64 bits with sign")
               : 0;
}

static int
take_stream(PyObject *object, void **stream)
{
    PyObject *integer = object == NULL ? NULL : PyNumber_Index(object);
    unsigned long long number = 0;

    if (integer != NULL) {
        number = PyLong_AsUnsignedLongLong(integer);
        Py_DECREF(integer);
    }
    *stream = (void *)(uintptr_t)number;
    return object != NULL && PyErr_Occurred()
               ? no_number(object, "stream", "an integer", "64 bits without sign")
               : 0;
}

static int
parse_options(PyObject *kwargs, py_attention_call *call)
{
    /* What most calls give comes first: the search ends when all is found. */
    static char *names[] = {"scale",        "is_causal",    "scratch",
                            "stream",       "mask",         "bias",
                            "alibi_slopes", "sinks",        "bottom_right",
                            "window_left",  "window_right", "softcap",
                            "dropout_p",    "seed",         "cu_seqlens_q",
                            "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
                            "kv_lens",      "bnhd",         NULL};
    py_attention_given *given = &call->given;
    tfast_attention_args *args = &call->args;
    PyObject *none = PyTuple_New(0);
    PyObject *scale = NULL, *left = NULL, *right = NULL, *softcap = NULL;
    PyObject *dropout_p = NULL, *max_q = NULL, *max_k = NULL, *stream = NULL;
    int is_causal = 0, bottom_right = 0, parsed;

    parsed = none != NULL &&
             PyArg_ParseTupleAndKeywords(
                 none, kwargs, "|$OpOOOOOOpOOOOOOOOOOp:attention", names, &scale,
                 &is_causal, &given->scratch, &stream, &given->mask, &given->bias,
                 &given->alibi_slopes, &given->sinks, &bottom_right, &left, &right,
                 &softcap, &dropout_p, &given->seed, &given->cu_seqlens_q,
                 &given->cu_seqlens_k, &max_q, &max_k, &given->kv_lens, &given->bnhd);
    Py_XDECREF(none);
    args->scale = NAN; /* refused unless it is given */
    args->window_left = args->window_right = -1;
    if (!parsed || take_number(scale, "scale", &args->scale) < 0 ||
        take_number(softcap, "softcap", &args->softcap) < 0 ||
        take_number(dropout_p, "dropout_p", &args->dropout_p) < 0 ||
        take_stream(stream, &args->stream) < 0 ||
        take_integer(left, "window_left", &args->window_left) < 0 ||
        take_integer(right, "window_right", &args->window_right) < 0 ||
        take_integer(max_q, "max_seqlen_q", &args->n_q) < 0 ||
        take_integer(max_k, "max_seqlen_k", &args->n_k) < 0) {
        return -1;
    }
    args->is_causal = is_causal != 0;
    args->bottom_right = bottom_right != 0;
    return 0;
}

/* A Python integer, or an array of one on the device. */
static int
parse_seed(py_attention_call *call)
{
    PyObject *seed = call->given.seed;

    if (!py_is_given(seed) || !PyLong_Check(seed)) {
        return 0;
    }
    call->given.seed = NULL;
    return take_integer(seed, "seed", &call->args.seed);
}

/* ---- Calls ----------------------------------------------------------------------- */

static PyObject *
run(py_attention_call *call)
{
    tfast_status status = TFAST_OK;
    const bool ready =
        py_attention_take(call) == 0 && py_attention_take_scratch(call) == 0;

    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        status = call->backward ? tfast_attention_backward(&call->args)
                                : tfast_attention(&call->args);
        Py_END_ALLOW_THREADS
    }
    py_attention_release(call);
    return ready ? py_result(status) : NULL;
}

PyObject *
py_attention(PyObject *module, PyObject *args, PyObject *kwargs)
{
    py_attention_call call;
    py_attention_given *given = &call.given;

    call.state = PyModule_GetState(module);
    call.given = (py_attention_given){NULL};
    call.args = (tfast_attention_args){.lse = NULL};
    call.backward = false;
    call.scratch = NULL;
    call.n = 0;
    if (!PyArg_ParseTuple(args, "OOOOO:attention", &given->q, &given->k, &given->v,
                          &given->out, &given->lse) ||
        parse_options(kwargs, &call) < 0 || parse_seed(&call) < 0) {
        return NULL;
    }
    return run(&call);
}

PyObject *
py_attention_backward(PyObject *module, PyObject *args, PyObject *kwargs)
{
    py_attention_call call;
    py_attention_given *given = &call.given;

    call.state = PyModule_GetState(module);
    call.given = (py_attention_given){NULL};
    call.args = (tfast_attention_args){.lse = NULL};
    call.backward = true;
    call.scratch = NULL;
    call.n = 0;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOOO:attention_backward", &given->dout,
                          &given->q, &given->k, &given->v, &given->out, &given->lse,
                          &given->dlse, &given->dq, &given->dk, &given->dv,
                          &given->dbias, &given->dalibi, &given->dsinks) ||
        parse_options(kwargs, &call) < 0 || parse_seed(&call) < 0) {
        return NULL;
    }
    return run(&call);
}
