/* Lists of borrowed arrays as one table: a row for each model parameter, a column for
 * each list. Every address is read from its object in the call that uses the address.
 * The table lives as long as an optimizer: a warm step allocates nothing, and the
 * search for overlaps is left out where all addresses are those of the last call. */
#ifndef PY_TABLE_H
#define PY_TABLE_H

#include "borrow.h"

enum { PY_MAX_COLUMNS = 8 };

typedef struct {
    void *data[PY_MAX_COLUMNS];
    int64_t numel;
    Py_ssize_t place;              /* of the row in the caller's lists */
    uint8_t dtype[PY_MAX_COLUMNS]; /* tfast_dtype */
} py_row;

/* Column 0 sets a row's shape, layout and device; a PY_SCALAR column holds one float32
 * in each row. */
typedef struct {
    const py_parameter *columns;
    int n_columns;
    unsigned written; /* a bit for each column */
    py_place place;   /* of all rows, by the first; the CPU without rows */

    py_row *rows;
    Py_ssize_t n_rows, capacity;
    Py_ssize_t n_checked; /* rows whose outputs are known not to overlap */
    Py_ssize_t n_trusted; /* n_checked when this call began */
    bool changed;         /* some output moved since */

    PyObject **held; /* references released at the end of the call */
    Py_ssize_t n_held, held_capacity;

    PyObject *relayout; /* borrowed: callable(like, array) -> array laid out as `like`,
                           or NULL */
    bool busy;          /* between begin and end */
} py_table;

/* Starts a call of up to `rows` rows. `written`: bits of columns that this call writes
 * beside those whose parameters say so. Returns 0, or -1 with RuntimeError (another
 * thread is in the table) or MemoryError. */
int py_table_begin(py_table *table, const py_parameter *columns, int n_columns,
                   unsigned written, Py_ssize_t rows);

/* Borrows one array for each column (NULL: absent) as the next row; `place` is its
 * index in messages. Returns 0, 1 if objects[0] is on another device than the rows
 * before (nothing is added), or -1 with an exception. */
int py_table_add(py_state *state, py_table *table, PyObject *const *objects,
                 Py_ssize_t place);

/* Refuses written arrays that overlap another array. Returns 0 or -1 with
 * PlacementError. */
int py_table_check(const py_state *state, py_table *table);

/* True where some output lies elsewhere than when the table was last checked. */
static inline bool
py_table_changed(const py_table *table)
{
    return table->changed || table->n_rows > table->n_trusted;
}

/* Refuses arrays of one column that overlap, in one table or in two, where one of the
 * two tables writes its own. Returns 0 or -1 with PlacementError. */
int py_tables_check(const py_state *state, py_table *const *tables, Py_ssize_t n_tables,
                    int column);

/* Holds a reference until the end of the call (steals it). */
int py_table_hold(py_table *table, PyObject *object);

/* Ends the call that began; releases what it held. */
void py_table_end(py_table *table);

/* Frees everything; the table is zero again. */
void py_table_clear(py_table *table);

#endif
