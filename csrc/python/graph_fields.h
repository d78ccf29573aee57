/* The values of a graph's fields, as Python has them and as the core takes them. */
#ifndef PY_GRAPH_FIELDS_H
#define PY_GRAPH_FIELDS_H

#include "graph.h"

/* One field: where its values are found in a graph, and during an append the value. */
typedef struct {
    const graph_schema_field *field;
    PyObject *key;
    PyObject *text;   /* "graph['x']" */
    const char *name; /* the same */
    PyObject *object; /* a reference during an append */
    py_array array;
    union {
        bool truth;
        int64_t integer;
        double number;
    } scalar;
} py_graph_field;

typedef struct {
    Py_ssize_t n;
    py_graph_field *each;
    tfast_graph_value *values; /* for the core */
} py_graph_fields;

/* Zeroed fields become those of a schema, which must outlive them; one key each.
 * Returns 0, or -1 with an exception. */
int py_graph_fields_init(py_graph_fields *fields, const tfast_graph_schema *schema,
                         PyObject *keys);
int py_graph_fields_traverse(py_graph_fields *fields, visitproc visit, void *arg);
void py_graph_fields_free(py_graph_fields *fields);

/* Fills `values` from a dict or another mapping, and holds what they point at until
 * they are dropped, which they must be after a failure too. Returns 0, or -1 with an
 * exception that names the field. */
int py_graph_fields_take(py_graph_fields *fields, py_state *state, PyObject *graph);
void py_graph_fields_drop(py_graph_fields *fields);

#endif
