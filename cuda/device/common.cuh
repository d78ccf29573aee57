/* What every file in cuda/device/ shares. NVRTC compiles them with -fmad=false: kernels
 * promise the bits of the CPU's, which fuse only where they say so. A host compiler
 * builds the same files against tests/simt/simt.h, which has its own forms of the
 * macros below. */
#ifndef TFAST_COMMON_CUH
#define TFAST_COMMON_CUH

#include "../arguments.h"
#include "../kernels.h"
#include "ptx.cuh"

#define DEVICE static __device__ __forceinline__
/* For what runs once in a while: its registers stay out of the loops around it. */
#define DEVICE_CALL static __device__ __noinline__

#ifdef __CUDACC_RTC__
/* TFAST_KERNEL(256, 4) name(...): blocks of 256 threads, at least 4 to a
 * multiprocessor, which bounds the registers. */
#    define TFAST_KERNEL(threads, blocks)                                              \
        __global__ void __launch_bounds__(threads, blocks)
#    define SHARED(type, name, count) __shared__ type name[count]
#    define SHARED_DYNAMIC(name) extern __shared__ __align__(128) char name[]
/* TFAST_EXPORT(file): the file's kernels, for the runner of tests/simt; NVRTC is given
 * their names. */
#    define TFAST_EXPORT(file)
#endif

/* That a shape is what kernels.h tells the host about it. */
#define CHECK_SHAPE(rows, threads, shared, ...)                                        \
    static_assert(__VA_ARGS__::ROWS == (rows) && __VA_ARGS__::THREADS == (threads) &&  \
                      __VA_ARGS__::BYTES == (shared),                                  \
                  #__VA_ARGS__);

#endif
