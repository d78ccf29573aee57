/* The graph cache's binding: the Python types and what their files share. */
#ifndef PY_GRAPH_H
#define PY_GRAPH_H

#include "../../python/core.h"
#include "../../python/made.h"
#include "../graph_cache.h"

typedef struct {
    PyObject_HEAD
    tfast_graph_cache *cache; /* a reference; never NULL in a complete object */
    bool pread;
} py_graph_cache;

/* The kind of arrays that batches have. */
typedef enum { PY_AS_NUMPY, PY_AS_CAPSULE, PY_AS_OBJECT } py_graph_as;

typedef struct {
    PyObject_HEAD
    py_graph_cache *cache;                  /* a reference */
    PyObject *array_type;                   /* a reference, or NULL */
    const struct dlpack_exchange *exchange; /* of array_type, for PY_AS_OBJECT */
    PyObject *from_dlpack; /* a reference: converts a capsule where exchange is NULL */
    py_graph_as as;
    tfast_graph_selection selection; /* its arrays are this object's */
    uint16_t *fields, *batch_of;
    int64_t *totals;
    uint8_t *dtypes; /* per selected field: its dtype, as in py_array */
} py_graph_selection;

typedef struct {
    PyObject_HEAD
    py_graph_selection *selection; /* a reference */
    tfast_graph_batch *batch;      /* a reference */
} py_graph_batch;

extern PyType_Spec py_graph_writer_spec, py_graph_cache_spec, py_graph_selection_spec,
    py_graph_batch_spec, py_graph_prefetch_spec, py_graph_order_spec;

/* Makes the types above and adds them to the module; from now on a signal ends a wait
 * for a lock of the cache. Returns 0 or -1 with an exception. */
int py_graph_add_types(PyObject *module, py_state *state);

/* True where reading n graphs takes long enough to release the GIL. Releasing it for
 * microseconds is costly: a waiting thread keeps it for milliseconds. */
bool py_graph_takes_long(const py_graph_cache *cache, int64_t n);

/* A zeroed object of a type, tracked by the garbage collector. */
PyObject *py_graph_alloc(PyTypeObject *type);

/* Frees the object itself: the last step of a dealloc. */
void py_graph_free(PyObject *self);

/* The module's state, from an object of one of its types. */
py_state *py_graph_state(PyObject *self);

/* GRAPH_... of a py_array's dtype, and the inverse, which is uint8 for strings and
 * bytes. */
int py_graph_dtype(int dtype);
int py_dtype_of_graph(int graph_dtype);

/* A copy of integers from Python; the owner frees data with PyMem_Free(). */
typedef struct {
    int64_t *data;
    int64_t n;
} py_int64s;

/* Takes an array of int64 on the CPU with one dimension, or a sequence of integers.
 * Returns 0, or -1 with TypeError, ValueError or MemoryError. */
int py_take_int64s(py_state *state, PyObject *object, const char *name, py_int64s *out);

/* Takes a sequence of integers in 0 .. end - 1 as uint16; the caller frees *out. */
int py_take_uint16s(PyObject *object, const char *name, int64_t end, uint16_t **out,
                    int *n);

/* The object as one of the types above, or NULL with TypeError. Borrowed. */
void *py_graph_object(py_state *state, PyObject *object, int type, const char *name);

/* A GraphBatch. It takes over the caller's reference to `batch`, also on failure. */
PyObject *py_graph_batch_new(py_graph_selection *selection, tfast_graph_batch *batch);

/* Functions of the module. */
PyObject *py_graph_collate(PyObject *module, PyObject *args);
PyObject *py_graph_adopt(PyObject *module, PyObject *args);
PyObject *py_graph_schema(PyObject *module, PyObject *args);
PyObject *py_graph_build_begin(PyObject *module, PyObject *args);
PyObject *py_graph_build_end(PyObject *module, PyObject *args);
PyObject *py_graph_repair(PyObject *module, PyObject *args);
PyObject *py_crc32c(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
