/* The table that this library exports. Opened by csrc/backend.c when the first CUDA
 * array is seen, never when the module is imported. */
#include "host.h"
#include "workspace.h"

#ifdef TFAST_SIMT /* the runner of tests/simt: the host's memory is its device memory */
static const char NAME[] = "simt";
enum { DEVICE_TYPE = TFAST_CPU };
#else
static const char NAME[] = "cuda";
enum { DEVICE_TYPE = TFAST_CUDA };
#endif

const tfast_backend tfast_cuda_backend = {
    TFAST_ABI,
    NAME,
    DEVICE_TYPE,
    tfast_cuda_unusable,
    tfast_held_clear,
    tfast_cuda_adamw,
    tfast_cuda_adamw_prepare,
    tfast_cuda_amp_grads,
    tfast_cuda_amp_update,
    tfast_cuda_attention,
    tfast_cuda_attention_backward,
    tfast_cuda_attention_scratch,
    tfast_cuda_gemm,
    tfast_cuda_neighbours_scratch,
    tfast_cuda_neighbours_count,
    tfast_cuda_trajectory_scratch,
    tfast_cuda_trajectory,
};

__attribute__((visibility("default"))) const tfast_backend *
tfast_library_open(uint32_t abi, tfast_fail_function fail)
{
    if (abi != TFAST_ABI) {
        return NULL;
    }
    tfast_cuda_fail = fail;
    return &tfast_cuda_backend;
}
