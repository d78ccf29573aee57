/* The only place where the core's statuses become Python exceptions. */
#include "core.h"

#include "../graph_cache/io.h"

#include <string.h>

/* The thread's message as str. Invalid UTF-8 is replaced: paths in the message may hold
 * any bytes, and truncation may split a character. */
static PyObject *
message(void)
{
    const char *text = tfast_message();

    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/* Raises OSError with the error number, so that Python picks the subclass, such as
 * FileNotFoundError; 0: a file is damaged, OSError without a number. Returns NULL. */
static PyObject *
os_error(void)
{
    const int number = graph_errno();
    PyObject *arguments = number == 0 ? Py_BuildValue("(N)", message())
                                      : Py_BuildValue("(iN)", number, message());

    if (arguments != NULL) {
        PyErr_SetObject(PyExc_OSError, arguments);
        Py_DECREF(arguments);
    }
    return NULL;
}

bool
py_signal_raised(void)
{
    PyGILState_STATE state = PyGILState_Ensure();
    const bool raised = PyErr_CheckSignals() < 0;

    PyGILState_Release(state);
    return raised;
}

PyObject *
py_result(tfast_status status)
{
    PyObject *type = PyExc_RuntimeError, *text;

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
        return os_error();
    case TFAST_EINTR: /* py_signal_raised() has set the exception */
        if (PyErr_Occurred()) {
            return NULL;
        }
        break;
    case TFAST_ECUDA:
        break;
    }
    text = message();
    if (text != NULL) {
        PyErr_SetObject(type, text);
        Py_DECREF(text);
    }
    return NULL;
}
