/* A table of borrowed arrays: a row for each parameter, a column for each of its
 * arrays. Lives as long as an optimizer, so that a warm step allocates nothing and
 * resolves again only what may have moved. */
#ifndef PY_TABLE_H
#define PY_TABLE_H

#include "tensor.h"

#define PY_MAX_COLUMNS 6

/* What belongs in a column. Column 0 sets a row's shape, layout and device. */
typedef struct {
    const char *name; /* in messages: "grads" */
    bool write;       /* must be writable, and overlap nothing else */
    bool scalar;      /* one float32; otherwise column 0's shape and layout */
    bool any_layout;  /* another layout is copied by `relayout` instead of refused */
    bool keep;        /* may be remembered between calls */
    int same_dtype;   /* must have that column's dtype; 0: any */
} py_column;

typedef struct {
    void *data[PY_MAX_COLUMNS];
    int64_t numel;
    Py_ssize_t place;              /* of the row in the caller's lists */
    uint8_t dtype[PY_MAX_COLUMNS]; /* tfast_dtype */
} py_row;

/* A kept array: its pointer counts while its place holds the same object. `storage`
 * keeps the memory alive should the tensor be given other data in place. */
typedef struct {
    PyObject *object;
    PyObject *storage;
    void *data;
    uint8_t dtype;
} py_kept;

enum { PY_KEPT_DIMS = 5 }; /* arrays of more dimensions are resolved every time */

/* The shape and strides that a row's kept arrays were checked against. */
typedef struct {
    const void *second; /* the object in the second column and its shape, as hints to */
    const void *second_shape; /* the cache: never followed, so they may be stale */
    int ndim;
    int64_t shape[PY_KEPT_DIMS];
    int64_t strides[PY_KEPT_DIMS];
} py_layout;

typedef struct {
    const py_column *columns;
    int n_columns;
    tfast_device device; /* of all rows, by the first */

    py_row *rows;
    Py_ssize_t n_rows, capacity;
    Py_ssize_t n_checked; /* rows whose outputs are known not to overlap */
    Py_ssize_t n_trusted; /* n_checked when this call began */
    bool changed;         /* some output moved since */

    py_kept *kept; /* capacity x n_columns, by the row's place; NULL: keep nothing */
    py_layout *layouts;
    unsigned tick; /* a sixteenth of what is kept is resolved anew each time */

    PyObject **held; /* references released at the end of the call */
    Py_ssize_t n_held, held_capacity;

    PyObject *relayout; /* borrowed: callable(like, array) -> array laid out as `like`,
                           or NULL */
    bool busy;          /* between begin and end */
} py_table;

/* Starts a call of up to `rows` rows. Returns 0, or -1 with RuntimeError (another
 * thread is in the table) or MemoryError. */
int py_table_begin(py_table *table, const py_column *columns, int n_columns,
                   Py_ssize_t rows, bool keep);

/* Borrows one array for each column (NULL: absent) as the next row; `place` is its
 * index in messages and for what is kept. Returns 0, 1 if objects[0] is on another
 * device than the rows before (nothing is added), or -1 with an exception. */
int py_table_add(py_state *state, py_table *table, PyObject *const *objects,
                 Py_ssize_t place);

/* Asks the cache for what the row at `place` had in its second column the last time. */
void py_table_hint(const py_table *table, Py_ssize_t place);

/* Refuses outputs that overlap another array. Returns 0 or -1 with ValueError. */
int py_table_check(py_table *table);

/* Holds a reference until the end of the call (steals it). */
int py_table_hold(py_table *table, PyObject *object);

/* Ends the call that began; releases what it held. */
void py_table_end(py_table *table);

/* Frees everything; the table is zero again. */
void py_table_clear(py_table *table);

/* Calls `visit` for every reference the table owns, for the garbage collector. */
int py_table_traverse(py_table *table, visitproc visit, void *arg);

#endif
