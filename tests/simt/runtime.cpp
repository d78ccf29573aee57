/* The CUDA runtime's twin: see runtime.h. Built without the sanitizers'
 * instrumentation. */
#include "simt.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <unistd.h>

struct simt_event {
    int device;
    uint64_t after; /* done when this many pieces of work are */
};

struct simt_stream {
    int device;
};

namespace {

struct copy {
    void *to;
    const void *from;
    size_t bytes;
};

struct work { /* a copy, or a launch where `body` is set */
    copy memory;
    dim3 grid, block;
    size_t dynamic;
    std::function<void()> body;
};

std::recursive_mutex lock; /* of everything below; a launch may come from any thread */
std::map<const char *, size_t> device_blocks, pinned_blocks;
std::vector<work> pending, captured;
uint64_t issued, done; /* pieces of work */
bool capturing;
std::atomic<int64_t> n_syncs, n_allocations, n_launches, n_copies;
std::atomic<int64_t> allocations_left{-1};
std::atomic<int> launch_error{cudaSuccess};
std::atomic<unsigned> most_blocks{0};
std::set<const void *> loaded_kernels;
simt_stream streams[SIMT_DEVICES] = {{0}, {1}};
std::atomic<pid_t> opened_by{0}; /* the process that first asked for devices */
std::atomic<int> contexts{0};    /* bit d: device d has one */

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_set = 0;       /* by this runtime */
thread_local int context_current = -1; /* the driver's: that of a device, or none */

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

/* A context must be current: the runtime makes one so where none is. */
cudaError_t
need_context()
{
    return context_current >= 0 ? cudaSuccess : cudaSetDevice(device_set);
}

/* CUDA refuses work in a stream of a device that is not current. */
cudaError_t
need_stream(cudaStream_t stream)
{
    const cudaError_t error = need_context();

    for (const simt_stream &known : streams) {
        if (stream == &known && known.device != context_current) {
            return cudaErrorInvalidResourceHandle;
        }
    }
    return error;
}

/* A call that the documentation forbids while any stream captures, but in relaxed mode.
 */
void
unsafe_call(const char *name)
{
    if (capturing && capture_mode != cudaStreamCaptureModeRelaxed) {
        fprintf(stderr, "simt: %s would invalidate the capture\n", name);
        simt::fail("an unsafe call during a capture");
    }
}

/* A call that has nothing to wait for while a stream captures. */
void
synchronising_call(const char *name)
{
    unsafe_call(name);
    n_syncs++;
}

bool
inside(const std::map<const char *, size_t> &blocks, const void *pointer, size_t bytes)
{
    const char *first = static_cast<const char *>(pointer);
    auto next = blocks.upper_bound(first);

    if (next == blocks.begin()) {
        return false;
    }
    --next;
    return first + bytes <= next->first + next->second;
}

void
perform(const work &piece)
{
    if (piece.body) {
        simt::run_grid(piece.grid, piece.block, piece.dynamic, piece.body);
        return;
    }
    simt::require(inside(device_blocks, piece.memory.to, piece.memory.bytes),
                  "a copy's target was freed before the copy ran");
    simt::require(inside(pinned_blocks, piece.memory.from, piece.memory.bytes),
                  "a copy's source was freed before the copy ran");
    memcpy(piece.memory.to, piece.memory.from, piece.memory.bytes);
}

void
finish_pending()
{
    for (const work &piece : pending) {
        perform(piece);
    }
    pending.clear();
    done = issued;
}

cudaError_t
allocate(std::map<const char *, size_t> &blocks, void **pointer, size_t bytes)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    if (need_context() != cudaSuccess) {
        return need_context();
    }
    n_allocations++;
    if (allocations_left == 0) {
        return cudaErrorMemoryAllocation;
    }
    if (allocations_left > 0) {
        allocations_left--;
    }
    if (posix_memalign(pointer, 256, bytes) != 0) {
        return cudaErrorMemoryAllocation;
    }
    memset(*pointer, 0xFF, bytes);
    blocks[static_cast<char *>(*pointer)] = bytes;
    return cudaSuccess;
}

cudaError_t
release(std::map<const char *, size_t> &blocks, void *pointer, const char *name)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    if (pointer == nullptr) {
        return cudaSuccess;
    }
    synchronising_call(name); /* the real ones wait for the device */
    finish_pending();
    simt::require(blocks.erase(static_cast<char *>(pointer)) == 1,
                  "a free of what was not allocated this way");
    free(pointer);
    return cudaSuccess;
}

} // namespace

/* ---- Devices and errors ---------------------------------------------------------- */

/* Of launches: every other twin that can fail returns its error. */
cudaError_t
cudaGetLastError()
{
    const cudaError_t error = last_error;

    last_error = cudaSuccess;
    return error;
}

const char *
cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorInitializationError:
        return "initialization error";
    case cudaErrorNoKernelImageForDevice:
        return "no kernel image is available for execution on the device";
    case cudaErrorUnsupportedPtxVersion:
        return "the provided PTX was compiled with an unsupported toolchain.";
    case cudaErrorInvalidResourceHandle:
        return "invalid resource handle";
    default:
        return "another error";
    }
}

static const int RUNTIME_VERSION = 13000;

cudaError_t
cudaDriverGetVersion(int *version)
{
    const char *driver = getenv("TRAINFAST_SIMT_DRIVER");

    *version = driver == nullptr ? RUNTIME_VERSION : atoi(driver);
    return cudaSuccess;
}

cudaError_t
cudaGetDeviceCount(int *count)
{
    int driver;

    if (opened_by == 0) {
        opened_by = getpid();
    }
    cudaDriverGetVersion(&driver);
    *count = driver < RUNTIME_VERSION ? 0 : SIMT_DEVICES;
    return *count == 0 ? cudaErrorInsufficientDriver : cudaSuccess;
}

cudaError_t
cudaRuntimeGetVersion(int *version)
{
    *version = RUNTIME_VERSION;
    return cudaSuccess;
}

cudaError_t
cudaGetDevice(int *device)
{
    *device = context_current >= 0 ? context_current : device_set;
    return cudaSuccess;
}

cudaError_t
cudaSetDevice(int device)
{
    if (opened_by != 0 && opened_by != getpid()) {
        return cudaErrorInitializationError;
    }
    if (device < 0 || device >= SIMT_DEVICES) {
        return cudaErrorInvalidDevice;
    }
    device_set = context_current = device;
    contexts |= 1 << device;
    return cudaSuccess;
}

/* The driver's handle of a context: any address but null. */
static int
get_context(void **context)
{
    *context = context_current < 0 ? nullptr : &streams[context_current];
    return opened_by == getpid() ? 0 : cudaErrorInitializationError;
}

static int
set_context(void *context)
{
    context_current =
        context == nullptr ? -1 : static_cast<simt_stream *>(context)->device;
    return 0;
}

static int
get_context_device(int *device)
{
    *device = context_current;
    return context_current >= 0 ? 0 : 201; /* CUDA_ERROR_INVALID_CONTEXT */
}

void *
simt_driver_call(const char *name)
{
    return strcmp(name, "cuCtxGetCurrent") == 0 ? reinterpret_cast<void *>(get_context)
           : strcmp(name, "cuCtxSetCurrent") == 0
               ? reinterpret_cast<void *>(set_context)
           : strcmp(name, "cuCtxGetDevice") == 0
               ? reinterpret_cast<void *>(get_context_device)
               : nullptr;
}

cudaError_t
cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    const char *named = getenv("TRAINFAST_SIMT_DEVICE");
    const int capability = named == nullptr ? 80 : atoi(named);

    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? capability / 10
             : attribute == cudaDevAttrComputeCapabilityMinor ? capability % 10
                                                              : 2;
    return device >= 0 && device < SIMT_DEVICES ? cudaSuccess : cudaErrorInvalidDevice;
}

void
simt_load_kernel(const void *kernel)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    if (loaded_kernels.count(kernel) == 0) {
        unsafe_call("loading a kernel");
        loaded_kernels.insert(kernel);
    }
}

cudaError_t
simt_function_attributes(cudaFuncAttributes *attributes)
{
    const char *version = getenv("TRAINFAST_SIMT_PTX");

    attributes->ptxVersion = version == nullptr ? 80 : atoi(version);
    return cudaSuccess;
}

/* ---- Memory ---------------------------------------------------------------------- */

cudaError_t
cudaMalloc(void **pointer, size_t bytes)
{
    unsafe_call("cudaMalloc");
    return allocate(device_blocks, pointer, bytes);
}

cudaError_t
cudaFree(void *pointer)
{
    return release(device_blocks, pointer, "cudaFree");
}

cudaError_t
cudaHostAlloc(void **pointer, size_t bytes, unsigned)
{
    unsafe_call("cudaHostAlloc");
    return allocate(pinned_blocks, pointer, bytes);
}

cudaError_t
cudaFreeHost(void *pointer)
{
    return release(pinned_blocks, pointer, "cudaFreeHost");
}

cudaError_t
cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                cudaStream_t stream)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);
    work piece = {{to, from, bytes}, {}, {}, 0, nullptr};

    if (need_stream(stream) != cudaSuccess) {
        return need_stream(stream);
    }
    simt::require(kind == cudaMemcpyHostToDevice, "only host to device has a twin");
    simt::require(inside(device_blocks, to, bytes),
                  "a copy to what is no device memory");
    simt::require(inside(pinned_blocks, from, bytes),
                  "a copy from pageable memory, which synchronises");
    n_copies++;
    (capturing ? captured : pending).push_back(piece);
    issued += !capturing;
    return cudaSuccess;
}

/* ---- Streams and events ---------------------------------------------------------- */

cudaError_t
cudaStreamSynchronize(cudaStream_t)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    simt::require(!capturing, "cudaStreamSynchronize of a stream that captures");
    synchronising_call("cudaStreamSynchronize");
    finish_pending();
    return cudaSuccess;
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    const cudaError_t error = need_context();

    n_allocations++;
    *event = new simt_event{context_current, 0};
    return error;
}

cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    if (need_stream(stream) != cudaSuccess) {
        return need_stream(stream);
    }
    if (event->device != context_current) {
        return cudaErrorInvalidResourceHandle;
    }
    simt::require(!capturing, "an event recorded in a capture never completes");
    event->after = issued;
    return cudaSuccess;
}

cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    unsafe_call("cudaEventQuery");
    return event->after <= done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    synchronising_call("cudaEventSynchronize");
    finish_pending();
    return cudaSuccess;
}

cudaError_t
cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status)
{
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t
cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode)
{
    std::swap(*mode, capture_mode);
    return cudaSuccess;
}

void
simt::launch(dim3 grid, dim3 block, size_t dynamic, cudaStream_t stream,
             std::function<void()> body)
{
    const std::lock_guard<std::recursive_mutex> guard(lock);
    const unsigned most = most_blocks;

    n_launches++;
    if (most > 0 && grid.x > most) {
        grid.x = most;
    }
    work piece = {{}, grid, block, dynamic, std::move(body)};
    last_error = static_cast<cudaError_t>(launch_error.load());
    if (last_error == cudaSuccess) {
        last_error = need_stream(stream);
    }
    if (last_error != cudaSuccess) {
        return;
    }
    if (capturing) {
        captured.push_back(std::move(piece));
        return;
    }
    issued++;
    pending.push_back(std::move(piece));
    finish_pending();
}

/* ---- For tests ------------------------------------------------------------------- */

static int
chosen_fault()
{
    const char *number = getenv("TRAINFAST_SIMT_FAULT");

    return number == nullptr ? 0 : atoi(number);
}

const int simt::fault = chosen_fault();

#define EXPORTED extern "C" __attribute__((visibility("default"))) void

EXPORTED
tfast_simt_counts(int64_t counts[3])
{
    counts[0] = n_syncs;
    counts[1] = n_allocations;
    counts[2] = n_launches;
}

extern "C" __attribute__((visibility("default"))) int64_t
tfast_simt_copies()
{
    return n_copies;
}

EXPORTED
tfast_simt_reset()
{
    n_syncs = n_allocations = n_launches = n_copies = 0;
}

EXPORTED
tfast_simt_seed(uint64_t seed)
{
    simt::set_seed(seed);
}

EXPORTED
tfast_simt_fail_allocations(int64_t after)
{
    allocations_left = after;
}

EXPORTED
tfast_simt_fail_launches(int error)
{
    launch_error = error;
}

EXPORTED
tfast_simt_most_blocks(unsigned blocks)
{
    most_blocks = blocks;
}

extern "C" __attribute__((visibility("default"))) int
tfast_simt_current()
{
    return context_current;
}

EXPORTED
tfast_simt_set_current(int device)
{
    context_current = -1;
    device_set = 0;
    if (device >= 0) {
        cudaSetDevice(device);
    }
}

extern "C" __attribute__((visibility("default"))) int
tfast_simt_contexts()
{
    return contexts;
}

extern "C" __attribute__((visibility("default"))) void *
tfast_simt_stream(int device)
{
    return &streams[device];
}

EXPORTED
tfast_simt_capture_begin()
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    captured.clear();
    capturing = true;
}

EXPORTED
tfast_simt_capture_end()
{
    capturing = false;
}

EXPORTED
tfast_simt_replay()
{
    const std::lock_guard<std::recursive_mutex> guard(lock);

    for (const work &piece : captured) {
        perform(piece);
    }
}
