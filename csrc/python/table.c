#include "table.h"

#include <string.h>

/* ---- Begin, end, free ------------------------------------------------------------ */

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
py_table_begin(py_table *table, const py_parameter *columns, int n_columns,
               unsigned written, Py_ssize_t rows)
{
    for (int c = 0; c < n_columns; c++) {
        written |= (unsigned)columns[c].written << c;
    }
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
    table->changed = table->columns != columns || table->written != written;
    table->columns = columns;
    table->n_columns = n_columns;
    table->written = written;
    table->place = (py_place){{TFAST_CPU, 0}, {columns[0].name, -1}};
    table->n_rows = 0;
    table->n_trusted = table->n_checked;
    table->n_checked = 0; /* set by py_table_check(): this call may fail first */
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

static bool
is_written(const py_table *table, int column)
{
    return (table->written >> column & 1) != 0;
}

static py_argument
argument_of(const py_table *table, int column, Py_ssize_t place)
{
    return (py_argument){table->columns[column].name, place};
}

static int
check_shape(const py_table *table, const py_array *array, const py_array *first,
            py_argument argument)
{
    char want[PY_SHAPE_TEXT], got[PY_SHAPE_TEXT];

    if (py_same_shape(array, first)) {
        return 0;
    }
    py_shape_text(first->ndim, first->shape, want, sizeof want);
    py_shape_text(array->ndim, array->shape, got, sizeof got);
    return py_argument_error(PyExc_ValueError, argument,
                             "must have shape %s as %s[%zd], got %s", want,
                             table->columns[0].name, argument.index, got);
}

/* Whether the array is a torch view of one element with the negative bit set.
 * py_borrow() recognises larger views by their strides; this one looks dense. */
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
        PyErr_Clear(); /* not a torch tensor */
        return false;
    }
    negated = PyObject_IsTrue(answer) == 1;
    Py_DECREF(answer);
    return negated;
}

/* Whether several elements share one address (stride 0), as after torch's expand(). */
static bool
repeats(const py_array *array)
{
    bool found = false;

    for (int d = 0; d < array->ndim; d++) {
        found = found || (array->strides[d] == 0 && array->shape[d] > 1);
    }
    return found && array->numel > 0;
}

/* Replaces an array of another layout by a copy in the layout of `like`, which has been
 * borrowed as `first`; refuses it if the column or the table has no relayout. */
static int
relayout(py_state *state, py_table *table, int column, PyObject *like,
         const py_array *first, PyObject *object, Py_ssize_t place, py_array *array)
{
    const py_argument argument = argument_of(table, column, place);
    const char *name = table->columns[0].name;
    PyObject *copy;

    if (!table->columns[column].any_layout || table->relayout == NULL) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must have the strides of %s[%zd]", name, place);
    }
    if (is_written(table, column) && repeats(array)) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "must not repeat elements where it is written");
    }
    py_release(array);
    copy = PyObject_CallFunctionObjArgs(table->relayout, like, object, NULL);
    if (copy == NULL || py_table_hold(table, copy) < 0 ||
        py_borrow(state, copy, argument, is_written(table, column) ? PY_WRITE : 0,
                  array) < 0) {
        return -1;
    }
    if (!py_same_shape(array, first) || !py_same_layout(array, first)) {
        return py_argument_error(PyExc_ValueError, argument,
                                 "could not be laid out as %s[%zd]", name, place);
    }
    return 0;
}

/* Borrows one array of a row and checks it against the row's first array. On failure
 * the caller must release `array`. */
static int
borrow_cell(py_state *state, py_table *table, int column, PyObject *const *objects,
            const py_array *first, Py_ssize_t place, py_array *array)
{
    const py_parameter *parameter = &table->columns[column];
    const py_argument argument = {parameter->name, place};
    PyObject *object = objects[column];
    const int how = (is_written(table, column) ? PY_WRITE : 0) |
                    (parameter->or_bytes ? PY_OR_UINT8 : 0);

    if (py_borrow(state, object, argument, how, array) < 0) {
        return -1;
    }
    if (!py_is_at(array, &table->place)) {
        return py_place_error(array, argument, &table->place);
    }
    if (parameter->kind == PY_SCALAR) {
        return py_check_scalar(array, argument, TFAST_F32);
    }
    if (parameter->own_shape) {
        return py_is_c_order(array) ? 0
                                    : py_argument_error(PyExc_ValueError, argument,
                                                        "must be contiguous");
    }
    if (check_shape(table, array, first, argument) < 0) {
        return -1;
    }
    if (py_same_layout(array, first) &&
        !(parameter->any_layout && is_negated(object, array))) {
        return 0;
    }
    return relayout(state, table, column, objects[0], first, object, place, array);
}

/* Stores a borrowed array in the row. The table takes array->owner until the end of the
 * call; on a wrong dtype it stays with the array. */
static int
set_cell(py_table *table, py_row *row, int column, py_array *array)
{
    const int like = table->columns[column].same_dtype;
    PyObject *owner = array->owner;

    row->data[column] = array->data;
    row->dtype[column] = (uint8_t)array->dtype;
    if (table->columns[column].own_shape) {
        row->own_numel = array->numel;
    }
    if (like != 0 && row->dtype[column] != row->dtype[like]) {
        return py_argument_error(
            PyExc_ValueError, argument_of(table, column, row->place),
            "must be %s as %s[%zd], got %s", py_dtype_name(row->dtype[like]),
            table->columns[like].name, row->place, py_dtype_name(array->dtype));
    }
    array->owner = NULL;
    return owner == NULL ? 0 : py_table_hold(table, owner);
}

/* Holds all objects of a row before the first is borrowed: borrowing may run Python
 * code, which may drop the caller's references. */
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

/* Borrows the array of column 0, which sets the row's shape. Returns 0, 1 if it is on
 * another device than the rows before, or -1. Unless 0 the caller must
 * release `first`. */
static int
borrow_first(py_state *state, py_table *table, PyObject *object, Py_ssize_t place,
             py_array *first)
{
    const py_argument argument = argument_of(table, 0, place);

    if (py_borrow(state, object, argument, is_written(table, 0) ? PY_WRITE : 0, first) <
        0) {
        return -1;
    }
    if (table->n_rows == 0) {
        table->place = (py_place){first->device, argument};
    }
    if (!py_is_at(first, &table->place)) {
        return 1;
    }
    if (!py_is_dense(first)) {
        return py_argument_error(PyExc_NotImplementedError, argument,
                                 "must be dense: its elements leave gaps");
    }
    return 0;
}

/* Whether a written array of the new row has another address, size or dtype than in the
 * row that it replaces, table->rows[n_rows], or that row has not been checked. */
static bool
row_moved(const py_table *table, const py_row *row)
{
    const py_row *before = &table->rows[table->n_rows];

    if (table->n_rows >= table->n_trusted || row->numel != before->numel ||
        row->own_numel != before->own_numel) {
        return true;
    }
    for (int c = 0; c < table->n_columns; c++) {
        if (is_written(table, c) &&
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
    for (int c = 0; c < table->n_columns; c++) {
        if (objects[c] != NULL) {
            py_prefetch(state, objects[c]);
        }
    }
    status = borrow_first(state, table, objects[0], place, &first);
    if (status == 0) {
        row.numel = first.numel;
        status = set_cell(table, &row, 0, &first);
    }
    if (status != 0) {
        py_release(&first);
        return status;
    }
    for (int c = 1; c < table->n_columns; c++) {
        if (objects[c] == NULL) {
            continue;
        }
        if (borrow_cell(state, table, c, objects, &first, place, &array) < 0 ||
            set_cell(table, &row, c, &array) < 0) {
            py_release(&array);
            return -1;
        }
    }
    table->changed |= row_moved(table, &row);
    table->rows[table->n_rows++] = row;
    return 0;
}

/* ---- Overlap --------------------------------------------------------------------- */

/* Appends a span for each array in columns first .. last - 1, and returns the end. */
static py_span *
fill_spans(const py_table *table, int group, int first, int last, py_span *spans)
{
    for (Py_ssize_t r = 0; r < table->n_rows; r++) {
        const py_row *row = &table->rows[r];

        for (int c = first; c < last; c++) {
            const py_parameter *column = &table->columns[c];
            const int64_t numel = column->kind == PY_SCALAR ? 1
                                  : column->own_shape       ? row->own_numel
                                                            : row->numel;
            const uintptr_t start = (uintptr_t)row->data[c];

            if (start != 0 && numel > 0) {
                *spans++ = (py_span){
                    .first = start,
                    .end = start + (uintptr_t)(numel * py_dtype_size(row->dtype[c])),
                    .name = table->columns[c].name,
                    .index = (int32_t)row->place,
                    .group = group,
                    .written = is_written(table, c)};
            }
        }
    }
    return spans;
}

/* Refuses overlaps in the columns first .. last - 1 of the tables. */
static int
check_columns(const py_state *state, py_table *const *tables, Py_ssize_t n_tables,
              int first, int last)
{
    py_span *spans, *end;
    size_t rows = 0;
    int status;

    for (Py_ssize_t t = 0; t < n_tables; t++) {
        rows += (size_t)tables[t]->n_rows;
    }
    spans = PyMem_Malloc((rows * (size_t)(last - first) + 1) * sizeof *spans);
    if (spans == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    end = spans;
    for (Py_ssize_t t = 0; t < n_tables; t++) {
        end = fill_spans(tables[t], (int)t, first, last, end);
    }
    status = py_check_spans(state->placement_error, spans, end - spans);
    PyMem_Free(spans);
    return status;
}

int
py_table_check(const py_state *state, py_table *table)
{
    if (!py_table_changed(table)) {
        table->n_checked = table->n_trusted;
        return 0;
    }
    if (check_columns(state, &table, 1, 0, table->n_columns) < 0) {
        return -1;
    }
    table->n_checked = table->n_rows;
    return 0;
}

int
py_tables_check(const py_state *state, py_table *const *tables, Py_ssize_t n_tables,
                int column)
{
    return check_columns(state, tables, n_tables, column, column + 1);
}
