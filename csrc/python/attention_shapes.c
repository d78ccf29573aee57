/* Checks the arrays of an attention call and fills the core's args struct. */
#include "attention.h"

#include <stdio.h>
#include <string.h>

/* ---- Shapes and strides ---------------------------------------------------------- */

static const char *
name_of(const py_attention_call *a, int p)
{
    return a->call.operation->parameters[p].name;
}

/* Sets an exception "*name* *rule*, got shape *shape*" and returns -1. */
static int
shape_error(const py_attention_call *a, int p, PyObject *type, const char *rule)
{
    return py_shape_error(type, name_of(a, p), a->call.found[p], "%s", rule);
}

static int
check_shape(const py_attention_call *a, int p, int ndim, const int64_t *want)
{
    const py_array *array = a->call.found[p];
    char text[PY_SHAPE_TEXT], rule[PY_SHAPE_TEXT + 32];

    if (array->ndim == ndim &&
        memcmp(array->shape, want, (size_t)ndim * sizeof *want) == 0) {
        return 0;
    }
    py_shape_text(ndim, want, text, sizeof text);
    snprintf(rule, sizeof rule, "must have shape %s", text);
    return shape_error(a, p, PyExc_ValueError, rule);
}

/* Fills the address and the strides for the kernels. A dimension of size 1 may have any
 * stride, even a negative one; the kernels get 0 for it. */
static int
fill_rows(const py_attention_call *a, int p, tfast_attention_rows *rows)
{
    const py_array *array = a->call.found[p];
    const py_attention_layout at = a->at;
    const int last = at.ndim - 1;
    int64_t strides[4];

    for (int d = 0; d < at.ndim; d++) {
        strides[d] = array->shape[d] > 1 ? array->strides[d] : 0;
        if (strides[d] < 0 && array->numel > 0) {
            return shape_error(a, p, PyExc_NotImplementedError,
                               "must have no negative strides");
        }
    }
    if (array->shape[last] > 1 && strides[last] != 1 && array->numel > 0) {
        return shape_error(a, p, PyExc_NotImplementedError,
                           "must have stride 1 in its last dimension");
    }
    rows->data = array->data;
    rows->batch = at.batch < 0 ? 0 : strides[at.batch];
    rows->head = strides[at.head];
    rows->row = strides[at.row];
    return 0;
}

/* Takes q, k or v; only their number of dimensions is checked here. */
static int
take_input(const py_attention_call *a, int p, tfast_attention_rows *rows)
{
    const py_array *array = a->call.found[p];

    if (array->ndim != a->at.ndim) {
        return shape_error(
            a, p, PyExc_ValueError,
            a->at.ndim == 3 ? "must have dimensions [rows, heads, dim] with cu_seqlens"
            : a->bnhd       ? "must have dimensions [batch, rows, heads, dim]"
                            : "must have dimensions [batch, heads, rows, dim]");
    }
    return fill_rows(a, p, rows);
}

/* Takes an optional array of the shape of `like`, with `dim` as its last dimension. */
static int
take_like(const py_attention_call *a, int p, int like, int64_t dim,
          tfast_attention_rows *rows)
{
    const py_array *array = a->call.found[p];
    int64_t shape[4];

    if (array == NULL) {
        return 0;
    }
    memcpy(shape, a->call.found[like]->shape, (size_t)a->at.ndim * sizeof *shape);
    shape[a->at.ndim - 1] = dim;
    return check_shape(a, p, a->at.ndim, shape) < 0 ? -1 : fill_rows(a, p, rows);
}

static int
agree(const py_attention_call *a, int p, int d, const char *what, int64_t want)
{
    const py_array *array = a->call.found[p];
    char rule[80];

    if (array->shape[d] == want) {
        return 0;
    }
    snprintf(rule, sizeof rule, "must have %s of %lld in dimension %d", what,
             (long long)want, d);
    return shape_error(a, p, PyExc_ValueError, rule);
}

static int
check_sizes(const py_attention_call *a)
{
    const py_array *q = a->call.found[Q], *k = a->call.found[K];
    const py_attention_layout at = a->at;
    const int dim = at.ndim - 1;
    const int64_t heads = q->shape[at.head], kv_heads = k->shape[at.head];
    char rule[80];

    if (at.batch >= 0 && (agree(a, K, 0, "q's batch", q->shape[0]) < 0 ||
                          agree(a, V, 0, "q's batch", q->shape[0]) < 0)) {
        return -1;
    }
    if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
        snprintf(rule, sizeof rule, "must have heads that divide q's %lld",
                 (long long)heads);
        return shape_error(a, K, PyExc_ValueError, rule);
    }
    if (agree(a, K, dim, "q's dim", q->shape[dim]) < 0 ||
        agree(a, V, at.head, "k's heads", kv_heads) < 0) {
        return -1;
    }
    return agree(a, V, at.row, "k's rows", k->shape[at.row]);
}

static int
take_inputs(py_attention_call *a)
{
    tfast_attention_args *args = &a->args;
    const py_array *q = a->call.found[Q], *k = a->call.found[K];
    const py_attention_layout at = a->at;

    if (take_input(a, Q, &args->q) < 0 || take_input(a, K, &args->k) < 0 ||
        take_input(a, V, &args->v) < 0 || check_sizes(a) < 0) {
        return -1;
    }
    args->device = q->device;
    args->dtype = (uint8_t)q->dtype;
    args->heads = q->shape[at.head];
    args->kv_heads = k->shape[at.head];
    args->dim = q->shape[at.ndim - 1];
    args->dim_v = a->call.found[V]->shape[at.ndim - 1];
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

/* Checks that cu_seqlens or kv_lens is a dense vector of n elements. */
static int
check_lengths(const py_attention_call *a, int p, int64_t n)
{
    if (check_shape(a, p, 1, &n) < 0) {
        return -1;
    }
    if (n > 1 && a->call.found[p]->strides[0] != 1) {
        return shape_error(a, p, PyExc_NotImplementedError, "must be dense");
    }
    return 0;
}

/* Sets *longest to the rows of the longest item, or checks the caller's value if it is
 * not 0. On a GPU the offsets cannot be read here, so the caller must pass it. The core
 * validates the offsets later; until then the difference of any two must not overflow,
 * hence unsigned. */
static int
find_longest(const py_array *cu_seqlens, const char *name, int64_t *longest)
{
    const int64_t *at = cu_seqlens->data;
    const py_argument argument = {name, -1};
    int64_t found = 0;

    if (cu_seqlens->device.type != TFAST_CPU) {
        return *longest > 0
                   ? 0
                   : py_argument_error(PyExc_ValueError, argument,
                                       "must be > 0 for cu_seqlens on a GPU, got %lld",
                                       (long long)*longest);
    }
    for (int64_t b = 0; b + 1 < cu_seqlens->shape[0]; b++) {
        const int64_t length = (int64_t)((uint64_t)at[b + 1] - (uint64_t)at[b]);
        found = length > found ? length : found;
    }
    if (*longest == 0) {
        *longest = found;
    }
    return *longest >= found
               ? 0
               : py_argument_error(PyExc_ValueError, argument,
                                   "must be at least the longest item's %lld, got %lld",
                                   (long long)found, (long long)*longest);
}

static int
take_lengths(py_attention_call *a)
{
    tfast_attention_args *args = &a->args;
    const py_array *q = a->call.found[CU_SEQLENS_Q], *k = a->call.found[CU_SEQLENS_K];
    const py_array *kv_lens = a->call.found[KV_LENS];

    if (q != NULL) {
        if (q->ndim != 1 || q->shape[0] == 0) {
            return shape_error(a, CU_SEQLENS_Q, PyExc_ValueError,
                               "must have one dimension of batch + 1 lengths");
        }
        if (check_lengths(a, CU_SEQLENS_Q, q->shape[0]) < 0 ||
            check_lengths(a, CU_SEQLENS_K, q->shape[0]) < 0 ||
            find_longest(q, "max_seqlen_q", &args->n_q) < 0 ||
            find_longest(k, "max_seqlen_k", &args->n_k) < 0) {
            return -1;
        }
        args->batch = q->shape[0] - 1;
        args->cu_seqlens_q = q->data;
        args->cu_seqlens_k = k->data;
    }
    if (kv_lens != NULL && args->batch > 0) {
        if (check_lengths(a, KV_LENS, args->batch) < 0) {
            return -1;
        }
        args->kv_lens = kv_lens->data;
    }
    return 0;
}

/* Returns -1, no limit, for a window > n_q + n_k, which reaches every key from every
 * query; otherwise returns `window`. The comparison with n_q + n_k is written so that
 * it cannot overflow. */
static int64_t
shorten_window(const tfast_attention_args *args, int64_t window)
{
    const bool packed = args->cu_seqlens_q != NULL;
    const int64_t n_q = packed ? args->total_q : args->n_q;
    const int64_t n_k = packed ? args->total_k : args->n_k;

    return window > n_q && window - n_q > n_k ? -1 : window;
}

/* ---- Options and their gradients ------------------------------------------------- */

/* Fills the strides with which an array broadcasts to [batch, heads, n_q, n_k]: 0 for
 * a missing dimension and for one of size 1. */
static int
broadcast(const py_attention_call *a, int p, int64_t stride[4])
{
    static const char *const words[] = {"batch", "heads", "queries", "keys"};
    const tfast_attention_args *args = &a->args;
    const py_array *array = a->call.found[p];
    const int64_t scores[] = {args->batch, args->heads, args->n_q, args->n_k};
    const int missing = 4 - array->ndim;
    char rule[120];

    if (missing < 0) {
        return shape_error(a, p, PyExc_ValueError, "must have at most 4 dimensions");
    }
    for (int d = 0; d < 4; d++) {
        const int64_t size = d < missing ? 1 : array->shape[d - missing];

        if (size != 1 && size != scores[d]) {
            snprintf(rule, sizeof rule,
                     "must broadcast to the scores: 1 or %lld (%s) in dimension %d",
                     (long long)scores[d], words[d], d - 4);
            return shape_error(a, p, PyExc_ValueError, rule);
        }
        stride[d] = size == 1 ? 0 : array->strides[d - missing];
    }
    return 0;
}

/* Takes the mask or the bias. */
static int
take_term(const py_attention_call *a, int p, tfast_attention_term *term)
{
    const py_array *array = a->call.found[p];

    if (array == NULL) {
        return 0;
    }
    term->data = array->data;
    term->dtype = (uint8_t)array->dtype;
    return broadcast(a, p, term->stride);
}

/* Takes sinks, dense [heads], or ALiBi slopes, dense [heads] or [batch or 1, heads].
 * *batch is the batch stride in elements, 0 where all items share the values. */
static int
take_per_head(const py_attention_call *a, int p, const void **data, int64_t *batch)
{
    const int64_t heads = a->args.heads;
    const py_array *array = a->call.found[p];
    bool fits;

    if (array == NULL) {
        return 0;
    }
    fits = array->ndim == 1 && array->shape[0] == heads;
    if (p == ALIBI_SLOPES && array->ndim == 2) {
        fits = array->shape[1] == heads &&
               (array->shape[0] == 1 || array->shape[0] == a->args.batch);
    }
    if (!fits) {
        char rule[80];

        snprintf(rule, sizeof rule,
                 p == ALIBI_SLOPES ? "must have q's %lld heads, or [batch, heads]"
                                   : "must have q's %lld heads",
                 (long long)heads);
        return shape_error(a, p, PyExc_ValueError, rule);
    }
    if (array->numel > 0 &&
        ((heads > 1 && array->strides[array->ndim - 1] != 1) ||
         (array->ndim == 2 && array->shape[0] > 1 && array->strides[0] != heads))) {
        return shape_error(a, p, PyExc_NotImplementedError,
                           "must be dense, in C order");
    }
    *batch = array->ndim == 2 && array->shape[0] != 1 ? heads : 0;
    *data = array->data;
    return 0;
}

static int
take_options(py_attention_call *a)
{
    tfast_attention_args *args = &a->args;
    int64_t unused;

    args->window_left = shorten_window(args, args->window_left);
    args->window_right = shorten_window(args, args->window_right);
    if (take_term(a, MASK, &args->mask) < 0 || take_term(a, BIAS, &args->bias) < 0 ||
        take_per_head(a, ALIBI_SLOPES, &args->alibi_slopes, &args->alibi_batch) < 0) {
        return -1;
    }
    return take_per_head(a, SINKS, &args->sinks, &unused);
}

/* A gradient of an option requires that option and must have its shape. */
static int
check_option_gradient(const py_attention_call *a, int p, int option)
{
    const py_array *array = a->call.found[p], *input = a->call.found[option];

    if (array == NULL) {
        return 0;
    }
    if (input == NULL) {
        return py_argument_error(PyExc_ValueError, (py_argument){name_of(a, p), -1},
                                 "must be None without %s", name_of(a, option));
    }
    return check_shape(a, p, input->ndim, input->shape);
}

static int
take_option_gradients(py_attention_call *a)
{
    tfast_attention_args *args = &a->args;
    const py_array *dbias = a->call.found[DBIAS], *dalibi = a->call.found[DALIBI];
    const py_array *dsinks = a->call.found[DSINKS];

    if (check_option_gradient(a, DBIAS, BIAS) < 0 ||
        check_option_gradient(a, DALIBI, ALIBI_SLOPES) < 0 ||
        check_option_gradient(a, DSINKS, SINKS) < 0) {
        return -1;
    }
    if (dbias != NULL) {
        if (broadcast(a, DBIAS, args->dbias_stride) < 0) {
            return -1;
        }
        /* strides of an empty array may be 0, which the core takes for broadcast */
        args->dbias = dbias->numel == 0 ? NULL : dbias->data;
    }
    if ((dalibi != NULL && !py_same_layout(dalibi, a->call.found[ALIBI_SLOPES])) ||
        (dsinks != NULL && dsinks->shape[0] > 1 && dsinks->strides[0] != 1)) {
        PyErr_SetString(PyExc_ValueError,
                        "dalibi and dsinks must be dense, in C order");
        return -1;
    }
    args->dalibi = dalibi == NULL ? NULL : dalibi->data;
    args->dsinks = dsinks == NULL ? NULL : dsinks->data;
    return 0;
}

/* ---- Results --------------------------------------------------------------------- */

/* Checks lse or dlse: [batch, heads, n_q], or [heads, total_q] with cu_seqlens. */
static int
check_lse(const py_attention_call *a, int p)
{
    const tfast_attention_args *args = &a->args;
    const int64_t whole[] = {args->batch, args->heads, args->n_q};
    const int64_t packed[] = {args->heads, args->total_q};
    const int ndim = args->cu_seqlens_q == NULL ? 3 : 2;
    const py_array *array = a->call.found[p];

    if (array == NULL) {
        return 0;
    }
    if (check_shape(a, p, ndim, ndim == 3 ? whole : packed) < 0) {
        return -1;
    }
    for (int d = 0; d < ndim; d++) {
        if (array->numel > 0 && array->shape[d] > 1 &&
            (d == ndim - 1 ? array->strides[d] != 1 : array->strides[d] < 0)) {
            return shape_error(a, p, PyExc_NotImplementedError,
                               "must have stride 1 in its last dimension");
        }
    }
    return 0;
}

static int
take_lse(py_attention_call *a)
{
    tfast_attention_args *args = &a->args;
    const py_array *lse = a->call.found[LSE], *dlse = a->call.found[DLSE];

    if (check_lse(a, LSE) < 0 || check_lse(a, DLSE) < 0) {
        return -1;
    }
    if (lse == NULL) {
        return 0;
    }
    if (dlse != NULL && !py_same_layout(lse, dlse)) {
        return shape_error(a, DLSE, PyExc_NotImplementedError,
                           "must have lse's strides");
    }
    args->lse = lse->data;
    args->dlse = dlse == NULL ? NULL : dlse->data;
    args->lse_batch = lse->ndim == 3 && lse->shape[0] > 1 ? lse->strides[0] : 0;
    args->lse_head = lse->shape[lse->ndim - 2] > 1 ? lse->strides[lse->ndim - 2] : 0;
    return 0;
}

static int
take_results(py_attention_call *a)
{
    tfast_attention_args *args = &a->args;

    if (take_like(a, OUT, Q, args->dim_v, &args->out) < 0 || take_lse(a) < 0) {
        return -1;
    }
    if (!a->backward) {
        return 0;
    }
    if (take_like(a, DOUT, Q, args->dim_v, &args->dout) < 0 ||
        take_like(a, DQ, Q, args->dim, &args->dq) < 0 ||
        take_like(a, DK, K, args->dim, &args->dk) < 0 ||
        take_like(a, DV, K, args->dim_v, &args->dv) < 0) {
        return -1;
    }
    return take_option_gradients(a);
}

/* take_inputs() comes first: it sets the sizes that the others check against. */
int
py_attention_take_arrays(py_attention_call *a)
{
    return take_inputs(a) < 0 || take_lengths(a) < 0 || take_options(a) < 0 ||
                   take_results(a) < 0
               ? -1
               : 0;
}
