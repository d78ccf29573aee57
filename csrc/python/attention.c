/* _core.attention and _core.attention_backward: any arrays. */
#include "attention_call.h"

#include <math.h>
#include <stdint.h>

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
    long long left = -1, right = -1, max_q = 0, max_k = 0;
    unsigned long long stream = 0;
    int is_causal = 0, bottom_right = 0, parsed;

    args->scale = NAN; /* refused unless it is given */
    parsed = none != NULL &&
             PyArg_ParseTupleAndKeywords(
                 none, kwargs, "|$dpOKOOOOpLLddOOOLLOp:attention", names, &args->scale,
                 &is_causal, &given->scratch, &stream, &given->mask, &given->bias,
                 &given->alibi_slopes, &given->sinks, &bottom_right, &left, &right,
                 &args->softcap, &args->dropout_p, &given->seed, &given->cu_seqlens_q,
                 &given->cu_seqlens_k, &max_q, &max_k, &given->kv_lens, &given->bnhd);
    Py_XDECREF(none);
    args->is_causal = is_causal != 0;
    args->bottom_right = bottom_right != 0;
    args->window_left = left;
    args->window_right = right;
    args->n_q = max_q;
    args->n_k = max_k;
    args->stream = (void *)(uintptr_t)stream;
    return parsed ? 0 : -1;
}

/* A Python integer, or an array of one on the device. */
static int
parse_seed(py_attention_call *call)
{
    PyObject *seed = call->given.seed;

    if (!py_is_given(seed) || !PyLong_Check(seed)) {
        return 0;
    }
    call->args.seed = PyLong_AsLongLong(seed);
    call->given.seed = NULL;
    if (call->args.seed == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "seed must fit into 64 bits with sign, got %S",
                     seed);
        return -1;
    }
    return 0;
}

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
