/* The producers of arrays that py_borrow() tries in turn. Each py_borrow_ function
 * fills the array and returns 0, or -1 with an exception. */
#ifndef PY_PRODUCERS_H
#define PY_PRODUCERS_H

#include "array.h"
#include "dlpack.h"
#include "state.h"

/* The type's DLPack exchange API, or NULL. It lives as long as the type. */
const dlpack_exchange *py_find_exchange(PyTypeObject *type);

/* Borrows by the exchange API: no Python call, nothing to release. */
int py_borrow_view(const dlpack_exchange *exchange, PyObject *object,
                   py_argument argument, int how, py_array *array);

/* Borrows by the attributes of a plain torch.Tensor or Parameter, for a torch without
 * the exchange API; call py_torch_load() first. Returns 0, 1 without an exception if
 * __dlpack__() must be tried instead (it borrows the tensor or raises the reason), or
 * -1 with a KeyboardInterrupt or the like. */
int py_torch_load(py_state *state);
int py_borrow_torch(const py_state *state, PyObject *object, py_array *array);

/* Borrows by __dlpack__(): the capsule becomes array->owner. */
int py_borrow_capsule(PyObject *object, py_argument argument, int how, py_array *array);

/* True for NumPy arrays. Loads NumPy's C API if the process has imported NumPy. */
bool py_is_numpy(py_state *state, PyObject *object);
int py_borrow_numpy(py_state *state, PyObject *object, py_argument argument, int how,
                    py_array *array);

/* The same for NumPy scalars: a 0-d array of the value becomes array->owner. */
bool py_is_numpy_scalar(py_state *state, PyObject *object);
int py_borrow_numpy_scalar(py_state *state, PyObject *object, py_argument argument,
                           int how, py_array *array);

/* Borrows by the buffer protocol: a capsule of the Py_buffer becomes array->owner. */
int py_borrow_buffer(PyObject *object, py_argument argument, int how, py_array *array);

#endif
