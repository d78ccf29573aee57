/* Statuses become exceptions here and nowhere else. */
#include "core.h"

#include "../graph_cache/io.h"

#include <string.h>

/* The message as text; paths in it may be any bytes, and its end may be cut. */
static PyObject *
message(void)
{
    const char *text = tfast_message();

    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/* With the error number, so that Python picks the class: FileNotFoundError and so on.
 * The message names the file. Without one: data that is damaged. */
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
