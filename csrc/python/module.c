/* The module trainfast._core: its methods and its state. */
#include "../backend.h"
#include "../graph_cache/python/binding.h"
#include "../threads.h"

#include <string.h>

static PyObject *
py_backends(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    const char *name, *unusable;
    bool in_use;

    for (int i = 0; list != NULL; i++) {
        PyObject *row;

        if (!tfast_backend_describe(i, &name, &unusable, &in_use)) {
            return list;
        }
        row = Py_BuildValue("(szO)", name, unusable, in_use ? Py_True : Py_False);
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(row);
    }
    return NULL;
}

static PyObject *
py_use_backend(PyObject *Py_UNUSED(module), PyObject *name)
{
    const char *text = NULL;

    if (name != Py_None) {
        Py_ssize_t bytes = 0;

        text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &bytes) : NULL;
        if (text == NULL || strlen(text) != (size_t)bytes) {
            PyErr_Format(PyExc_TypeError, "name must be a backend's or None, got %R",
                         name);
            return NULL;
        }
    }
    return py_result(tfast_backend_use(text));
}

static PyObject *
py_backend_in_use(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyUnicode_FromString(tfast_backend_for(TFAST_CPU)->name);
}

static PyObject *
py_num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(tfast_num_threads());
}

static PyObject *
py_thread_runtime(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyUnicode_FromString(tfast_thread_runtime());
}

#define WITH_KEYWORDS(function) ((PyCFunction)(void (*)(void))function)

static PyMethodDef methods[] = {
    {"adamw", WITH_KEYWORDS(py_adamw), METH_FASTCALL | METH_KEYWORDS,
     "One AdamW step on lists of arrays; see trainfast.adamw_step."},
    {"adamw_groups", WITH_KEYWORDS(py_adamw_groups), METH_FASTCALL | METH_KEYWORDS,
     "One AdamW step on torch param groups, after a pass over their gradients if\n"
     "measure_inf or measure_norm is set. Returns (number of parameters with\n"
     "gradients, whether one or its gradient is float64), or None, with nothing\n"
     "changed, if a parameter lacks state or is on another device."},
    {"amp_grads", WITH_KEYWORDS(py_amp_grads), METH_FASTCALL | METH_KEYWORDS,
     "One pass over gradients: infinity check, norm, rewriting; see csrc/tfast.h."},
    {"amp_update", WITH_KEYWORDS(py_amp_update), METH_FASTCALL | METH_KEYWORDS,
     "Updates the loss scale at the end of an iteration; see csrc/tfast.h. Each\n"
     "tracker is one int32."},
    {"attention", WITH_KEYWORDS(py_attention), METH_FASTCALL | METH_KEYWORDS,
     "softmax(q k^T) v with all options; see trainfast.attention and csrc/tfast.h."},
    {"attention_backward", WITH_KEYWORDS(py_attention_backward),
     METH_FASTCALL | METH_KEYWORDS,
     "The gradients of attention; see trainfast.attention_backward."},
    {"gemm", WITH_KEYWORDS(py_gemm), METH_FASTCALL | METH_KEYWORDS,
     "out = a b by cuBLAS, for dense CUDA matrices; see csrc/tfast.h."},
    {"neighbours", WITH_KEYWORDS(py_neighbours), METH_FASTCALL | METH_KEYWORDS,
     "Edges between near points; see trainfast.numpy and csrc/tfast.h. Calls\n"
     "make(number of edges), which returns the arrays to fill, and returns them."},
    {"trajectory", WITH_KEYWORDS(py_trajectory), METH_FASTCALL | METH_KEYWORDS,
     "Errors of predicted trajectories; see trainfast.trajectory_metrics and\n"
     "csrc/tfast.h."},
    {"graph_collate", py_graph_collate, METH_VARARGS,
     "graph_collate(selection, indices, /)\n--\n\n"
     "Collates now; several threads copy a large batch."},
    {"graph_adopt", py_graph_adopt, METH_VARARGS,
     "graph_adopt(path, /)\n--\n\n"
     "Seals the segments of dead writers; returns (graphs kept, uncommitted graphs\n"
     "found)."},
    {"graph_schema", py_graph_schema, METH_VARARGS,
     "graph_schema(path, /)\n--\n\n"
     "The widest serialised schema of the segments, including those being written;\n"
     "None: no segments."},
    {"graph_build_begin", py_graph_build_begin, METH_VARARGS,
     "graph_build_begin(path, /)\n--\n\n"
     "Begins a build; until it ends, the cache opens only with `partial`."},
    {"graph_build_anew", py_graph_build_anew, METH_VARARGS,
     "graph_build_anew(path, /)\n--\n\n"
     "Begins a build of a cache that is there, and drops all its graphs."},
    {"graph_is_building", py_graph_is_building, METH_VARARGS,
     "graph_is_building(path, /)\n--\n\n"
     "Whether a build has begun and not ended."},
    {"graph_build_end", py_graph_build_end, METH_VARARGS,
     "graph_build_end(path, order, /)\n--\n\n"
     "Ends a build. order: indices of the graphs to keep; None: all, in their order."},
    {"graph_repair", py_graph_repair, METH_VARARGS,
     "graph_repair(source, target, line, /)\n--\n\n"
     "Copies every readable committed graph into a new cache, and calls line(text)\n"
     "with each line of the report. Returns the report's counts."},
    {"crc32c", WITH_KEYWORDS(py_crc32c), METH_VARARGS | METH_KEYWORDS,
     "crc32c(data, crc=0)\n--\n\nCRC-32C as in the graph cache, continued from crc."},
    {"backends", py_backends, METH_NOARGS,
     "[(name, why it cannot run here or None, in use)], best first; the backends for\n"
     "tests are last."},
    {"use_backend", py_use_backend, METH_O,
     "Forces a backend by name; None selects the best again."},
    {"backend_in_use", py_backend_in_use, METH_NOARGS, "Name of the CPU backend."},
    {"num_threads", py_num_threads, METH_NOARGS, "Most threads that a call may use."},
    {"thread_runtime", py_thread_runtime, METH_NOARGS,
     "Thread runtime in use: 'openmp (path)' or 'own'."},
    {NULL, NULL, 0, NULL},
};

static int
module_exec(PyObject *module)
{
    py_state *state = PyModule_GetState(module);
    static const char *const names[PY_N_NAMES] = {
        [PY_GRAD] = "grad",
        [PY_STEP] = "step",
        [PY_EXP_AVG] = "exp_avg",
        [PY_EXP_AVG_SQ] = "exp_avg_sq",
        [PY_MAX_EXP_AVG_SQ] = "max_exp_avg_sq",
        [PY_EXP_AVG_CODES] = "exp_avg_q8",
        [PY_EXP_AVG_SQ_CODES] = "exp_avg_sq_q8",
        [PY_MAX_EXP_AVG_SQ_CODES] = "max_exp_avg_sq_q8",
        [PY_SCALES] = "scales_q8",
        [PY_MASTER_PARAM] = "master_param",
        [PY_WEIGHT_COPY] = "weight_copy",
        [PY_COMPENSATION] = "compensation",
        [PY_MASTER_REMAINDER] = "master_remainder",
        [PY_EMA] = "ema",
    };
    PyObject *workspace, *small_calls;
    bool complete = true;

    memset(state->numpy_numbers, -1, sizeof state->numpy_numbers);
    for (int i = 0; i < PY_N_NAMES; i++) {
        state->names[i] = PyUnicode_InternFromString(names[i]);
        complete &= state->names[i] != NULL;
    }
    workspace = PyType_FromModuleAndSpec(module, &py_workspace_spec, NULL);
    state->workspace_type = (PyTypeObject *)workspace;
    small_calls = PyType_FromModuleAndSpec(module, &py_small_calls_spec, NULL);
    state->placement_error = PyErr_NewExceptionWithDoc(
        "trainfast._core.PlacementError",
        "Arrays are valid except for their memory addresses: a written array overlaps\n"
        "another or itself, or an array is not aligned to its elements.",
        PyExc_ValueError, NULL);
    if (!complete || workspace == NULL || state->placement_error == NULL ||
        PyModule_AddObjectRef(module, "Workspace", workspace) < 0 ||
        PyModule_AddObjectRef(module, "PlacementError", state->placement_error) < 0 ||
        PyModule_AddObjectRef(module, "SmallCalls", small_calls) < 0 ||
        py_graph_add_types(module, state) < 0 ||
        PyModule_AddStringConstant(module, "version", TRAINFAST_VERSION) < 0) {
        Py_XDECREF(small_calls);
        return -1;
    }
    Py_DECREF(small_calls);
    if (tfast_backend_init() != TFAST_OK) {
        py_result(TFAST_EINVAL);
        return -1;
    }
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    py_state *state = PyModule_GetState(module);

    for (int i = 0; i < state->n_fast; i++) {
        Py_VISIT(state->fast[i].type);
    }
    Py_VISIT(state->workspace_type);
    Py_VISIT(state->placement_error);
    for (int i = 0; i < PY_N_GRAPH_TYPES; i++) {
        Py_VISIT(state->graph_types[i]);
    }
    for (int i = 0; i < (int)(sizeof state->numpy_descrs / sizeof(PyObject *)); i++) {
        Py_VISIT(state->numpy_descrs[i]);
    }
    for (int i = 0; i < PY_N_TORCH_NAMES; i++) {
        Py_VISIT(state->torch_names[i]);
    }
    for (int i = 0; i < PY_N_TORCH_DTYPES; i++) {
        Py_VISIT(state->torch_dtypes[i]);
    }
    Py_VISIT(state->torch_strided);
    for (int i = 0; i < PY_N_NAMES; i++) {
        Py_VISIT(state->names[i]);
    }
    return 0;
}

static int
module_clear(PyObject *module)
{
    py_state *state = PyModule_GetState(module);

    while (state->n_fast > 0) {
        state->n_fast--; /* not in Py_CLEAR(), which may evaluate it twice */
        Py_CLEAR(state->fast[state->n_fast].type);
    }
    Py_CLEAR(state->workspace_type);
    Py_CLEAR(state->placement_error);
    for (int i = 0; i < PY_N_GRAPH_TYPES; i++) {
        Py_CLEAR(state->graph_types[i]);
    }
    for (int i = 0; i < (int)(sizeof state->numpy_descrs / sizeof(PyObject *)); i++) {
        Py_CLEAR(state->numpy_descrs[i]);
    }
    for (int i = 0; i < PY_N_TORCH_NAMES; i++) {
        Py_CLEAR(state->torch_names[i]);
    }
    for (int i = 0; i < PY_N_TORCH_DTYPES; i++) {
        Py_CLEAR(state->torch_dtypes[i]);
    }
    Py_CLEAR(state->torch_strided);
    for (int i = 0; i < PY_N_NAMES; i++) {
        Py_CLEAR(state->names[i]);
    }
    return 0;
}

static void
module_free(void *module)
{
    module_clear(module);
}

/* The headers of Python 3.11 do not name the slots of later versions. */
enum {
    MOD_MULTIPLE_INTERPRETERS = 3,
    PER_INTERPRETER_GIL_SUPPORTED = 2,
    MOD_GIL = 4,
    GIL_USED = 0
};

static PyModuleDef_Slot slots[4] = {{Py_mod_exec, module_exec}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "trainfast._core",
    .m_doc = "The C core of trainfast; use it through the trainfast package.",
    .m_size = sizeof(py_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    if (Py_Version >= 0x030C0000) { /* 3.12 */
        slots[1] = (PyModuleDef_Slot){MOD_MULTIPLE_INTERPRETERS,
                                      (void *)PER_INTERPRETER_GIL_SUPPORTED};
    }
    if (Py_Version >= 0x030D0000) { /* 3.13 */
        slots[2] = (PyModuleDef_Slot){MOD_GIL, (void *)GIL_USED};
    }
    return PyModuleDef_Init(&definition);
}
