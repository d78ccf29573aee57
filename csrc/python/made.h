/* Makes arrays for Python over memory of the core: the opposite of borrow.h. */
#ifndef PY_MADE_H
#define PY_MADE_H

#include "borrow.h"

/* The array to make, in C order. */
typedef struct {
    void *data;
    int dtype; /* as in py_array */
    int ndim;
    const int64_t *shape;
} py_made;

/* A NumPy array over the data, which `base` keeps alive. bfloat16 becomes uint16 and
 * float8 uint8 if ml_dtypes cannot be imported. NULL with an exception. */
PyObject *py_make_numpy(py_state *state, const py_made *made, bool writable,
                        PyObject *base);

/* A NumPy array with memory of its own; sets made->data to the memory's address. */
PyObject *py_new_numpy(py_state *state, py_made *made);

struct dlpack_exchange;

/* The DLPack exchange API of an array type, or NULL. It lives as long as the type. */
const struct dlpack_exchange *py_find_maker(PyTypeObject *type);

/* Bytes of the `note` below. */
size_t py_dlpack_bytes(int ndim);

/* Makes an array over the data: an object of the type that `exchange` belongs to, or a
 * DLPack capsule if `exchange` is NULL. Consumes one reference to the data:
 * release(context) is called once when the data is no longer used, on any thread, with
 * or without the GIL, and also if this function fails (but if the exchange API fails,
 * that is up to the API). `note`: py_dlpack_bytes() bytes of memory for the DLPack
 * struct, valid until release() is called; NULL: malloc(). NULL with an exception. */
PyObject *py_make_dlpack(const struct dlpack_exchange *exchange, const py_made *made,
                         void (*release)(void *context), void *context, void *note);

/* The same as a capsule of DLPack before 1.0, for torch before 2.10. */
PyObject *py_make_dlpack_unversioned(const py_made *made,
                                     void (*release)(void *context), void *context,
                                     void *note);

#endif
