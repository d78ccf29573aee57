/* _core.trajectory: arrays with any strides, of any framework. */
#include "core.h"

#include <string.h>

enum {
    TOTALS,
    AGENTS,
    PRED,
    TARGET,
    MASK,
    PROBABILITIES,
    DEFINITION,
    TOP_K,
    MISS_THRESHOLD,
    STRICT_FINAL,
    SCRATCH,
    STREAM,
    N_PARAMETERS
};

#define AT(field) PY_AT(tfast_trajectory_args, field)
#define OUTPUT(name_)                                                                  \
    .name = name_, .kind = PY_ARRAY, .dtype = PY_EXACTLY(TFAST_F64), .written = true
#define INPUT(name_, dtype_) .name = name_, .kind = PY_ARRAY, .dtype = dtype_

static const py_parameter parameters[N_PARAMETERS] = {
    [TOTALS] = {OUTPUT("totals"), .required = true},
    [AGENTS] = {OUTPUT("agents")},
    [PRED] = {INPUT("pred", PY_FLOATS), .required = true},
    [TARGET] = {INPUT("target", PY_FLOATS), .required = true},
    [MASK] = {INPUT("mask", PY_FLOATS_OR_BOOL)}, /* take_arrays() refuses floats */
    [PROBABILITIES] = {INPUT("probabilities", PY_FLOATS)},
    [DEFINITION] = {.name = "definition", .kind = PY_OBJECT},
    [TOP_K] = {.name = "top_k", .kind = PY_INTEGER, .at = AT(top_k), .or_none = true},
    [MISS_THRESHOLD] = {.name = "miss_threshold",
                        .kind = PY_REAL,
                        .at = AT(miss_threshold)},
    [STRICT_FINAL] = {.name = "strict_final", .kind = PY_FLAG, .at = AT(strict_final)},
    [SCRATCH] = {.name = "scratch", .kind = PY_OBJECT},
    [STREAM] = {.name = "stream", .kind = PY_STREAM, .at = AT(stream)},
};

static const uint8_t order[] = {PRED, TARGET, TOTALS, AGENTS, MASK, PROBABILITIES};
static const py_operation operation = {.name = "trajectory",
                                       .parameters = parameters,
                                       .n_parameters = N_PARAMETERS,
                                       .order = order,
                                       .n_order = sizeof order,
                                       .needs =
                                           1u << TOTALS | 1u << PRED | 1u << TARGET};

static int
take_definition(PyObject *object, tfast_trajectory_definition *definition)
{
    static const char *const names[] = {[TFAST_TRAJECTORY_SEED] = "seed",
                                        [TFAST_TRAJECTORY_AV2] = "av2",
                                        [TFAST_TRAJECTORY_NUSCENES] = "nuscenes"};
    int choice = (int)*definition;

    if (py_take_choice(object, "definition", names, (int)(sizeof names / sizeof *names),
                       &choice) < 0) {
        return -1;
    }
    *definition = (tfast_trajectory_definition)choice;
    return 0;
}

/* Checks the shape of an array and takes its strides. */
static int
take_strides(const py_call *call, int p, int ndim, const int64_t *shape,
             const char *dimensions, int64_t *strides)
{
    const py_array *array = call->found[p];
    char text[PY_SHAPE_TEXT];

    if (array->ndim != ndim ||
        memcmp(array->shape, shape, (size_t)ndim * sizeof *shape) != 0) {
        py_shape_text(ndim, shape, text, sizeof text);
        return py_shape_error(PyExc_ValueError, parameters[p].name, array,
                              "must have shape %s, which is %s of pred", text,
                              dimensions);
    }
    memcpy(strides, array->strides, (size_t)ndim * sizeof *strides);
    return 0;
}

/* Checks that an output is dense. */
static int
check_output(const py_call *call, int p, int64_t rows)
{
    const int64_t shape[] = {rows, TFAST_TRAJECTORY_METRICS};
    const py_array *array = call->found[p];
    int64_t strides[2];

    if (take_strides(call, p, 2, shape, "the results", strides) < 0) {
        return -1;
    }
    if (array->numel > 0 &&
        (strides[1] != 1 || (rows > 1 && strides[0] != TFAST_TRAJECTORY_METRICS))) {
        return py_argument_error(PyExc_ValueError,
                                 (py_argument){parameters[p].name, -1},
                                 "must be dense and row-major");
    }
    return 0;
}

/* Takes pred, [n, modes, steps, dim] or [n, steps, dim]. */
static int
take_pred(const py_array *pred, tfast_trajectory_args *args)
{
    const int last = pred->ndim - 1;

    if (pred->ndim != 3 && pred->ndim != 4) {
        return py_shape_error(PyExc_ValueError, "pred", pred,
                              "must have dimensions [agents, modes, steps, "
                              "coordinates] or [agents, steps, coordinates]");
    }
    args->pred = pred->data;
    args->pred_dtype = (uint8_t)pred->dtype;
    args->n = pred->shape[0];
    args->modes = pred->ndim == 4 ? pred->shape[1] : 1;
    args->steps = pred->shape[last - 1];
    args->dim = pred->shape[last];
    args->pred_stride[0] = pred->strides[0];
    args->pred_stride[1] = pred->ndim == 4 ? pred->strides[1] : 0;
    args->pred_stride[2] = pred->strides[last - 1];
    args->pred_stride[3] = pred->strides[last];
    args->device = pred->device;
    return 0;
}

static int
take_arrays(const py_call *call, tfast_trajectory_args *args)
{
    const py_array *mask = call->found[MASK], *given = call->found[PROBABILITIES];

    if (take_pred(call->found[PRED], args) < 0) {
        return -1;
    }
    const int64_t steps[] = {args->n, args->steps, args->dim};
    const int64_t modes[] = {args->n, args->modes};

    if (take_strides(call, TARGET, 3, steps, "[agents, steps, coordinates]",
                     args->target_stride) < 0 ||
        check_output(call, TOTALS, 2) < 0 ||
        (call->found[AGENTS] != NULL && check_output(call, AGENTS, args->n) < 0) ||
        (mask != NULL && take_strides(call, MASK, 2, steps, "[agents, steps]",
                                      args->mask_stride) < 0) ||
        (given != NULL && take_strides(call, PROBABILITIES, 2, modes, "[agents, modes]",
                                       args->probability_stride) < 0)) {
        return -1;
    }
    if (mask != NULL && mask->dtype != TFAST_BOOL) {
        return py_argument_error(PyExc_ValueError, (py_argument){"mask", -1},
                                 "must be bool, true for steps that count, got %s; "
                                 "pass mask != 0",
                                 py_dtype_name(mask->dtype));
    }
    args->target = call->found[TARGET]->data;
    args->target_dtype = (uint8_t)call->found[TARGET]->dtype;
    args->totals = call->found[TOTALS]->data;
    args->agents = call->found[AGENTS] == NULL ? NULL : call->found[AGENTS]->data;
    args->mask = mask == NULL ? NULL : mask->data;
    args->probabilities = given == NULL ? NULL : given->data;
    args->probability_dtype = given == NULL ? TFAST_F32 : (uint8_t)given->dtype;
    return 0;
}

static int
take_scratch(py_call *call, tfast_trajectory_args *args)
{
    int64_t bytes;
    const tfast_status status = tfast_trajectory_scratch(&bytes, args);

    return py_take_scratch(call, call->given[SCRATCH], status, bytes, &args->scratch,
                           &args->scratch_bytes);
}

PyObject *
py_trajectory(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    tfast_trajectory_args fields = {.miss_threshold = 2};
    tfast_status status = TFAST_OK;
    bool ready;
    py_call call;

    call.state = PyModule_GetState(module);
    if (py_parse(&call, &operation, &fields, args, n, names) < 0 ||
        take_definition(call.given[DEFINITION], &fields.definition) < 0) {
        return NULL;
    }
    ready = py_borrow_arrays(&call, &fields) == 0 && take_arrays(&call, &fields) == 0 &&
            py_check_overlap(&call) == 0 && take_scratch(&call, &fields) == 0;
    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        status = tfast_trajectory(&fields);
        Py_END_ALLOW_THREADS
    }
    py_release_arrays(&call);
    return ready ? py_result(status) : NULL;
}
