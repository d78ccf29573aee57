#include "table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Life ------------------------------------------------------------------------ */

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
py_table_begin(py_table *table, const py_column *columns, int n_columns,
               Py_ssize_t rows)
{
    if (table->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "workspace must not be used by two threads at once");
        return -1;
    }
    if (rows > table->capacity) {
        if (grow((void **)&table->rows, (size_t)rows * sizeof *table->rows) < 0) {
            return -1;
        }
        table->capacity = rows;
    }
    table->changed = table->columns != columns;
    table->columns = columns;
    table->n_columns = n_columns;
    table->device = (tfast_device){TFAST_CPU, 0};
    table->n_rows = 0;
    table->n_trusted = table->n_checked;
    table->n_checked = 0; /* until py_table_check: this call may end half-way */
    table->busy = true;
    return 0;
}

int
py_table_hold(py_table *table, PyObject *object)
{
    if (table->n_held == table->held_capacity) {
        const Py_ssize_t capacity = 2 * table->held_capacity + 64;

        if (grow((void **)&table->held, (size_t)capacity * sizeof *table->held) < 0) {
            Py_DECREF(object);
            return -1;
        }
        table->held_capacity = capacity;
    }
    table->held[table->n_held++] = object;
    return 0;
}

void
py_table_end(py_table *table)
{
    while (table->n_held > 0) {
        Py_DECREF(table->held[--table->n_held]);
    }
    table->relayout = NULL;
    table->busy = false;
}

void
py_table_clear(py_table *table)
{
    PyMem_Free(table->rows);
    PyMem_Free(table->held);
    memset(table, 0, sizeof *table);
}

/* ---- Rows ------------------------------------------------------------------------ */

static const char *
device_text(tfast_device device, char *text, size_t bytes)
{
    if (device.type == TFAST_CPU) {
        return "cpu";
    }
    snprintf(text, bytes, "cuda:%d", device.index);
    return text;
}

static int
check_device(const py_array *array, const py_table *table, py_argument argument,
             Py_ssize_t place)
{
    char want[24], got[24];

    if (array->device.type == table->device.type &&
        array->device.index == table->device.index) {
        return 0;
    }
    return py_argument_error(
        PyExc_ValueError, argument, "must be on %s as %s[%zd], got %s",
        device_text(table->device, want, sizeof want), table->columns[0].name, place,
        device_text(array->device, got, sizeof got));
}

static int
check_shape(const py_array *array, const py_array *first, const py_column *column,
            const py_table *table, Py_ssize_t place)
{
    const py_argument argument = {column->name, place};
    char want[128], got[128];

    if (column->scalar) {
        if (array->numel == 1 && array->dtype == TFAST_F32) {
            return 0;
        }
        return py_argument_error(PyExc_ValueError, argument,
                                 "must hold one float32, got %lld elements of %s",
                                 (long long)array->numel,
                                 tfast_dtype_name(array->dtype));
    }
    if (py_same_shape(array, first)) {
        return 0;
    }
    py_shape_text(first->ndim, first->shape, want, sizeof want);
    py_shape_text(array->ndim, array->shape, got, sizeof got);
    return py_argument_error(PyExc_ValueError, argument,
                             "must have shape %s as %s[%zd], got %s", want,
                             table->columns[0].name, place, got);
}

/* A negative view of one element looks dense but its data has the other sign; larger
 * ones have gaps. */
static bool
is_negated(PyObject *object, const py_array *array)
{
    PyObject *answer;
    bool negated;

    if (array->numel != 1) {
        return false;
    }
    answer = PyObject_CallMethod(object, "is_neg", NULL);
    if (answer == NULL) {
        PyErr_Clear(); /* not torch */
        return false;
    }
    negated = PyObject_IsTrue(answer) == 1;
    Py_DECREF(answer);
    return negated;
}

/* True where one place stands for several elements, as in torch's expand(). */
static bool
repeats(const py_array *array)
{
    bool found = false;

    for (int d = 0; d < array->ndim; d++) {
        found = found || (array->strides[d] == 0 && array->shape[d] > 1);
    }
    return found && array->numel > 0;
}

/* Replaces a borrowed array by a copy in the first one's layout. */
static int
relayout(py_state *state, py_table *table, PyObject *like, PyObject *object,
         py_argument argument, int how, py_array *array)
{
    PyObject *copy;

    if (table->relayout == NULL) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must have the strides of %s[%zd]",
                                 table->columns[0].name, argument.index);
    }
    py_release(array);
    copy = PyObject_CallFunctionObjArgs(table->relayout, like, object, NULL);
    if (copy == NULL || py_table_hold(table, copy) < 0) {
        return -1;
    }
    return py_borrow(state, copy, argument, how, array);
}

/* Borrows one array of a row and checks it against the row's first. */
static int
borrow_cell(py_state *state, py_table *table, int c, PyObject *object, PyObject *like,
            const py_array *first, Py_ssize_t place, py_array *array)
{
    const py_column *column = &table->columns[c];
    const py_argument argument = {column->name, place};
    const int how = column->write ? PY_WRITE : 0;

    if (py_borrow(state, object, argument, how, array) < 0) {
        return -1;
    }
    if (check_device(array, table, argument, place) < 0 ||
        check_shape(array, first, column, table, place) < 0) {
        py_release(array);
        return -1;
    }
    if (!column->scalar && (!py_same_layout(array, first) ||
                            (column->any_layout && is_negated(object, array)))) {
        if (!column->any_layout) {
            py_release(array);
            return py_argument_error(PyExc_ValueError, argument,
                                     "must have the strides of %s[%zd]",
                                     table->columns[0].name, place);
        }
        if (column->write && repeats(array)) {
            py_release(array);
            return py_argument_error(PyExc_ValueError, argument,
                                     "must not repeat elements where it is written");
        }
        if (relayout(state, table, like, object, argument, how, array) < 0) {
            return -1;
        }
        if (!py_same_shape(array, first) || !py_same_layout(array, first)) {
            py_release(array);
            return py_argument_error(PyExc_ValueError, argument,
                                     "could not be laid out as %s[%zd]",
                                     table->columns[0].name, place);
        }
    }
    return 0;
}

/* Holds what owns a borrowed array's memory until the end of the call. */
static int
hold_owner(py_table *table, py_array *array)
{
    PyObject *owner = array->owner;

    array->owner = NULL;
    return owner == NULL ? 0 : py_table_hold(table, owner);
}

/* Holds a row's objects before the first is borrowed: that may run Python code, which
 * may drop the caller's references. */
static int
hold_objects(py_table *table, PyObject *const *objects)
{
    for (int c = 0; c < table->n_columns; c++) {
        if (objects[c] != NULL && !table->columns[c].held &&
            py_table_hold(table, Py_NewRef(objects[c])) < 0) {
            return -1;
        }
    }
    return 0;
}

static void
set_cell(py_row *row, int c, void *data, uint8_t dtype)
{
    row->data[c] = data;
    row->dtype[c] = dtype;
}

static int
check_dtype(const py_table *table, const py_row *row, int c, Py_ssize_t place)
{
    const int like = table->columns[c].same_dtype;

    if (like == 0 || row->dtype[c] == row->dtype[like]) {
        return 0;
    }
    return py_argument_error(
        PyExc_ValueError, (py_argument){table->columns[c].name, place},
        "must be %s as %s[%zd], got %s", tfast_dtype_name(row->dtype[like]),
        table->columns[like].name, place, tfast_dtype_name(row->dtype[c]));
}

static int
add_first(py_state *state, py_table *table, PyObject *object, Py_ssize_t place,
          py_array *first, py_row *row)
{
    const py_argument argument = {table->columns[0].name, place};
    const int how = table->columns[0].write ? PY_WRITE : 0;
    bool elsewhere;

    if (py_borrow(state, object, argument, how, first) < 0) {
        return -1;
    }
    if (table->n_rows == 0) {
        table->device = first->device;
    }
    elsewhere = first->device.type != table->device.type ||
                first->device.index != table->device.index;
    if (elsewhere || !py_is_dense(first)) {
        py_release(first);
        return elsewhere ? 1
                         : py_argument_error(PyExc_NotImplementedError, argument,
                                             "must be dense: its elements leave gaps");
    }
    row->numel = first->numel;
    set_cell(row, 0, first->data, (uint8_t)first->dtype);
    return hold_owner(table, first);
}

/* True where an output of the row lies elsewhere than in the call before. */
static bool
row_moved(const py_table *table, const py_row *row)
{
    const py_row *before = &table->rows[table->n_rows];

    if (table->n_rows >= table->n_trusted || row->numel != before->numel) {
        return true;
    }
    for (int c = 0; c < table->n_columns; c++) {
        if (table->columns[c].write &&
            (row->data[c] != before->data[c] || row->dtype[c] != before->dtype[c])) {
            return true;
        }
    }
    return false;
}

int
py_table_add(py_state *state, py_table *table, PyObject *const *objects,
             Py_ssize_t place)
{
    py_row row = {.place = place};
    py_array first, array;
    int status;

    if (hold_objects(table, objects) < 0) {
        return -1;
    }
    status = add_first(state, table, objects[0], place, &first, &row);
    if (status != 0) {
        return status;
    }
    for (int c = 1; c < table->n_columns; c++) {
        if (objects[c] == NULL) {
            continue;
        }
        if (borrow_cell(state, table, c, objects[c], objects[0], &first, place,
                        &array) < 0) {
            return -1;
        }
        set_cell(&row, c, array.data, (uint8_t)array.dtype);
        if (check_dtype(table, &row, c, place) < 0) {
            py_release(&array);
            return -1;
        }
        if (hold_owner(table, &array) < 0) {
            return -1;
        }
    }
    table->changed |= row_moved(table, &row);
    table->rows[table->n_rows++] = row;
    return 0;
}

/* ---- Overlap --------------------------------------------------------------------- */

typedef struct {
    uintptr_t start, end;
    const py_column *column;
    Py_ssize_t place, table;
} span;

static int
span_order(const void *a, const void *b)
{
    const span *x = a, *y = b;

    return (x->start > y->start) - (x->start < y->start);
}

/* Appends what a table's columns first .. last - 1 hold; returns how many there are. */
static Py_ssize_t
fill_spans(const py_table *table, Py_ssize_t index, int first, int last, span *spans)
{
    Py_ssize_t n = 0;

    for (Py_ssize_t r = 0; r < table->n_rows; r++) {
        const py_row *row = &table->rows[r];

        for (int c = first; c < last; c++) {
            const py_column *column = &table->columns[c];
            const int64_t numel = column->scalar ? 1 : row->numel;
            const uintptr_t start = (uintptr_t)row->data[c];

            if (start != 0 && numel > 0) {
                const size_t size = tfast_dtype_size(row->dtype[c]);
                spans[n++] = (span){start, start + (size_t)numel * size, column,
                                    row->place, index};
            }
        }
    }
    return n;
}

static int
overlap_error(const py_state *state, const span *one, const span *other)
{
    if (one->table == other->table) {
        PyErr_Format(state->placement_error, "%s[%zd] must not overlap %s[%zd]",
                     one->column->name, one->place, other->column->name, other->place);
    } else {
        PyErr_Format(state->placement_error,
                     "%s[%zd] of group %zd must not overlap %s[%zd] of group %zd",
                     one->column->name, one->place, one->table, other->column->name,
                     other->place, other->table);
    }
    return -1;
}

/* Sweeps spans by their start; an overlap counts when either side is written. */
static int
sweep(const py_state *state, span *spans, Py_ssize_t n)
{
    const span *write = NULL, *any = NULL; /* those that reach furthest so far */

    qsort(spans, (size_t)n, sizeof *spans, span_order);
    for (Py_ssize_t i = 0; i < n; i++) {
        const span *s = &spans[i];
        const span *other = s->column->write ? any : write;

        if (other != NULL && s->start < other->end) {
            return overlap_error(state, s, other);
        }
        if (any == NULL || s->end > any->end) {
            any = s;
        }
        if (s->column->write && (write == NULL || s->end > write->end)) {
            write = s;
        }
    }
    return 0;
}

static span *
new_spans(Py_ssize_t n)
{
    span *spans = PyMem_Malloc(((size_t)n + 1) * sizeof *spans);

    if (spans == NULL) {
        PyErr_NoMemory();
    }
    return spans;
}

int
py_table_check(const py_state *state, py_table *table)
{
    const int columns = table->n_columns;
    span *spans;
    int status;

    if (!py_table_changed(table)) {
        table->n_checked = table->n_trusted;
        return 0;
    }
    spans = new_spans(table->n_rows * columns);
    if (spans == NULL) {
        return -1;
    }
    status = sweep(state, spans, fill_spans(table, 0, 0, columns, spans));
    PyMem_Free(spans);
    if (status == 0) {
        table->n_checked = table->n_rows;
    }
    return status;
}

int
py_tables_check(const py_state *state, py_table *const *tables, Py_ssize_t n_tables,
                int column)
{
    Py_ssize_t n = 0, rows = 0;
    span *spans;
    int status;

    for (Py_ssize_t t = 0; t < n_tables; t++) {
        rows += tables[t]->n_rows;
    }
    spans = new_spans(rows);
    if (spans == NULL) {
        return -1;
    }
    for (Py_ssize_t t = 0; t < n_tables; t++) {
        n += fill_spans(tables[t], t, column, column + 1, spans + n);
    }
    status = sweep(state, spans, n);
    PyMem_Free(spans);
    return status;
}
