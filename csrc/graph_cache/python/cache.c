/* The type GraphCache: an open cache, and its graphs as arrays. */
#include "../../backend.h"
#include "binding.h"

#include <stdlib.h>
#include <string.h>

/* ---- One field of one graph ------------------------------------------------------ */

typedef struct {
    py_state *state;
    const graph_schema_field *field;
    const tfast_graph_array *array;
    PyObject *base; /* borrowed; owns the memory at array->data */
} entry;

static void
widen(void *out, int bytes, const tfast_graph_array *array)
{
    tfast_graph_kernels_in_use()->widen(out, bytes, array->data, array->stored,
                                        array->numel, 0);
}

/* A new array of the field's dtype; the file stores its integers in a narrower one. */
static PyObject *
widened(const entry *e, py_made *made)
{
    PyObject *array = py_new_numpy(e->state, made);

    if (array != NULL && e->array->numel > 0) {
        widen(made->data, (int)py_dtype_size(made->dtype), e->array);
    }
    return array;
}

static PyObject *
number_of(const entry *e)
{
    int64_t integer;
    double number;
    uint8_t truth; /* not bool: a damaged, unverified file may hold any byte */

    switch (e->field->dtype) {
    case GRAPH_BOOL:
        memcpy(&truth, e->array->data, sizeof truth);
        return PyBool_FromLong(truth != 0);
    case GRAPH_F64:
        memcpy(&number, e->array->data, sizeof number);
        return PyFloat_FromDouble(number);
    default:
        if (e->array->stored == GRAPH_AS_IS) {
            memcpy(&integer, e->array->data, sizeof integer);
        } else {
            widen(&integer, (int)sizeof integer, e->array);
        }
        return PyLong_FromLongLong(integer);
    }
}

/* Decodes a copy, because the decoder reads bytes more than once and another process
 * may change a mapped file in between. */
static PyObject *
text_of(const tfast_graph_array *array)
{
    PyObject *text, *bytes = PyBytes_FromStringAndSize(array->data, array->numel);

    if (bytes == NULL) {
        return NULL;
    }
    text = PyUnicode_DecodeUTF8(PyBytes_AsString(bytes), array->numel, NULL);
    Py_DECREF(bytes);
    return text;
}

/* A new reference to the Python value of a field; NULL with an exception. */
static PyObject *
value_of(const entry *e)
{
    const int dtype = e->field->dtype;
    const tfast_graph_array *array = e->array;
    py_made made;

    if (array->stored == GRAPH_ABSENT) {
        Py_RETURN_NONE;
    }
    if (dtype == GRAPH_STRING) {
        return text_of(array);
    }
    if (dtype == GRAPH_BYTES) {
        return PyBytes_FromStringAndSize(array->data, array->numel);
    }
    if ((e->field->flags & GRAPH_SCALAR) != 0) {
        return number_of(e);
    }
    made = (py_made){(void *)(uintptr_t)array->data, py_dtype_of_graph(dtype),
                     array->rank, array->shape};
    if (array->stored != GRAPH_AS_IS) {
        return widened(e, &made);
    }
    return py_make_numpy(e->state, &made, false, e->base);
}

enum { LONG_BYTES = 1 << 20 }; /* reading more takes over about 0.1 ms */

bool
py_graph_takes_long(const py_graph_cache *cache, int64_t n)
{
    const double graphs = (double)tfast_graph_cache_len(cache->cache);
    const double bytes = (double)tfast_graph_cache_file_bytes(cache->cache);

    return cache->pread || (double)n * bytes > LONG_BYTES * graphs;
}

/* ---- Methods --------------------------------------------------------------------- */

static void
free_record(PyObject *capsule)
{
    free(PyCapsule_GetPointer(capsule, "trainfast.record"));
}

static int
take_index(PyObject *number, int64_t end, int64_t *i)
{
    *i = PyLong_AsLongLong(number);
    if (*i == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (*i < 0 || *i >= end) {
        PyErr_Format(PyExc_IndexError, "index must be in 0 .. %lld, got %lld",
                     (long long)end - 1, (long long)*i);
        return -1;
    }
    return 0;
}

static PyObject *
make_list(py_graph_cache *self, const tfast_graph_array *arrays, PyObject *base)
{
    const tfast_graph_schema *schema = tfast_graph_cache_schema(self->cache);
    const Py_ssize_t n = schema->header.n_fields;
    PyObject *list = PyList_New(n);

    for (Py_ssize_t i = 0; i < n && list != NULL; i++) {
        const entry e = {py_graph_state((PyObject *)self), &schema->fields[i],
                         &arrays[i], base};
        PyObject *value = value_of(&e);

        if (value == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SetItem(list, i, value); /* steals the reference */
        }
    }
    return list;
}

static PyObject *
cache_get(py_graph_cache *self, PyObject *number)
{
    const tfast_graph_schema *schema = tfast_graph_cache_schema(self->cache);
    tfast_graph_array *arrays;
    PyObject *base = NULL, *list = NULL;
    PyThreadState *thread;
    void *owned = NULL;
    tfast_status status;
    int64_t i;

    if (take_index(number, tfast_graph_cache_len(self->cache), &i) < 0) {
        return NULL;
    }
    arrays = PyMem_Calloc((size_t)schema->header.n_fields + 1, sizeof *arrays);
    if (arrays == NULL) {
        return PyErr_NoMemory();
    }
    thread = py_graph_takes_long(self, 1) ? PyEval_SaveThread() : NULL;
    status = tfast_graph_cache_get(self->cache, i, arrays, &owned);
    if (thread != NULL) {
        PyEval_RestoreThread(thread);
    }
    if (status != TFAST_OK) {
        py_result(status);
        goto done;
    }
    base = owned == NULL ? Py_NewRef((PyObject *)self)
                         : PyCapsule_New(owned, "trainfast.record", free_record);
    if (base == NULL) {
        free(owned);
        goto done;
    }
    list = make_list(self, arrays, base);
done:
    Py_XDECREF(base);
    PyMem_Free(arrays);
    return list;
}

static PyObject *
cache_counts(py_graph_cache *self, PyObject *number)
{
    const tfast_graph_schema *schema = tfast_graph_cache_schema(self->cache);
    const int64_t n = tfast_graph_cache_len(self->cache);
    const long n_counts = schema == NULL ? 0 : schema->header.n_counts;
    const long count = PyLong_AsLong(number);
    py_made made = {NULL, PY_INT64, 1, &n};
    PyObject *array;

    if (count == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (count < -1 || count >= n_counts) {
        PyErr_Format(PyExc_ValueError, "count must be in -1 .. %ld, got %ld",
                     n_counts - 1, count);
        return NULL;
    }
    array = py_new_numpy(py_graph_state((PyObject *)self), &made);
    if (array != NULL && n > 0) {
        if (count < 0) {
            tfast_graph_cache_frame_bytes(self->cache, made.data);
        } else {
            tfast_graph_cache_counts(self->cache, (int)count, made.data);
        }
    }
    return array;
}

static PyObject *
cache_keys(py_graph_cache *self, PyObject *Py_UNUSED(unused))
{
    const int64_t n = tfast_graph_cache_len(self->cache);
    PyObject *keys = PyBytes_FromStringAndSize(NULL, 16 * n);
    tfast_status status;

    if (keys == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_cache_keys(self->cache, (uint8_t *)PyBytes_AsString(keys));
    Py_END_ALLOW_THREADS
    if (status != TFAST_OK) {
        Py_DECREF(keys);
        return py_result(status);
    }
    return keys;
}

/* ---- Verify ---------------------------------------------------------------------- */

enum { VERIFY_SLICE = 64 << 20 }; /* approximate bytes between checks for signals */

/* The state of a verify() that runs without the GIL. */
typedef struct {
    PyThreadState *thread; /* of PyEval_SaveThread(); report_damage() takes the GIL */
    PyObject *damaged;     /* [(index, message)] */
    bool failed;           /* an exception is set; cache_verify() returns with it */
} report;

static void
report_damage(void *context, int64_t i, const char *message)
{
    report *r = context;
    PyObject *row;

    PyEval_RestoreThread(r->thread);
    row = r->failed
              ? NULL
              : Py_BuildValue("(LN)", (long long)i,
                              PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message),
                                                   "replace"));
    if (row == NULL || PyList_Append(r->damaged, row) < 0) {
        r->failed = true; /* the core goes on to the end of the slice */
    }
    Py_XDECREF(row);
    r->thread = PyEval_SaveThread();
}

/* Verifies graphs first .. end - 1, without the GIL, then checks for signals. Returns
 * 0, or -1 with an exception. */
static int
verify_slice(py_graph_cache *self, int64_t first, int64_t end, bool values, report *r)
{
    tfast_status status;

    r->thread = PyEval_SaveThread();
    status =
        tfast_graph_cache_verify(self->cache, first, end, values, report_damage, r);
    PyEval_RestoreThread(r->thread);
    if (r->failed) {
        return -1;
    }
    if (status != TFAST_OK) {
        py_result(status);
        return -1;
    }
    return PyErr_CheckSignals();
}

static PyObject *
cache_verify(py_graph_cache *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"first", "end", "values", NULL};
    const int64_t n = tfast_graph_cache_len(self->cache);
    long long first, end;
    const int64_t bytes = tfast_graph_cache_file_bytes(self->cache) / (n + 1) + 1;
    const int64_t slice = VERIFY_SLICE / bytes + 1; /* in graphs */
    report r = {NULL, NULL, false};
    int values;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLp:verify", names, &first, &end,
                                     &values)) {
        return NULL;
    }
    if (first < 0 || end < first || end > n) {
        PyErr_Format(
            PyExc_ValueError,
            "first and end must be 0 <= first <= end <= %lld, got %lld and %lld",
            (long long)n, first, end);
        return NULL;
    }
    r.damaged = PyList_New(0);
    for (int64_t i = first; r.damaged != NULL && i < end; i += slice) {
        const int64_t stop = end - i < slice ? end : i + slice;

        if (verify_slice(self, i, stop, values != 0, &r) < 0) {
            Py_CLEAR(r.damaged);
        }
    }
    /* A call for no graphs checks the bytes between the records. A single slice of all
     * graphs has checked them already. */
    if (r.damaged != NULL && (first == end || (first == 0 && end == n && n > slice)) &&
        verify_slice(self, end, end, values != 0, &r) < 0) {
        Py_CLEAR(r.damaged);
    }
    return r.damaged;
}

/* ---- Attributes ------------------------------------------------------------------ */

static PyObject *
cache_schema(py_graph_cache *self, void *Py_UNUSED(closure))
{
    const tfast_graph_schema *schema = tfast_graph_cache_schema(self->cache);

    if (schema == NULL) {
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize((const char *)schema->bytes,
                                     (Py_ssize_t)schema->n_bytes);
}

static PyObject *
cache_fingerprint(py_graph_cache *self, void *Py_UNUSED(closure))
{
    return PyBytes_FromStringAndSize(
        (const char *)tfast_graph_cache_fingerprint(self->cache), 16);
}

static PyObject *
cache_file_bytes(py_graph_cache *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(tfast_graph_cache_file_bytes(self->cache));
}

static PyObject *
cache_segments(py_graph_cache *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(tfast_graph_cache_segments(self->cache));
}

static PyObject *
cache_pread(py_graph_cache *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->pread);
}

static Py_ssize_t
cache_len(py_graph_cache *self)
{
    return (Py_ssize_t)tfast_graph_cache_len(self->cache);
}

/* ---- The type -------------------------------------------------------------------- */

/* The mode for the argument `pread`: with None the core decides by the file system.
 * Returns 0, or -1 with an exception. */
static int
take_mode(PyObject *pread, int *mode)
{
    const int truth = pread == Py_None ? 0 : PyObject_IsTrue(pread);

    *mode = pread == Py_None ? TFAST_GRAPH_BY_FILE_SYSTEM
            : truth          ? TFAST_GRAPH_PREAD
                             : TFAST_GRAPH_MMAP;
    return truth < 0 ? -1 : 0;
}

static PyObject *
cache_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", "verify", "pread", "partial", NULL};
    PyObject *path = NULL, *pread = Py_None;
    py_graph_cache *self = NULL;
    tfast_graph_cache *cache = NULL;
    tfast_graph_open_options options = {.verify = TFAST_GRAPH_VERIFY_ONCE};
    int partial = 0;
    tfast_status status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$iOp:GraphCache", names,
                                     PyUnicode_FSConverter, &path, &options.verify,
                                     &pread, &partial) ||
        take_mode(pread, &options.mode) < 0) {
        goto done;
    }
    options.partial = partial != 0;
    if (options.verify < TFAST_GRAPH_VERIFY_NEVER ||
        options.verify > TFAST_GRAPH_VERIFY_ALWAYS) {
        PyErr_Format(PyExc_ValueError, "verify must be 0, 1 or 2, got %d",
                     options.verify);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    status = tfast_graph_cache_open(&cache, PyBytes_AsString(path), &options);
    Py_END_ALLOW_THREADS
    if (status != TFAST_OK) {
        py_result(status);
        goto done;
    }
    self = (py_graph_cache *)py_graph_alloc(type);
    if (self == NULL) {
        tfast_graph_cache_release(cache);
        goto done;
    }
    self->cache = cache;
    self->pread = tfast_graph_cache_mode(cache) == TFAST_GRAPH_PREAD;
done:
    Py_XDECREF(path);
    return (PyObject *)self;
}

static int
cache_traverse(py_graph_cache *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    return 0;
}

static void
cache_dealloc(py_graph_cache *self)
{
    PyObject_GC_UnTrack(self);
    if (self->cache != NULL) {
        tfast_graph_cache_release(self->cache);
    }
    py_graph_free((PyObject *)self);
}

static PyMethodDef cache_methods[] = {
    {"get", (PyCFunction)cache_get, METH_O,
     "get($self, index, /)\n--\n\n"
     "The fields of a graph: NumPy arrays (read-only views of the record, or copies\n"
     "if stored in a narrower dtype), Python's bool, int, float, str or bytes, or\n"
     "None if the graph lacks the field."},
    {"counts", (PyCFunction)cache_counts, METH_O,
     "counts($self, count, /)\n--\n\n"
     "Count `count` of every graph, int64 [len]; -1: the graph's bytes in the file."},
    {"keys", (PyCFunction)cache_keys, METH_NOARGS,
     "keys($self, /)\n--\n\nThe keys of all graphs, 16 bytes each."},
    {"verify", (PyCFunction)(void (*)(void))cache_verify, METH_VARARGS | METH_KEYWORDS,
     "verify($self, /, first, end, values)\n--\n\n"
     "Checks graphs first .. end - 1 in full; values: also that floats are finite.\n"
     "An empty range or a range of all graphs also checks commit frames; their index\n"
     "is -1. Returns [(index, message), ...]."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef cache_attributes[] = {
    {"schema", (getter)cache_schema, NULL, "Serialised schema; None if empty.", NULL},
    {"fingerprint", (getter)cache_fingerprint, NULL,
     "16 bytes that change with every change of the cache.", NULL},
    {"file_bytes", (getter)cache_file_bytes, NULL, "Bytes of the used segments.", NULL},
    {"segments", (getter)cache_segments, NULL, "Number of used segments.", NULL},
    {"pread", (getter)cache_pread, NULL, "Whether files are read, not mapped.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot cache_slots[] = {
    {Py_tp_doc,
     "An open graph cache. verify: graphs are checked 0 never, 1 at the first, 2 at\n"
     "every access. pread: files are read, not mapped; None: on network file systems."},
    {Py_tp_new, cache_new},
    {Py_tp_traverse, cache_traverse},
    {Py_tp_dealloc, cache_dealloc},
    {Py_tp_methods, cache_methods},
    {Py_tp_getset, cache_attributes},
    {Py_sq_length, cache_len},
    {0, NULL},
};

PyType_Spec py_graph_cache_spec = {
    .name = "trainfast._core.GraphCache",
    .basicsize = sizeof(py_graph_cache),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = cache_slots,
};
