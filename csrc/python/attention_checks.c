/* What every array of one attention call goes through: borrowed, and checked. */
#include "attention_call.h"

#include <stdio.h>
#include <string.h>

int
py_attention_wrong(PyObject *type, const char *name, const char *rule,
                   const py_array *array)
{
    char shape[PY_SHAPE_TEXT];

    py_shape_text(array->ndim, array->shape, shape, sizeof shape);
    return py_argument_error(type, (py_argument){name, -1}, "%s, got shape %s", rule,
                             shape);
}

py_array *
py_attention_borrow(py_attention_call *call, PyObject *object, const char *name,
                    int how)
{
    py_array *array = &call->arrays[call->n];
    const tfast_device *device = &call->arrays[0].device;

    if (py_borrow(call->state, object, (py_argument){name, -1}, how, array) < 0) {
        return NULL;
    }
    call->names[call->n] = name;
    call->written[call->n] = (how & PY_WRITE) != 0;
    call->n++;
    if (array->device.type != device->type || array->device.index != device->index) {
        py_argument_error(PyExc_ValueError, (py_argument){name, -1},
                          "must be on q's device");
        return NULL;
    }
    return array;
}

int
py_attention_check_dtype(const py_array *array, const char *name, int dtype)
{
    if (array->dtype == dtype) {
        return 0;
    }
    return py_argument_error(PyExc_ValueError, (py_argument){name, -1},
                             "must be %s, got %s", py_dtype_name(dtype),
                             py_dtype_name(array->dtype));
}

int
py_attention_check_shape(const py_array *array, const char *name, int ndim,
                         const int64_t *want)
{
    char text[PY_SHAPE_TEXT], rule[PY_SHAPE_TEXT + 32];

    if (array->ndim == ndim &&
        memcmp(array->shape, want, (size_t)ndim * sizeof *want) == 0) {
        return 0;
    }
    py_shape_text(ndim, want, text, sizeof text);
    snprintf(rule, sizeof rule, "must have shape %s", text);
    return py_attention_wrong(PyExc_ValueError, name, rule, array);
}

int
py_attention_lse_dtype(const py_attention_call *call)
{
    return call->args.dtype == TFAST_F64 ? TFAST_F64 : TFAST_F32;
}
