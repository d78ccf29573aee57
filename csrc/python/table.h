/* Lists of borrowed arrays as one table: a row for each model parameter, a column for
 * each list. Every address is read from its object in the call that uses the address.
 * The table lives as long as an optimizer: a warm step allocates nothing, and skips the
 * overlap check if all written arrays have the addresses of the previous call. */
#ifndef PY_TABLE_H
#define PY_TABLE_H

#include "borrow.h"

enum { PY_MAX_COLUMNS = 10 };

typedef struct {
    void *data[PY_MAX_COLUMNS];
    int64_t numel;
    int64_t own_numel;             /* of the column with a shape of its own */
    Py_ssize_t place;              /* index in the caller's lists */
    uint8_t dtype[PY_MAX_COLUMNS]; /* tfast_dtype */
} py_row;

/* Column 0 sets a row's shape, layout and device, to which the other arrays must
 * conform; a PY_SCALAR column holds one float32 in each row. */
typedef struct {
    const py_parameter *columns;
    int n_columns;
    unsigned written; /* a bit for each column that is written */
    py_place place;   /* of all rows, set by the first; without rows the CPU */

    py_row *rows;
    Py_ssize_t n_rows, capacity;
    Py_ssize_t n_checked; /* rows whose written arrays are known not to overlap */
    Py_ssize_t n_trusted; /* n_checked of the previous call */
    bool changed;         /* some written array differs from the one checked */

    PyObject **held; /* references to release at the end of the call */
    Py_ssize_t n_held, held_capacity;

    PyObject *relayout; /* borrowed: callable(like, array) -> array laid out as `like`,
                           or NULL */
    bool busy;          /* between py_table_begin() and py_table_end() */
} py_table;

/* Starts a call of up to `rows` rows. `written`: bits of columns that this call writes
 * in addition to those whose py_parameter says so. Returns 0, or -1 with RuntimeError
 * (another thread uses the table) or MemoryError. */
int py_table_begin(py_table *table, const py_parameter *columns, int n_columns,
                   unsigned written, Py_ssize_t rows);

/* Borrows one array for each column (NULL: absent) as the next row; `place` is its
 * index in messages. Returns 0, 1 if objects[0] is on another device than the rows
 * before (nothing is added), or -1 with an exception. */
int py_table_add(py_state *state, py_table *table, PyObject *const *objects,
                 Py_ssize_t place);

/* Refuses written arrays that overlap another array of the table, unless no written
 * array has changed. Returns 0 or -1 with PlacementError. */
int py_table_check(const py_state *state, py_table *table);

/* True if some written array is new or has moved since the previous call's check. */
static inline bool
py_table_changed(const py_table *table)
{
    return table->changed || table->n_rows > table->n_trusted;
}

/* Refuses two arrays of one column, of the same table or of two, that overlap if at
 * least one of them is written. Returns 0 or -1 with PlacementError. */
int py_tables_check(const py_state *state, py_table *const *tables, Py_ssize_t n_tables,
                    int column);

/* Steals a reference and holds it until the end of the call; on failure releases it.
 * Returns 0, or -1 with MemoryError. */
int py_table_hold(py_table *table, PyObject *object);

/* Ends the call and releases the references that it held. */
void py_table_end(py_table *table);

/* Frees the table's memory; the table is zero-initialised again. */
void py_table_clear(py_table *table);

#endif
