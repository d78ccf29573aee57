/* Arrays that this module makes for Python, over memory that an owner keeps alive. The
 * opposite of borrow.h. */
#ifndef PY_MADE_H
#define PY_MADE_H

#include "borrow.h"

/* What the array is to be; in C order. */
typedef struct {
    void *data;
    int dtype; /* as in py_array */
    int ndim;
    const int64_t *shape;
} py_made;

/* A NumPy array over the data, which `base` keeps alive. Dtypes of ml_dtypes become
 * uint16 or uint8 where that cannot be imported. NULL with an exception. */
PyObject *py_make_numpy(py_state *state, const py_made *made, bool writable,
                        PyObject *base);

/* A NumPy array with memory of its own, whose address it writes to made->data. */
PyObject *py_new_numpy(py_state *state, py_made *made);

struct dlpack_exchange;

/* The exchange API of a type of arrays, or NULL. It lives as long as the type. */
const struct dlpack_exchange *py_find_maker(PyTypeObject *type);

/* An object of the type that `exchange` was found on, or without it a DLPack capsule.
 * release(context) is called once when the data is no longer used, by any thread, with
 * or without the GIL; also on failure, but for what the exchange API has taken then.
 * note: py_dlpack_bytes(ndim) that last until then, or NULL: they are allocated. */
size_t py_dlpack_bytes(int ndim);
PyObject *py_make_dlpack(const struct dlpack_exchange *exchange, const py_made *made,
                         void (*release)(void *context), void *context, void *note);

/* A capsule of DLPack before 1.0, which torch before 2.10 may ask for. */
PyObject *py_make_dlpack_unversioned(const py_made *made,
                                     void (*release)(void *context), void *context,
                                     void *note);

#endif
