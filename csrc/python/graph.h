/* The graph cache for Python: its types, and what their files share. */
#ifndef PY_GRAPH_H
#define PY_GRAPH_H

#include "../graph_cache/graph_cache.h"
#include "core.h"
#include "made.h"

typedef struct {
    PyObject_HEAD
    tfast_graph_cache *cache; /* one reference; never NULL once it is made */
    bool pread;
} py_graph_cache;

/* What the arrays of batches are. */
typedef enum { PY_AS_NUMPY, PY_AS_CAPSULE, PY_AS_OBJECT } py_graph_as;

typedef struct {
    PyObject_HEAD
    py_graph_cache *cache;                  /* a reference */
    PyObject *array_type;                   /* a reference, or NULL */
    const struct dlpack_exchange *exchange; /* of array_type, for PY_AS_OBJECT */
    PyObject *from_dlpack; /* a reference: makes one of a capsule without `exchange` */
    py_graph_as as;
    tfast_graph_selection selection; /* its arrays are this object's */
    uint16_t *fields, *batch_of;
    int64_t *totals;
    uint8_t *dtypes; /* per selected field: py_array's number */
} py_graph_selection;

typedef struct {
    PyObject_HEAD
    py_graph_selection *selection; /* a reference */
    tfast_graph_batch *batch;      /* one, too */
} py_graph_batch;

extern PyType_Spec py_graph_writer_spec, py_graph_cache_spec, py_graph_selection_spec,
    py_graph_batch_spec, py_graph_prefetch_spec, py_graph_order_spec,
    py_graph_recipe_spec, py_graph_iteration_spec;

/* Makes the types above and enters them into the module. Returns 0 or -1. */
int py_graph_add_types(PyObject *module, py_state *state);

/* Whether reading n graphs takes long enough for other threads to run meanwhile. To
 * give the GIL away for microseconds is costly: a thread that waits for it keeps it for
 * milliseconds. */
bool py_graph_takes_long(const py_graph_cache *cache, int64_t n);

/* A zeroed object of a type, which is tracked by the collector. */
PyObject *py_graph_alloc(PyTypeObject *type);

/* Frees an object's own memory, the last step of a dealloc. */
void py_graph_free(PyObject *self);

/* The module's state, from an object of one of its types. */
py_state *py_graph_state(PyObject *self);

/* GRAPH_... of a py_array's dtype, and the other way round; strings and bytes are
 * uint8. */
int py_graph_dtype(int dtype);
int py_dtype_of_graph(int graph_dtype);

/* Integers that Python gave, copied; data to be freed with PyMem_Free(). */
typedef struct {
    int64_t *data;
    int64_t n;
} py_int64s;

/* Takes an array of int64 on the CPU with one dimension, or a sequence of integers.
 * Returns 0, or -1 with TypeError, ValueError or MemoryError. */
int py_take_int64s(py_state *state, PyObject *object, const char *name, py_int64s *out);

/* The same for numbers that must lie in 0 .. end - 1 and fit uint16. */
int py_take_uint16s(PyObject *object, const char *name, int64_t end, uint16_t **out,
                    int *n);

/* The object as one of the types above, or NULL with TypeError. Borrowed. */
void *py_graph_object(py_state *state, PyObject *object, int type, const char *name);

/* Takes the reference that `batch` comes with, also on failure. */
PyObject *py_graph_batch_new(py_graph_selection *selection, tfast_graph_batch *batch);

/* Arrays of a batch, new ones each time; NULL with an exception. The number of an array
 * must be one that there is. */
int py_graph_batch_counts(const py_graph_batch *self);
PyObject *py_graph_batch_field(py_graph_batch *self, Py_ssize_t i);
PyObject *py_graph_batch_ptr(py_graph_batch *self, Py_ssize_t count);
PyObject *py_graph_batch_vector(py_graph_batch *self, Py_ssize_t i);
/* The first n of a count's sums, in memory of their own. */
PyObject *py_graph_batch_sums(py_graph_batch *self, Py_ssize_t count, int64_t n);

/* Array `number` of the fields, ptrs and batch vectors, one after another; and sums as
 * above, where the number is of a count, or else one of `constants`. An exception for
 * any other number. */
PyObject *py_graph_batch_array(py_graph_batch *self, Py_ssize_t number);
PyObject *py_graph_batch_sums_or(py_graph_batch *self, Py_ssize_t number, int64_t n,
                                 PyObject *constants);

/* The next batch of a GraphOrder, n == 0 at its end: indices that are the object's own,
 * until the next call. Returns 0, or -1 with an exception. */
int py_graph_order_next(PyObject *order, const int64_t **indices, int64_t *n);
int64_t py_graph_order_position(PyObject *order);

/* Asks a GraphPrefetch for the next batch of a GraphOrder, whose position after it is
 * its tag. Returns 1, 0 at the order's end, or -1 with an exception. */
int py_graph_prefetch_submit(PyObject *prefetch, PyObject *order);
/* Asks for a batch of these; next gives the tag. Returns 0 or -1. */
int py_graph_prefetch_take(PyObject *prefetch, PyObject *indices, int64_t tag);

/* The GraphBatch that was asked for first; NULL with its exception, or with that of a
 * signal's handler: then it is still pending. */
PyObject *py_graph_prefetch_next(PyObject *prefetch, int64_t *tag);
int64_t py_graph_prefetch_pending(PyObject *prefetch);

/* The method dicts(); graph_dicts.c. */
PyObject *py_graph_batch_dicts(PyObject *self, PyObject *args);

/* What a GraphRecipe makes of a batch. NULL with an exception. */
PyObject *py_graph_recipe_make(PyObject *recipe, py_graph_batch *batch);

/* Functions of the module. */
PyObject *py_graph_collate(PyObject *module, PyObject *args);
PyObject *py_graph_adopt(PyObject *module, PyObject *args);
PyObject *py_graph_schema(PyObject *module, PyObject *args);
PyObject *py_graph_build_begin(PyObject *module, PyObject *args);
PyObject *py_graph_build_end(PyObject *module, PyObject *args);
PyObject *py_graph_repair(PyObject *module, PyObject *args);
PyObject *py_crc32c(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
