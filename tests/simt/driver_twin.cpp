/* The CUDA driver's twin: see driver_twin.h. Built without the sanitizers'
 * instrumentation. */
#include "driver_twin.h"
#include "driver.h"
#include "work.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <unistd.h>

struct CUctx_st {
    int device;
};

struct CUstream_st {
    int device;
};

struct CUevent_st {
    int device;
    uint64_t after; /* done when this many pieces of work are */
};

struct CUfunc_st {
    const simt::kernel *kernel;
    CUcontext context;
    size_t allowed; /* dynamic shared memory, by its attribute */
};

struct CUmod_st {
    const simt::image *image;
    CUcontext context;
    std::map<const simt::kernel *, CUfunc_st> functions; /* that were asked for */
};

namespace {

std::vector<std::unique_ptr<CUmod_st>> modules; /* under the lock of work.h */
std::atomic<int> launch_error{CUDA_SUCCESS}, load_error{CUDA_SUCCESS};
CUstream_st streams[SIMT_DEVICES] = {{0}, {1}};
std::atomic<pid_t> opened_by{0}; /* the process that called cuInit first */
std::atomic<int> contexts{0};    /* bit d: device d has one */

thread_local int current = -1; /* the device whose context it is, or none */

int
variable(const char *name, int otherwise)
{
    const char *value = getenv(name);

    return value == nullptr ? otherwise : atoi(value);
}

int
capability()
{
    return variable("TRAINFAST_SIMT_DEVICE", variable("TRAINFAST_SIMT_PTX", 80));
}

/* The path of kernels.h that the devices take. */
int
path_taken()
{
    return variable("TRAINFAST_SIMT_PTX", capability() < 80 ? 75 : 80);
}

/* The primary context of a device: of another one where what it is has changed. */
CUcontext
primary(int device)
{
    static std::map<std::array<int, 3>, CUctx_st> known;
    const std::lock_guard<std::recursive_mutex> guard(simt::work_lock);
    CUcontext context = &known[{device, capability(), path_taken()}];

    context->device = device;
    return context;
}

CUresult
need_driver()
{
    return opened_by == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult
need_context()
{
    const CUresult error = need_driver();

    return error == CUDA_SUCCESS && current < 0 ? CUDA_ERROR_INVALID_CONTEXT : error;
}

/* What a device's handle needs: that the device's context is current. */
CUresult
need_device(int device)
{
    const CUresult error = need_context();

    return error == CUDA_SUCCESS && device != current ? CUDA_ERROR_INVALID_HANDLE
                                                      : error;
}

/* What is loaded in a context needs: that one. */
CUresult
need_own(CUcontext context)
{
    const CUresult error = need_context();

    return error == CUDA_SUCCESS && context != primary(current)
               ? CUDA_ERROR_INVALID_HANDLE
               : error;
}

CUresult
need_stream(CUstream stream)
{
    for (const CUstream_st &known : streams) {
        if (stream == &known) {
            return need_device(known.device);
        }
    }
    return need_context();
}

CUresult
allocate(simt::memory kind, void **pointer, size_t bytes, const char *name)
{
    const CUresult error = need_context();

    simt::unsafe_call(name);
    if (error != CUDA_SUCCESS || bytes == 0) {
        return error != CUDA_SUCCESS ? error : CUDA_ERROR_INVALID_VALUE;
    }
    *pointer = simt::allocate(kind, bytes);
    return *pointer == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult
release(simt::memory kind, void *pointer, const char *name)
{
    const CUresult error = need_context();

    if (error != CUDA_SUCCESS || pointer == nullptr) {
        return error != CUDA_SUCCESS ? error : CUDA_ERROR_INVALID_VALUE;
    }
    simt::synchronising_call(name); /* the real ones wait for the device */
    simt::release(kind, pointer);
    return CUDA_SUCCESS;
}

} // namespace

/* ---- The twins ------------------------------------------------------------------- */

namespace twin {

#define DECLARED(name, symbol, parameters) static CUresult name parameters;
TFAST_DRIVER_CALLS(DECLARED)

static CUresult
cuInit(unsigned flags)
{
    pid_t none = 0;

    opened_by.compare_exchange_strong(none, getpid());
    return flags == 0 ? need_driver() : CUDA_ERROR_INVALID_VALUE;
}

static CUresult
cuDriverGetVersion(int *version)
{
    *version = variable("TRAINFAST_SIMT_DRIVER", 13000);
    return CUDA_SUCCESS;
}

static CUresult
cuGetErrorString(CUresult error, const char **text)
{
    static const std::map<CUresult, const char *> texts = {
        {CUDA_SUCCESS, "no error"},
        {CUDA_ERROR_INVALID_VALUE, "invalid argument"},
        {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
        {CUDA_ERROR_NOT_INITIALIZED, "initialization error"},
        {CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"},
        {CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"},
        {CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"},
        {CUDA_ERROR_INVALID_CONTEXT, "invalid device context"},
        {CUDA_ERROR_NO_BINARY_FOR_GPU,
         "no kernel image is available for execution on the device"},
        {CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"},
        {CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "PTX JIT compiler library not found"},
        {CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
         "the provided PTX was compiled with an unsupported toolchain."},
        {CUDA_ERROR_JIT_COMPILATION_DISABLED, "PTX JIT compilation was disabled"},
        {CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"},
        {CUDA_ERROR_NOT_FOUND, "named symbol not found"},
        {CUDA_ERROR_NOT_READY, "device not ready"}};
    const auto found = texts.find(error);

    *text = found == texts.end() ? nullptr : found->second;
    return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* ---- Devices and contexts -------------------------------------------------------- */

static CUresult
cuDeviceGetCount(int *count)
{
    *count = SIMT_DEVICES;
    return need_driver();
}

static CUresult
cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return need_driver() != CUDA_SUCCESS            ? need_driver()
           : ordinal >= 0 && ordinal < SIMT_DEVICES ? CUDA_SUCCESS
                                                    : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult
cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = capability() / 10;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = capability() % 10;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 2;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return cuDeviceGet(&device, device);
}

static CUresult
cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    const CUresult error = cuDeviceGet(&device, device);

    if (error == CUDA_SUCCESS) {
        contexts |= 1 << device;
        *context = primary(device);
    }
    return error;
}

static CUresult
cuCtxGetCurrent(CUcontext *context)
{
    *context = current < 0 ? nullptr : primary(current);
    return need_driver();
}

static CUresult
cuCtxSetCurrent(CUcontext context)
{
    current = context == nullptr ? -1 : context->device;
    return need_driver();
}

static CUresult
cuCtxGetDevice(CUdevice *device)
{
    *device = current;
    return need_context();
}

/* ---- Modules and kernels --------------------------------------------------------- */

static CUresult
cuModuleLoadData(CUmodule *module, const void *data)
{
    const std::lock_guard<std::recursive_mutex> guard(simt::work_lock);
    const simt::image *image = simt::image_at(data);
    const CUresult error =
        need_context() != CUDA_SUCCESS ? need_context() : load_error.load();

    simt::unsafe_call("cuModuleLoadData");
    if (error != CUDA_SUCCESS) {
        return error;
    }
    if (image == nullptr) {
        return CUDA_ERROR_INVALID_IMAGE;
    }
    if (image->arch / 10 != capability() / 10 || image->arch > capability() ||
        image->arch != path_taken()) {
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    modules.push_back(
        std::make_unique<CUmod_st>(CUmod_st{image, primary(current), {}}));
    *module = modules.back().get();
    return CUDA_SUCCESS;
}

static CUresult
cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    const std::lock_guard<std::recursive_mutex> guard(simt::work_lock);
    const CUresult error = need_own(module->context);
    const simt::kernel_table *table = module->image->table;

    if (error != CUDA_SUCCESS) {
        return error;
    }
    for (int i = 0; i < table->n; i++) {
        const simt::kernel *kernel = &table->kernels[i];
        if (strcmp(kernel->id, name) == 0 &&
            (kernel->path == 0 || kernel->path == module->image->arch)) {
            if (module->functions.count(kernel) == 0) {
                simt::unsafe_call("loading a kernel");
                module->functions[kernel] = {kernel, module->context, 0};
            }
            *function = &module->functions[kernel];
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult
cuFuncSetAttribute(CUfunction function, int attribute, int value)
{
    const std::lock_guard<std::recursive_mutex> guard(simt::work_lock);
    const CUresult error = need_own(function->context);

    if (error != CUDA_SUCCESS) {
        return error;
    }
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
        size_t(value) > simt::shared_limit) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    function->allowed = size_t(value);
    return CUDA_SUCCESS;
}

/* On each of two multiprocessors: small enough that tests reach a second round. */
static CUresult
cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                            int threads, size_t shared)
{
    simt::require(unsigned(threads) == function->kernel->threads &&
                      shared == function->kernel->shared,
                  "asked about blocks of another size than the kernel's");
    *blocks = 2;
    return need_own(function->context);
}

static CUresult
cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
               CUstream stream, void **parameters, void **extra)
{
    const std::lock_guard<std::recursive_mutex> guard(simt::work_lock);
    const simt::kernel *kernel = function->kernel;

    for (CUresult error :
         {launch_error.load(), need_own(function->context), need_stream(stream)}) {
        if (error != CUDA_SUCCESS) {
            return error;
        }
    }
    if (grid_x == 0 || grid_x > INT32_MAX) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    simt::require(grid_y == 1 && grid_z == 1 && block_x == kernel->threads &&
                      block_y == 1 && block_z == 1 && shared == kernel->shared &&
                      parameters != nullptr && extra == nullptr,
                  "a launch that is not as kernels.h says");
    const char *argument = static_cast<const char *>(parameters[0]);
    const std::vector<char> bytes(argument, argument + kernel->bytes);
    simt::issue_launch(grid_x, block_x, shared, function->allowed,
                       [kernel, bytes] { kernel->run(bytes.data()); });
    return CUDA_SUCCESS;
}

/* ---- Memory ---------------------------------------------------------------------- */

static void *
host_pointer(CUdeviceptr pointer)
{
    return reinterpret_cast<void *>(pointer);
}

static CUresult
cuMemAlloc(CUdeviceptr *pointer, size_t bytes)
{
    void *memory = nullptr;
    const CUresult error = allocate(simt::DEVICE_MEMORY, &memory, bytes, "cuMemAlloc");

    *pointer = reinterpret_cast<CUdeviceptr>(memory);
    return error;
}

static CUresult
cuMemFree(CUdeviceptr pointer)
{
    return release(simt::DEVICE_MEMORY, host_pointer(pointer), "cuMemFree");
}

static CUresult
cuMemAllocHost(void **pointer, size_t bytes)
{
    return allocate(simt::PINNED_MEMORY, pointer, bytes, "cuMemAllocHost");
}

static CUresult
cuMemFreeHost(void *pointer)
{
    return release(simt::PINNED_MEMORY, pointer, "cuMemFreeHost");
}

static CUresult
cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    const CUresult error = need_stream(stream);

    if (error == CUDA_SUCCESS) {
        simt::issue_copy(host_pointer(to), from, bytes);
    }
    return error;
}

/* The end of a call that waits for all work, unless it has failed. */
static CUresult
wait(CUresult error, const char *name)
{
    const std::lock_guard<std::recursive_mutex> guard(simt::work_lock);

    if (error == CUDA_SUCCESS) {
        simt::synchronising_call(name);
        simt::finish_work();
    }
    return error;
}

/* To pageable memory, so that it waits. */
static CUresult
cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    const CUresult error = wait(need_stream(stream), "cuMemcpyDtoHAsync");

    if (error == CUDA_SUCCESS) {
        memcpy(to, host_pointer(from), bytes);
    }
    return error;
}

/* ---- Events and captures --------------------------------------------------------- */

static CUresult
cuEventCreate(CUevent *event, unsigned)
{
    const CUresult error = need_context();

    simt::count_allocation();
    *event = error == CUDA_SUCCESS ? new CUevent_st{current, 0} : nullptr;
    return error;
}

static CUresult
cuEventDestroy(CUevent event)
{
    delete event;
    return need_driver();
}

static CUresult
cuEventRecord(CUevent event, CUstream stream)
{
    const std::lock_guard<std::recursive_mutex> guard(simt::work_lock);
    const CUresult error = need_stream(stream) != CUDA_SUCCESS
                               ? need_stream(stream)
                               : need_device(event->device);

    if (error != CUDA_SUCCESS) {
        return error;
    }
    simt::require(!simt::is_capturing(),
                  "an event recorded in a capture never completes");
    event->after = simt::issued_work();
    return CUDA_SUCCESS;
}

static CUresult
cuEventQuery(CUevent event)
{
    const std::lock_guard<std::recursive_mutex> guard(simt::work_lock);

    simt::unsafe_call("cuEventQuery");
    return need_driver() != CUDA_SUCCESS ? need_driver()
           : simt::is_done(event->after) ? CUDA_SUCCESS
                                         : CUDA_ERROR_NOT_READY;
}

static CUresult
cuEventSynchronize(CUevent)
{
    return wait(need_driver(), "cuEventSynchronize");
}

static CUresult
cuStreamSynchronize(CUstream stream)
{
    return wait(need_stream(stream), "cuStreamSynchronize");
}

static CUresult
cuStreamIsCapturing(CUstream, int *status)
{
    *status = simt::is_capturing() ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                   : CU_STREAM_CAPTURE_STATUS_NONE;
    return need_context();
}

static CUresult
cuThreadExchangeStreamCaptureMode(int *mode)
{
    *mode = simt::exchange_mode(*mode);
    return need_driver();
}

} // namespace twin

void *
simt_driver_call(const char *symbol)
{
    int version;

    twin::cuDriverGetVersion(&version);
#define FOUND(name, own, parameters)                                                   \
    if (version != 0 && strcmp(symbol, #own) == 0) {                                   \
        return reinterpret_cast<void *>(twin::name);                                   \
    }
    TFAST_DRIVER_CALLS(FOUND)
    return nullptr;
}

/* ---- For tests ------------------------------------------------------------------- */

const int simt_fault = variable("TRAINFAST_SIMT_FAULT", 0);

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void
tfast_simt_fail_launches(int error)
{
    launch_error = error;
}

EXPORTED void
tfast_simt_fail_loads(int error)
{
    load_error = error;
}

EXPORTED int
tfast_simt_current()
{
    return current;
}

EXPORTED void
tfast_simt_set_current(int device)
{
    CUcontext context = nullptr;

    twin::cuInit(0);
    if (device >= 0) {
        twin::cuDevicePrimaryCtxRetain(&context, device);
    }
    twin::cuCtxSetCurrent(context);
}

EXPORTED int
tfast_simt_contexts()
{
    return contexts;
}

EXPORTED void *
tfast_simt_stream(int device)
{
    return &streams[device];
}
