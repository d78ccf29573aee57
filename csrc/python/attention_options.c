/* The options of one attention call, and the gradients of those that have one. */
#include "attention_call.h"

#include <stdio.h>
#include <string.h>

/* ---- Terms: mask, bias and its gradient ------------------------------------------ */

/* Strides with which an array broadcasts to the scores. */
static int
broadcast(const py_attention_call *call, const py_array *array, const char *name,
          int64_t stride[4])
{
    static const char *const words[] = {"batch", "heads", "queries", "keys"};
    const tfast_attention_args *args = &call->args;
    const int64_t scores[] = {args->batch, args->heads, args->n_q, args->n_k};
    const int missing = 4 - array->ndim;

    if (missing < 0) {
        return py_attention_wrong(PyExc_ValueError, name,
                                  "must have at most 4 dimensions", array);
    }
    for (int d = 0; d < 4; d++) {
        const int64_t size = d < missing ? 1 : array->shape[d - missing];

        if (size != 1 && size != scores[d]) {
            char rule[120];

            snprintf(rule, sizeof rule,
                     "must broadcast to the scores: 1 or %lld (%s) in dimension %d",
                     (long long)scores[d], words[d], d - 4);
            return py_attention_wrong(PyExc_ValueError, name, rule, array);
        }
        stride[d] = size == 1 ? 0 : array->strides[d - missing];
    }
    return 0;
}

static int
take_terms(py_attention_call *call)
{
    const struct {
        PyObject *object;
        const char *name;
        int how;
        tfast_attention_term *term;
    } wanted[] = {
        {call->given.mask, "mask", PY_OR_BOOL, &call->args.mask},
        {call->given.bias, "bias", 0, &call->args.bias},
    };

    for (int i = 0; i < 2; i++) {
        const py_array *array;

        if (!py_is_given(wanted[i].object)) {
            continue;
        }
        array =
            py_attention_borrow(call, wanted[i].object, wanted[i].name, wanted[i].how);
        if (array == NULL ||
            broadcast(call, array, wanted[i].name, wanted[i].term->stride) < 0) {
            return -1;
        }
        wanted[i].term->data = array->data;
        wanted[i].term->dtype = (uint8_t)array->dtype;
    }
    return 0;
}

/* What an option's gradient is checked against. */
static const py_array *
option_named(const py_attention_call *call, const char *name)
{
    for (int i = 0; i < call->n; i++) {
        if (strcmp(call->names[i], name) == 0) {
            return &call->arrays[i];
        }
    }
    return NULL;
}

/* ---- Numbers for heads: ALiBi slopes, sinks, and their gradients ----------------- */

/* A dense array [heads], or [batch or 1, heads] with `per_item`. */
static int
take_per_head(py_attention_call *call, PyObject *object, const char *name, int how,
              bool per_item, const void **data, int64_t *batch)
{
    const int64_t heads = call->args.heads;
    const py_array *array;
    bool fits;

    if (!py_is_given(object)) {
        return 0;
    }
    array = py_attention_borrow(call, object, name, how);
    if (array == NULL ||
        py_attention_check_dtype(array, name, py_attention_lse_dtype(call)) < 0) {
        return -1;
    }
    fits = array->ndim == 1 && array->shape[0] == heads;
    if (per_item && array->ndim == 2) {
        fits = array->shape[1] == heads &&
               (array->shape[0] == 1 || array->shape[0] == call->args.batch);
    }
    if (!fits) {
        char rule[80];

        snprintf(rule, sizeof rule,
                 per_item ? "must have q's %lld heads, or [batch, heads]"
                          : "must have q's %lld heads",
                 (long long)heads);
        return py_attention_wrong(PyExc_ValueError, name, rule, array);
    }
    if (array->numel > 0 &&
        ((heads > 1 && array->strides[array->ndim - 1] != 1) ||
         (array->ndim == 2 && array->shape[0] > 1 && array->strides[0] != heads))) {
        return py_attention_wrong(PyExc_NotImplementedError, name,
                                  "must be dense, in C order", array);
    }
    *batch = array->ndim == 2 && array->shape[0] != 1 ? heads : 0;
    *data = array->data;
    return 0;
}

int
py_attention_take_options(py_attention_call *call)
{
    tfast_attention_args *args = &call->args;
    const py_attention_given *given = &call->given;
    int64_t unused;

    if (take_terms(call) < 0 ||
        take_per_head(call, given->alibi_slopes, "alibi_slopes", 0, true,
                      &args->alibi_slopes, &args->alibi_batch) < 0 ||
        take_per_head(call, given->sinks, "sinks", 0, false, &args->sinks, &unused) <
            0) {
        return -1;
    }
    if (py_is_given(given->seed)) {
        py_array *array = &call->arrays[call->n];
        void *seed;

        if (py_borrow_scalar(call->state, given->seed, "seed", PY_INT64, args->device,
                             false, array, &seed) < 0) {
            return -1;
        }
        call->names[call->n] = "seed";
        call->written[call->n++] = false;
        args->seed_at = seed;
    }
    return 0;
}

/* ---- Gradients of options ------------------------------------------------------ */

/* The gradient of an option; it needs the option, and has its shape. */
static int
take_option_gradient(py_attention_call *call, PyObject *object, const char *name,
                     const char *option, const py_array **taken)
{
    const py_array *input = option_named(call, option), *array;

    if (!py_is_given(object)) {
        return 0;
    }
    if (input == NULL) {
        return py_argument_error(PyExc_ValueError, (py_argument){name, -1},
                                 "must be None without %s", option);
    }
    array = py_attention_borrow(call, object, name, PY_WRITE);
    if (array == NULL ||
        py_attention_check_dtype(array, name, py_attention_lse_dtype(call)) < 0 ||
        py_attention_check_shape(array, name, input->ndim, input->shape) < 0) {
        return -1;
    }
    *taken = array;
    return 0;
}

int
py_attention_take_option_gradients(py_attention_call *call)
{
    tfast_attention_args *args = &call->args;
    const py_attention_given *given = &call->given;
    const py_array *dbias = NULL, *dalibi = NULL, *dsinks = NULL;

    if (take_option_gradient(call, given->dbias, "dbias", "bias", &dbias) < 0 ||
        take_option_gradient(call, given->dalibi, "dalibi", "alibi_slopes", &dalibi) <
            0 ||
        take_option_gradient(call, given->dsinks, "dsinks", "sinks", &dsinks) < 0) {
        return -1;
    }
    if (dbias != NULL) {
        if (broadcast(call, dbias, "dbias", args->dbias_stride) < 0) {
            return -1;
        }
        /* without elements it may have strides of 0, as if it were broadcast */
        args->dbias = dbias->numel == 0 ? NULL : dbias->data;
    }
    if ((dalibi != NULL &&
         !py_same_layout(dalibi, option_named(call, "alibi_slopes"))) ||
        (dsinks != NULL && dsinks->shape[0] > 1 && dsinks->strides[0] != 1)) {
        PyErr_SetString(PyExc_ValueError,
                        "dalibi and dsinks must be dense, in C order");
        return -1;
    }
    args->dalibi = dalibi == NULL ? NULL : dalibi->data;
    args->dsinks = dsinks == NULL ? NULL : dsinks->data;
    return 0;
}
