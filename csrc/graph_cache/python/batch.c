/* The types GraphSelection (the contents and array type of batches) and GraphBatch (one
 * collated batch, with its arrays as attributes). */
#include "binding.h"

/* ---- GraphSelection -------------------------------------------------------------- */

/* A new reference to from_dlpack(), which the array API standard requires of the module
 * that defines an array type. NULL with TypeError if the module has none. */
static PyObject *
find_from_dlpack(PyObject *type)
{
    PyObject *name = PyObject_GetAttrString(type, "__module__");
    PyObject *module = name == NULL ? NULL : PyImport_Import(name);
    PyObject *function =
        module == NULL ? NULL : PyObject_GetAttrString(module, "from_dlpack");

    if (function == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "array_type must have the DLPack exchange API, or its module "
                     "from_dlpack, got %R",
                     type);
    }
    Py_XDECREF(module);
    Py_XDECREF(name);
    return function;
}

static int
take_array_type(py_graph_selection *self, PyObject *type)
{
    if (type == Py_None) {
        return 0;
    }
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "array_type must be a type or None");
        return -1;
    }
    self->as = PY_AS_CAPSULE;
    if (type != (PyObject *)&PyBaseObject_Type) {
        self->as = PY_AS_OBJECT;
        self->exchange = py_find_maker((PyTypeObject *)type);
        if (self->exchange == NULL &&
            (self->from_dlpack = find_from_dlpack(type)) == NULL) {
            return -1;
        }
    }
    self->array_type = Py_NewRef(type);
    return 0;
}

static int
take_padding(py_graph_selection *self, py_state *state, long long n_slots,
             PyObject *totals, int n_counts)
{
    py_int64s numbers = {NULL, 0};

    self->selection.n_slots = n_slots;
    if ((n_slots != 0) != (totals != Py_None) || n_slots < 0) {
        PyErr_Format(PyExc_ValueError,
                     "n_slots must be > 0 and totals be given, or neither, got %lld "
                     "and %R; pass both for padding",
                     n_slots, totals);
        return -1;
    }
    if (totals == Py_None) {
        return 0;
    }
    if (py_take_int64s(state, totals, "totals", &numbers) < 0) {
        return -1;
    }
    self->totals = numbers.data;
    self->selection.totals = numbers.data;
    if (numbers.n != n_counts) {
        PyErr_Format(PyExc_ValueError, "totals must have %d numbers, got %lld",
                     n_counts, (long long)numbers.n);
        return -1;
    }
    for (int64_t i = 0; i < numbers.n; i++) {
        if (numbers.data[i] < -1) {
            PyErr_Format(PyExc_ValueError, "totals[%lld] must be >= -1, got %lld",
                         (long long)i, (long long)numbers.data[i]);
            return -1;
        }
    }
    return 0;
}

static int
take_fields(py_graph_selection *self, const tfast_graph_schema *schema,
            PyObject *fields, PyObject *batch_of)
{
    tfast_graph_selection *selection = &self->selection;
    const int n_fields = schema == NULL ? 0 : schema->header.n_fields;
    const int n_counts = schema == NULL ? 0 : schema->header.n_counts;

    if (py_take_uint16s(fields, "fields", n_fields, &self->fields,
                        &selection->n_fields) < 0 ||
        py_take_uint16s(batch_of, "batch_of", n_counts, &self->batch_of,
                        &selection->n_batch_of) < 0) {
        return -1;
    }
    selection->fields = self->fields;
    selection->batch_of = self->batch_of;
    self->dtypes = PyMem_Calloc((size_t)selection->n_fields + 1, 1);
    if (self->dtypes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < selection->n_fields; i++) {
        self->dtypes[i] =
            (uint8_t)py_dtype_of_graph(schema->fields[self->fields[i]].dtype);
    }
    return 0;
}

static PyObject *
selection_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"cache",  "fields",     "batch_of", "n_slots",
                            "totals", "array_type", NULL};
    py_state *state = PyType_GetModuleState(type);
    PyObject *cache, *fields, *totals = Py_None, *array_type = Py_None;
    PyObject *empty = PyTuple_New(0), *batch_of = empty;
    const tfast_graph_schema *schema;
    py_graph_selection *self = NULL;
    long long n_slots = 0;

    if (empty == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O$LOO:GraphSelection", names,
                                     &cache, &fields, &batch_of, &n_slots, &totals,
                                     &array_type) ||
        py_graph_object(state, cache, PY_GRAPH_CACHE, "cache") == NULL) {
        goto done;
    }
    self = (py_graph_selection *)py_graph_alloc(type);
    if (self == NULL) {
        goto done;
    }
    self->cache = (py_graph_cache *)Py_NewRef(cache);
    schema = tfast_graph_cache_schema(self->cache->cache);
    if (take_fields(self, schema, fields, batch_of) < 0 ||
        take_padding(self, state, n_slots, totals,
                     schema == NULL ? 0 : schema->header.n_counts) < 0 ||
        take_array_type(self, array_type) < 0) {
        Py_CLEAR(self);
    }
done:
    Py_XDECREF(empty);
    return (PyObject *)self;
}

static int
selection_traverse(py_graph_selection *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT((PyObject *)self->cache);
    Py_VISIT(self->array_type);
    Py_VISIT(self->from_dlpack);
    return 0;
}

static void
selection_dealloc(py_graph_selection *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF((PyObject *)self->cache);
    Py_XDECREF(self->array_type);
    Py_XDECREF(self->from_dlpack);
    PyMem_Free(self->fields);
    PyMem_Free(self->batch_of);
    PyMem_Free(self->totals);
    PyMem_Free(self->dtypes);
    py_graph_free((PyObject *)self);
}

static PyType_Slot selection_slots[] = {
    {Py_tp_doc,
     "Contents and array type of batches. array_type: None for NumPy arrays, object\n"
     "for DLPack capsules, or a type with the DLPack exchange API or with\n"
     "from_dlpack() in its module, such as torch.Tensor."},
    {Py_tp_new, selection_new},
    {Py_tp_traverse, selection_traverse},
    {Py_tp_dealloc, selection_dealloc},
    {0, NULL},
};

PyType_Spec py_graph_selection_spec = {
    .name = "trainfast._core.GraphSelection",
    .basicsize = sizeof(py_graph_selection),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = selection_slots,
};

/* ---- GraphBatch ------------------------------------------------------------------ */

typedef py_graph_batch graph_batch;

PyObject *
py_graph_batch_new(py_graph_selection *selection, tfast_graph_batch *batch)
{
    py_state *state = py_graph_state((PyObject *)selection);
    graph_batch *self =
        (graph_batch *)py_graph_alloc(state->graph_types[PY_GRAPH_BATCH]);

    if (self == NULL) {
        tfast_graph_batch_release(batch);
        return NULL;
    }
    self->selection = (py_graph_selection *)Py_NewRef((PyObject *)selection);
    self->batch = batch;
    return (PyObject *)self;
}

static void
release_batch(void *batch)
{
    tfast_graph_batch_release(batch);
}

/* A new array over the batch's memory. A NumPy array holds a reference to the
 * GraphBatch. A DLPack array holds a reference to the core's batch instead, because its
 * last release may come from a thread without the GIL. The GraphBatch keeps no
 * reference to its arrays: the collector could not see the cycle. */
static PyObject *
make_array_of(graph_batch *self, const void *data, int dtype, int ndim,
              const int64_t *shape)
{
    const py_graph_selection *selection = self->selection;
    const py_made made = {(void *)data, dtype, ndim, shape};
    PyObject *array = NULL, *capsule;
    void *note;

    if (selection->as == PY_AS_NUMPY) {
        return py_make_numpy(py_graph_state((PyObject *)self), &made, true,
                             (PyObject *)self);
    }
    note = tfast_graph_batch_note(self->batch, py_dlpack_bytes(ndim));
    tfast_graph_batch_retain(self->batch);
    if (selection->from_dlpack == NULL) {
        return py_make_dlpack(selection->exchange, &made, release_batch, self->batch,
                              note);
    }
    capsule = py_make_dlpack_unversioned(&made, release_batch, self->batch, note);
    if (capsule != NULL) {
        array = PyObject_CallFunctionObjArgs(selection->from_dlpack, capsule, NULL);
        Py_DECREF(capsule);
    }
    return array;
}

static PyObject *
make_array(graph_batch *self, size_t at, int dtype, int ndim, const int64_t *shape)
{
    return make_array_of(self, self->batch->arena + at, dtype, ndim, shape);
}

/* A new list of n items; item i is make(self, i). NULL with an exception. */
static PyObject *
make_list(graph_batch *self, Py_ssize_t n,
          PyObject *(*make)(graph_batch *self, Py_ssize_t i))
{
    PyObject *list = PyList_New(n);

    for (Py_ssize_t i = 0; i < n && list != NULL; i++) {
        PyObject *item = make(self, i);

        if (item == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SetItem(list, i, item); /* steals the reference */
        }
    }
    return list;
}

static int
count_of_counts(const graph_batch *self)
{
    const tfast_graph_schema *schema =
        tfast_graph_cache_schema(self->selection->cache->cache);

    return schema == NULL ? 0 : schema->header.n_counts;
}

static PyObject *
make_field(graph_batch *self, Py_ssize_t i)
{
    if (self->batch->ranks[i] < 0) {
        return Py_NewRef(Py_None);
    }
    return make_array(self, self->batch->field_at[i], self->selection->dtypes[i],
                      self->batch->ranks[i], self->batch->shapes[i]);
}

static PyObject *
make_ptr(graph_batch *self, Py_ssize_t i)
{
    const int64_t n = self->batch->n_slots + 1;

    return make_array(self, self->batch->ptr_at[i], PY_INT64, 1, &n);
}

/* The first n prefix sums of count i, from the copy outside the arena. */
static PyObject *
make_sums(graph_batch *self, Py_ssize_t i, int64_t n)
{
    const int64_t *sums = self->batch->sums + i * (self->batch->n_slots + 1);

    return make_array_of(self, sums, PY_INT64, 1, &n);
}

static PyObject *
make_slices(graph_batch *self, Py_ssize_t i)
{
    return make_sums(self, i, self->batch->n_slots + 1);
}

static PyObject *
make_starts(graph_batch *self, Py_ssize_t i)
{
    return make_sums(self, i, self->batch->n_slots);
}

static PyObject *
make_vector(graph_batch *self, Py_ssize_t i)
{
    const int64_t n = self->batch->totals[self->selection->batch_of[i]];

    return make_array(self, self->batch->batch_at[i], PY_INT64, 1, &n);
}

static PyObject *
batch_fields(graph_batch *self, void *Py_UNUSED(closure))
{
    return make_list(self, self->selection->selection.n_fields, make_field);
}

static PyObject *
batch_ptrs(graph_batch *self, void *Py_UNUSED(closure))
{
    return make_list(self, count_of_counts(self), make_ptr);
}

static PyObject *
batch_slices(graph_batch *self, void *Py_UNUSED(closure))
{
    return make_list(self, count_of_counts(self), make_slices);
}

static PyObject *
batch_starts(graph_batch *self, void *Py_UNUSED(closure))
{
    return make_list(self, count_of_counts(self), make_starts);
}

static PyObject *
batch_batches(graph_batch *self, void *Py_UNUSED(closure))
{
    return make_list(self, self->selection->selection.n_batch_of, make_vector);
}

static PyObject *
batch_arena(graph_batch *self, void *Py_UNUSED(closure))
{
    const int64_t bytes = (int64_t)self->batch->bytes;

    return make_array(self, 0, PY_UINT8, 1, &bytes);
}

static PyObject *
batch_n_graphs(graph_batch *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->batch->n_graphs);
}

static PyObject *
batch_n_slots(graph_batch *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->batch->n_slots);
}

static PyObject *
batch_nbytes(graph_batch *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->batch->bytes);
}

static PyObject *
batch_totals(graph_batch *self, void *Py_UNUSED(closure))
{
    const int n = count_of_counts(self);
    PyObject *totals = PyTuple_New(n);

    for (int i = 0; i < n && totals != NULL; i++) {
        PyObject *total = PyLong_FromLongLong(self->batch->totals[i]);

        if (total == NULL) {
            Py_CLEAR(totals);
        } else {
            PyTuple_SetItem(totals, i, total); /* steals the reference */
        }
    }
    return totals;
}

static PyObject *
field_offset(graph_batch *self, Py_ssize_t i)
{
    return PyLong_FromSize_t(self->batch->field_at[i]);
}

static PyObject *
ptr_offset(graph_batch *self, Py_ssize_t i)
{
    return PyLong_FromSize_t(self->batch->ptr_at[i]);
}

static PyObject *
batch_offset(graph_batch *self, Py_ssize_t i)
{
    return PyLong_FromSize_t(self->batch->batch_at[i]);
}

static PyObject *
batch_offsets(graph_batch *self, void *Py_UNUSED(closure))
{
    PyObject *fields =
        make_list(self, self->selection->selection.n_fields, field_offset);
    PyObject *ptrs = make_list(self, count_of_counts(self), ptr_offset);
    PyObject *batches =
        make_list(self, self->selection->selection.n_batch_of, batch_offset);
    PyObject *all = fields == NULL || ptrs == NULL || batches == NULL
                        ? NULL
                        : PyTuple_Pack(3, fields, ptrs, batches);

    Py_XDECREF(fields);
    Py_XDECREF(ptrs);
    Py_XDECREF(batches);
    return all;
}

static int
batch_traverse(graph_batch *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT((PyObject *)self->selection);
    return 0;
}

static void
batch_dealloc(graph_batch *self)
{
    PyObject_GC_UnTrack(self);
    tfast_graph_batch_release(self->batch);
    Py_DECREF((PyObject *)self->selection);
    py_graph_free((PyObject *)self);
}

static PyGetSetDef batch_attributes[] = {
    {"n_graphs", (getter)batch_n_graphs, NULL, "Number of graphs, unpadded.", NULL},
    {"n_slots", (getter)batch_n_slots, NULL, "Number of graphs, padded.", NULL},
    {"totals", (getter)batch_totals, NULL, "Sum of each count, with padding.", NULL},
    {"nbytes", (getter)batch_nbytes, NULL, "Bytes of the arena.", NULL},
    {"fields", (getter)batch_fields, NULL,
     "Arrays of the selected fields; None if no graph of the batch has the field. "
     "Every attribute makes new arrays at each access.",
     NULL},
    {"ptrs", (getter)batch_ptrs, NULL,
     "For each count: int64 [n_slots + 1], its prefix sums over the graphs.", NULL},
    {"slices", (getter)batch_slices, NULL,
     "A copy of ptrs, in memory outside the arena.", NULL},
    {"starts", (getter)batch_starts, NULL,
     "For each count: slices without the last element, int64 [n_slots].", NULL},
    {"batches", (getter)batch_batches, NULL,
     "For each count in batch_of: its batch vector, int64 [total].", NULL},
    {"arena", (getter)batch_arena, NULL, "The whole arena, uint8 [nbytes].", NULL},
    {"offsets", (getter)batch_offsets, NULL,
     "Byte offsets in the arena: (of fields, of ptrs, of batches).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot batch_slots[] = {
    {Py_tp_doc,
     "One collated batch. All arrays but slices and starts lie in one arena; the\n"
     "arrays keep the memory alive."},
    {Py_tp_traverse, batch_traverse},
    {Py_tp_dealloc, batch_dealloc},
    {Py_tp_getset, batch_attributes},
    {0, NULL},
};

PyType_Spec py_graph_batch_spec = {
    .name = "trainfast._core.GraphBatch",
    .basicsize = sizeof(graph_batch),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = batch_slots,
};

/* ---- Collate --------------------------------------------------------------------- */

PyObject *
py_graph_collate(PyObject *module, PyObject *args)
{
    py_state *state = PyModule_GetState(module);
    PyObject *object, *indices;
    py_graph_selection *selection;
    py_int64s numbers;
    tfast_graph_batch *batch = NULL;
    PyThreadState *thread;
    tfast_status status;

    if (!PyArg_ParseTuple(args, "OO:graph_collate", &object, &indices)) {
        return NULL;
    }
    selection = py_graph_object(state, object, PY_GRAPH_SELECTION, "selection");
    if (selection == NULL || py_take_int64s(state, indices, "indices", &numbers) < 0) {
        return NULL;
    }
    thread =
        py_graph_takes_long(selection->cache, numbers.n) ? PyEval_SaveThread() : NULL;
    status = tfast_graph_collate(selection->cache->cache, &selection->selection,
                                 numbers.data, numbers.n, false, &batch);
    if (thread != NULL) {
        PyEval_RestoreThread(thread);
    }
    PyMem_Free(numbers.data);
    return status == TFAST_OK ? py_graph_batch_new(selection, batch)
                              : py_result(status);
}
