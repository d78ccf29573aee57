#include "core.h"

#include "producers.h"

#include <stdio.h>
#include <string.h>

/* ---- Types ----------------------------------------------------------------------- */

/* Whether the type is, or inherits from, a class `name`, of `module` unless it is NULL.
 */
static bool
inherits(PyTypeObject *type, const char *name, const char *module)
{
    PyObject *bases = PyObject_GetAttrString((PyObject *)type, "__mro__");
    const Py_ssize_t n = bases == NULL ? 0 : PyTuple_Size(bases);
    bool found = false;

    for (Py_ssize_t i = 0; i < n && !found; i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GetItem(bases, i);
        found = py_type_text_is(base, "__name__", name, false) &&
                (module == NULL || py_type_text_is(base, "__module__", module, false));
    }
    if (bases == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(bases);
    return found;
}

/* False for subclasses of torch.Tensor other than Parameter: they inherit Tensor's
 * DLPack export, but the exported memory need not hold their values (fake, distributed
 * and masked tensors). Sets *is_torch to whether the type is torch.Tensor or any
 * subclass of it. */
static bool
is_plain_type(PyTypeObject *type, bool *is_torch)
{
    *is_torch = inherits(type, "Tensor", "torch");
    return !*is_torch ||
           (py_type_text_is(type, "__name__", "Tensor", false) &&
            py_type_text_is(type, "__module__", "torch", false)) ||
           (py_type_text_is(type, "__name__", "Parameter", false) &&
            py_type_text_is(type, "__module__", "torch.nn.parameter", false));
}

/* ---- Lazy views: torch's conjugate and negative bits ----------------------------- */

/* Whether a torch tensor may have the conjugate or the negative bit set, which neither
 * the exchange API nor data_ptr() shows. x.conj() is complex; x.conj().imag is a float
 * view of complex memory, so its strides are even. The strides of a single float tell
 * nothing: it counts only with PY_ANY_DTYPE. See also is_negated() in table.c. */
static bool
may_be_lazy(const py_array *array, int how)
{
    if (array->dtype == PY_COMPLEX64 || array->dtype == PY_COMPLEX128) {
        return true;
    }
    if (array->dtype != TFAST_F32 && array->dtype != TFAST_F64 &&
        array->dtype != TFAST_F16) {
        return false;
    }
    for (int d = array->ndim - 1; d >= 0 && array->numel > 1; d--) {
        if (array->shape[d] != 1 && array->strides[d] % 2 != 0) {
            return false;
        }
    }
    return array->numel > 1 || (how & PY_ANY_DTYPE) != 0;
}

/* Calls a method that returns a bool; false if the object has no such method. */
static bool
says(PyObject *object, const char *method)
{
    PyObject *answer = PyObject_CallMethod(object, method, NULL);
    const bool yes = answer != NULL && PyObject_IsTrue(answer) == 1;

    PyErr_Clear();
    Py_XDECREF(answer);
    return yes;
}

/* Borrows by the exchange API or, with `exchange` NULL, by torch's attributes; resolves
 * lazy views for PY_ANY_DTYPE and refuses them otherwise. Returns 0, -1 with an
 * exception, or 1 without one if the attributes do not describe the tensor. */
static int
borrow_fast(const py_state *state, const dlpack_exchange *exchange, PyObject *object,
            py_argument argument, int how, py_array *array)
{
    int status = exchange != NULL
                     ? py_borrow_view(exchange, object, argument, how, array)
                     : py_borrow_torch(state, object, array);
    PyObject *once;

    if (status != 0 || !may_be_lazy(array, how) ||
        !(says(object, "is_neg") || says(object, "is_conj"))) {
        return status;
    }
    if ((how & PY_ANY_DTYPE) == 0) {
        return py_argument_error(PyExc_NotImplementedError, argument,
                                 "must not be a lazily negated view (resolve_neg() "
                                 "makes a tensor of it)");
    }
    once = PyObject_CallMethod(object, "resolve_conj", NULL);
    array->owner = once == NULL ? NULL : PyObject_CallMethod(once, "resolve_neg", NULL);
    Py_XDECREF(once);
    return array->owner == NULL
               ? -1
               : borrow_fast(state, exchange, array->owner, argument, how, array);
}

/* Whether objects of this type have a word after their count and type. */
static bool
has_body(PyTypeObject *type)
{
    PyObject *size = PyObject_GetAttrString((PyObject *)type, "__basicsize__");
    const long bytes = size == NULL ? 0 : PyLong_AsLong(size);

    PyErr_Clear();
    Py_XDECREF(size);
    return bytes >= (long)(sizeof(PyObject) + sizeof(uintptr_t));
}

/* Makes py_borrow() call borrow_fast() for this type from now on. */
static void
remember(py_state *state, PyTypeObject *type, const dlpack_exchange *exchange)
{
    if (state->n_fast < (int)(sizeof state->fast / sizeof *state->fast)) {
        Py_INCREF((PyObject *)type);
        state->fast[state->n_fast].type = type;
        state->fast[state->n_fast].has_body = exchange != NULL && has_body(type);
        state->fast[state->n_fast++].exchange = exchange;
    }
}

static bool
is_remembered(const py_state *state, const PyTypeObject *type)
{
    bool found = false;

    for (int i = 0; i < state->n_fast; i++) {
        found |= state->fast[i].type == type;
    }
    return found;
}

void
py_prefetch(const py_state *state, PyObject *object)
{
    enum { LINE = 64, LINES = 4 };

    for (int i = 0; i < state->n_fast; i++) {
        if (state->fast[i].type == Py_TYPE(object) && state->fast[i].has_body) {
            const uintptr_t body = *(const uintptr_t *)(object + 1);

            for (int line = 0; line < LINES; line++) {
                __builtin_prefetch((const void *)(body + (uintptr_t)(line * LINE)));
            }
        }
    }
}

/* ---- Any array ------------------------------------------------------------------- */

/* Borrows an array whose type borrow_fast() does not know: tries the producers in turn,
 * and remembers a type that has the exchange API or is torch's. */
static int
borrow_unknown(py_state *state, PyObject *object, py_argument argument, int how,
               py_array *array)
{
    PyTypeObject *type = Py_TYPE(object);
    const dlpack_exchange *exchange;
    bool is_torch, plain;

    if (py_is_numpy(state, object)) {
        if (inherits(type, "MaskedArray", NULL)) {
            return py_argument_error(
                PyExc_TypeError, argument,
                "must not be a masked array: its mask would be ignored");
        }
        return py_borrow_numpy(state, object, argument, how, array);
    }
    if ((how & PY_ANY_DTYPE) != 0 && py_is_numpy_scalar(state, object)) {
        return py_borrow_numpy_scalar(state, object, argument, how, array);
    }
    plain = is_plain_type(type, &is_torch);
    if (!plain) {
        PyObject *name = PyType_GetName(type);
        const char *text = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);

        py_argument_error(
            PyExc_NotImplementedError, argument,
            "must be a torch.Tensor or Parameter itself, got its subclass %.100s",
            text == NULL ? "of no name" : text);
        Py_XDECREF(name);
        return -1;
    }
    exchange = py_find_exchange(type);
    if (exchange != NULL) {
        if (borrow_fast(state, exchange, object, argument, how, array) < 0) {
            return -1;
        }
        remember(state, type, exchange);
        return 0;
    }
    if (is_torch && !is_remembered(state, type)) {
        int status = py_torch_load(state);

        if (status == 0) {
            remember(state, type, NULL);
            status = borrow_fast(state, NULL, object, argument, how, array);
        }
        if (status <= 0) {
            return status;
        }
    }
    if (PyObject_HasAttrString(object, "__dlpack__")) {
        PyObject *detached =
            is_torch ? PyObject_CallMethod(object, "detach", NULL) : Py_NewRef(object);
        const int status =
            detached == NULL ? -1 : py_borrow_capsule(detached, argument, how, array);
        Py_XDECREF(detached);
        return status;
    }
    if (PyObject_CheckBuffer(object)) {
        return py_borrow_buffer(object, argument, how, array);
    }
    return py_argument_error(PyExc_TypeError, argument,
                             "must be an array (NumPy, torch, DLPack or a buffer)");
}

/* Whether a torch tensor's storage was resized to 0 bytes, which is how sharding
 * libraries free memory. check_data() raises ValueError for it: NotImplementedError
 * would make callers fall back on torch, whose kernels dereference the null pointer. */
static bool
is_freed(PyObject *object)
{
    PyObject *storage = PyObject_CallMethod(object, "untyped_storage", NULL);
    PyObject *bytes =
        storage == NULL ? NULL : PyObject_CallMethod(storage, "nbytes", NULL);
    const bool freed = bytes != NULL && PyLong_AsLongLong(bytes) == 0;

    PyErr_Clear();
    Py_XDECREF(bytes);
    Py_XDECREF(storage);
    return freed;
}

/* Alignment of an element in bytes, a power of two. */
static const uint8_t alignments[PY_N_DTYPES] = {
    [TFAST_F32] = 4,        [TFAST_F64] = 8,      [TFAST_F16] = 2,
    [TFAST_BF16] = 2,       [TFAST_BOOL] = 1,     [PY_INT64] = 8,
    [PY_INT32] = 4,         [PY_INT16] = 2,       [PY_INT8] = 1,
    [PY_UINT64] = 8,        [PY_UINT32] = 4,      [PY_UINT16] = 2,
    [PY_UINT8] = 1,         [PY_COMPLEX64] = 4,   [PY_COMPLEX128] = 8,
    [PY_FLOAT8_E4M3FN] = 1, [PY_FLOAT8_E5M2] = 1,
};

static bool
dtype_fits(int dtype, int how)
{
    if ((how & PY_ONLY_INT64) != 0) {
        return dtype == PY_INT64;
    }
    if ((how & PY_ONLY_INT32) != 0) {
        return dtype == PY_INT32;
    }
    return dtype < TFAST_N_DTYPES || (how & PY_ANY_DTYPE) != 0 ||
           (dtype == TFAST_BOOL && (how & PY_OR_BOOL) != 0) ||
           (dtype == PY_UINT8 && (how & PY_OR_UINT8) != 0);
}

/* What holds of every array, whoever produced it. */
static int
check_array(const py_state *state, PyObject *object, py_argument argument, int how,
            const py_array *array)
{
    if (!dtype_fits(array->dtype, how)) {
        return py_dtype_error(argument, how, "%s", py_dtype_name(array->dtype));
    }
    if (array->numel == 0) {
        return 0;
    }
    if (array->data == NULL && is_freed(object)) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must have data, got a tensor whose memory was freed");
    }
    if (array->data == NULL) {
        return py_argument_error(
            PyExc_NotImplementedError, argument,
            "must have data, got a null pointer (a fake or meta tensor)");
    }
    if (((uintptr_t)array->data & (alignments[array->dtype] - 1u)) != 0) {
        return py_argument_error(state->placement_error, argument,
                                 "must be aligned to %d bytes, got address %p",
                                 alignments[array->dtype], array->data);
    }
    return 0;
}

int
py_borrow(py_state *state, PyObject *object, py_argument argument, int how,
          py_array *array)
{
    int status = 1; /* not done yet */

    array->owner = NULL;
    for (int i = 0; i < state->n_fast && status > 0; i++) {
        if (state->fast[i].type == Py_TYPE(object)) {
            status = borrow_fast(state, state->fast[i].exchange, object, argument, how,
                                 array);
        }
    }
    if (status > 0 && Py_TYPE(object) == state->numpy_type) {
        status = py_borrow_numpy(state, object, argument, how, array);
    }
    if (status > 0) {
        status = borrow_unknown(state, object, argument, how, array);
    }
    if (status == 0) {
        status = check_array(state, object, argument, how, array);
    }
    if (status < 0) {
        py_release(array);
    }
    return status;
}

void
py_release(py_array *array)
{
    Py_CLEAR(array->owner);
}

/* ---- Checks of one array: device, dtype ------------------------------------------ */

static const char *
device_text(tfast_device device, char *text, size_t bytes)
{
    if (device.type == TFAST_CPU) {
        return "cpu";
    }
    snprintf(text, bytes, "cuda:%d", device.index);
    return text;
}

bool
py_is_at(const py_array *array, const py_place *place)
{
    return array->device.type == place->device.type &&
           array->device.index == place->device.index;
}

int
py_place_error(const py_array *array, py_argument argument, const py_place *place)
{
    char want[24], got[24], of[128];

    py_argument_text(place->of, of, sizeof of);
    return py_argument_error(PyExc_ValueError, argument, "must be on %s as %s, got %s",
                             device_text(place->device, want, sizeof want), of,
                             device_text(array->device, got, sizeof got));
}

int
py_check_scalar(const py_array *array, py_argument argument, int dtype)
{
    if (array->numel == 1 && array->dtype == dtype) {
        return 0;
    }
    return py_argument_error(
        PyExc_ValueError, argument, "must hold one %s, got %lld elements of %s",
        py_dtype_name(dtype), (long long)array->numel, py_dtype_name(array->dtype));
}

/* The first array that may lie anywhere sets the place of the others. */
static int
check_place(py_call *call, const py_parameter *parameter, const py_array *array,
            py_argument argument)
{
    char got[24];

    if (parameter->on_cpu) {
        return array->device.type == TFAST_CPU
                   ? 0
                   : py_argument_error(PyExc_ValueError, argument,
                                       "must be on cpu, got %s",
                                       device_text(array->device, got, sizeof got));
    }
    if (call->place.device.type == 0) {
        call->place = (py_place){array->device, argument};
    }
    return py_is_at(array, &call->place)
               ? 0
               : py_place_error(array, argument, &call->place);
}

/* The dtype that a rule requires; -1: py_borrow() has already checked the dtype. */
static int
wanted_dtype(const py_call *call, int rule)
{
    const int first = call->n == 0 ? TFAST_F32 : call->arrays[0].dtype;

    switch (rule) {
    case PY_FLOATS:
    case PY_FLOATS_OR_BOOL:
        return -1;
    case PY_FIRSTS:
        return first;
    case PY_ACCUMULATORS:
        return first == TFAST_F64 ? TFAST_F64 : TFAST_F32;
    default:
        return rule - PY_EXACT;
    }
}

static int
check_dtype(const py_call *call, const py_parameter *parameter, const py_array *array,
            py_argument argument)
{
    const int want = wanted_dtype(call, parameter->dtype);

    if (parameter->kind != PY_ARRAY) {
        return py_check_scalar(array, argument, want);
    }
    if (want < 0 || array->dtype == want) {
        return 0;
    }
    return py_argument_error(PyExc_ValueError, argument, "must be %s, got %s",
                             py_dtype_name(want), py_dtype_name(array->dtype));
}

/* ---- The arrays of a call -------------------------------------------------------- */

/* Borrows `object` into the next of call->arrays, and checks its device and dtype. */
static const py_array *
borrow_next(py_call *call, const py_parameter *parameter, bool written,
            PyObject *object, Py_ssize_t index)
{
    const py_argument argument = {parameter->name, index};
    py_array *array = &call->arrays[call->n];
    const int how = (written ? PY_WRITE : 0) |
                    (parameter->dtype == PY_FLOATS_OR_BOOL      ? PY_OR_BOOL
                     : parameter->dtype == PY_EXACTLY(PY_INT64) ? PY_ONLY_INT64
                     : parameter->dtype == PY_EXACTLY(PY_INT32) ? PY_ONLY_INT32
                                                                : 0);

    if (py_borrow(call->state, object, argument, how, array) < 0) {
        return NULL;
    }
    call->of[call->n].argument = argument;
    call->of[call->n].written = written;
    call->n++;
    if (check_place(call, parameter, array, argument) < 0 ||
        check_dtype(call, parameter, array, argument) < 0) {
        return NULL;
    }
    return array;
}

const py_array *
py_borrow_argument(py_call *call, int p, PyObject *object, Py_ssize_t index)
{
    const py_parameter *parameter = &call->operation->parameters[p];
    const bool written = parameter->written || (call->written >> p & 1) != 0;

    call->found[p] = borrow_next(call, parameter, written, object, index);
    return call->found[p];
}

int
py_borrow_arrays(py_call *call, void *fields)
{
    for (uint64_t left = call->seen; left != 0; left &= left - 1) {
        const int p = __builtin_ctzll(left);
        const py_parameter *parameter = &call->operation->parameters[p];
        const uint16_t at =
            parameter->kind == PY_SCALAR ? parameter->at : parameter->scalar_at;
        const py_array *array;

        if (call->given[p] == NULL || (parameter->kind != PY_ARRAY && at == 0)) {
            continue;
        }
        array = py_borrow_argument(call, p, call->given[p], -1);
        if (array == NULL) {
            return -1;
        }
        if (at != 0) {
            memcpy((char *)fields + at - 1, &array->data, sizeof array->data);
        }
    }
    return 0;
}

int
py_check_overlap(const py_call *call)
{
    py_span spans[PY_MAX_ARRAYS];
    Py_ssize_t n = 0;

    for (int i = 0; i < call->n; i++) {
        if (call->arrays[i].numel > 0) {
            spans[n++] =
                py_span_of(&call->arrays[i], call->of[i].argument, call->of[i].written);
        }
    }
    return py_check_spans(call->state->placement_error, spans, n);
}

/* The array of n float32 that `function` returns. */
static const py_array *
borrow_scratch(py_call *call, PyObject *function, int64_t n)
{
    static const py_parameter scratch = {"scratch's array", PY_ARRAY,
                                         PY_EXACTLY(TFAST_F32), .written = true};
    const py_array *array;

    if (function == NULL) {
        PyErr_SetString(PyExc_TypeError, "scratch must be a function where the call "
                                         "needs memory, got None");
        return NULL;
    }
    call->scratch = PyObject_CallFunction(function, "L", (long long)n);
    array = call->scratch == NULL
                ? NULL
                : borrow_next(call, &scratch, true, call->scratch, -1);
    if (array == NULL) {
        return NULL;
    }
    if (array->ndim != 1 || array->shape[0] != n) {
        py_shape_error(PyExc_ValueError, scratch.name, array, "must have shape (%lld,)",
                       (long long)n);
        return NULL;
    }
    if ((n > 1 && array->strides[0] != 1) ||
        (uintptr_t)array->data % TFAST_SCRATCH_ALIGNMENT != 0) {
        py_shape_error(PyExc_ValueError, scratch.name, array,
                       "must be dense and aligned to %d bytes",
                       (int)TFAST_SCRATCH_ALIGNMENT);
        return NULL;
    }
    return py_check_overlap(call) < 0 ? NULL : array;
}

int
py_take_scratch(py_call *call, PyObject *function, tfast_status status, int64_t bytes,
                void **data, int64_t *got)
{
    const py_array *array;

    if (status != TFAST_OK) {
        Py_XDECREF(py_result(status));
        return -1;
    }
    if (bytes == 0) {
        return 0;
    }
    array = borrow_scratch(call, function, (bytes + 3) / 4);
    if (array == NULL) {
        return -1;
    }
    *data = array->data;
    *got = 4 * array->numel;
    return 0;
}

void
py_release_arrays(py_call *call)
{
    while (call->n > 0) {
        py_release(&call->arrays[--call->n]);
    }
    Py_CLEAR(call->scratch);
}
