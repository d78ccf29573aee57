/* Arrays of Python (NumPy, torch, any DLPack or buffer producer) as pointers, shapes
 * and strides, valid for one call of the core.
 *
 * Every operation has a static table with one row for each of its parameters, and takes
 * these steps from Python's arguments to its args struct in csrc/tfast.h:
 *
 *     py_parse()           matches arguments to rows; stores numbers in the struct
 *     py_borrow_arrays()   borrows arrays; checks dtypes and devices
 *     (its own file)       checks shapes; stores addresses and strides
 *     py_check_overlap()   refuses written arrays that share memory with another
 *     py_take_scratch()    asks the caller's framework for memory
 *     py_release_arrays()  gives everything back
 *
 * Lists of arrays, a row for each model parameter, go through table.h instead of the
 * second and fourth function. */
#ifndef PY_BORROW_H
#define PY_BORROW_H

#include "array.h"
#include "state.h"

#include <stddef.h>

/* ---- One array ------------------------------------------------------------------- */

/* Borrows `object`. Its dtype must be float64, float32, float16 or bfloat16, unless the
 * flags `how` say otherwise, and its data aligned to its elements. Returns 0, or -1
 * with TypeError (not an array), ValueError (read-only, byte order, no data),
 * PlacementError (misaligned) or NotImplementedError (a valid array that is
 * unsupported: other dtypes and devices, sparse, tensor subclasses). */
int py_borrow(py_state *state, PyObject *object, py_argument argument, int how,
              py_array *array);

/* Fetches into the cache what py_borrow() will read of a tensor: from torch 2.10 the
 * word behind a Python object's header points there. Several tensors that are fetched
 * before the first is borrowed are waited for once. A wrong address only costs time. */
void py_prefetch(const py_state *state, PyObject *object);

/* Gives back what py_borrow() took; accepts a zeroed array. */
void py_release(py_array *array);

/* The device that all arrays of a call must share, and the argument that set it. */
typedef struct {
    tfast_device device; /* type 0: not set yet */
    py_argument of;
} py_place;

bool py_is_at(const py_array *array, const py_place *place);

/* Sets ValueError for an array on another device, and returns -1. */
int py_place_error(const py_array *array, py_argument argument, const py_place *place);

/* Returns 0, or -1 with ValueError if the array is not one element of the dtype. */
int py_check_scalar(const py_array *array, py_argument argument, int dtype);

/* ---- The parameters of an operation ---------------------------------------------- */

/* What is passed, or the C type that is stored. Kinds from PY_REAL on are numbers. */
enum {
    PY_OBJECT,        /* kept as it is */
    PY_LIST,          /* a list, kept as it is */
    PY_ARRAY,         /* a borrowed array */
    PY_SCALAR,        /* an array of one element; its address is stored */
    PY_REAL,          /* double */
    PY_INTEGER,       /* int64_t */
    PY_SHORT_INTEGER, /* int32_t */
    PY_FLAG,          /* bool */
    PY_STREAM,        /* void * */
};

/* The dtype rule of an array. */
enum {
    PY_FLOATS,         /* any of the four float dtypes */
    PY_FLOATS_OR_BOOL, /* these or bool */
    PY_FIRSTS,         /* that of the first array in the table's order */
    PY_ACCUMULATORS,   /* float64 where the first array is float64, else float32 */
    PY_EXACT           /* and above: one dtype, see PY_EXACTLY() */
};
#define PY_EXACTLY(dtype) (PY_EXACT + (dtype))

/* The offset of a struct's field, plus 1; 0, the default, means: do not store. */
#define PY_AT(type, field) (uint16_t)(offsetof(type, field) + 1)

typedef struct {
    const char *name;
    uint8_t kind;
    uint8_t dtype;      /* dtype rule of arrays */
    bool required;      /* must not be None */
    bool or_none;       /* of a number: None is allowed, and stores nothing */
    bool written;       /* the array must be writable and overlap no other */
    bool on_cpu;        /* the array must lie there, wherever the others do */
    uint16_t at;        /* PY_AT() of the number, or of a PY_SCALAR's address */
    uint16_t scalar_at; /* of a number that may also be passed as an array of one
                           element of `dtype`: PY_AT() of the array's address */
    /* Only for columns of a py_table: */
    bool any_layout;    /* an array of another layout is copied by `relayout` */
    bool held;          /* the caller holds the objects, so the table need not */
    bool or_bytes;      /* an array of uint8 is allowed */
    bool own_shape;     /* an array in C order of another shape; see py_row */
    uint8_t same_dtype; /* must have the dtype of this column; 0: any */
} py_parameter;

enum { PY_MAX_PARAMETERS = 40, PY_MAX_ARRAYS = 24 };

typedef struct {
    const char *name; /* in messages */
    const py_parameter *parameters;
    int n_parameters;
    const uint8_t *order; /* the row of each positional argument */
    int n_order;
    bool all;       /* all positional arguments must be given */
    uint64_t needs; /* a bit for each row whose argument must be given */
} py_operation;

/* One call of an operation. */
typedef struct {
    py_state *state;
    const py_operation *operation;
    PyObject *given[PY_MAX_PARAMETERS]; /* by row, borrowed from the caller; NULL: not
                                           given, None, or a number */
    uint64_t seen;                      /* a bit for each argument that is not None */
    uint64_t written; /* a bit for each row that is written, beside the table's */
    py_place place;
    PyObject *scratch; /* owned: the array of py_take_scratch() */
    int n;             /* number of borrowed arrays */
    const py_array *found[PY_MAX_PARAMETERS]; /* by row; NULL: none */
    struct {
        py_argument argument;
        bool written;
    } of[PY_MAX_ARRAYS];
    py_array arrays[PY_MAX_ARRAYS];
} py_call;

/* Starts a call, whose `state` is set: fills the other fields, and the numbers in the
 * struct `fields`. `names`: the names of the keyword arguments, which follow the n
 * positional ones (METH_FASTCALL). Returns 0, or -1 with TypeError or, for a number out
 * of range, ValueError. */
int py_parse(py_call *call, const py_operation *operation, void *fields,
             PyObject *const *args, Py_ssize_t n, PyObject *names);

/* Sets *choice to the index of the text `object` among n >= 2 names; NULL: leaves it.
 * Returns 0, or -1 with ValueError, which calls the argument `name`. */
int py_take_choice(PyObject *object, const char *name, const char *const *names, int n,
                   int *choice);

/* Borrows the given arrays in the order of the table, and stores the addresses of
 * scalars in `fields`. Returns 0, or -1 with an exception. */
int py_borrow_arrays(py_call *call, void *fields);

/* Borrows one array as an argument of row `parameter`; `index`: its index in a list, or
 * -1. Returns NULL with an exception. */
const py_array *py_borrow_argument(py_call *call, int parameter, PyObject *object,
                                   Py_ssize_t index);

/* Returns 0, or -1 with PlacementError if a written array shares memory with another
 * array or, by its strides, with itself. */
int py_check_overlap(const py_call *call);

/* After a backend was asked for the bytes of scratch that it needs, with that `status`:
 * calls function(n), n being the number of float32 that hold them, and stores where
 * they are and how many it got. The array must be aligned to TFAST_SCRATCH_ALIGNMENT
 * and overlap no other. Returns 0, also for 0 bytes, or -1 with an exception. */
int py_take_scratch(py_call *call, PyObject *function, tfast_status status,
                    int64_t bytes, void **data, int64_t *got);

/* Gives back all arrays, also after a failure. */
void py_release_arrays(py_call *call);

#endif
