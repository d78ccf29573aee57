/* Arrays as Python knows them (NumPy, torch, any DLPack or buffer producer), borrowed
 * as pointers, shapes and strides. */
#ifndef PY_TENSOR_H
#define PY_TENSOR_H

#include "array.h"
#include "state.h"

/* Borrows `object`, of dtype float64, float32, float16 or bfloat16 or what `how` says,
 * with data aligned to its elements. Returns 0, or -1 with TypeError (not an array),
 * ValueError (read-only, byte order, no data; PlacementError for alignment) or
 * NotImplementedError (right, but nothing here computes it: other dtypes and devices,
 * sparse, tensor subclasses).
 */
int py_borrow(py_state *state, PyObject *object, py_argument argument, int how,
              py_array *array);

/* Borrows an array of one element of that dtype on that device, and sets *value to it.
 * Returns 0 or -1 with an exception. */
int py_borrow_scalar(py_state *state, PyObject *object, const char *name, int dtype,
                     tfast_device device, bool write, py_array *array, void **value);

/* Gives back what py_borrow() took; accepts a zeroed array. */
void py_release(py_array *array);

/* Hints to the cache, for loops over many small tensors, where each costs a dozen cache
 * misses and few instructions: the lines of the tensor's body (the C++ object behind
 * the Python one), and, later, what the body points at. They read a tensor of a known
 * type, and do nothing for any other object. */
void py_hint_body(const py_state *state, PyObject *object);
void py_hint_parts(const py_state *state, PyObject *object);

/* The same for many tensors at once that the cache has lost, without their autograd
 * metadata. Reads a word of each body first, so that all of these misses overlap: a
 * hint for a page whose translation is lost, too, is dropped, a read is not. Runs no
 * Python code. */
void py_hint_tensors(const py_state *state, PyObject *const *objects, Py_ssize_t n);

#endif
