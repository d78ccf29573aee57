/* A borrowed array, its dtype and its layout, and how messages name it. */
#ifndef PY_ARRAY_H
#define PY_ARRAY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../tfast.h"

#define PY_MAX_DIMS 64 /* NumPy's limit */

/* Flags for py_borrow(). 0: read-only access, one of the four dtypes of tfast_dtype. */
enum {
    PY_WRITE = 1,       /* refuse a read-only array */
    PY_OR_BOOL = 2,     /* also take bool */
    PY_ONLY_INT64 = 4,  /* take int64 only */
    PY_ANY_DTYPE = 8,   /* also take every dtype below, and NumPy scalars. Copies what
                          cannot be borrowed: NumPy arrays that are byte-swapped,
                          misaligned or have strides of partial elements, and
                          torch's lazily conjugated or negated views */
    PY_ONLY_INT32 = 16, /* take int32 only */
    PY_OR_UINT8 = 32,   /* also take uint8 */
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
    void *data; /* may be NULL for an empty array */
    int64_t numel;
    tfast_device device;
    int dtype;
    int ndim;
    const int64_t *shape;
    const int64_t *strides; /* in elements, never NULL */
    PyObject *owner; /* a reference that keeps the memory; NULL: the object does */
    /* Storage for shape and strides, if the producer's cannot be pointed to. */
    int64_t buffer[PY_MAX_DIMS * 2];
} py_array;

/* Names an argument in messages: "grads[3]", or "found_inf" with index < 0. */
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

/* True if the elements fill numel places without gaps, in any order of dimensions. */
bool py_is_dense(const py_array *array);

/* True if the elements lie one after another, the last dimension fastest. */
bool py_is_c_order(const py_array *array);

/* True if a and b have the same shape. */
bool py_same_shape(const py_array *a, const py_array *b);

/* True if a and b, of the same shape, have the same strides except in dimensions of
 * size 1, or have no elements. */
bool py_same_layout(const py_array *a, const py_array *b);

/* Sets NotImplementedError "*argument* must be *dtypes that `how` accepts*, got
 * *format*" and returns -1. */
int py_dtype_error(py_argument argument, int how, const char *format, ...)
    TFAST_PRINTF(3, 4);

/* Whether a type's attribute is the text `want`, or, with `prefix`, begins with it. */
bool py_type_text_is(PyTypeObject *type, const char *attribute, const char *want,
                     bool prefix);

/* Writes "(2, 3)" for messages. */
enum { PY_SHAPE_TEXT = 120 }; /* bytes, enough for four dimensions */
void py_shape_text(int ndim, const int64_t *shape, char *text, size_t bytes);

/* ---- Overlap --------------------------------------------------------------------- */

/* The address range of an array, from its first to its last byte. Kept small, because
 * all arrays of a call, often thousands, are sorted by address. */
typedef struct {
    uintptr_t first, end;  /* end: one past the last byte */
    const py_array *array; /* for its strides; NULL: dense */
    const char *name;      /* and index: of the argument, see py_argument */
    int32_t index;
    int32_t group;        /* which param group, for messages; -1: no groups */
    int32_t position;     /* before sorting */
    int32_t next_written; /* index of the next written span in sorted order, or n */
    bool written;
} py_span;

/* The span of an array, dense or strided. The array must have elements. */
py_span py_span_of(const py_array *array, py_argument argument, bool written);

/* Returns 0, or -1 with the exception `error` where a written span shares an element
 * with another span, or with itself. Sorts the spans. Exact for dense arrays and for
 * strided arrays whose address ranges are disjoint or that interleave with one period,
 * such as q, k and v in one packed array; all others count as shared. Takes O(n log n)
 * for dense spans. */
int py_check_spans(PyObject *error, py_span *spans, Py_ssize_t n);

#endif
