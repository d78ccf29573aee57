/* Statuses become exceptions here and nowhere else. */
#include "core.h"

PyObject *
py_result(tfast_status status)
{
    PyObject *type = PyExc_RuntimeError;

    switch (status) {
    case TFAST_OK:
        Py_RETURN_NONE;
    case TFAST_EINVAL:
        type = PyExc_ValueError;
        break;
    case TFAST_ETYPE:
        type = PyExc_TypeError;
        break;
    case TFAST_EUNSUPPORTED:
        type = PyExc_NotImplementedError;
        break;
    case TFAST_ENOMEM:
        type = PyExc_MemoryError;
        break;
    case TFAST_EIO:
        type = PyExc_OSError;
        break;
    case TFAST_ECUDA:
        break;
    }
    PyErr_SetString(type, tfast_message());
    return NULL;
}
