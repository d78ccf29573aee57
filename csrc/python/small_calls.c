/* The type SmallCalls: decides by size which attention calls are left to torch, because
 * torch is faster, and counts them.
 *
 * Reads shapes, dtypes and devices through the DLPack exchange API (torch 2.10 and
 * later), otherwise from the tensors' attributes, which takes longer. */
#include "core.h"
#include "producers.h"

#include <string.h>

/* Indices of the objects that a SmallCalls holds. input.dtype is an index or OTHER. */
enum {
    TENSOR, /* plain types; their subclasses are left alone */
    PARAMETER,
    FLOAT32,
    FLOAT64,
    FLOAT16,
    BFLOAT16,
    IS_GRAD_ENABLED, /* torch.is_grad_enabled */
    SHAPE,           /* from here: names of attributes */
    DTYPE,
    IS_CPU,
    REQUIRES_GRAD,
    N_HELD,
    OTHER = N_HELD
};

/* Why a call was left to torch, in the order in which counts() returns them. */
enum { SMALL, AMX, FUSED, N_REASONS, NONE = N_REASONS };

enum { MIN_DIMS = 2 }; /* fewer: not an input of attention */

/* Thresholds for leaving a call to torch, measured on 2 threads with AVX-512 and AMX.
 *
 * The kernels save time in proportion to scores = batch * heads * n_q * n_k, less where
 * n_q leaves query tiles partly empty, and lose a constant time in Python. */
#define SMALL_WORK 0x1p19 /* scores * min(n_q, FULL_TILE) of float32 and float64 */
enum { FULL_TILE = 32 };
/* Scores, of any dtype and device. Decides for float16 and bfloat16, which torch must
 * convert; for float32 and float64 on the CPU SMALL_WORK is the higher limit. */
#define SMALL_SCORES_HALF 0x1p10
/* Up to this n_q query tiles are mostly empty, and torch is faster unless k has more
 * than FEW_KEYS elements: then memory bandwidth limits both. */
enum { FEW_QUERIES = 8 };
#define FEW_KEYS 0x1p20
/* With AMX torch multiplies bfloat16 matrices faster than the kernels do. With
 * gradients torch also converts, and is faster only above this n_q * n_k * dim. */
#define AMX_HEAD 0x1p21
/* torch's fused inference path materialises the scores. It is slower than the kernels
 * where n exceeds FUSED_DIMS * head_dim, and from FUSED_SCORES scores (32 MiB of
 * float32) on, because each call's memory is then mapped and page-faulted anew. */
enum { FUSED_DIMS = 8 };
#define FUSED_SCORES 0x1p23

typedef struct {
    PyObject_HEAD
    PyObject *held[N_HELD];
    const dlpack_exchange *exchange; /* NULL: read attributes */
    bool amx;
    long long counts[N_REASONS];
} small_calls;

/* The properties of a tensor that the rules use. */
typedef struct {
    int dtype, ndim;
    bool cpu;
    double numel;
    double last[3]; /* the last three sizes: heads, rows, dim */
} input;

/* ---- Reading --------------------------------------------------------------------- */

static void
take_size(input *x, int d, double size)
{
    x->numel *= size;
    if (d >= x->ndim - 3) {
        x->last[d - x->ndim + 3] = size;
    }
}

static bool
read_view(const small_calls *self, PyObject *tensor, input *x)
{
    dlpack_tensor view;
    int code;

    if (self->exchange->view_from_object(tensor, &view) != 0) {
        PyErr_Clear(); /* a nested or sparse tensor, or inside torch.func */
        return false;
    }
    code = view.dtype.code << 8 | view.dtype.bits;
    x->dtype = code == (DLPACK_FLOAT << 8 | 32)    ? FLOAT32
               : code == (DLPACK_FLOAT << 8 | 64)  ? FLOAT64
               : code == (DLPACK_FLOAT << 8 | 16)  ? FLOAT16
               : code == (DLPACK_BFLOAT << 8 | 16) ? BFLOAT16
                                                   : OTHER;
    x->cpu = view.device.type == DLPACK_CPU || view.device.type == DLPACK_CUDA_HOST;
    x->ndim = view.ndim;
    for (int d = 0; d < view.ndim; d++) {
        take_size(x, d, (double)view.shape[d]);
    }
    return true;
}

static bool
is_true(const small_calls *self, PyObject *tensor, int name)
{
    PyObject *value = PyObject_GetAttr(tensor, self->held[name]);

    Py_XDECREF(value);
    return value == Py_True;
}

static bool
read_attributes(const small_calls *self, PyObject *tensor, input *x)
{
    PyObject *shape = PyObject_GetAttr(tensor, self->held[SHAPE]);
    PyObject *dtype = PyObject_GetAttr(tensor, self->held[DTYPE]);

    x->ndim = shape == NULL ? -1 : (int)PyTuple_Size(shape);
    for (int d = 0; d < x->ndim; d++) {
        take_size(x, d, PyLong_AsDouble(PyTuple_GetItem(shape, d)));
    }
    x->dtype = OTHER;
    for (int i = FLOAT32; i <= BFLOAT16; i++) {
        if (self->held[i] == dtype) {
            x->dtype = i;
        }
    }
    x->cpu = is_true(self, tensor, IS_CPU);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    if (PyErr_Occurred() != NULL) { /* nested tensors have no shape */
        PyErr_Clear();
        return false;
    }
    return true;
}

static bool
is_plain(const small_calls *self, PyObject *object)
{
    return (PyObject *)Py_TYPE(object) == self->held[TENSOR] ||
           (PyObject *)Py_TYPE(object) == self->held[PARAMETER];
}

/* False if `object` is not a plain tensor, or has fewer than MIN_DIMS dimensions. */
static bool
read_input(const small_calls *self, PyObject *object, input *x)
{
    *x = (input){.numel = 1, .last = {1, 1, 1}};
    return is_plain(self, object) &&
           (self->exchange != NULL ? read_view(self, object, x)
                                   : read_attributes(self, object, x)) &&
           x->ndim >= MIN_DIMS;
}

/* Whether autograd would record a call with these three tensors. May set an
 * exception. */
static bool
has_grad(const small_calls *self, PyObject *const *tensors)
{
    PyObject *enabled = PyObject_CallNoArgs(self->held[IS_GRAD_ENABLED]);
    const int n = enabled == Py_True ? 3 : 0;
    bool found = false;

    for (int i = 0; i < n && !found && PyErr_Occurred() == NULL; i++) {
        found = is_true(self, tensors[i], REQUIRES_GRAD);
    }
    Py_XDECREF(enabled);
    return found;
}

/* ---- Rules ----------------------------------------------------------------------- */

/* Why torch is faster for (query, key, value), or NONE. May set an exception. */
static int
reason_of(const small_calls *self, PyObject *const *tensors)
{
    input q, k;
    double n_q, n_k, dim, scores;
    bool few, amx, grad;

    if (!is_plain(self, tensors[2]) || !read_input(self, tensors[0], &q) ||
        !read_input(self, tensors[1], &k) || q.dtype == OTHER || k.dtype != q.dtype ||
        k.cpu != q.cpu) {
        return NONE;
    }
    n_q = q.last[1];
    n_k = k.last[1];
    dim = q.last[2];
    scores = dim > 0 ? q.numel / dim * n_k : 0;
    if (scores <= SMALL_SCORES_HALF) {
        return SMALL;
    }
    if (!q.cpu) {
        return NONE;
    }
    if (q.dtype == FLOAT32 || q.dtype == FLOAT64) {
        return scores * (n_q < FULL_TILE ? n_q : FULL_TILE) <= SMALL_WORK ||
                       (n_q <= FEW_QUERIES && k.numel <= FEW_KEYS)
                   ? SMALL
                   : NONE;
    }
    few = n_q <= FEW_QUERIES && k.numel <= FEW_KEYS;
    amx = self->amx && q.dtype == BFLOAT16;
    if (amx && n_q * n_k * dim > AMX_HEAD) {
        return AMX;
    }
    if (!amx && !few) { /* with gradients or without */
        return NONE;
    }
    grad = has_grad(self, tensors);
    if (amx && !grad) {
        return AMX;
    }
    return few && (n_q <= 1 || !grad) ? SMALL : NONE;
}

/* Whether dropout_p is the number 0; false for other objects (proxies of tracers). */
static bool
is_zero(PyObject *number)
{
    double value = 1;

    if (PyFloat_Check(number) || PyLong_Check(number)) {
        value = PyFloat_AsDouble(number);
        PyErr_Clear(); /* the integer was too large for a double */
    }
    return value == 0;
}

static PyObject *
leaves_attention(small_calls *self, PyObject *const *args, Py_ssize_t n)
{
    int reason;

    if (n != 5) {
        PyErr_Format(PyExc_TypeError, "leaves_attention() takes 5 arguments, got %zd",
                     n);
        return NULL;
    }
    reason = args[3] == Py_None && is_zero(args[4]) ? reason_of(self, args) : NONE;
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (reason == NONE) {
        Py_RETURN_FALSE;
    }
    self->counts[reason]++;
    Py_RETURN_TRUE;
}

static PyObject *
leaves_module(small_calls *self, PyObject *const *args, Py_ssize_t n)
{
    input x;
    double heads, rows;

    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "leaves_module() takes x and heads");
        return NULL;
    }
    heads = PyLong_AsDouble(args[1]);
    if (heads == -1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (!read_input(self, args[0], &x) || !x.cpu || x.ndim != 3) {
        Py_RETURN_FALSE;
    }
    rows = x.last[1];
    return PyBool_FromLong((self->amx && x.dtype == BFLOAT16) ||
                           (rows * heads <= FUSED_DIMS * x.last[2] &&
                            x.last[0] * heads * rows * rows < FUSED_SCORES));
}

static PyObject *
count_module(small_calls *self, PyObject *Py_UNUSED(unused))
{
    self->counts[FUSED]++;
    Py_RETURN_NONE;
}

static PyObject *
counts(small_calls *self, PyObject *reset)
{
    const int forget = PyObject_IsTrue(reset);
    PyObject *result = forget < 0
                           ? NULL
                           : Py_BuildValue("LLL", self->counts[SMALL],
                                           self->counts[AMX], self->counts[FUSED]);

    if (result != NULL && forget) {
        memset(self->counts, 0, sizeof self->counts);
    }
    return result;
}

/* ---- The type -------------------------------------------------------------------- */

static PyObject *
small_calls_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    static const char *const names[N_HELD] = {[SHAPE] = "shape",
                                              [DTYPE] = "dtype",
                                              [IS_CPU] = "is_cpu",
                                              [REQUIRES_GRAD] = "requires_grad"};
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *given[N_HELD] = {NULL};
    small_calls *self;
    int amx;

    if (!PyArg_ParseTuple(args, "(O!O!)(OOOO)Op:SmallCalls", &PyType_Type,
                          &given[TENSOR], &PyType_Type, &given[PARAMETER],
                          &given[FLOAT32], &given[FLOAT64], &given[FLOAT16],
                          &given[BFLOAT16], &given[IS_GRAD_ENABLED], &amx)) {
        return NULL;
    }
    self = (small_calls *)allocate(type, 0);
    for (int i = 0; self != NULL && i < N_HELD; i++) {
        self->held[i] = names[i] == NULL ? Py_NewRef(given[i])
                                         : PyUnicode_InternFromString(names[i]);
        if (self->held[i] == NULL) {
            Py_CLEAR(self);
        }
    }
    if (self != NULL) {
        self->amx = amx != 0;
        self->exchange = py_find_exchange((PyTypeObject *)self->held[TENSOR]);
    }
    return (PyObject *)self;
}

static int
small_calls_traverse(small_calls *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (int i = 0; i < N_HELD; i++) {
        Py_VISIT(self->held[i]);
    }
    return 0;
}

static int
small_calls_clear(small_calls *self)
{
    for (int i = 0; i < N_HELD; i++) {
        Py_CLEAR(self->held[i]);
    }
    return 0;
}

static void
small_calls_dealloc(small_calls *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(self);
    small_calls_clear(self);
    release(self);
    Py_DECREF(type);
}

#define FAST(function) ((PyCFunction)(void (*)(void))function)

static PyMethodDef small_calls_methods[] = {
    {"leaves_attention", FAST(leaves_attention), METH_FASTCALL,
     "leaves_attention($self, query, key, value, attn_mask, dropout_p, /)\n--\n\n"
     "Whether torch's function is faster; if so, counts the call. False with a mask\n"
     "or dropout."},
    {"leaves_module", FAST(leaves_module), METH_FASTCALL,
     "leaves_module($self, x, heads, /)\n--\n\n"
     "Whether torch's fused inference path is faster for input x [batch, n, dim].\n"
     "False unless x is on the CPU."},
    {"count_module", (PyCFunction)count_module, METH_NOARGS,
     "count_module($self, /)\n--\n\nCounts a call of torch's fused inference path."},
    {"counts", (PyCFunction)counts, METH_O,
     "counts($self, reset, /)\n--\n\n"
     "Numbers of calls left to torch: (small, bfloat16 with AMX, fused inference\n"
     "path). Sets them to 0 if `reset` is true."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot small_calls_slots[] = {
    {Py_tp_doc,
     "SmallCalls((Tensor, Parameter), (float32, float64, float16, bfloat16),\n"
     "           is_grad_enabled, amx, /)\n--\n\n"
     "Decides by size which attention calls are left to torch, and counts them."},
    {Py_tp_new, small_calls_new},
    {Py_tp_traverse, small_calls_traverse},
    {Py_tp_clear, small_calls_clear},
    {Py_tp_dealloc, small_calls_dealloc},
    {Py_tp_methods, small_calls_methods},
    {0, NULL},
};

PyType_Spec py_small_calls_spec = {
    .name = "trainfast._core.SmallCalls",
    .basicsize = sizeof(small_calls),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = small_calls_slots,
};
