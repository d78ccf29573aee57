/* The state of the Python module, one per interpreter. */
#ifndef PY_STATE_H
#define PY_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

enum {
    PY_GRAPH_WRITER,
    PY_GRAPH_CACHE,
    PY_GRAPH_SELECTION,
    PY_GRAPH_BATCH,
    PY_GRAPH_PREFETCH,
    PY_GRAPH_ORDER,
    PY_N_GRAPH_TYPES
};

/* Names of a torch.Tensor's attributes and methods: see producer_torch.c. */
enum {
    PY_TORCH_LAYOUT,
    PY_TORCH_DTYPE,
    PY_TORCH_SHAPE,
    PY_TORCH_IS_CPU,
    PY_TORCH_IS_CUDA,
    PY_TORCH_GET_DEVICE,
    PY_TORCH_DATA_PTR,
    PY_TORCH_STRIDE,
    PY_TORCH_IS_CONTIGUOUS,
    PY_N_TORCH_NAMES
};
enum { PY_N_TORCH_DTYPES = 17 }; /* at least PY_N_DTYPES of array.h */

/* Interned strings: an attribute of tensors, and the entries of an AdamW state. */
enum {
    PY_GRAD,
    PY_STEP,
    PY_EXP_AVG,
    PY_EXP_AVG_SQ,
    PY_MAX_EXP_AVG_SQ,
    PY_EXP_AVG_CODES,
    PY_EXP_AVG_SQ_CODES,
    PY_MAX_EXP_AVG_SQ_CODES,
    PY_SCALES,
    PY_MASTER_PARAM,
    PY_WEIGHT_COPY,
    PY_COMPENSATION,
    PY_MASTER_REMAINDER,
    PY_EMA,
    PY_N_NAMES
};

typedef struct {
    struct {
        PyTypeObject *type;
        const struct dlpack_exchange *exchange; /* NULL: use torch's attributes */
        bool has_body; /* an object has the word that py_prefetch() reads */
    } fast[8];         /* types that borrow_fast() in borrow.c borrows */
    int n_fast;
    PyObject *torch_names[PY_N_TORCH_NAMES], *torch_dtypes[PY_N_TORCH_DTYPES],
        *torch_strided; /* NULL until a tensor without the exchange API is borrowed */
    bool numpy_ready;
    PyTypeObject *numpy_type; /* ndarray, once NumPy is loaded */
    /* For ml_dtypes' bfloat16, float8_e4m3fn and float8_e5m2, in this order: the type
     * numbers that NumPy gave them, -1 if not met yet; and the PyArray_Descr of arrays
     * that this module makes, NULL before the first */
    int numpy_numbers[3];
    PyObject *numpy_descrs[3];
    PyTypeObject *workspace_type;
    PyObject *placement_error; /* a subclass of ValueError: see module.c */
    PyTypeObject *graph_types[PY_N_GRAPH_TYPES];
    PyObject *names[PY_N_NAMES];
} py_state;

#endif
