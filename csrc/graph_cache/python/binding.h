/* The graph cache's Python binding: the structs of its types, and shared functions. */
#ifndef PY_GRAPH_H
#define PY_GRAPH_H

#include "../../python/core.h"
#include "../../python/made.h"
#include "../graph_cache.h"

typedef struct {
    PyObject_HEAD
    tfast_graph_cache *cache; /* a reference; never NULL in a complete object */
    bool pread;               /* files are read graph by graph, not mapped */
} py_graph_cache;

/* The arrays of batches: NumPy arrays, DLPack capsules, or objects of array_type. */
typedef enum { PY_AS_NUMPY, PY_AS_CAPSULE, PY_AS_OBJECT } py_graph_as;

typedef struct {
    PyObject_HEAD
    py_graph_cache *cache;                  /* a reference */
    PyObject *array_type;                   /* a reference, or NULL */
    const struct dlpack_exchange *exchange; /* array_type's exchange API, or NULL */
    PyObject *from_dlpack; /* a reference; converts capsules where exchange is NULL */
    py_graph_as as;
    tfast_graph_selection selection; /* its pointers refer to the arrays below */
    uint16_t *fields, *batch_of;
    int64_t *totals;
    uint8_t *dtypes; /* dtype of each selected field, numbered as in py_array */
} py_graph_selection;

typedef struct {
    PyObject_HEAD
    py_graph_selection *selection; /* a reference */
    tfast_graph_batch *batch;      /* a reference */
} py_graph_batch;

extern PyType_Spec py_graph_writer_spec, py_graph_cache_spec, py_graph_selection_spec,
    py_graph_batch_spec, py_graph_prefetch_spec, py_graph_order_spec;

/* Creates the types above and adds them to the module. Also lets a Python signal
 * handler that raises end a wait for a lock of a cache. Returns 0, or -1 with an
 * exception. */
int py_graph_add_types(PyObject *module, py_state *state);

/* Whether reading n graphs takes long enough to release the GIL. Releasing it for
 * microseconds is a loss: a thread that waits for the GIL then keeps it for
 * milliseconds. */
bool py_graph_takes_long(const py_graph_cache *cache, int64_t n);

/* A new zeroed object of the type, tracked by the garbage collector; NULL with an
 * exception. */
PyObject *py_graph_alloc(PyTypeObject *type);

/* Frees the object itself: the last step of a dealloc. */
void py_graph_free(PyObject *self);

/* The module's state, from an object of one of its types. */
py_state *py_graph_state(PyObject *self);

/* The GRAPH_... dtype for a dtype of py_array, and the inverse, which returns uint8 for
 * GRAPH_STRING and GRAPH_BYTES. */
int py_graph_dtype(int dtype);
int py_dtype_of_graph(int graph_dtype);

/* A copy of integers from Python; the owner frees data with PyMem_Free(). */
typedef struct {
    int64_t *data;
    int64_t n;
} py_int64s;

/* Copies a one-dimensional int64 array on the CPU, or a sequence of integers. `name` is
 * for messages. Returns 0, or -1 with TypeError, ValueError or MemoryError. */
int py_take_int64s(py_state *state, PyObject *object, const char *name, py_int64s *out);

/* Copies a sequence of integers in 0 .. end - 1; the caller frees *out with
 * PyMem_Free(). Returns 0, or -1 with an exception. */
int py_take_uint16s(PyObject *object, const char *name, int64_t end, uint16_t **out,
                    int *n);

/* Casts `object`, which stays borrowed, to the struct of type number PY_GRAPH_...; NULL
 * with TypeError if it has another type. */
void *py_graph_object(py_state *state, PyObject *object, int type, const char *name);

/* A new GraphBatch. Steals the caller's reference to `batch`, even on failure. */
PyObject *py_graph_batch_new(py_graph_selection *selection, tfast_graph_batch *batch);

/* Functions of the module. */
PyObject *py_graph_collate(PyObject *module, PyObject *args);
PyObject *py_graph_adopt(PyObject *module, PyObject *args);
PyObject *py_graph_schema(PyObject *module, PyObject *args);
PyObject *py_graph_build_begin(PyObject *module, PyObject *args);
PyObject *py_graph_build_anew(PyObject *module, PyObject *args);
PyObject *py_graph_is_building(PyObject *module, PyObject *args);
PyObject *py_graph_build_end(PyObject *module, PyObject *args);
PyObject *py_graph_repair(PyObject *module, PyObject *args);
PyObject *py_crc32c(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
