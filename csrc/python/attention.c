/* _core.attention and _core.attention_backward. */
#include "attention.h"

#include <math.h>

/* ---- Parameters ------------------------------------------------------------------ */

#define AT(field) PY_AT(py_attention_call, field)
#define ARRAY(name_, dtype_) .name = name_, .kind = PY_ARRAY, .dtype = dtype_
#define OUTPUT(name_, dtype_) ARRAY(name_, dtype_), .written = true
#define NUMBER(kind_, name_, field)                                                    \
    {                                                                                  \
        .name = name_, .kind = kind_, .at = AT(field)                                  \
    }

static const py_parameter parameters[N_PARAMETERS] = {
    [Q] = {ARRAY("q", PY_FLOATS), .required = true},
    [K] = {ARRAY("k", PY_FIRSTS), .required = true},
    [V] = {ARRAY("v", PY_FIRSTS), .required = true},
    [OUT] = {ARRAY("out", PY_FIRSTS)},       /* out and lse: written only by */
    [LSE] = {ARRAY("lse", PY_ACCUMULATORS)}, /* the forward pass */
    [DOUT] = {ARRAY("dout", PY_FIRSTS)},
    [DLSE] = {ARRAY("dlse", PY_ACCUMULATORS)},
    [DQ] = {OUTPUT("dq", PY_FIRSTS)},
    [DK] = {OUTPUT("dk", PY_FIRSTS)},
    [DV] = {OUTPUT("dv", PY_FIRSTS)},
    [DBIAS] = {OUTPUT("dbias", PY_ACCUMULATORS)},
    [DALIBI] = {OUTPUT("dalibi", PY_ACCUMULATORS)},
    [DSINKS] = {OUTPUT("dsinks", PY_ACCUMULATORS)},
    [CU_SEQLENS_Q] = {ARRAY("cu_seqlens_q", PY_EXACTLY(PY_INT64))},
    [CU_SEQLENS_K] = {ARRAY("cu_seqlens_k", PY_EXACTLY(PY_INT64))},
    [KV_LENS] = {ARRAY("kv_lens", PY_EXACTLY(PY_INT64))},
    [MASK] = {ARRAY("mask", PY_FLOATS_OR_BOOL)},
    [BIAS] = {ARRAY("bias", PY_FLOATS)},
    [ALIBI_SLOPES] = {ARRAY("alibi_slopes", PY_ACCUMULATORS)},
    [SINKS] = {ARRAY("sinks", PY_ACCUMULATORS)},
    [SEED] = {.name = "seed",
              .kind = PY_INTEGER,
              .at = AT(args.seed),
              .dtype = PY_EXACTLY(PY_INT64),
              .scalar_at = AT(args.seed_at)},
    [SCALE] = NUMBER(PY_REAL, "scale", args.scale),
    [IS_CAUSAL] = NUMBER(PY_FLAG, "is_causal", args.is_causal),
    [SCRATCH] = {.name = "scratch", .kind = PY_OBJECT},
    [STREAM] = NUMBER(PY_STREAM, "stream", args.stream),
    [BOTTOM_RIGHT] = NUMBER(PY_FLAG, "bottom_right", args.bottom_right),
    [WINDOW_LEFT] = NUMBER(PY_INTEGER, "window_left", args.window_left),
    [WINDOW_RIGHT] = NUMBER(PY_INTEGER, "window_right", args.window_right),
    [SOFTCAP] = NUMBER(PY_REAL, "softcap", args.softcap),
    [DROPOUT_P] = NUMBER(PY_REAL, "dropout_p", args.dropout_p),
    [MAX_SEQLEN_Q] = NUMBER(PY_INTEGER, "max_seqlen_q", args.n_q),
    [MAX_SEQLEN_K] = NUMBER(PY_INTEGER, "max_seqlen_k", args.n_k),
    [BNHD] = NUMBER(PY_FLAG, "bnhd", bnhd),
};

static const uint8_t forward_order[] = {Q, K, V, OUT, LSE};
static const uint8_t backward_order[] = {DOUT, Q,  K,  V,     OUT,    LSE,   DLSE,
                                         DQ,   DK, DV, DBIAS, DALIBI, DSINKS};
static const py_operation forward = {.name = "attention",
                                     .parameters = parameters,
                                     .n_parameters = N_PARAMETERS,
                                     .order = forward_order,
                                     .n_order = sizeof forward_order,
                                     .all = true};
static const py_operation backward = {.name = "attention_backward",
                                      .parameters = parameters,
                                      .n_parameters = N_PARAMETERS,
                                      .order = backward_order,
                                      .n_order = sizeof backward_order,
                                      .all = true};

/* ---- The call -------------------------------------------------------------------- */

/* Checks which arrays are given together, and chooses the order of dimensions. */
static int
check_given(py_attention_call *a)
{
    PyObject *const *given = a->call.given;
    const bool packed = given[CU_SEQLENS_Q] != NULL;

    if (packed != (given[CU_SEQLENS_K] != NULL)) {
        PyErr_SetString(PyExc_ValueError,
                        "cu_seqlens_q and cu_seqlens_k must be given together");
        return -1;
    }
    if (given[OUT] == NULL && !a->backward) {
        PyErr_SetString(PyExc_TypeError, "out must be an array, got None");
        return -1;
    }
    if (a->backward &&
        (given[DOUT] == NULL || given[OUT] == NULL || given[LSE] == NULL)) {
        PyErr_SetString(PyExc_TypeError, "dout, out and lse must be arrays, got None");
        return -1;
    }
    a->at = packed    ? (py_attention_layout){3, -1, 1, 0}
            : a->bnhd ? (py_attention_layout){4, 0, 2, 1}
                      : (py_attention_layout){4, 0, 1, 2};
    return 0;
}

static int
take_scratch(py_attention_call *a)
{
    int64_t bytes;
    const tfast_status status = tfast_attention_scratch(&bytes, &a->args, a->backward);

    return py_take_scratch(&a->call, a->call.given[SCRATCH], status, bytes,
                           &a->args.scratch, &a->args.scratch_bytes);
}

/* Borrows and checks the arrays of a parsed call, and runs it. */
static PyObject *
run(py_attention_call *a)
{
    tfast_status status = TFAST_OK;
    const bool ready = check_given(a) == 0 && py_borrow_arrays(&a->call, a) == 0 &&
                       py_attention_take_arrays(a) == 0 &&
                       py_check_overlap(&a->call) == 0 && take_scratch(a) == 0;

    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        status = a->backward ? tfast_attention_backward(&a->args)
                             : tfast_attention(&a->args);
        Py_END_ALLOW_THREADS
    }
    py_release_arrays(&a->call);
    return ready ? py_result(status) : NULL;
}

/* Sets the defaults. scale has none: the core refuses NaN, so it must be given. */
static void
begin(py_attention_call *a, PyObject *module, bool is_backward)
{
    a->args =
        (tfast_attention_args){.scale = NAN, .window_left = -1, .window_right = -1};
    a->bnhd = false;
    a->backward = is_backward;
    a->call.state = PyModule_GetState(module);
}

PyObject *
py_attention(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    py_attention_call a;

    begin(&a, module, false);
    if (py_parse(&a.call, &forward, &a, args, n, names) < 0) {
        return NULL;
    }
    a.call.written = (uint64_t)1 << OUT | (uint64_t)1 << LSE;
    return run(&a);
}

PyObject *
py_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t n,
                      PyObject *names)
{
    py_attention_call a;

    begin(&a, module, true);
    return py_parse(&a.call, &backward, &a, args, n, names) < 0 ? NULL : run(&a);
}
