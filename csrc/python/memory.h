/* What a table remembers of each place between calls: arrays whose pointers need not be
 * resolved again, and addresses to ask the cache for. */
#ifndef PY_MEMORY_H
#define PY_MEMORY_H

#include "tensor.h"

enum {
    PY_MAX_COLUMNS = 8,
    PY_KEPT_DIMS = 5, /* arrays of more dimensions are resolved every time */
    PY_RESOLVE_EVERY = 16
};

/* Of one place. A kept array's pointer counts while the caller comes with the same
 * object, the row has the layout that it was checked against, and the storage has not
 * moved the data. */
typedef struct {
    /* hints to the cache, never followed, so they may be stale: the object in the
     * second column, its shape, and what the row's arrays came from, with its parts */
    const void *second, *second_shape, *source, *source_parts;
    struct {
        PyObject *object;
        void *data;
        void *const *watch; /* where its storage says where the data is */
    } kept[PY_MAX_COLUMNS];
    uint8_t dtype[PY_MAX_COLUMNS]; /* of the kept arrays */
    int16_t ndim;
    int64_t shape[PY_KEPT_DIMS];
    int64_t strides[PY_KEPT_DIMS];
} py_memory;

/* Of one place, apart because it is rarely read: what keeps the memory of kept arrays,
 * and what they watch, alive should a tensor be given another storage in place. */
typedef struct {
    PyObject *storage[PY_MAX_COLUMNS];
} py_storages;

typedef struct {
    py_memory *places; /* NULL: nothing is remembered */
    py_storages *storages;
    Py_ssize_t capacity;
    unsigned tick; /* a part of what is kept is resolved anew each time */
} py_memories;

/* Room for places 0 .. n - 1. Returns 0, or -1 with MemoryError. */
int py_memories_reserve(py_memories *memories, Py_ssize_t n);

/* Frees everything; the struct is zero again. */
void py_memories_clear(py_memories *memories);
int py_memories_traverse(py_memories *memories, visitproc visit, void *arg);

/* The memory of a place whose row begins with `first`, or NULL where nothing may be
 * kept. Forgets arrays that were checked against another layout. With *trusted, what is
 * kept counts; else it is this place's turn to be resolved anew. */
py_memory *py_memory_of(py_memories *memories, Py_ssize_t place, const py_array *first,
                        bool *trusted);

/* Whether the array that is kept of a column still is where it was. */
static inline bool
py_memory_holds(const py_memory *memory, int column, const PyObject *object)
{
    return memory->kept[column].object == object &&
           *memory->kept[column].watch == memory->kept[column].data;
}

/* Remembers an array of that place, just borrowed from `object`. */
void py_memory_keep(py_memories *memories, Py_ssize_t place, int column,
                    PyObject *object, const py_array *array);

/* Whether something is kept of a place's column. */
static inline bool
py_memory_keeps(const py_memories *memories, Py_ssize_t place, int column)
{
    return place < memories->capacity &&
           memories->places[place].kept[column].object != NULL;
}

/* Whether what is kept of a place is to be resolved anew in this call. */
static inline bool
py_memory_is_turn(const py_memories *memories, Py_ssize_t place)
{
    return ((size_t)place + memories->tick) % PY_RESOLVE_EVERY == 0;
}

/* Remembers, for hints, the dict that a place's arrays came from. */
void py_memory_source(py_memories *memories, Py_ssize_t place, PyObject *dict);

/* Asks the cache for what a place's memory says its row will read. */
void py_memory_hint(const py_memories *memories, Py_ssize_t place);

/* Asks the cache for what is kept of a place, for its turn to be resolved anew: each
 * depth finds in the cache what the one before asked for. */
typedef enum { PY_HINT_OBJECTS, PY_HINT_BODIES, PY_HINT_PARTS } py_memory_depth;
void py_memory_hint_kept(const py_state *state, const py_memories *memories,
                         Py_ssize_t place, py_memory_depth depth);

#endif
