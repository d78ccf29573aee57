/* The runner's own test: kernels that use all of it, and faults that it must see. Its
 * arguments are the case and the seed of the order. It ends with 1 when a kernel's
 * result is wrong, which a fault may or may not cause. */
#include "common.cuh"

#include <cstdio>
#include <cstdlib>

enum { WRONG = 1 << 20 };

/* ---- What must work -------------------------------------------------------------- */

/* Sums `in` by warp, block and grid, with static and dynamic shared memory together. */
TFAST_KERNEL(128, 1)
sum_kernel(const int *in, int *out, float *blocks, int n)
{
    SHARED(int, part, 4);
    SHARED_DYNAMIC(raw);
    int *all = (int *)raw;
    const int tid = threadIdx.x, lane = tid % 32, i = blockIdx.x * blockDim.x + tid;
    int v = i < n ? in[i] : 0;

    all[tid] = v;
    for (int by = 16; by > 0; by /= 2) {
        v += __shfl_down_sync(~0u, v, by);
    }
    if (lane == 0) {
        part[tid / 32] = v;
    }
    __syncthreads();
    if (tid < 32) {
        v = tid < 4 ? part[tid] : 0;
        for (int by = 16; by > 0; by /= 2) {
            v += __shfl_xor_sync(~0u, v, by);
        }
        if (tid == 0) {
            atomicAdd(out, v);
            atomicAdd(blocks, 1.0f);
        }
    }
    if (all[tid ^ 64] != (((i ^ 64) < n) ? in[i ^ 64] : 0)) {
        atomicAdd(out, (int)WRONG);
    }
}

/* Votes, and shuffles among half of a warp. */
TFAST_KERNEL(64, 1)
vote_kernel(int *out)
{
    const int lane = threadIdx.x % 32;
    const bool odd = __ballot_sync(~0u, lane & 1) == 0xAAAAAAAA;

    if (!odd || !__any_sync(~0u, lane == 5) || __all_sync(~0u, lane < 31)) {
        atomicAdd(out, (int)WRONG);
    }
    for (int i = 0; i < 5; i++) {
        if ((__syncthreads_or(threadIdx.x == 40 && i % 2 == 0) != 0) != (i % 2 == 0)) {
            atomicAdd(out, (int)WRONG);
        }
    }
    if (lane < 16) {
        const int before = __shfl_up_sync(0xFFFFu, lane, 1);
        const int third = __shfl_sync(0xFFFFu, lane, 3);
        if (before != (lane > 0 ? lane - 1 : 0) || third != 3) {
            atomicAdd(out, (int)WRONG);
        }
    }
}

/* c = a b' for a 16 x 16 and b 8 x 16 in float16, by way of cp.async and ldmatrix. */
TFAST_KERNEL(32, 1)
product_kernel(const uint16_t *a, const uint16_t *b, float *c)
{
    SHARED_DYNAMIC(raw);
    const int lane = threadIdx.x;
    const smem at = smem_address(raw);
    uint32_t fa[4], fb[2];
    float fc[4] = {};

    cp_async_16(at + lane * 16, a + lane * 8, true);
    cp_async_commit();
    cp_async_16(at + 512 + lane * 16, b + lane % 16 * 8, lane < 16);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    ldmatrix_x4(fa, at + lane % 16 * 32 + lane / 16 * 16);
    ldmatrix_x2(fb, at + 512 + lane % 8 * 32 + lane / 8 % 2 * 16);
    mma_m16n8k16_f16(fc, fa, fb);
    for (int i = 0; i < 4; i++) {
        c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = fc[i];
    }
}

static bool
product_is_right()
{
    alignas(16) uint16_t a[256], b[128];
    float c[128];

    for (int i = 0; i < 256; i++) {
        a[i] = (uint16_t)cvt_rn_f16_f32((float)(i % 7 - 3));
        b[i % 128] = (uint16_t)cvt_rn_f16_f32((float)(i % 128 % 5 - 2));
    }
    LAUNCH(product_kernel, 1, 32, 1024, a, b, c);
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 8; j++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) {
                sum += cvt_f32_f16(a[i * 16 + k]) * cvt_f32_f16(b[j * 16 + k]);
            }
            if (c[i * 8 + j] != sum) {
                return false;
            }
        }
    }
    return true;
}

/* Static and dynamic arrays together; the attribute counts the latter. */
TFAST_KERNEL(32, 1)
large_kernel(int *out)
{
    SHARED(int, x, 1);
    SHARED_DYNAMIC(raw);
    if (threadIdx.x == 0) {
        x[0] = raw[0] = 1;
        out[1] += x[0];
    }
}

static bool
large_blocks_run()
{
    int out[2] = {};

    LAUNCH(large_kernel, 1, 32, (48 << 10) - 4, out);
    simt::run_grid(1, 32, 48 << 10, 48 << 10, [&] { large_kernel(out); });
    return out[1] == 2;
}

static bool
everything_works()
{
    int in[1000], out = 0, votes = 0;
    float blocks = 0;

    for (int i = 0; i < 1000; i++) {
        in[i] = i;
    }
    LAUNCH(sum_kernel, 8, 128, 512, in, &out, &blocks, 1000);
    LAUNCH(vote_kernel, 3, 64, 0, &votes);
    return out == 499500 && blocks == 8 && votes == 0 && product_is_right() &&
           large_blocks_run();
}

/* ---- What must be seen ----------------------------------------------------------- */

/* No barrier: right by luck when warps run in order. */
TFAST_KERNEL(96, 1)
missing_barrier_kernel(int *out)
{
    SHARED(int, x, 1);
    if (threadIdx.x == 0) {
        x[0] = 7;
    }
    if (threadIdx.x == 64 && x[0] != 7) {
        out[0] = 1;
    }
}

TFAST_KERNEL(64, 1)
missing_syncwarp_kernel(int *out)
{
    SHARED(int, x, 64);
    x[threadIdx.x] = threadIdx.x;
    if (x[threadIdx.x & ~1u] != (int)(threadIdx.x & ~1u)) {
        out[0] = 1;
    }
}

TFAST_KERNEL(64, 1)
colliding_blocks_kernel(int *out)
{
    if (threadIdx.x == 0) {
        out[1] = (int)blockIdx.x;
    }
}

/* The last block reads what the others wrote before their atomics. */
TFAST_KERNEL(32, 1)
last_block_kernel(int *out, int *parts, bool before, bool after)
{
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = 1;
        if (before) {
            __threadfence();
        }
        if (atomicAdd(&out[1], 1) == (int)gridDim.x - 1) {
            if (after) {
                __threadfence();
            }
            for (unsigned i = 0; i < gridDim.x; i++) {
                out[2] += parts[i];
            }
        }
    }
}

TFAST_KERNEL(64, 1)
uneven_barrier_kernel()
{
    if (threadIdx.x < 32) {
        __syncthreads();
    }
}

TFAST_KERNEL(32, 1)
diverged_warp_kernel(int *out)
{
    if (threadIdx.x < 16) {
        out[1] = __shfl_sync(~0u, out[1], 0);
    } else {
        out[1] = __ballot_sync(~0u, true) != 0;
    }
}

/* Half of the lanes leave before the vote that waits for all. */
TFAST_KERNEL(32, 1)
absent_lanes_kernel(int *out)
{
    if (threadIdx.x < 16 && __any_sync(~0u, false)) {
        out[1] = 1;
    }
}

TFAST_KERNEL(64, 1)
past_shared_kernel()
{
    SHARED(float, x, 33);
    x[threadIdx.x] = 1;
}

TFAST_KERNEL(32, 1)
unwritten_shared_kernel(int *out)
{
    SHARED(float, x, 32);
    if (threadIdx.x == 0 && x[0] != x[0]) { /* NaN */
        out[0] = 1;
    }
}

TFAST_KERNEL(32, 1)
early_read_kernel(int *out, const uint16_t *from, bool wait)
{
    SHARED_DYNAMIC(raw);
    cp_async_16(smem_address(raw) + threadIdx.x * 16, from, true);
    cp_async_commit();
    if (wait) {
        cp_async_wait<0>();
    }
    if (threadIdx.x == 0 && ((uint16_t *)raw)[0] != from[0]) {
        out[0] = 1;
    }
    cp_async_wait<0>();
}

TFAST_KERNEL(32, 1)
misaligned_kernel(int *out, const uint16_t *from)
{
    out[1] = (int)((const uint2 *)(from + 1))->x;
}

static void
run_fault(const char *name, int *out)
{
    alignas(16) static const uint16_t from[16] = {1, 2, 3};
    int parts[8] = {};

    if (strcmp(name, "missing_barrier") == 0) {
        LAUNCH(missing_barrier_kernel, 1, 96, 0, out);
    } else if (strcmp(name, "missing_syncwarp") == 0) {
        LAUNCH(missing_syncwarp_kernel, 1, 64, 0, out);
    } else if (strcmp(name, "colliding_blocks") == 0) {
        LAUNCH(colliding_blocks_kernel, 2, 64, 0, out);
    } else if (strcmp(name, "missing_fence_before") == 0) {
        LAUNCH(last_block_kernel, 8, 32, 0, out, parts, false, true);
    } else if (strcmp(name, "missing_fence_after") == 0) {
        LAUNCH(last_block_kernel, 8, 32, 0, out, parts, true, false);
    } else if (strcmp(name, "both_fences") == 0) {
        LAUNCH(last_block_kernel, 8, 32, 0, out, parts, true, true);
        out[0] = out[2] != 8;
    } else if (strcmp(name, "uneven_barrier") == 0) {
        LAUNCH(uneven_barrier_kernel, 1, 64, 0);
    } else if (strcmp(name, "diverged_warp") == 0) {
        LAUNCH(diverged_warp_kernel, 1, 32, 0, out);
    } else if (strcmp(name, "absent_lanes") == 0) {
        LAUNCH(absent_lanes_kernel, 1, 32, 0, out);
    } else if (strcmp(name, "past_shared") == 0) {
        LAUNCH(past_shared_kernel, 1, 34, 0);
    } else if (strcmp(name, "unwritten_shared") == 0) {
        LAUNCH(unwritten_shared_kernel, 1, 32, 0, out);
    } else if (strcmp(name, "early_read") == 0) {
        LAUNCH(early_read_kernel, 1, 32, 512, out, from, false);
    } else if (strcmp(name, "waited_read") == 0) {
        LAUNCH(early_read_kernel, 1, 32, 512, out, from, true);
    } else if (strcmp(name, "unasked_shared") == 0) {
        LAUNCH(large_kernel, 1, 32, 48 << 10, out);
    } else if (strcmp(name, "misaligned") == 0) {
        LAUNCH(misaligned_kernel, 1, 1, 0, out, from);
    } else {
        fprintf(stderr, "no case is named %s\n", name);
        out[0] = 2;
    }
}

int
main(int argc, char **argv)
{
    int out[3] = {};

    if (argc != 3) {
        return 2;
    }
    simt::set_seed(strtoull(argv[2], nullptr, 0));
    if (strcmp(argv[1], "works") == 0) {
        return !everything_works();
    }
    run_fault(argv[1], out);
    return out[0];
}
