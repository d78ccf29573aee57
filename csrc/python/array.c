/* What a borrowed array is: its dtype and its layout, and how messages name it. */
#include "array.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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

const uint8_t py_dtype_alignments[PY_N_DTYPES] = {
    [TFAST_F32] = 4,        [TFAST_F64] = 8,      [TFAST_F16] = 2,
    [TFAST_BF16] = 2,       [TFAST_BOOL] = 1,     [PY_INT64] = 8,
    [PY_INT32] = 4,         [PY_INT16] = 2,       [PY_INT8] = 1,
    [PY_UINT64] = 8,        [PY_UINT32] = 4,      [PY_UINT16] = 2,
    [PY_UINT8] = 1,         [PY_COMPLEX64] = 4,   [PY_COMPLEX128] = 8,
    [PY_FLOAT8_E4M3FN] = 1, [PY_FLOAT8_E5M2] = 1,
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

bool
py_dtype_fits(int dtype, int how)
{
    if ((how & PY_ONLY_INT64) != 0) {
        return dtype == PY_INT64;
    }
    if ((how & PY_ONLY_INT32) != 0) {
        return dtype == PY_INT32;
    }
    return dtype >= 0 && (dtype < TFAST_N_DTYPES || (how & PY_ANY_DTYPE) != 0 ||
                          (dtype == TFAST_BOOL && (how & PY_OR_BOOL) != 0));
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
                                     : "float64, float32, float16 or bfloat16",
        got);
}

/* ---- Layouts --------------------------------------------------------------------- */

bool
py_is_dense(const py_array *array)
{
    int64_t expected = 1;
    bool c_order = true, used[PY_MAX_DIMS] = {false};

    for (int d = array->ndim - 1; d >= 0 && c_order; d--) {
        c_order = array->shape[d] == 1 || array->strides[d] == expected;
        expected *= array->shape[d];
    }
    if (c_order || array->numel == 0) {
        return true;
    }
    /* Any order: find the dimension of each next stride. */
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
