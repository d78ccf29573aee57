/* The type Workspace. */
#include "core.h"

#include <unistd.h>

int
py_workspace_reserve(py_workspace *workspace, Py_ssize_t n)
{
    tfast_adamw_slot *slots = workspace->slots;

    if (n <= workspace->n_slots) {
        return 0;
    }
    slots = PyMem_Realloc(slots, (size_t)n * sizeof *slots);
    if (slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    workspace->slots = slots;
    workspace->n_slots = n;
    return 0;
}

static PyObject *
workspace_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
              PyObject *Py_UNUSED(kwargs))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    py_workspace *workspace = (py_workspace *)allocate(type, 0);

    if (workspace != NULL) {
        workspace->process = getpid();
    }
    return (PyObject *)workspace;
}

static int
workspace_traverse(py_workspace *workspace, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)workspace));
    return py_table_traverse(&workspace->table, visit, arg);
}

static int
workspace_clear(py_workspace *workspace)
{
    if (!workspace->table.busy) {
        py_table_clear(&workspace->table);
    }
    return 0;
}

static void
workspace_dealloc(py_workspace *workspace)
{
    PyTypeObject *type = Py_TYPE((PyObject *)workspace);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(workspace);
    py_table_clear(&workspace->table);
    PyMem_Free(workspace->slots);
    if (workspace->process == getpid()) {
        tfast_workspace_clear(&workspace->backend);
    }
    release(workspace);
    Py_DECREF(type);
}

static PyType_Slot workspace_slots[] = {
    {Py_tp_doc,
     "What one optimizer keeps between its steps: the pointers it has resolved,\n"
     "scratch memory, and on CUDA the table in device memory. Not for two\n"
     "threads at once."},
    {Py_tp_new, workspace_new},
    {Py_tp_traverse, workspace_traverse},
    {Py_tp_clear, workspace_clear},
    {Py_tp_dealloc, workspace_dealloc},
    {0, NULL},
};

PyType_Spec py_workspace_spec = {
    .name = "trainfast._core.Workspace",
    .basicsize = sizeof(py_workspace),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = workspace_slots,
};
