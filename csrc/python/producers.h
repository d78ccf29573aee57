/* The kinds of producers that py_borrow() asks in turn. Each function fills the
 * array and returns 0, or -1 with an exception. */
#ifndef PY_PRODUCERS_H
#define PY_PRODUCERS_H

#include "array.h"
#include "dlpack.h"
#include "state.h"

/* The type's DLPack exchange API, or NULL. It lives as long as the type. */
const dlpack_exchange *py_find_exchange(PyTypeObject *type);

/* By the exchange API: no Python call, nothing to release. */
int py_borrow_view(const dlpack_exchange *exchange, PyObject *object,
                   py_argument argument, int how, py_array *array);

/* By the attributes of a plain torch.Tensor or Parameter, for a torch without the
 * exchange API; call py_torch_load() first. Returns 0, or 1 without an exception where
 * another way has to say what the tensor is. */
int py_torch_load(py_state *state);
int py_borrow_torch(const py_state *state, PyObject *object, py_array *array);

/* By __dlpack__(): the capsule becomes the array's owner. */
int py_borrow_capsule(PyObject *object, py_argument argument, int how, py_array *array);

/* True for NumPy arrays; loads NumPy's C API once somebody has imported NumPy. */
bool py_is_numpy(py_state *state, PyObject *object);
int py_borrow_numpy(py_state *state, PyObject *object, py_argument argument, int how,
                    py_array *array);

/* The same for NumPy's scalars: an array made of one becomes the owner. */
bool py_is_numpy_scalar(py_state *state, PyObject *object);
int py_borrow_numpy_scalar(py_state *state, PyObject *object, py_argument argument,
                           int how, py_array *array);

/* By the buffer protocol: a capsule that holds the buffer becomes the owner. */
int py_borrow_buffer(PyObject *object, py_argument argument, int how, py_array *array);

#endif
