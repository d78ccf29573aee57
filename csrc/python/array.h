/* A borrowed array, its dtype and its layout, and how messages name it. */
#ifndef PY_ARRAY_H
#define PY_ARRAY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../tfast.h"

#define PY_MAX_DIMS 64 /* NumPy's limit */

/* How an array is borrowed; 0: to be read, of one of the four float dtypes. */
enum {
    PY_WRITE = 1,      /* a read-only array is refused */
    PY_OR_BOOL = 2,    /* bool is also taken */
    PY_ONLY_INT64 = 4, /* int64 is taken, and nothing else */
    PY_ANY_DTYPE = 8,  /* so is every dtype here, and NumPy's scalars; NumPy arrays with
                          swapped bytes or odd addresses are copied */
    PY_ONLY_INT32 = 16, /* int32 is taken, and nothing else */
};

/* A py_array's dtype is a tfast_dtype, TFAST_BOOL, or one of these. */
enum {
    PY_INT64 = TFAST_BOOL + 1,
    PY_INT32,
    PY_INT16,
    PY_INT8,
    PY_UINT64,
    PY_UINT32,
    PY_UINT16,
    PY_UINT8,
    PY_COMPLEX64,
    PY_COMPLEX128,
    PY_FLOAT8_E4M3FN,
    PY_FLOAT8_E5M2,
    PY_N_DTYPES
};

/* One borrowed array. Valid while the object it came from and `owner` are held. */
typedef struct {
    void *data; /* NULL for an empty array */
    int64_t numel;
    tfast_device device;
    int dtype;
    int ndim;
    const int64_t *shape;
    const int64_t *strides; /* in elements, never NULL */
    PyObject *owner;        /* new reference; NULL: the object itself suffices */
    int64_t
        buffer[PY_MAX_DIMS * 2]; /* shape and strides where the producer keeps none */
} py_array;

/* Which argument an array is, for messages: "grads[3]"; index < 0: "found_inf". */
typedef struct {
    const char *name;
    Py_ssize_t index;
} py_argument;

/* Sets an exception "*argument* *format*" and returns -1. */
int py_argument_error(PyObject *type, py_argument argument, const char *format, ...)
    TFAST_PRINTF(3, 4);

/* Writes "grads[3]" or "found_inf". */
void py_argument_text(py_argument argument, char *text, size_t bytes);

/* Sets an exception "*argument* *rule*, got shape *shape*" and returns -1. */
int py_shape_error(PyObject *type, const char *name, const py_array *array,
                   const char *format, ...) TFAST_PRINTF(4, 5);

/* Bytes of one element, and "float32" and so on. */
int64_t py_dtype_size(int dtype);
const char *py_dtype_name(int dtype);

/* True where the elements fill numel places without gaps, in any order of dimensions.
 */
bool py_is_dense(const py_array *array);

/* True where a and b have the same shape. */
bool py_same_shape(const py_array *a, const py_array *b);

/* True where equal indices lie at equal offsets; dimensions of size 1 do not count.
 * Shapes must be the same. */
bool py_same_layout(const py_array *a, const py_array *b);

/* Sets NotImplementedError "*argument* must be *dtypes*, got ..." and returns -1. */
int py_dtype_error(py_argument argument, int how, const char *format, ...)
    TFAST_PRINTF(3, 4);

/* A type's attribute as UTF-8 text compared with `want`, or with its beginning. */
bool py_type_text_is(PyTypeObject *type, const char *attribute, const char *want,
                     bool prefix);

/* Writes "(2, 3)" for messages. */
enum { PY_SHAPE_TEXT = 120 }; /* bytes that are enough for four dimensions */
void py_shape_text(int ndim, const int64_t *shape, char *text, size_t bytes);

/* ---- Overlap --------------------------------------------------------------------- */

/* The bytes from an array's first to its last element. Small, since lists of many
 * arrays are sorted by it. */
typedef struct {
    uintptr_t first, end;  /* end: one past the last byte */
    const py_array *array; /* NULL: dense */
    const char *name;      /* of the argument, with its index in a list or -1 */
    int32_t index;
    int32_t group;    /* of a call with several groups of parameters; -1: only one */
    int32_t position; /* among the spans as they were given */
    int32_t
        next_written; /* the first written span after this one in order of `first` */
    bool written;
} py_span;

/* A strided array's span, for an array with elements. */
py_span py_span_of(const py_array *array, py_argument argument, bool written);

/* Returns 0, or -1 with the exception `error` where a written span shares an element
 * with another span, or with itself. Sorts the spans. Exact for dense arrays and for
 * strided arrays that lie apart or interleave in one regular pattern, as q, k and v in
 * one packed array do; what cannot be decided counts as shared. Takes O(n log n) for
 * dense spans. */
int py_check_spans(PyObject *error, py_span *spans, Py_ssize_t n);

#endif
