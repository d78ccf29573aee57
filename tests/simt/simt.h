/* CUDA for a host compiler: what the .cu sources include in place of NVRTC's built-in
 * declarations, so that their kernels run on the CPU, one block at a time, every thread
 * a fiber.
 *
 *   fibers.cpp   scheduling, barriers, shared memory, launches
 *   warp.cpp     what the lanes of a warp do together
 *   ptx_twin.h   the functions of cuda/device/ptx.cuh
 *
 * and for programs that have the host's files of cuda/, too:
 *
 *   driver_twin  the calls of the CUDA driver, counted
 *   images.cpp   what kernels there are
 *
 * What it finds: barriers that not every thread reaches, warps that diverge at a
 * warp-wide operation, reads of shared memory that was never written (it starts as
 * NaN), asynchronous copies used before they were waited for; with -fsanitize=address
 * reads and writes out of bounds, of shared memory too; with -fsanitize=thread missing
 * barriers and fences and colliding blocks, since switching fibers carries no ordering
 * but barriers and fences do. What it cannot find: wrong PTX text, 32-bit address
 * mistakes, weak memory order, errors of ptxas, speed. How tensor cores round their
 * sums can be asked for: see warp.cpp.
 *
 * TRAINFAST_SIMT_FAULT=n switches on a fault that faults.py planted: none by default.
 * TRAINFAST_SIMT_SEED=n shuffles the order of blocks, warps and lanes; 0 is launch
 * order. */
#ifndef TFAST_SIMT_H
#define TFAST_SIMT_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

/* ---- Keywords and types ---------------------------------------------------------- */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline /* forced, gcc takes twice as long for no speed */
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint2
make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}

inline uint4
make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

inline float2
make_float2(float x, float y)
{
    return {x, y};
}

/* ---- The runner ------------------------------------------------------------------ */

extern "C" const int simt_fault; /* the planted one that is on, or 0 */

namespace simt {

struct thread {
    dim3 index;
    int lane, warp;
    unsigned n_votes;       /* at barriers */
    bool fenced;            /* its atomics publish what it did before */
    const void *atomics[8]; /* since its last fence, the latest eight */
    unsigned n_atomics;
};

extern thread *self; /* the thread that runs */
extern dim3 block_index, block_size, grid_size;
extern size_t dynamic_bytes; /* of shared memory, for this launch */
extern char dynamic_key;

/* What a test may look at; never reset here. */
struct statistics {
    uint64_t blocks, collectives, mma, ldmatrix, wavefronts, async_copies;
};
extern statistics stats;

/* Bytes of shared memory that a block may ask for, to try a smaller device's limit. */
extern size_t shared_limit;

/* Prints what is wrong, where every thread stands, and aborts. */
[[noreturn]] void fail(const char *what);

inline void
require(bool holds, const char *what)
{
    if (__builtin_expect(!holds, 0)) {
        fail(what);
    }
}

void set_seed(uint64_t seed);
void sync_threads();
bool sync_threads_or(bool vote); /* whether any thread's is true */
void sync_warp(uint32_t mask = ~0u);
void thread_fence();
void note_atomic(const void *address); /* before it happens */

/* Runs a kernel, which `body` calls for one thread. Its attribute allows so many bytes
 * of dynamic shared memory; a block that has no more of them than 48 KB, static arrays
 * included, needs no such attribute. */
void run_grid(dim3 grid, dim3 block, size_t dynamic, size_t allowed,
              const std::function<void()> &body);

/* This block's array for `key`, allocated when its first thread asks. */
char *shared_array(const void *key, size_t bytes);

/* All lanes of `mask` meet here; the last one runs `exec` over everyone's argument. */
typedef void (*warp_function)(void **arguments, uint32_t mask);
void collective(const char *what, uint32_t mask, void *argument, warp_function exec);

/* The word of lane `from`; one's own when `from` is not a lane. */
uint32_t exchange(const char *what, uint32_t mask, uint32_t word, int from);
uint32_t ballot(uint32_t mask, bool vote);

/* A double goes as two words. */
template <typename T>
T
shuffle(const char *what, uint32_t mask, T value, int from)
{
    static_assert(sizeof(T) % 4 == 0, "only words are exchanged");
    uint32_t words[sizeof(T) / 4];

    memcpy(words, &value, sizeof value);
    for (uint32_t &word : words) {
        word = exchange(what, mask, word, from);
    }
    memcpy(&value, words, sizeof value);
    return value;
}

/* A function that runs `kernel`, with its arguments converted to the kernel's own
 * types: for programs whose kernels are not in kernels.h. */
template <typename... Parameters>
auto
launcher(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic)
{
    return [=](Parameters... arguments) {
        run_grid(grid, block, dynamic, 0, [=] { kernel(arguments...); });
    };
}

/* ---- Kernels of cuda/device/ ----------------------------------------------------- */

/* One, with what kernels.h says of it. */
struct kernel {
    const char *id;
    int path;
    size_t bytes; /* of its argument */
    unsigned threads;
    size_t shared;
    void (*run)(const void *argument); /* for one thread */
};

struct kernel_table { /* of a file */
    const kernel *kernels;
    int n;
};

struct image {
    int arch;
    const kernel_table *table;
};

/* The image that `data` points at, null if it is none. */
const image *image_at(const void *data);

template <typename ARGUMENT, auto KERNEL>
void
run_kernel(const void *argument)
{
    static_assert(std::is_same<decltype(KERNEL), void (*)(ARGUMENT)>::value,
                  "kernels.h names another argument than the kernel takes");
    static_assert(std::is_trivially_copyable<ARGUMENT>::value, "a launch copies bytes");
    KERNEL(*static_cast<const ARGUMENT *>(argument));
}

} // namespace simt

/* ---- Built-in variables and functions -------------------------------------------- */

#define threadIdx (simt::self->index)
#define blockIdx (simt::block_index)
#define blockDim (simt::block_size)
#define gridDim (simt::grid_size)

#define __syncthreads() simt::sync_threads()
#define __syncthreads_or(vote) simt::sync_threads_or(vote)
#define __syncwarp(...) simt::sync_warp(__VA_ARGS__)
#define __threadfence() simt::thread_fence()
#define __shfl_sync(mask, value, lane)                                                 \
    simt::shuffle("__shfl_sync", mask, value, (lane)&31)
#define __shfl_xor_sync(mask, value, bits)                                             \
    simt::shuffle("__shfl_xor_sync", mask, value, simt::self->lane ^ int(bits))
#define __shfl_down_sync(mask, value, by)                                              \
    simt::shuffle("__shfl_down_sync", mask, value, simt::self->lane + int(by))
#define __shfl_up_sync(mask, value, by)                                                \
    simt::shuffle("__shfl_up_sync", mask, value, simt::self->lane - int(by))
#define __ballot_sync(mask, vote) simt::ballot(mask, vote)
#define __any_sync(mask, vote) (simt::ballot(mask, vote) != 0)
#define __all_sync(mask, vote) (simt::ballot(mask, !(vote)) == 0)

inline int
__popc(uint32_t bits)
{
    return __builtin_popcount(bits);
}

inline uint32_t
__float_as_uint(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float
__uint_as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline int64_t
__double_as_longlong(double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline double
__longlong_as_double(int64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Relaxed, as on the device: ordering is __threadfence's. Fibers do not interrupt each
 * other, so load and store are one step where the host has no such operation. */
template <typename T>
T
atomicAdd(T *address, T value)
{
    simt::note_atomic(address);
    if constexpr (std::is_integral<T>::value) {
        return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
    } else {
        T before, after;
        __atomic_load(address, &before, __ATOMIC_RELAXED);
        after = before + value;
        __atomic_store(address, &after, __ATOMIC_RELAXED);
        return before;
    }
}

template <typename T>
T
atomicMax(T *address, T value)
{
    T before;

    simt::note_atomic(address);
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    if (value > before) {
        __atomic_store(address, &value, __ATOMIC_RELAXED);
    }
    return before;
}

/* Counts to `last` and then from 0 again. */
inline uint32_t
atomicInc(uint32_t *address, uint32_t last)
{
    uint32_t before;

    simt::note_atomic(address);
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    __atomic_store_n(address, before >= last ? 0 : before + 1, __ATOMIC_RELAXED);
    return before;
}

template <typename T>
T
atomicExch(T *address, T value)
{
    simt::note_atomic(address);
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}

/* ---- The macros of common.cuh ---------------------------------------------------- */

#define TFAST_KERNEL(threads, blocks) void
#define SHARED(type, name, count)                                                      \
    static char name##_key;                                                            \
    type *name = (type *)simt::shared_array(&name##_key, sizeof(type) * (count))
#define SHARED_DYNAMIC(name)                                                           \
    char *name = simt::shared_array(&simt::dynamic_key, simt::dynamic_bytes)
#define SIMT_ENTRY(path, id, arguments, rows, threads, shared, ...)                    \
    {#id,     path,   sizeof(arguments),                                               \
     threads, shared, simt::run_kernel<arguments, &__VA_ARGS__>},
#define TFAST_EXPORT(file)                                                             \
    static const simt::kernel own_kernels[] = {KERNELS_OF_##file(SIMT_ENTRY)};         \
    namespace simt {                                                                   \
    extern const kernel_table kernels_of_##file;                                       \
    const kernel_table kernels_of_##file = {                                           \
        own_kernels, (int)(sizeof own_kernels / sizeof own_kernels[0])};               \
    }

/* For what is not in kernels.h. */
#define LAUNCH(kernel, grid, block, dynamic, ...)                                      \
    simt::launcher(kernel, grid, block, dynamic)(__VA_ARGS__)

#include "ptx_twin.h"

#endif
