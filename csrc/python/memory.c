#include "memory.h"

#include <string.h>

enum {
    KEEP_BELOW = 4096, /* elements: updating more costs so much that resolving their
                          pointers each time is free, and memory of a size that
                          somebody may want back is not kept alive */
    WATCH_WORDS = 5,   /* of a storage's body that are looked at */
    LINE = 64
};

static int
grow(void **array, size_t bytes)
{
    void *larger = PyMem_Realloc(*array, bytes);

    if (larger == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *array = larger;
    return 0;
}

int
py_memories_reserve(py_memories *memories, Py_ssize_t n)
{
    const size_t had = (size_t)memories->capacity, want = (size_t)n;

    if (n <= memories->capacity) {
        return 0;
    }
    if (grow((void **)&memories->places, want * sizeof *memories->places) < 0 ||
        grow((void **)&memories->storages, want * sizeof *memories->storages) < 0) {
        return -1;
    }
    memset(memories->places + had, 0, (want - had) * sizeof *memories->places);
    memset(memories->storages + had, 0, (want - had) * sizeof *memories->storages);
    memories->capacity = n;
    return 0;
}

static void
forget(py_memories *memories, Py_ssize_t place, int column)
{
    Py_CLEAR(memories->places[place].kept[column].object);
    Py_CLEAR(memories->storages[place].storage[column]);
}

void
py_memories_clear(py_memories *memories)
{
    for (Py_ssize_t place = 0; place < memories->capacity; place++) {
        for (int c = 0; c < PY_MAX_COLUMNS; c++) {
            forget(memories, place, c);
        }
    }
    PyMem_Free(memories->places);
    PyMem_Free(memories->storages);
    memset(memories, 0, sizeof *memories);
}

int
py_memories_traverse(py_memories *memories, visitproc visit, void *arg)
{
    for (Py_ssize_t place = 0; place < memories->capacity; place++) {
        for (int c = 0; c < PY_MAX_COLUMNS; c++) {
            Py_VISIT(memories->places[place].kept[c].object);
            Py_VISIT(memories->storages[place].storage[c]);
        }
    }
    return 0;
}

/* A loop, since memcmp() of a dimension or two costs more. */
static bool
same_layout(const py_memory *memory, const py_array *array)
{
    bool same = memory->ndim == array->ndim;

    for (int d = 0; d < array->ndim && same; d++) {
        same = memory->shape[d] == array->shape[d] &&
               memory->strides[d] == array->strides[d];
    }
    return same;
}

py_memory *
py_memory_of(py_memories *memories, Py_ssize_t place, const py_array *first,
             bool *trusted)
{
    py_memory *memory;

    if (place >= memories->capacity || first->ndim > PY_KEPT_DIMS ||
        first->numel >= KEEP_BELOW) {
        return NULL;
    }
    memory = &memories->places[place];
    *trusted = !py_memory_is_turn(memories, place);
    if (!same_layout(memory, first)) {
        const size_t bytes = (size_t)first->ndim * sizeof(int64_t);

        for (int c = 0; c < PY_MAX_COLUMNS; c++) {
            forget(memories, place, c);
        }
        memory->ndim = (int16_t)first->ndim;
        memcpy(memory->shape, first->shape, bytes);
        memcpy(memory->strides, first->strides, bytes);
    }
    return memory;
}

/* The word of a storage's body (the C++ object behind the Python one) that points at
 * its data. A storage moves these under its tensors when it is resized, or shared, as
 * multiprocessing does with all that it sends. NULL where there is none: the data begin
 * further on, or this is another torch. */
static void *const *
find_watch(PyObject *storage, const void *data)
{
    PyObject *number = PyObject_GetAttrString(storage, "_cdata");
    const size_t address = number == NULL ? 0 : PyLong_AsSize_t(number);
    void *const *body = NULL;

    if (PyErr_Occurred() == NULL) {
        body = (void *const *)address;
    }
    PyErr_Clear();
    Py_XDECREF(number);
    for (int w = 0; body != NULL && data != NULL && w < WATCH_WORDS; w++) {
        if (body[w] == data) {
            return &body[w];
        }
    }
    return NULL;
}

void
py_memory_keep(py_memories *memories, Py_ssize_t place, int column, PyObject *object,
               const py_array *array)
{
    py_memory *memory = &memories->places[place];
    PyObject *storage;
    void *const *watch = NULL;

    if (memory->dtype[column] == array->dtype &&
        memory->kept[column].data == array->data &&
        py_memory_holds(memory, column, object)) {
        return;
    }
    forget(memories, place, column);
    storage = PyObject_CallMethod(object, "untyped_storage", NULL);
    PyErr_Clear();
    if (storage != NULL) {
        watch = find_watch(storage, array->data);
    }
    if (watch == NULL) { /* cannot be kept alive or watched, so it is not kept */
        Py_XDECREF(storage);
        return;
    }
    memory->kept[column].object = Py_NewRef(object);
    memory->kept[column].data = array->data;
    memory->kept[column].watch = watch;
    memory->dtype[column] = (uint8_t)array->dtype;
    memories->storages[place].storage[column] = storage;
}

void
py_memory_source(py_memories *memories, Py_ssize_t place, PyObject *dict)
{
    if (place < memories->capacity) {
        memories->places[place].source = dict;
        memories->places[place].source_parts = py_dict_parts(dict);
    }
}

void
py_memory_hint(const py_memories *memories, Py_ssize_t place)
{
    if (place < memories->capacity) {
        const py_memory *memory = &memories->places[place];
        const char *shape = memory->second_shape, *parts = memory->source_parts;

        __builtin_prefetch(memory->second);
        for (int c = 0; c < PY_MAX_COLUMNS; c++) {
            if (memory->kept[c].object != NULL) {
                __builtin_prefetch((const void *)memory->kept[c].watch);
            }
        }
        __builtin_prefetch(memory->source);
        if (shape != NULL) { /* in the midst of its body */
            __builtin_prefetch(shape - LINE);
            __builtin_prefetch(shape);
            __builtin_prefetch(shape + LINE);
        }
        if (parts != NULL) {
            __builtin_prefetch(parts);
            __builtin_prefetch(parts + LINE);
        }
    }
}

void
py_memory_hint_kept(const py_state *state, const py_memories *memories,
                    Py_ssize_t place, py_memory_depth depth)
{
    for (int c = 0; c < PY_MAX_COLUMNS && place < memories->capacity; c++) {
        PyObject *object = memories->places[place].kept[c].object;

        if (object == NULL) {
            continue;
        }
        if (depth == PY_HINT_OBJECTS) {
            __builtin_prefetch(object);
        } else if (depth == PY_HINT_BODIES) {
            py_hint_body(state, object);
        } else {
            py_hint_parts(state, object);
        }
    }
}
