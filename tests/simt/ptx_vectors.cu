/* Runs every function of cuda/device/ptx.cuh on fixed inputs: the kernel of_NAME makes
 * the words whose hash ptx_vectors.txt has for NAME. As a program it has the twins, and
 * prints what must be that file; test_ptx.py compiles the kernels by NVRTC and runs
 * them on a GPU, where those for a newer ARCH are left out. NaNs are canonical and
 * matrices hold small integers, so all of it is exact; ex2_approx is only checked to be
 * within 2 units in the last place of the truth. */
#include "common.cuh"

enum { WORDS = 1 << 16, LANES = 32, INPUT = 1024 };

/* Words of more than a warp: thread i of many makes out[i]. Others: a warp makes them,
 * with 512 bytes of shared memory; from out[INPUT] on lie 128 words, 0 to 127. */
#define MANY(name) extern "C" TFAST_KERNEL(256, 1) of_##name(uint32_t *out)
#define WARP(name) extern "C" TFAST_KERNEL(LANES, 1) of_##name(uint32_t *out)

/* ---- Kernels --------------------------------------------------------------------- */

/* Every float16 pattern has its neighbourhood among these: the upper half of a float's
 * bits runs through all values, the lower half through ties and their neighbours. */
DEVICE float
some_float(uint32_t i)
{
    const uint32_t low[4] = {0x0000, 0x0FFF, 0x1000, 0x9001};

    return __uint_as_float(i << 16 | low[i % 4] << (i % 3));
}

MANY(cvt_rn_f16_f32)
{
    const uint32_t i = blockIdx.x * 256 + threadIdx.x;
    out[i] = cvt_rn_f16_f32(some_float(i));
}

MANY(cvt_f32_f16)
{
    const uint32_t i = blockIdx.x * 256 + threadIdx.x;
    const float value = cvt_f32_f16(i);
    out[i] = value == value ? __float_as_uint(value) : 0x7FFFFFFF;
}

MANY(pack_f16)
{
    const uint32_t i = blockIdx.x * 256 + threadIdx.x;
    out[i] = pack_f16(some_float(i), some_float(i * 40503 % WORDS));
}

MANY(unpack_f16)
{
    const uint32_t i = blockIdx.x * 256 + threadIdx.x;
    const float2 pair = unpack_f16((i % 0x7C00) << 16 | (i % 0x7B00 | 0x8000));
    out[i] = __float_as_uint(pair.x) * 31 + __float_as_uint(pair.y);
}

MANY(ex2_approx)
{
    const uint32_t i = blockIdx.x * 256 + threadIdx.x;
    out[i] = __float_as_uint(ex2_approx((float)i / 256 - 120));
}

/* 16 bytes to each lane's place in shared memory and out again, by halves. */
WARP(st_shared)
{
    SHARED_DYNAMIC(raw);
    const uint32_t lane = threadIdx.x;
    const smem at = smem_address(raw) + lane * 16;

    st_shared_128(at, make_uint4(lane, lane << 8, lane << 16, lane << 20));
    st_shared_f32(at + 4, (float)lane);
    const float2 first = ld_shared_2f32(at), second = ld_shared_2f32(at + 8);
    out[lane * 4] = __float_as_uint(first.x);
    out[lane * 4 + 1] = __float_as_uint(first.y);
    out[lane * 4 + 2] = __float_as_uint(second.x);
    out[lane * 4 + 3] = __float_as_uint(second.y);
}

/* 16 bytes of each lane, then 8. */
WARP(st_global)
{
    const uint32_t lane = threadIdx.x;

    st_global_128(out + lane * 4, make_uint4(lane, lane << 8, lane << 16, lane << 20));
    st_global_64(out + 128 + lane * 2, make_uint2(lane + 7, lane << 9));
}

WARP(ldmatrix)
{
    SHARED_DYNAMIC(raw);
    const uint32_t lane = threadIdx.x;
    const smem at = smem_address(raw) + lane * 16;
    uint32_t r[14];

    st_shared_128(at, make_uint4(lane, lane + 100, lane + 200, (lane + 300) << 16));
    __syncwarp();
    ldmatrix_x1(r, at);
    ldmatrix_x2(r + 1, at);
    ldmatrix_x4(r + 3, at);
    ldmatrix_x1_trans(r + 7, at);
    ldmatrix_x2_trans(r + 8, at);
    ldmatrix_x4_trans(r + 10, at);
    for (int i = 0; i < 14; i++) {
        out[lane * 14 + i] = r[i];
    }
}

/* Two small integers as a pair of float16 or bfloat16; both are exact. */
DEVICE uint32_t
small_pair(uint32_t seed, bool bf16)
{
    const float low = (float)(int)(seed * 7 % 13) - 6,
                high = (float)(int)(seed % 9) - 4;

    return bf16 ? __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000)
                : pack_f16(low, high);
}

/* 0: k8 f16, 1: k16 f16, 2: k16 bf16 */
template <int WHICH>
DEVICE void
multiply(uint32_t *out)
{
    const uint32_t lane = threadIdx.x;
    uint32_t a[4], b[2];
    float c[4];

    for (uint32_t i = 0; i < 4; i++) {
        a[i] = small_pair(lane * 4 + i, WHICH == 2);
        b[i % 2] = small_pair(lane * 5 + i + 77, WHICH == 2);
        c[i] = (float)(lane + i);
    }
    if (WHICH == 0) {
        mma_m16n8k8_f16(c, a, b);
    } else if (WHICH == 1) {
        mma_m16n8k16_f16(c, a, b);
    } else {
        mma_m16n8k16_bf16(c, a, b);
    }
    for (int i = 0; i < 4; i++) {
        out[lane * 4 + i] = __float_as_uint(c[i]);
    }
}

WARP(mma_m16n8k8_f16)
{
    multiply<0>(out);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
WARP(mma_m16n8k16_f16)
{
    multiply<1>(out);
}
WARP(mma_m16n8k16_bf16)
{
    multiply<2>(out);
}

MANY(pack_bf16)
{
    const uint32_t i = blockIdx.x * 256 + threadIdx.x;
    out[i] = pack_bf16(some_float(i), some_float(i * 40503 % WORDS));
}

/* Odd lanes' copies are not valid, which means zeros. */
WARP(cp_async)
{
    SHARED_DYNAMIC(raw);
    const uint32_t lane = threadIdx.x;

    cp_async_16(smem_address(raw) + lane * 16, out + INPUT + lane * 4, lane % 2 == 0);
    cp_async_commit();
    cp_async_wait<0>();
    for (uint32_t i = 0; i < 4; i++) {
        out[lane * 4 + i] = ((uint32_t *)raw)[lane * 4 + i];
    }
}
#endif

/* ---- The program ----------------------------------------------------------------- */

#ifndef __CUDACC_RTC__
#    include <math.h>
#    include <stdio.h>

alignas(16) static uint32_t words[WORDS];

static void
run(void (*kernel)(uint32_t *), int n)
{
    const unsigned threads = n > LANES * 14 ? 256 : LANES;

    memset(words, 0, sizeof words);
    for (uint32_t i = 0; i < LANES * 4; i++) {
        words[INPUT + i] = i;
    }
    LAUNCH(kernel, n > LANES * 14 ? n / threads : 1, threads, 512, words);
}

/* Prints the FNV-1a hash of the first n words. */
static void
report(const char *name, int arch, int n, void (*kernel)(uint32_t *))
{
    uint64_t hash = 0xCBF29CE484222325u;

    run(kernel, n);
    for (int i = 0; i < n; i++) {
        hash = (hash ^ words[i]) * 0x100000001B3u;
    }
    printf("%s arch %d words %d hash %016llx\n", name, arch, n,
           (unsigned long long)hash);
}

static void
report_ex2()
{
    double worst = 0;

    run(of_ex2_approx, WORDS);
    for (int i = 0; i < WORDS; i++) {
        const double right = exp2((double)((float)i / 256 - 120));
        float got;
        memcpy(&got, &words[i], sizeof got);
        const double unit = ldexp(1.0, ilogb(right) - 23);
        worst = right < 3e38 ? fmax(worst, fabs(got - right) / unit) : worst;
    }
    printf("ex2_approx arch 75 within 2 units %s\n", worst <= 2 ? "yes" : "no");
}

int
main()
{
    report("cvt_rn_f16_f32", 75, WORDS, of_cvt_rn_f16_f32);
    report("cvt_f32_f16", 75, WORDS, of_cvt_f32_f16);
    report("pack_f16", 75, WORDS, of_pack_f16);
    report("unpack_f16", 75, WORDS, of_unpack_f16);
    report_ex2();
    report("st_shared", 75, LANES * 4, of_st_shared);
    report("st_global", 75, LANES * 6, of_st_global);
    report("ldmatrix", 75, LANES * 14, of_ldmatrix);
    report("mma_m16n8k8_f16", 75, LANES * 4, of_mma_m16n8k8_f16);
    report("mma_m16n8k16_f16", 80, LANES * 4, of_mma_m16n8k16_f16);
    report("mma_m16n8k16_bf16", 80, LANES * 4, of_mma_m16n8k16_bf16);
    report("pack_bf16", 80, WORDS, of_pack_bf16);
    report("cp_async", 80, LANES * 4, of_cp_async);
}
#endif
