/* Stands in for the CUDA driver, libcuda.so.1, in tests of the library that is shipped:
 * it takes machine code and PTX as the driver does, finds kernels in them by name, and
 * prints what is loaded and launched, but runs nothing. Device memory is the host's.
 * The environment says which GPU and driver it is: STUB_CAPABILITY (80), STUB_VERSION
 * (12090), STUB_DEVICES (1). */
#include "driver.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CUctx_st {
    int device;
};

struct CUmod_st {
    const char *image;
};

struct CUfunc_st {
    const char *name;
    int shared;    /* that it may have */
    int arguments; /* bytes of them; of PTX 0 */
};

static struct CUctx_st contexts[8];
static CUcontext current;

static int
setting(const char *name, int otherwise)
{
    const char *text = getenv(name);

    return text == NULL ? otherwise : atoi(text);
}

/* ---- The driver and its devices -------------------------------------------------- */

CUresult
cuInit(unsigned flags)
{
    return flags != 0                        ? CUDA_ERROR_INVALID_VALUE
           : setting("STUB_DEVICES", 1) == 0 ? CUDA_ERROR_NO_DEVICE
                                             : CUDA_SUCCESS;
}

CUresult
cuDriverGetVersion(int *version)
{
    *version = setting("STUB_VERSION", 12090);
    return CUDA_SUCCESS;
}

CUresult
cuGetErrorString(CUresult error, const char **text)
{
    static char words[32];

    snprintf(words, sizeof words, "error %d", error);
    *text = words;
    return CUDA_SUCCESS;
}

CUresult
cuDeviceGetCount(int *count)
{
    *count = setting("STUB_DEVICES", 1);
    return CUDA_SUCCESS;
}

CUresult
cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return ordinal >= 0 && ordinal < setting("STUB_DEVICES", 1)
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_DEVICE;
}

CUresult
cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    const int capability = setting("STUB_CAPABILITY", 80);

    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? capability / 10
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
                 ? capability % 10
                 : 4;
    return device < 8 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult
cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    contexts[device].device = device;
    *context = &contexts[device];
    return CUDA_SUCCESS;
}

CUresult
cuCtxGetCurrent(CUcontext *context)
{
    *context = current;
    return CUDA_SUCCESS;
}

CUresult
cuCtxSetCurrent(CUcontext context)
{
    current = context;
    return CUDA_SUCCESS;
}

CUresult
cuCtxGetDevice(CUdevice *device)
{
    *device = current == NULL ? -1 : current->device;
    return current == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

/* ---- Modules and kernels --------------------------------------------------------- */

/* The architecture stands in the low byte of a cubin's flags, and from CUDA 13 on in
 * the next one. */
static int
arch_of(const Elf64_Ehdr *elf)
{
    const int low = elf->e_flags & 0xFF, next = elf->e_flags >> 8 & 0xFF;

    return elf->e_ident[EI_ABIVERSION] >= 8 ? next : low;
}

CUresult
cuModuleLoadData(CUmodule *module, const void *image)
{
    const int capability = setting("STUB_CAPABILITY", 80);
    const Elf64_Ehdr *elf = image;

    if (memcmp(image, ELFMAG, SELFMAG) == 0 && elf->e_machine == 190) {
        const int arch = arch_of(elf);
        printf("load sm_%d\n", arch);
        if (arch / 10 != capability / 10 || arch > capability) {
            return CUDA_ERROR_NO_BINARY_FOR_GPU;
        }
    } else if (strstr(image, ".version") != NULL) {
        printf("load PTX\n");
        if (setting("STUB_VERSION", 12090) < 12090) { /* CUDA's, whose PTX it is */
            return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
        }
    } else {
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = malloc(sizeof **module);
    (*module)->image = image;
    return CUDA_SUCCESS;
}

static int
has_symbol(const char *image, const char *name)
{
    const Elf64_Ehdr *elf = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + elf->e_shoff);

    for (int i = 0; i < elf->e_shnum; i++) {
        const Elf64_Shdr *section = &sections[i];
        if (section->sh_type != SHT_SYMTAB) {
            continue;
        }
        const char *names = image + sections[section->sh_link].sh_offset;
        const Elf64_Sym *symbols = (const Elf64_Sym *)(image + section->sh_offset);
        for (size_t s = 0; s < section->sh_size / sizeof *symbols; s++) {
            if (ELF64_ST_TYPE(symbols[s].st_info) == STT_FUNC &&
                strcmp(names + symbols[s].st_name, name) == 0) {
                return 1;
            }
        }
    }
    return 0;
}

/* Bytes of a kernel's arguments, from the attributes that NVIDIA's compilers write: a
 * format, a kind and a number; of format 4 the number is that of bytes that follow. */
static int
bytes_of_arguments(const char *image, const char *name)
{
    enum { SIZED = 4, PARAMETER_BYTES = 0x19 };
    const Elf64_Ehdr *elf = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + elf->e_shoff);
    const char *names = image + sections[elf->e_shstrndx].sh_offset;
    const char prefix[] = ".nv.info.";

    for (int i = 0; i < elf->e_shnum; i++) {
        const char *own = names + sections[i].sh_name;
        const unsigned char *at = (const unsigned char *)image + sections[i].sh_offset;
        const unsigned char *end = at + sections[i].sh_size;
        if (strncmp(own, prefix, sizeof prefix - 1) != 0 ||
            strcmp(own + sizeof prefix - 1, name) != 0) {
            continue;
        }
        while (at < end) {
            const int number = at[2] | at[3] << 8;
            if (at[1] == PARAMETER_BYTES) {
                return number;
            }
            at += 4 + (at[0] == SIZED ? number : 0);
        }
    }
    return -1;
}

static int
has_entry(const char *ptx, const char *name)
{
    const size_t length = strlen(name);

    for (const char *at = strstr(ptx, name); at != NULL; at = strstr(at + 1, name)) {
        if (at[length] == '(' && strncmp(at - 7, ".entry ", 7) == 0) {
            return 1;
        }
    }
    return 0;
}

CUresult
cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    const char *image = module->image;
    const int is_elf = memcmp(image, ELFMAG, SELFMAG) == 0;

    if (!(is_elf ? has_symbol(image, name) : has_entry(image, name))) {
        return CUDA_ERROR_NOT_FOUND;
    }
    *function = malloc(sizeof **function);
    **function = (struct CUfunc_st){name, 48 << 10,
                                    is_elf ? bytes_of_arguments(image, name) : 0};
    return CUDA_SUCCESS;
}

CUresult
cuFuncSetAttribute(CUfunction function, int attribute, int value)
{
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    function->shared = value;
    return CUDA_SUCCESS;
}

CUresult
cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                            int threads, size_t shared)
{
    *blocks = 2;
    return function != NULL && threads > 0 && shared <= (size_t)function->shared
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

CUresult
cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
               CUstream stream, void **parameters, void **extra)
{
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 ||
        block_y != 1 || block_z != 1 || (int)shared > function->shared ||
        parameters == NULL || parameters[0] == NULL || extra != NULL ||
        current == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    printf("launch %s %u %u %d %p\n", function->name, grid_x, block_x,
           function->arguments, (void *)stream);
    return CUDA_SUCCESS;
}

/* ---- Memory, events, streams ----------------------------------------------------- */

CUresult
cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    void *data = malloc(bytes);

    memcpy(pointer, &data, sizeof data);
    return data != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult
cuMemFree_v2(CUdeviceptr pointer)
{
    void *data;

    memcpy(&data, &pointer, sizeof data);
    free(data);
    return CUDA_SUCCESS;
}

CUresult
cuMemAllocHost_v2(void **pointer, size_t bytes)
{
    *pointer = malloc(bytes);
    return *pointer != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult
cuMemFreeHost(void *pointer)
{
    free(pointer);
    return CUDA_SUCCESS;
}

CUresult
cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    void *data;

    (void)stream;
    memcpy(&data, &to, sizeof data);
    memcpy(data, from, bytes);
    return CUDA_SUCCESS;
}

CUresult
cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    return CUDA_SUCCESS;
}

CUresult
cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    const void *data;

    (void)stream;
    memcpy(&data, &from, sizeof data);
    memcpy(to, data, bytes);
    return CUDA_SUCCESS;
}

CUresult
cuEventCreate(CUevent *event, unsigned flags)
{
    (void)flags;
    *event = malloc(1);
    return CUDA_SUCCESS;
}

CUresult
cuEventDestroy_v2(CUevent event)
{
    free(event);
    return CUDA_SUCCESS;
}

CUresult
cuEventRecord(CUevent event, CUstream stream)
{
    (void)stream;
    return event != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult
cuEventQuery(CUevent event)
{
    return event != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult
cuEventSynchronize(CUevent event)
{
    return cuEventQuery(event);
}

CUresult
cuStreamIsCapturing(CUstream stream, int *status)
{
    (void)stream;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult
cuThreadExchangeStreamCaptureMode(int *mode)
{
    static int own = CU_STREAM_CAPTURE_MODE_GLOBAL;
    const int before = own;

    own = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
