/* What the module remembers between calls. */
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

/* Attributes of a torch.Tensor: see producer_torch.c. */
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
enum { PY_N_TORCH_DTYPES = 17 }; /* PY_N_DTYPES, which array.h has */

/* What an array's borrower remembers between calls, one per interpreter. */
typedef struct {
    struct {
        PyTypeObject *type;
        const struct dlpack_exchange *exchange; /* NULL: by torch's attributes */
    } fast[8]; /* types whose arrays resolve without a Python call */
    int n_fast;
    PyObject *torch_names[PY_N_TORCH_NAMES], *torch_dtypes[PY_N_TORCH_DTYPES],
        *torch_strided; /* NULL until a torch without the exchange API is met */
    bool numpy_ready;
    PyTypeObject *numpy_type; /* ndarray, once NumPy is loaded */
    /* bfloat16, float8_e4m3fn and float8_e5m2 in NumPy: the type numbers that ml_dtypes
     * got, or -1; and the dtypes that arrays made here get */
    int numpy_numbers[3];
    PyObject *numpy_descrs[3];
    PyTypeObject *workspace_type;
    PyObject *placement_error; /* a ValueError: see module.c */
    PyTypeObject *graph_types[PY_N_GRAPH_TYPES];
    PyObject *s_grad, *s_step, *s_exp_avg, *s_exp_avg_sq, *s_max_exp_avg_sq, *s_ema,
        *s_master_param, *s_weight_copy; /* interned */
} py_state;

#endif
