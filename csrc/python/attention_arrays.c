/* The arrays of one attention call: borrowed, and checked against one another. */
#include "attention_call.h"

#include <stdio.h>
#include <string.h>

/* ---- Rows: q, k, v, out and their gradients -------------------------------------- */

/* Which dimensions of an array are batch (-1: none), head and row. */
typedef struct {
    int ndim, batch, head, row;
} layout;

static layout
layout_of(const py_attention_call *call)
{
    if (py_is_given(call->given.cu_seqlens_q)) {
        return (layout){3, -1, 1, 0};
    }
    return call->given.bnhd ? (layout){4, 0, 2, 1} : (layout){4, 0, 1, 2};
}

/* Strides for the kernels. A dimension of size 1 may have any stride, which they must
 * not see: it becomes 0. */
static int
fill_rows(const py_array *array, const char *name, layout at,
          tfast_attention_rows *rows)
{
    const int last = at.ndim - 1;
    int64_t strides[4];

    for (int d = 0; d < at.ndim; d++) {
        strides[d] = array->shape[d] > 1 ? array->strides[d] : 0;
        if (strides[d] < 0 && array->numel > 0) {
            return py_attention_wrong(PyExc_NotImplementedError, name,
                                      "must have no negative strides", array);
        }
    }
    if (array->shape[last] > 1 && strides[last] != 1 && array->numel > 0) {
        return py_attention_wrong(PyExc_NotImplementedError, name,
                                  "must have stride 1 in its last dimension", array);
    }
    rows->data = array->data;
    rows->batch = at.batch < 0 ? 0 : strides[at.batch];
    rows->head = strides[at.head];
    rows->row = strides[at.row];
    return 0;
}

/* q, k or v, of which only the number of dimensions and the dtype are known. */
static const py_array *
take_input(py_attention_call *call, PyObject *object, const char *name,
           tfast_attention_rows *rows)
{
    const layout at = layout_of(call);
    const py_array *array = py_attention_borrow(call, object, name, 0);

    if (array == NULL ||
        py_attention_check_dtype(array, name, call->arrays[0].dtype) < 0) {
        return NULL;
    }
    if (array->ndim != at.ndim) {
        py_attention_wrong(
            PyExc_ValueError, name,
            at.ndim == 3 ? "must have dimensions [rows, heads, dim] with cu_seqlens"
            : call->given.bnhd ? "must have dimensions [batch, rows, heads, dim]"
                               : "must have dimensions [batch, heads, rows, dim]",
            array);
        return NULL;
    }
    return fill_rows(array, name, at, rows) < 0 ? NULL : array;
}

/* An array whose shape is that of q or k, but for the last dimension. */
static int
take_like(py_attention_call *call, PyObject *object, const char *name, int how,
          const py_array *like, int64_t dim, tfast_attention_rows *rows)
{
    const layout at = layout_of(call);
    const py_array *array;
    int64_t shape[4];

    if (!py_is_given(object)) {
        return 0;
    }
    array = py_attention_borrow(call, object, name, how);
    memcpy(shape, like->shape, (size_t)at.ndim * sizeof *shape);
    shape[at.ndim - 1] = dim;
    if (array == NULL || py_attention_check_dtype(array, name, call->args.dtype) < 0 ||
        py_attention_check_shape(array, name, at.ndim, shape) < 0) {
        return -1;
    }
    return fill_rows(array, name, at, rows);
}

static int
agree(const char *name, const char *what, int64_t want, const py_array *array, int d)
{
    char rule[80];

    if (array->shape[d] == want) {
        return 0;
    }
    snprintf(rule, sizeof rule, "must have %s of %lld in dimension %d", what,
             (long long)want, d);
    return py_attention_wrong(PyExc_ValueError, name, rule, array);
}

static int
check_sizes(const py_array *q, const py_array *k, const py_array *v, layout at)
{
    const int dim = at.ndim - 1;
    const int64_t heads = q->shape[at.head], kv_heads = k->shape[at.head];

    if (at.batch >= 0 && (agree("k", "q's batch", q->shape[0], k, 0) < 0 ||
                          agree("v", "q's batch", q->shape[0], v, 0) < 0)) {
        return -1;
    }
    if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
        char rule[80];

        snprintf(rule, sizeof rule, "must have heads that divide q's %lld",
                 (long long)heads);
        return py_attention_wrong(PyExc_ValueError, "k", rule, k);
    }
    if (agree("k", "q's dim", q->shape[dim], k, dim) < 0 ||
        agree("v", "k's heads", kv_heads, v, at.head) < 0 ||
        agree("v", "k's rows", k->shape[at.row], v, at.row) < 0) {
        return -1;
    }
    return 0;
}

static int
take_inputs(py_attention_call *call)
{
    tfast_attention_args *args = &call->args;
    const layout at = layout_of(call);
    const py_array *q, *k, *v;

    q = take_input(call, call->given.q, "q", &args->q);
    if (q == NULL) {
        return -1;
    }
    k = take_input(call, call->given.k, "k", &args->k);
    v = k == NULL ? NULL : take_input(call, call->given.v, "v", &args->v);
    if (v == NULL || check_sizes(q, k, v, at) < 0) {
        return -1;
    }
    args->device = q->device;
    args->dtype = (uint8_t)q->dtype;
    args->heads = q->shape[at.head];
    args->kv_heads = k->shape[at.head];
    args->dim = q->shape[at.ndim - 1];
    args->dim_v = v->shape[at.ndim - 1];
    if (at.batch >= 0) {
        args->batch = q->shape[at.batch];
        args->n_q = q->shape[at.row];
        args->n_k = k->shape[at.row];
    } else {
        args->total_q = q->shape[at.row];
        args->total_k = k->shape[at.row];
    }
    return 0;
}

/* ---- Lengths --------------------------------------------------------------------- */

/* An int64 array [n], or [any] for n < 0. */
static const py_array *
take_lengths(py_attention_call *call, PyObject *object, const char *name, int64_t n)
{
    const py_array *array = py_attention_borrow(call, object, name, PY_ONLY_INT64);
    const int64_t shape[] = {
        n < 0 && array != NULL && array->ndim == 1 ? array->shape[0] : n};

    if (array == NULL) {
        return NULL;
    }
    if (n < 0 && (array->ndim != 1 || array->shape[0] == 0)) {
        py_attention_wrong(PyExc_ValueError, name,
                           "must have one dimension of batch + 1 lengths", array);
        return NULL;
    }
    if (py_attention_check_shape(array, name, 1, shape) < 0) {
        return NULL;
    }
    if (array->shape[0] > 1 && array->strides[0] != 1) {
        py_attention_wrong(PyExc_NotImplementedError, name, "must be dense", array);
        return NULL;
    }
    return array;
}

/* The longest item, in *longest unless the caller knows it, which it must where the
 * lengths are on a GPU. Lengths are checked in the core: here they only must not
 * overflow. */
static int
find_longest(const py_array *cu_seqlens, const char *name, int64_t *longest)
{
    const int64_t *at = cu_seqlens->data;
    int64_t found = 0;

    if (cu_seqlens->device.type != TFAST_CPU) {
        if (*longest <= 0) {
            return py_argument_error(PyExc_ValueError, (py_argument){name, -1},
                                     "must be > 0 for cu_seqlens on a GPU, got %lld",
                                     (long long)*longest);
        }
        return 0;
    }
    for (int64_t b = 0; b + 1 < cu_seqlens->shape[0]; b++) {
        const int64_t length = (int64_t)((uint64_t)at[b + 1] - (uint64_t)at[b]);
        found = length > found ? length : found;
    }
    if (*longest == 0) {
        *longest = found;
    }
    if (*longest < found) {
        return py_argument_error(PyExc_ValueError, (py_argument){name, -1},
                                 "must be at least the longest item's %lld, got %lld",
                                 (long long)found, (long long)*longest);
    }
    return 0;
}

static int
take_cu_seqlens(py_attention_call *call)
{
    tfast_attention_args *args = &call->args;
    const py_array *q, *k;

    if (!py_is_given(call->given.cu_seqlens_q)) {
        return 0;
    }
    q = take_lengths(call, call->given.cu_seqlens_q, "cu_seqlens_q", -1);
    if (q == NULL) {
        return -1;
    }
    k = take_lengths(call, call->given.cu_seqlens_k, "cu_seqlens_k", q->shape[0]);
    if (k == NULL || find_longest(q, "max_seqlen_q", &args->n_q) < 0 ||
        find_longest(k, "max_seqlen_k", &args->n_k) < 0) {
        return -1;
    }
    args->batch = q->shape[0] - 1;
    args->cu_seqlens_q = q->data;
    args->cu_seqlens_k = k->data;
    return 0;
}

static int
take_kv_lens(py_attention_call *call)
{
    const py_array *array;

    if (!py_is_given(call->given.kv_lens) || call->args.batch == 0) {
        return 0;
    }
    array = take_lengths(call, call->given.kv_lens, "kv_lens", call->args.batch);
    call->args.kv_lens = array == NULL ? NULL : array->data;
    return array == NULL ? -1 : 0;
}

/* ---- Results --------------------------------------------------------------------- */

static int
take_lse(py_attention_call *call, PyObject *object, const char *name, int how,
         const py_array **taken)
{
    const tfast_attention_args *args = &call->args;
    const int64_t whole[] = {args->batch, args->heads, args->n_q};
    const int64_t packed[] = {args->heads, args->total_q};
    const int ndim = args->cu_seqlens_q == NULL ? 3 : 2;
    const py_array *array;

    if (!py_is_given(object)) {
        return 0;
    }
    array = py_attention_borrow(call, object, name, how);
    if (array == NULL ||
        py_attention_check_dtype(array, name, py_attention_lse_dtype(call)) < 0 ||
        py_attention_check_shape(array, name, ndim, ndim == 3 ? whole : packed) < 0) {
        return -1;
    }
    for (int d = 0; d < ndim; d++) {
        if (array->numel > 0 && array->shape[d] > 1 &&
            (d == ndim - 1 ? array->strides[d] != 1 : array->strides[d] < 0)) {
            return py_attention_wrong(PyExc_NotImplementedError, name,
                                      "must have stride 1 in its last dimension",
                                      array);
        }
    }
    *taken = array;
    return 0;
}

static int
take_lses(py_attention_call *call)
{
    tfast_attention_args *args = &call->args;
    const py_array *lse = NULL, *dlse = NULL;

    if (take_lse(call, call->given.lse, "lse", call->backward ? 0 : PY_WRITE, &lse) <
            0 ||
        take_lse(call, call->given.dlse, "dlse", 0, &dlse) < 0) {
        return -1;
    }
    if (lse == NULL) {
        return 0;
    }
    if (dlse != NULL && !py_same_layout(lse, dlse)) {
        return py_attention_wrong(PyExc_NotImplementedError, "dlse",
                                  "must have lse's strides", dlse);
    }
    args->lse = lse->data;
    args->dlse = dlse == NULL ? NULL : dlse->data;
    args->lse_batch = lse->ndim == 3 && lse->shape[0] > 1 ? lse->strides[0] : 0;
    args->lse_head = lse->shape[lse->ndim - 2] > 1 ? lse->strides[lse->ndim - 2] : 0;
    return 0;
}

static int
take_forward(py_attention_call *call)
{
    return take_like(call, call->given.out, "out", PY_WRITE, &call->arrays[0],
                     call->args.dim_v, &call->args.out) < 0
               ? -1
               : take_lses(call);
}

static int
take_backward(py_attention_call *call)
{
    tfast_attention_args *args = &call->args;
    const py_attention_given *given = &call->given;
    const py_array *q = &call->arrays[0], *k = &call->arrays[1];

    if (!py_is_given(given->dout) || !py_is_given(given->out) ||
        !py_is_given(given->lse)) {
        PyErr_SetString(PyExc_TypeError, "dout, out and lse must be arrays, got None");
        return -1;
    }
    if (take_like(call, given->out, "out", 0, q, args->dim_v, &args->out) < 0 ||
        take_like(call, given->dout, "dout", 0, q, args->dim_v, &args->dout) < 0 ||
        take_lses(call) < 0 ||
        take_like(call, given->dq, "dq", PY_WRITE, q, args->dim, &args->dq) < 0 ||
        take_like(call, given->dk, "dk", PY_WRITE, k, args->dim, &args->dk) < 0 ||
        take_like(call, given->dv, "dv", PY_WRITE, k, args->dim_v, &args->dv) < 0) {
        return -1;
    }
    return py_attention_take_option_gradients(call);
}

/* A window that ends past every key is none. */
static int64_t
shorten_window(const tfast_attention_args *args, int64_t window)
{
    const bool packed = args->cu_seqlens_q != NULL;
    const int64_t n_q = packed ? args->total_q : args->n_q;
    const int64_t n_k = packed ? args->total_k : args->n_k;

    return window > n_q && window - n_q > n_k ? -1 : window;
}

int
py_attention_take(py_attention_call *call)
{
    tfast_attention_args *args = &call->args;

    if (py_is_given(call->given.cu_seqlens_q) !=
        py_is_given(call->given.cu_seqlens_k)) {
        PyErr_SetString(PyExc_ValueError,
                        "cu_seqlens_q and cu_seqlens_k must be given together");
        return -1;
    }
    if (take_inputs(call) < 0 || take_cu_seqlens(call) < 0 || take_kv_lens(call) < 0 ||
        py_attention_take_options(call) < 0 ||
        (call->backward ? take_backward(call) : take_forward(call)) < 0) {
        return -1;
    }
    args->window_left = shorten_window(args, args->window_left);
    args->window_right = shorten_window(args, args->window_right);
    return py_attention_check_overlap(call);
}

/* ---- Scratch --------------------------------------------------------------------- */

static int
check_scratch(const py_array *array, int64_t n)
{
    if (py_attention_check_dtype(array, "scratch's array", TFAST_F32) < 0 ||
        py_attention_check_shape(array, "scratch's array", 1, &n) < 0) {
        return -1;
    }
    if ((n > 1 && array->strides[0] != 1) ||
        (uintptr_t)array->data % TFAST_SCRATCH_ALIGNMENT != 0) {
        return py_attention_wrong(PyExc_ValueError, "scratch's array",
                                  "must be dense and aligned to 16 bytes", array);
    }
    return 0;
}

int
py_attention_take_scratch(py_attention_call *call)
{
    const py_array *array;
    int64_t bytes, n;
    const tfast_status status =
        tfast_attention_scratch(&bytes, &call->args, call->backward);

    if (status != TFAST_OK) {
        Py_XDECREF(py_result(status));
        return -1;
    }
    if (bytes == 0) {
        return 0;
    }
    if (!py_is_given(call->given.scratch)) {
        PyErr_SetString(PyExc_TypeError,
                        "scratch must be a function where the call needs memory, got "
                        "None");
        return -1;
    }
    n = (bytes + 3) / 4;
    call->scratch = PyObject_CallFunction(call->given.scratch, "L", (long long)n);
    if (call->scratch == NULL) {
        return -1;
    }
    array = py_attention_borrow(call, call->scratch, "scratch's array", PY_WRITE);
    if (array == NULL || check_scratch(array, n) < 0) {
        return -1;
    }
    call->args.scratch = array->data;
    call->args.scratch_bytes = 4 * n;
    return 0;
}

void
py_attention_release(py_attention_call *call)
{
    while (call->n > 0) {
        py_release(&call->arrays[--call->n]);
    }
    Py_CLEAR(call->scratch);
}
