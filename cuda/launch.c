/* Kernels: which machine code a device takes, loaded file by file when a kernel of the
 * file is first needed, and launched. */
#include "host.h"
#include "images.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- The list of kernels --------------------------------------------------------- */

typedef struct {
    const char *id;
    size_t arguments; /* bytes of them */
    int rows, threads, shared;
} kernel_facts;

#define FACTS(path, id, arguments, rows, threads, shared, ...)                         \
    {#id, sizeof(arguments), rows, threads, shared},
static const kernel_facts kernels[N_KERNELS] = {TFAST_KERNELS(FACTS)};

#define ONE(...) +1
#define COUNT(file) 0 KERNELS_OF_##file(ONE),
static const int kernels_of_file[N_FILES] = {TFAST_DEVICE_FILES(COUNT)};

static int
file_of(int kernel)
{
    int file = 0;

    for (; kernel >= kernels_of_file[file]; file++) {
        kernel -= kernels_of_file[file];
    }
    return file;
}

int
tfast_kernel_rows(int kernel)
{
    return kernels[kernel].rows;
}

/* A block may have 48 KB, static arrays included, or more dynamic ones where the
 * kernel's attribute says so. Static arrays, and what aligns the dynamic ones behind
 * them, take less than 1 KB here. */
enum { UNASKED_BYTES = 47 << 10 };

/* ---- What is loaded -------------------------------------------------------------- */

/* Of one context. Nothing is unloaded: what a context holds ends with it. */
typedef struct loaded {
    struct loaded *next;
    CUcontext context;
    int arch; /* of the images that it takes */
    bool is_ptx;
    int multiprocessors;
    CUmodule modules[N_FILES]; /* this and the next two: 0 until they are needed */
    CUfunction functions[N_KERNELS];
    int full_grid[N_KERNELS];
} loaded;

static loaded *all_loaded;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that is loaded */

/* Unsupported, so that callers leave the work to torch. */
static tfast_status
fail_without_code(int capability, int newest)
{
    if (capability < 75) {
        return tfast_cuda_fail(TFAST_EUNSUPPORTED,
                               "the GPU must be sm_75 or newer, got sm_%d", capability);
    }
    return tfast_cuda_fail(TFAST_EUNSUPPORTED,
                           "this library has no code for the GPU, an sm_%d, only for "
                           "sm_%d and older; in trainfast's sources, "
                           "TRAINFAST_CUDA_ARCHS=%d pip install . builds one that has",
                           capability, newest, capability);
}

/* Machine code of the GPU's own major version, the newest that is not newer than it;
 * otherwise the newest PTX, which the driver compiles. */
static tfast_status
choose_images(loaded *of, int capability)
{
    int newest = 0;

    for (int i = 0; i < tfast_n_images; i++) {
        const tfast_image *image = &tfast_images[i];
        const bool own = !image->is_ptx && image->arch / 10 == capability / 10;
        newest = image->arch > newest ? image->arch : newest;
        if (image->arch > capability || (!own && !image->is_ptx)) {
            continue;
        }
        if (of->arch == 0 || (own && of->is_ptx) ||
            (own != of->is_ptx && image->arch > of->arch)) {
            of->arch = image->arch;
            of->is_ptx = image->is_ptx;
        }
    }
    return of->arch != 0 ? TFAST_OK : fail_without_code(capability, newest);
}

static tfast_status
ask_device(loaded *of)
{
    CUdevice device;
    int major, minor;

    CU_TRY(cuCtxGetDevice, (&device));
    CU_TRY(cuDeviceGetAttribute,
           (&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    CU_TRY(cuDeviceGetAttribute,
           (&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    CU_TRY(cuDeviceGetAttribute,
           (&of->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    return choose_images(of, major * 10 + minor);
}

/* What is loaded in the current context. Called with the lock, as the next two. */
static tfast_status
find_loaded(loaded **found)
{
    tfast_status status;
    CUcontext context;
    loaded *of;

    CU_TRY(cuCtxGetCurrent, (&context));
    for (of = all_loaded; of != NULL; of = of->next) {
        if (of->context == context) {
            *found = of;
            return TFAST_OK;
        }
    }
    of = calloc(1, sizeof *of);
    if (of == NULL) {
        return tfast_cuda_fail(TFAST_ENOMEM, "out of memory");
    }
    of->context = context;
    status = ask_device(of);
    if (status != TFAST_OK) {
        free(of);
        return status;
    }
    of->next = all_loaded;
    *found = all_loaded = of;
    return TFAST_OK;
}

/* PTX of CUDA 12.9 is what drivers from 575 on read. */
static tfast_status
load_image(CUmodule *module, const tfast_image *image)
{
    const CUresult error = tfast_cuda_driver.cuModuleLoadData(module, image->data);

    if (error == CUDA_ERROR_UNSUPPORTED_PTX_VERSION ||
        error == CUDA_ERROR_INVALID_PTX) {
        return tfast_cuda_fail(TFAST_ECUDA,
                               "cuModuleLoadData: this library has no code for the "
                               "GPU, and the driver does not read its PTX; install "
                               "driver 575 or newer, or build trainfast on this "
                               "machine with TRAINFAST_CUDA=1");
    }
    return tfast_cuda_status(error, "cuModuleLoadData");
}

static tfast_status
load_file(loaded *of, int file)
{
    for (int i = 0; i < tfast_n_images && of->modules[file] == NULL; i++) {
        const tfast_image *image = &tfast_images[i];
        if (image->file == file && image->arch == of->arch &&
            image->is_ptx == of->is_ptx) {
            const tfast_status status = load_image(&of->modules[file], image);
            if (status != TFAST_OK) {
                return status;
            }
        }
    }
    return TFAST_OK;
}

static tfast_status
load_kernel(loaded *of, int kernel)
{
    const kernel_facts *facts = &kernels[kernel];
    const int file = file_of(kernel);
    CUfunction function;
    tfast_status status;

    if (of->functions[kernel] != NULL) {
        return TFAST_OK;
    }
    status = load_file(of, file);
    if (status != TFAST_OK) {
        return status;
    }
    CU_TRY(cuModuleGetFunction,
           (&function, of->modules[file], tfast_kernel_names[kernel]));
    if (facts->shared > UNASKED_BYTES) {
        CU_TRY(
            cuFuncSetAttribute,
            (function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, facts->shared));
    }
    of->functions[kernel] = function;
    return TFAST_OK;
}

/* ---- Calls ----------------------------------------------------------------------- */

tfast_status
tfast_kernel_path(int *path)
{
    loaded *of;
    tfast_status status;

    pthread_mutex_lock(&lock);
    status = find_loaded(&of);
    *path = status != TFAST_OK ? 0 : of->arch < 80 ? 75 : 80;
    pthread_mutex_unlock(&lock);
    return status;
}

static tfast_status
ask_full_grid(loaded *of, int kernel)
{
    int resident;

    if (of->full_grid[kernel] == 0) {
        CU_TRY(cuOccupancyMaxActiveBlocksPerMultiprocessor,
               (&resident, of->functions[kernel], kernels[kernel].threads,
                (size_t)kernels[kernel].shared));
        of->full_grid[kernel] = of->multiprocessors * resident;
    }
    return TFAST_OK;
}

tfast_status
tfast_full_grid(int *blocks, int kernel)
{
    loaded *of;
    tfast_status status;

    pthread_mutex_lock(&lock);
    status = find_loaded(&of);
    if (status == TFAST_OK) {
        status = load_kernel(of, kernel);
    }
    if (status == TFAST_OK) {
        status = ask_full_grid(of, kernel);
    }
    *blocks = status == TFAST_OK ? of->full_grid[kernel] : 0;
    pthread_mutex_unlock(&lock);
    return status;
}

/* The driver's error, with the kernel's name. */
static tfast_status
launch_status(CUresult error, int kernel)
{
    char call[80];

    if (error == CUDA_SUCCESS) {
        return TFAST_OK;
    }
    snprintf(call, sizeof call, "launch of %s", kernels[kernel].id);
    return tfast_cuda_status(error, call);
}

tfast_status
tfast_launch(int kernel, int64_t blocks, void *stream, const void *arguments,
             size_t bytes)
{
    const kernel_facts *facts = &kernels[kernel];
    void *parameters[] = {(void *)arguments};
    CUfunction function = NULL;
    tfast_status status;
    loaded *of;

    if (bytes != facts->arguments || blocks < 1 || blocks > INT32_MAX) {
        return tfast_cuda_fail(TFAST_ECUDA,
                               "launch of %s: must be of 1 block to 2^31 - 1 with %zu "
                               "bytes, got %lld with %zu",
                               facts->id, facts->arguments, (long long)blocks, bytes);
    }
    pthread_mutex_lock(&lock);
    status = find_loaded(&of);
    if (status == TFAST_OK) {
        status = load_kernel(of, kernel);
    }
    if (status == TFAST_OK) {
        function = of->functions[kernel];
    }
    pthread_mutex_unlock(&lock);
    if (status != TFAST_OK) {
        return status;
    }
    return launch_status(tfast_cuda_driver.cuLaunchKernel(
                             function, (unsigned)blocks, 1, 1, (unsigned)facts->threads,
                             1, 1, (unsigned)facts->shared, (CUstream)stream,
                             parameters, NULL),
                         kernel);
}
