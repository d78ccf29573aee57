#include "array.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void
py_argument_text(py_argument argument, char *text, size_t bytes)
{
    if (argument.index < 0) {
        snprintf(text, bytes, "%s", argument.name);
    } else {
        snprintf(text, bytes, "%s[%zd]", argument.name, argument.index);
    }
}

int
py_argument_error(PyObject *type, py_argument argument, const char *format, ...)
{
    char rule[384];
    va_list values;

    va_start(values, format);
    vsnprintf(rule, sizeof rule, format, values);
    va_end(values);
    if (argument.index < 0) {
        PyErr_Format(type, "%s %s", argument.name, rule);
    } else {
        PyErr_Format(type, "%s[%zd] %s", argument.name, argument.index, rule);
    }
    return -1;
}

int
py_shape_error(PyObject *type, const char *name, const py_array *array,
               const char *format, ...)
{
    char rule[256], shape[PY_SHAPE_TEXT];
    va_list values;

    va_start(values, format);
    vsnprintf(rule, sizeof rule, format, values);
    va_end(values);
    py_shape_text(array->ndim, array->shape, shape, sizeof shape);
    PyErr_Format(type, "%s %s, got shape %s", name, rule, shape);
    return -1;
}

/* ---- Dtypes ---------------------------------------------------------------------- */

static const struct {
    const char *name;
    int size; /* bytes */
} dtypes[PY_N_DTYPES] = {
    [TFAST_F32] = {"float32", 4},
    [TFAST_F64] = {"float64", 8},
    [TFAST_F16] = {"float16", 2},
    [TFAST_BF16] = {"bfloat16", 2},
    [TFAST_BOOL] = {"bool", 1},
    [PY_INT64] = {"int64", 8},
    [PY_INT32] = {"int32", 4},
    [PY_INT16] = {"int16", 2},
    [PY_INT8] = {"int8", 1},
    [PY_UINT64] = {"uint64", 8},
    [PY_UINT32] = {"uint32", 4},
    [PY_UINT16] = {"uint16", 2},
    [PY_UINT8] = {"uint8", 1},
    [PY_COMPLEX64] = {"complex64", 8},
    [PY_COMPLEX128] = {"complex128", 16},
    [PY_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1},
    [PY_FLOAT8_E5M2] = {"float8_e5m2", 1},
};

int64_t
py_dtype_size(int dtype)
{
    return dtypes[dtype].size;
}

const char *
py_dtype_name(int dtype)
{
    return dtypes[dtype].name;
}

int
py_dtype_error(py_argument argument, int how, const char *format, ...)
{
    char got[160];
    va_list values;

    va_start(values, format);
    vsnprintf(got, sizeof got, format, values);
    va_end(values);
    return py_argument_error(
        PyExc_NotImplementedError, argument, "must be %s, got %s",
        (how & PY_ONLY_INT64) != 0   ? "int64"
        : (how & PY_ONLY_INT32) != 0 ? "int32"
        : (how & PY_ANY_DTYPE) != 0  ? "of bool, an integer, a float or a complex dtype"
        : (how & PY_OR_BOOL) != 0    ? "bool, float64, float32, float16 or bfloat16"
        : (how & PY_OR_UINT8) != 0   ? "float64, float32, float16, bfloat16 or uint8"
                                     : "float64, float32, float16 or bfloat16",
        got);
}

/* ---- Layouts --------------------------------------------------------------------- */

bool
py_is_c_order(const py_array *array)
{
    int64_t expected = 1;
    bool c_order = true;

    for (int d = array->ndim - 1; d >= 0 && c_order; d--) {
        c_order = array->shape[d] == 1 || array->strides[d] == expected;
        expected *= array->shape[d];
    }
    return c_order || array->numel == 0;
}

bool
py_is_dense(const py_array *array)
{
    int64_t expected = 1;
    bool used[PY_MAX_DIMS] = {false};

    if (py_is_c_order(array)) {
        return true;
    }
    /* Any other order: each next stride must be the extent of the dimensions so far. */
    for (expected = 1; expected < array->numel;) {
        int d = 0;
        while (d < array->ndim &&
               (used[d] || array->shape[d] == 1 || array->strides[d] != expected)) {
            d++;
        }
        if (d == array->ndim) {
            return false;
        }
        used[d] = true;
        expected *= array->shape[d];
    }
    return true;
}

bool
py_same_shape(const py_array *a, const py_array *b)
{
    bool same = a->ndim == b->ndim;

    for (int d = 0; d < a->ndim && same; d++) {
        same = a->shape[d] == b->shape[d];
    }
    return same;
}

bool
py_same_layout(const py_array *a, const py_array *b)
{
    for (int d = 0; d < a->ndim; d++) {
        if (a->strides[d] != b->strides[d] && a->shape[d] != 1) {
            return a->numel == 0;
        }
    }
    return true;
}

void
py_shape_text(int ndim, const int64_t *shape, char *text, size_t bytes)
{
    size_t used = (size_t)snprintf(text, bytes, "(");

    for (int d = 0; d < ndim && used + 32 < bytes; d++) {
        used += (size_t)snprintf(text + used, bytes - used,
                                 d + 1 < ndim ? "%lld, " : "%lld", (long long)shape[d]);
    }
    snprintf(text + used, bytes - used, ndim == 1 ? ",)" : ")");
}

/* ---- Overlap: two strided arrays ------------------------------------------------- */

/* The dimensions of a strided array that have more than one element. Everything is in
 * bytes. Strides are made positive, because `first` is the lowest address. */
typedef struct {
    uintptr_t first, size; /* size: of one element */
    int ndim;
    uintptr_t strides[PY_MAX_DIMS], steps[PY_MAX_DIMS]; /* steps: shape - 1 */
} pattern;

static void
find_pattern(const py_span *span, pattern *found)
{
    const py_array *array = span->array;

    found->first = span->first;
    found->size = (uintptr_t)py_dtype_size(array->dtype);
    found->ndim = 0;
    for (int d = 0; d < array->ndim; d++) {
        const int64_t stride = array->strides[d];

        if (array->shape[d] > 1) {
            found->strides[found->ndim] =
                (uintptr_t)(stride < 0 ? -stride : stride) * found->size;
            found->steps[found->ndim++] = (uintptr_t)(array->shape[d] - 1);
        }
    }
}

/* The bytes that an array spans from its first one on, modulo `period`. A dimension
 * whose stride is a multiple of the period keeps the residue: it adds nothing. */
static uintptr_t
width_in(const pattern *array, uintptr_t period)
{
    uintptr_t width = array->size;

    for (int d = 0; d < array->ndim; d++) {
        if (array->strides[d] % period != 0) {
            width += array->strides[d] * array->steps[d];
        }
    }
    return width;
}

/* Whether the bytes of the two arrays are disjoint modulo `period`. */
static bool
are_apart_in(const pattern *a, const pattern *b, uintptr_t period)
{
    const uintptr_t width_a = width_in(a, period), width_b = width_in(b, period);
    const uintptr_t ahead = (b->first % period + period - a->first % period) % period;

    return ahead >= width_a && ahead + width_b <= period;
}

/* Whether two spans whose address ranges overlap share an element. They do not if they
 * are disjoint modulo a stride of either; if no stride proves that, assume they do. */
static bool
share_elements(const py_span *one, const py_span *other)
{
    pattern a, b;

    if (one->array == NULL || other->array == NULL) {
        return true;
    }
    find_pattern(one, &a);
    find_pattern(other, &b);
    for (int d = 0; d < a.ndim; d++) {
        if (a.strides[d] > 0 && are_apart_in(&a, &b, a.strides[d])) {
            return false;
        }
    }
    for (int d = 0; d < b.ndim; d++) {
        if (b.strides[d] > 0 && are_apart_in(&a, &b, b.strides[d])) {
            return false;
        }
    }
    return true;
}

/* Whether two indices may address the same element. They cannot if each stride is at
 * least the extent that the dimensions with smaller strides cover. */
static bool
shares_with_itself(const py_span *span)
{
    pattern array;

    find_pattern(span, &array);
    for (int d = 0; d < array.ndim; d++) {
        uintptr_t covered = array.size;

        for (int smaller = 0; smaller < array.ndim; smaller++) {
            if (array.strides[smaller] < array.strides[d] ||
                (array.strides[smaller] == array.strides[d] && smaller < d)) {
                covered += array.strides[smaller] * array.steps[smaller];
            }
        }
        if (array.strides[d] < covered) {
            return true;
        }
    }
    return false;
}

/* ---- Overlap: all arrays of a call ----------------------------------------------- */

py_span
py_span_of(const py_array *array, py_argument argument, bool written)
{
    const int64_t size = py_dtype_size(array->dtype);
    uintptr_t first = (uintptr_t)array->data, end = first + (uintptr_t)size;

    for (int d = 0; d < array->ndim; d++) {
        const int64_t reach = (array->shape[d] - 1) * array->strides[d] * size;

        if (reach < 0) {
            first += (uintptr_t)reach;
        } else {
            end += (uintptr_t)reach;
        }
    }
    return (py_span){.first = first,
                     .end = end,
                     .array = array,
                     .name = argument.name,
                     .index = (int32_t)argument.index,
                     .group = -1,
                     .written = written};
}

static int
by_first(const void *a, const void *b)
{
    const py_span *x = a, *y = b;

    return (x->first > y->first) - (x->first < y->first);
}

static py_argument
argument_of(const py_span *span)
{
    return (py_argument){span->name, span->index};
}

/* The message begins with the written span; if both are, with the one given later. */
static int
overlap_error(PyObject *error, const py_span *one, const py_span *other)
{
    char text[160];

    if (one->written == other->written ? one->position < other->position
                                       : other->written) {
        const py_span *swapped = one;

        one = other;
        other = swapped;
    }
    py_argument_text(argument_of(other), text, sizeof text);
    if (one->group == other->group) {
        return py_argument_error(error, argument_of(one), "must not overlap %s", text);
    }
    return py_argument_error(error, argument_of(one),
                             "of group %d must not overlap %s of group %d",
                             (int)one->group, text, (int)other->group);
}

/* Insertion sort for few spans: there qsort() would take longer than a small call. */
static void
sort_spans(py_span *spans, Py_ssize_t n)
{
    if (n > 24) {
        qsort(spans, (size_t)n, sizeof *spans, by_first);
        return;
    }
    for (Py_ssize_t i = 1; i < n; i++) {
        const py_span span = spans[i];
        Py_ssize_t j = i;

        for (; j > 0 && spans[j - 1].first > span.first; j--) {
            spans[j] = spans[j - 1];
        }
        spans[j] = span;
    }
}

/* Sets next_written of spans that are sorted by `first`. */
static void
link_written(py_span *spans, Py_ssize_t n)
{
    int32_t next = (int32_t)n;

    for (Py_ssize_t i = n - 1; i >= 0; i--) {
        spans[i].next_written = next;
        if (spans[i].written) {
            next = (int32_t)i;
        }
    }
}

int
py_check_spans(PyObject *error, py_span *spans, Py_ssize_t n)
{
    bool any_written = false;

    for (Py_ssize_t i = 0; i < n; i++) {
        spans[i].position = (int32_t)i;
        any_written |= spans[i].written;
        if (spans[i].written && spans[i].array != NULL &&
            shares_with_itself(&spans[i])) {
            return py_argument_error(error, argument_of(&spans[i]),
                                     "must not overlap itself");
        }
    }
    if (!any_written) {
        return 0;
    }
    sort_spans(spans, n);
    link_written(spans, n);
    /* Compare each span with later ones that begin inside it: a written span with all
     * of them, another only with the written ones. */
    for (Py_ssize_t i = 0; i < n; i++) {
        const py_span *span = &spans[i];
        Py_ssize_t j = span->written ? i + 1 : span->next_written;

        while (j < n && spans[j].first < span->end) {
            if (share_elements(span, &spans[j])) {
                return overlap_error(error, span, &spans[j]);
            }
            j = span->written ? j + 1 : spans[j].next_written;
        }
    }
    return 0;
}

/* ---- Types ----------------------------------------------------------------------- */

bool
py_type_text_is(PyTypeObject *type, const char *attribute, const char *want,
                bool prefix)
{
    PyObject *value = PyObject_GetAttrString((PyObject *)type, attribute);
    const char *text = value == NULL ? NULL : PyUnicode_AsUTF8AndSize(value, NULL);
    const bool is = text != NULL && (prefix ? strncmp(text, want, strlen(want)) == 0
                                            : strcmp(text, want) == 0);

    if (text == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(value);
    return is;
}
