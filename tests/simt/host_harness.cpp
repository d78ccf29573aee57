/* The host side of cuda/ as the driver sees it: what a call leaves current, what it may
 * do while a stream captures, what it loads; and what the driver's twin refuses. Its
 * first argument is the seed of the order. */
#include "driver.h"
#include "driver_twin.h"
#include "harness.h"
#include "images.h"

/* In cuda/launch.c. */
extern "C" tfast_status tfast_launch(int kernel, int64_t blocks, void *stream,
                                     const void *arguments, size_t bytes);

namespace {

tfast_driver driver;

char message[512]; /* of the last call that failed */

tfast_status
note_failure(tfast_status status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

bool
holds(bool fact, const char *what)
{
    if (!fact) {
        fprintf(stderr, "%s\n", what);
    }
    return fact;
}

/* ---- Calls ----------------------------------------------------------------------- */

/* AdamW of one slot with a workspace of its own. */
struct steps {
    float param[300], grad[300], first[300], second[300];
    tfast_adamw_slot slot = {};
    tfast_workspace workspace = {};
    tfast_adamw_args args = {};

    explicit steps(int device)
    {
        for (int i = 0; i < 300; i++) {
            param[i] = grad[i] = first[i] = second[i] = 0.5f;
        }
        slot.param = param;
        slot.grad = grad;
        slot.exp_avg = first;
        slot.exp_avg_sq = second;
        slot.numel = 300;
        args.slots = &slot;
        args.n_slots = 1;
        args.device = {TFAST_CPU, device};
        args.workspace = &workspace;
        args.stream = tfast_simt_stream(device);
        args.step = 1;
        args.lr = 0.1;
        args.beta1 = 0.9;
        args.beta2 = 0.99;
        args.eps = 1e-8;
    }

    ~steps() { backend->workspace_clear(workspace.data); }

    bool operator()() { return backend->adamw(&args) == TFAST_OK; }
};

/* Forward on float16 by tensor cores. */
bool
attend(int device)
{
    std::vector<uint16_t> rows(64 * 64, tfast_to_f16(1));
    std::vector<uint16_t> out(rows.size());
    const tfast_attention_rows from = {rows.data(), 64 * 64, 64 * 64, 64};
    tfast_attention_args args = {};

    args.q = args.k = args.v = args.out = from;
    args.out.data = out.data();
    args.batch = args.heads = args.kv_heads = 1;
    args.n_q = args.n_k = args.dim = args.dim_v = 64;
    args.window_left = args.window_right = -1;
    args.scale = 1;
    args.dtype = TFAST_F16;
    args.device = {TFAST_CPU, device};
    args.stream = tfast_simt_stream(device);
    return backend->attention(&args) == TFAST_OK && out == rows;
}

/* ---- What a call leaves ---------------------------------------------------------- */

bool
is_left_as_it_was(int current)
{
    int mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

    driver.cuThreadExchangeStreamCaptureMode(&mode);
    return holds(tfast_simt_current() == current,
                 "a call leaves another context current") &&
           holds(mode == CU_STREAM_CAPTURE_MODE_GLOBAL,
                 "a call leaves another capture mode");
}

bool
leaves_everything_as_it_was()
{
    bool right = true;

    for (int current = -1; current < SIMT_DEVICES; current++) {
        for (int device = 0; device < SIMT_DEVICES; device++) {
            steps step(device);
            tfast_simt_set_current(current);
            right = right && step() && is_left_as_it_was(current) && attend(device) &&
                    is_left_as_it_was(current);
            step.slot.numel = 299; /* another table */
            tfast_simt_fail_allocations(0);
            steps fails(device);
            right = right && holds(!fails(), "memory from nowhere") &&
                    is_left_as_it_was(current);
            tfast_simt_fail_allocations(-1);
            right = right && fails() && step() && is_left_as_it_was(current);
        }
    }
    tfast_simt_set_current(-1);
    return right;
}

/* The devices become others, with contexts of their own. */
bool
loads_in_each_context()
{
    bool right = true;

    for (const char *ptx : {"75", "80", "75"}) {
        setenv("TRAINFAST_SIMT_PTX", ptx, 1);
        for (int device = 0; device < SIMT_DEVICES; device++) {
            right = right && holds(attend(device), "attention differs");
        }
    }
    unsetenv("TRAINFAST_SIMT_PTX");
    return right;
}

bool
refuses_older_devices()
{
    setenv("TRAINFAST_SIMT_DEVICE", "70", 1);
    const bool taken = attend(0);
    unsetenv("TRAINFAST_SIMT_DEVICE");
    return holds(!taken &&
                     strcmp(message, "the GPU must be sm_75 or newer, got sm_70") == 0,
                 "a GPU that is too old");
}

/* Must come before all others. */
bool
captures_first_launches()
{
    steps step(0);
    bool right;

    tfast_simt_capture_begin();
    right = step() && step.param[0] == 0.5f;
    tfast_simt_capture_end();
    tfast_simt_replay();
    return right && holds(step.param[0] < 0.5f && is_left_as_it_was(-1),
                          "what was captured differs");
}

bool
refuses_other_arguments()
{
    float scale = 1, found = 0;
    int32_t tracker = 0;
    int64_t counts[3];
    tfast_amp_update_args args = {};

    args.scale = &scale;
    args.growth_tracker = &tracker;
    args.found_infs[0] = &found;
    args.n_found_infs = 1;

    tfast_simt_set_current(0);
    tfast_simt_reset();
    const tfast_status status =
        tfast_launch(KERNEL_amp_update, 1, nullptr, &args, sizeof args - 8);
    tfast_simt_counts(counts);
    tfast_simt_set_current(-1);
    return holds(status == TFAST_ECUDA && counts[2] == 0,
                 "a launch with arguments of another size");
}

/* ---- What the twin refuses ------------------------------------------------------- */

CUresult
load(CUmodule *module, int arch, int file)
{
    for (int i = 0; i < tfast_n_images; i++) {
        if (tfast_images[i].arch == arch && tfast_images[i].file == file) {
            return driver.cuModuleLoadData(module, tfast_images[i].data);
        }
    }
    return CUDA_ERROR_NOT_FOUND;
}

const char *
name_of(int kernel)
{
    return tfast_kernel_names[kernel];
}

bool
refuses_other_images()
{
    CUmodule module;
    CUfunction function;
    bool right;

    tfast_simt_set_current(0);
    right = load(&module, 75, FILE_attention_forward) == CUDA_ERROR_NO_BINARY_FOR_GPU &&
            driver.cuModuleLoadData(&module, "") == CUDA_ERROR_INVALID_IMAGE &&
            load(&module, 80, FILE_attention_forward) == CUDA_SUCCESS &&
            driver.cuModuleGetFunction(&function, module,
                                       name_of(KERNEL_forward_75_mma_f16_32_0)) ==
                CUDA_ERROR_NOT_FOUND &&
            driver.cuModuleGetFunction(&function, module, name_of(KERNEL_amp)) ==
                CUDA_ERROR_NOT_FOUND &&
            driver.cuModuleGetFunction(&function, module,
                                       name_of(KERNEL_forward_80_mma_f16_32_0)) ==
                CUDA_SUCCESS &&
            driver.cuFuncSetAttribute(function,
                                      CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      228 << 10) == CUDA_ERROR_INVALID_VALUE;
    return holds(right, "the twin takes another GPU's image");
}

bool
refuses_other_contexts()
{
    tfast_amp_update_args args = {};
    void *parameters[] = {&args};
    CUmodule module;
    CUfunction function;
    CUdeviceptr memory;
    bool right;
    const auto launch = [&](void *stream) {
        return driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, (CUstream)stream,
                                     parameters, nullptr);
    };

    tfast_simt_set_current(0);
    right = load(&module, 80, FILE_amp) == CUDA_SUCCESS &&
            driver.cuModuleGetFunction(&function, module, name_of(KERNEL_amp_update)) ==
                CUDA_SUCCESS &&
            launch(tfast_simt_stream(1)) == CUDA_ERROR_INVALID_HANDLE;
    tfast_simt_set_current(1);
    right = right && launch(nullptr) == CUDA_ERROR_INVALID_HANDLE;
    tfast_simt_set_current(-1);
    right = right && launch(nullptr) == CUDA_ERROR_INVALID_CONTEXT &&
            driver.cuMemAlloc(&memory, 8) == CUDA_ERROR_INVALID_CONTEXT;
    return holds(right, "the twin takes another context's kernel");
}

void
find_driver()
{
#define FIND(name, symbol, parameters)                                                 \
    driver.name = reinterpret_cast<decltype(driver.name)>(simt_driver_call(#symbol));
    TFAST_DRIVER_CALLS(FIND)
}

} // namespace

int
main(int argc, char **argv)
{
    if (argc != 3) {
        return 2;
    }
    tfast_simt_seed(strtoull(argv[1], nullptr, 0));
    find_driver();
    backend = tfast_library_open(TFAST_ABI, note_failure);
    if (backend == nullptr || backend->unusable() != nullptr) {
        return 2;
    }
    if (captures_first_launches() && leaves_everything_as_it_was() &&
        loads_in_each_context() && refuses_older_devices() &&
        refuses_other_arguments() && refuses_other_images() &&
        refuses_other_contexts()) {
        return 0;
    }
    fprintf(stderr, "%s\n", message);
    return 1;
}
