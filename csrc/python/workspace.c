/* The type Workspace; see core.h. */
#include "core.h"

#include <unistd.h>

/* Grows an array to at least n elements of `size` bytes, keeping its contents. *room is
 * its capacity in elements. Returns 0, or -1 with MemoryError. */
static int
reserve(void **array, Py_ssize_t *room, Py_ssize_t n, size_t size)
{
    void *larger;

    if (n <= *room) {
        return 0;
    }
    larger = PyMem_Realloc(*array, (size_t)n * size);
    if (larger == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *array = larger;
    *room = n;
    return 0;
}

int
py_workspace_reserve(py_workspace *workspace, Py_ssize_t n, bool extras)
{
    if (reserve((void **)&workspace->slots, &workspace->n_slots, n,
                sizeof *workspace->slots) < 0) {
        return -1;
    }
    return !extras ? 0
                   : reserve((void **)&workspace->extras, &workspace->n_extras, n,
                             sizeof *workspace->extras);
}

int
py_workspace_reserve_tensors(py_workspace *workspace, Py_ssize_t n)
{
    return reserve((void **)&workspace->tensors, &workspace->n_tensors, n,
                   sizeof *workspace->tensors);
}

int
py_workspace_reserve_specs(py_workspace *workspace, Py_ssize_t rows)
{
    const Py_ssize_t before = workspace->n_specs;

    if (reserve((void **)&workspace->specs, &workspace->n_specs, 2 * rows,
                sizeof *workspace->specs) < 0) {
        return -1;
    }
    for (Py_ssize_t i = before; i < workspace->n_specs; i++) {
        workspace->specs[i] = NULL;
    }
    return 0;
}

py_workspace *
py_workspace_of(const py_state *state, PyObject *object)
{
    if (Py_TYPE(object) != state->workspace_type) {
        PyErr_SetString(PyExc_TypeError, "workspace must be a Workspace");
        return NULL;
    }
    return (py_workspace *)object;
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
    PyMem_Free(workspace->extras);
    PyMem_Free(workspace->tensors);
    for (Py_ssize_t i = 0; i < workspace->n_specs; i++) {
        Py_XDECREF(workspace->specs[i]);
    }
    PyMem_Free(workspace->specs);
    if (workspace->backend.data != NULL && workspace->process == getpid()) {
        /* Waits for the GPU, which may wait for a callback that needs the GIL. */
        Py_BEGIN_ALLOW_THREADS
        tfast_workspace_clear(&workspace->backend);
        Py_END_ALLOW_THREADS
    }
    release(workspace);
    Py_DECREF(type);
}

static PyType_Slot workspace_slots[] = {
    {Py_tp_doc,
     "Memory that one optimizer keeps between its steps: scratch memory, and on CUDA\n"
     "a table in device memory. Two threads must not use a workspace at once."},
    {Py_tp_new, workspace_new},
    {Py_tp_traverse, workspace_traverse},
    {Py_tp_dealloc, workspace_dealloc},
    {0, NULL},
};

PyType_Spec py_workspace_spec = {
    .name = "trainfast._core.Workspace",
    .basicsize = sizeof(py_workspace),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = workspace_slots,
};
