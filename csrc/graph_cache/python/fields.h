/* Converts a graph's fields from Python values to tfast_graph_value, for an append. */
#ifndef PY_GRAPH_FIELDS_H
#define PY_GRAPH_FIELDS_H

#include "binding.h"

/* One field: its key, and during an append its value in that graph. */
typedef struct {
    const graph_schema_field *field;
    PyObject *key;
    PyObject *text;   /* "graph['x']", for messages */
    const char *name; /* `text` in UTF-8, owned by `text` */
    PyObject *object; /* the value; a reference during an append */
    py_array array; /* borrowed from `object`; its buffer has a str's shape, strides */
    union {         /* the value of a Python bool, int or float */
        bool truth;
        int64_t integer;
        double number;
    } scalar;
} py_graph_field;

typedef struct {
    Py_ssize_t n;
    py_graph_field *each;
    tfast_graph_value *values; /* [n], for tfast_graph_writer_append() */
} py_graph_fields;

/* Initialises zeroed fields for a schema, which must outlive them. keys: a sequence
 * with the key of each field. Returns 0, or -1 with an exception. */
int py_graph_fields_init(py_graph_fields *fields, const tfast_graph_schema *schema,
                         PyObject *keys);
int py_graph_fields_traverse(py_graph_fields *fields, visitproc visit, void *arg);
void py_graph_fields_free(py_graph_fields *fields);

/* Fills `values` from a dict or another mapping and holds the objects that they point
 * into until py_graph_fields_drop(), which must be called after a failure too. Returns
 * 0, or -1 with an exception that names the field. */
int py_graph_fields_take(py_graph_fields *fields, py_state *state, PyObject *graph);
void py_graph_fields_drop(py_graph_fields *fields);

#endif
