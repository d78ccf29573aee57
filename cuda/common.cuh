/* What every file in cuda/ shares. Compile with -fmad=false: kernels promise the bits
 * of the CPU's, which fuse only where they say so. A host compiler builds the same
 * files against tests/simt/simt.h, which has its own forms of the macros below. */
#ifndef TFAST_COMMON_CUH
#define TFAST_COMMON_CUH

#include "ptx.cuh"
#include "tfast.h"

#define DEVICE static __device__ __forceinline__
/* For what runs once in a while: its registers stay out of the loops around it. */
#define DEVICE_CALL static __device__ __noinline__

#ifdef __CUDACC__
/* TFAST_KERNEL(256, 4) name(...): blocks of 256 threads, at least 4 to a
 * multiprocessor, which bounds the registers. */
#    define TFAST_KERNEL(threads, blocks)                                              \
        __global__ void __launch_bounds__(threads, blocks)
#    define SHARED(type, name, count) __shared__ type name[count]
#    define SHARED_DYNAMIC(name) extern __shared__ __align__(128) char name[]
/* Asynchronous; a launch that fails is seen by cudaGetLastError(). */
#    define LAUNCH(kernel, grid, block, dynamic, stream, ...)                          \
        kernel<<<grid, block, dynamic, stream>>>(__VA_ARGS__)
#endif

/* Sets the message of the core that opened this library. */
extern tfast_fail_function tfast_cuda_fail;

/* TFAST_OK, or TFAST_ECUDA with a message that names the call. */
tfast_status tfast_cuda_status(cudaError_t error, const char *call);

/* Returns from the function when the call fails. */
#define CUDA_TRY(call)                                                                 \
    do {                                                                               \
        const tfast_status status_ = tfast_cuda_status(call, #call);                   \
        if (status_ != TFAST_OK) {                                                     \
            return status_;                                                            \
        }                                                                              \
    } while (0)

/* Makes a device current, and at the end of the scope what the thread had before it. In
 * between the thread may allocate, ask events and load kernels, as the first launch of
 * each does, even while a stream, of this or another thread, captures: those calls
 * touch no captured work. */
class tfast_device_scope {
  public:
    tfast_status enter(int device);
    ~tfast_device_scope();

  private:
    bool moved_ = false, relaxed_ = false; /* what is to be undone */
    void *before_ = nullptr;               /* the thread's context; null: none */
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/* In backend.cu: what this library offers. */
extern const tfast_backend tfast_cuda_backend;

/* In workspace.cu: frees what a workspace holds, of whichever kind. */
void tfast_held_clear(void *data);

/* In adamw.cu, amp.cu, attention.cu and gemm.cu. */
tfast_status tfast_cuda_adamw(const tfast_adamw_args *args);
tfast_status tfast_cuda_adamw_prepare(const tfast_adamw_args *args);
tfast_status tfast_cuda_amp_grads(const tfast_amp_grads_args *args);
tfast_status tfast_cuda_amp_update(const tfast_amp_update_args *args);
tfast_status tfast_cuda_attention(const tfast_attention_args *args);
tfast_status tfast_cuda_attention_backward(const tfast_attention_args *args);
tfast_status tfast_cuda_attention_scratch(int64_t *bytes,
                                          const tfast_attention_args *args,
                                          bool backward);
tfast_status tfast_cuda_gemm(const tfast_gemm_args *args);

#endif
