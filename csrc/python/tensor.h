/* Arrays as Python knows them (NumPy, torch, any DLPack or buffer producer), borrowed
 * as pointers, shapes and strides. */
#ifndef PY_TENSOR_H
#define PY_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../tfast.h"

#define PY_MAX_DIMS 64 /* NumPy's limit */

enum {
    PY_GRAPH_WRITER,
    PY_GRAPH_CACHE,
    PY_GRAPH_SELECTION,
    PY_GRAPH_BATCH,
    PY_GRAPH_PREFETCH,
    PY_GRAPH_ORDER,
    PY_N_GRAPH_TYPES
};

/* What an array's borrower remembers between calls, one per interpreter. */
typedef struct {
    struct {
        PyTypeObject *type;
        const struct dlpack_exchange *exchange;
        int body_word; /* see py_hint_body(); 0: unknown */
    } fast[8];         /* types whose arrays resolve without a Python call */
    int n_fast;
    bool numpy_ready;
    PyTypeObject *numpy_type; /* ndarray, once NumPy is loaded */
    /* bfloat16, float8_e4m3fn and float8_e5m2 in NumPy: the type numbers that ml_dtypes
     * got, or -1; and the dtypes that arrays made here get */
    int numpy_numbers[3];
    PyObject *numpy_descrs[3];
    PyTypeObject *workspace_type;
    PyTypeObject *graph_types[PY_N_GRAPH_TYPES];
    PyObject *s_grad, *s_step, *s_exp_avg, *s_exp_avg_sq, *s_max_exp_avg_sq, *s_ema,
        *s_master_param, *s_weight_copy; /* interned */
} py_state;

/* How an array is borrowed; 0: to be read, of one of the four float dtypes. */
enum {
    PY_WRITE = 1,      /* a read-only array is refused */
    PY_OR_BOOL = 2,    /* bool is also taken */
    PY_ONLY_INT64 = 4, /* int64 is taken, and nothing else */
    PY_ANY_DTYPE = 8,  /* so is every dtype here, and NumPy's scalars; NumPy arrays with
                          swapped bytes or odd addresses are copied */
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

/* Borrows `object`, of dtype float64, float32, float16 or bfloat16 or what `how` says,
 * with data aligned to its elements. Returns 0, or -1 with TypeError (not an array),
 * ValueError (read-only, byte order, alignment, no data) or NotImplementedError (right,
 * but nothing here computes it: other dtypes and devices, sparse, tensor subclasses).
 */
int py_borrow(py_state *state, PyObject *object, py_argument argument, int how,
              py_array *array);

/* Bytes of one element, and "float32" and so on. */
int64_t py_dtype_size(int dtype);
const char *py_dtype_name(int dtype);

/* Borrows an array of one element of that dtype on that device, and sets *value to it.
 * Returns 0 or -1 with an exception. */
int py_borrow_scalar(py_state *state, PyObject *object, const char *name, int dtype,
                     tfast_device device, bool write, py_array *array, void **value);

/* Gives back what py_borrow() took; accepts a zeroed array. */
void py_release(py_array *array);

/* True where the elements fill numel places without gaps, in any order of dimensions.
 */
bool py_is_dense(const py_array *array);

/* True where a and b have the same shape. */
bool py_same_shape(const py_array *a, const py_array *b);

/* True where equal indices lie at equal offsets; dimensions of size 1 do not count.
 * Shapes must be the same. */
bool py_same_layout(const py_array *a, const py_array *b);

/* Hints to the cache, for loops over many small tensors, where each costs a dozen cache
 * misses and few instructions: the lines of the tensor's body (the C++ object behind
 * the Python one), and, later, what the body points at. They read a tensor of a known
 * type, and do nothing for any other object. */
void py_hint_body(const py_state *state, PyObject *object);
void py_hint_parts(const py_state *state, PyObject *object);

/* The same for many tensors at once that the cache has lost, without their autograd
 * metadata. Reads a word of each body first, so that all of these misses overlap: a
 * hint for a page whose translation is lost, too, is dropped, a read is not. Runs no
 * Python code. */
void py_hint_tensors(const py_state *state, PyObject *const *objects, Py_ssize_t n);

/* Where a dict has its table of keys, or NULL: an address to ask the cache for, and for
 * nothing else. */
const void *py_dict_parts(PyObject *dict);

/* Writes "(2, 3)" for messages. */
enum { PY_SHAPE_TEXT = 120 }; /* bytes that are enough for four dimensions */
void py_shape_text(int ndim, const int64_t *shape, char *text, size_t bytes);

#endif
