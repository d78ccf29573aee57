/* Host twins of the functions of cuda/ptx.cuh, under the same names. Memory that an
 * instruction touches is touched here, in instrumented code, lane by lane. */
#ifndef TFAST_SIMT_PTX_TWIN_H
#define TFAST_SIMT_PTX_TWIN_H

#include "half.h"

typedef char *smem; /* an address in shared memory; 32 bits on the device */

namespace simt {

struct ldmatrix_lane {
    uint32_t row[4], out[4];
    uintptr_t address;
    int matrices;
};
void ldmatrix_deal(ldmatrix_lane *lane, bool transposed);

struct mma_lane {
    float *c;
    const uint32_t *a, *b;
};
void mma(mma_lane *lane, int k, bool bf16);

/* Copies of this thread: noted, closed into a group, taken out when a wait lets at most
 * `may_remain` groups stay in flight. A null source stands for zeros. */
void async_issue(void *to, const void *from);
void async_commit();
bool async_next(int may_remain, void **to, const void **from);
void async_end(); /* of the thread: nothing may be in flight */

inline void
require_aligned(const void *address, size_t bytes, const char *what)
{
    require(reinterpret_cast<uintptr_t>(address) % bytes == 0, what);
}

/* Every lane reads the row it names itself, then the rows are dealt out. */
template <int N, bool TRANSPOSED>
void
ldmatrix(uint32_t *r, smem at)
{
    ldmatrix_lane lane = {{}, {}, reinterpret_cast<uintptr_t>(at), N};

    require_aligned(at, 16, "an ldmatrix row must be aligned to 16 bytes");
    const uint4 row = *reinterpret_cast<const uint4 *>(at);
    lane.row[0] = row.x;
    lane.row[1] = row.y;
    lane.row[2] = row.z;
    lane.row[3] = row.w;
    ldmatrix_deal(&lane, TRANSPOSED);
    for (int m = 0; m < N; m++) {
        r[m] = lane.out[m];
    }
}

} // namespace simt

inline smem
smem_address(const void *pointer)
{
    return static_cast<char *>(const_cast<void *>(pointer));
}

inline smem
smem_xor(smem at, int bits)
{
    return at +
           ((reinterpret_cast<uintptr_t>(at) ^ bits) - reinterpret_cast<uintptr_t>(at));
}

template <typename X>
X
opaque(X x)
{
    return x;
}

inline void
st_global_128(void *to, uint4 value)
{
    simt::require_aligned(to, 16, "st.global.v4 must be aligned to 16 bytes");
    *static_cast<uint4 *>(to) = value;
}

inline void
st_global_64(void *to, uint2 value)
{
    simt::require_aligned(to, 8, "st.global.v2 must be aligned to 8 bytes");
    *static_cast<uint2 *>(to) = value;
}

inline void
ldmatrix_x1(uint32_t *r, smem at)
{
    simt::ldmatrix<1, false>(r, at);
}

inline void
ldmatrix_x2(uint32_t *r, smem at)
{
    simt::ldmatrix<2, false>(r, at);
}

inline void
ldmatrix_x4(uint32_t *r, smem at)
{
    simt::ldmatrix<4, false>(r, at);
}

inline void
ldmatrix_x1_trans(uint32_t *r, smem at)
{
    simt::ldmatrix<1, true>(r, at);
}

inline void
ldmatrix_x2_trans(uint32_t *r, smem at)
{
    simt::ldmatrix<2, true>(r, at);
}

inline void
ldmatrix_x4_trans(uint32_t *r, smem at)
{
    simt::ldmatrix<4, true>(r, at);
}

inline void
mma_m16n8k8_f16(float *c, const uint32_t *a, const uint32_t *b)
{
    simt::mma_lane lane = {c, a, b};
    simt::mma(&lane, 8, false);
}

inline void
mma_m16n8k16_f16(float *c, const uint32_t *a, const uint32_t *b)
{
    simt::mma_lane lane = {c, a, b};
    simt::mma(&lane, 16, false);
}

inline void
mma_m16n8k16_bf16(float *c, const uint32_t *a, const uint32_t *b)
{
    simt::mma_lane lane = {c, a, b};
    simt::mma(&lane, 16, true);
}

/* The target becomes NaN when the copy is issued and gets its data at the wait: reading
 * too early and overwriting a live buffer both show. */
inline void
cp_async_16(smem to, const void *from, bool valid)
{
    simt::require_aligned(to, 16, "the target of cp.async must be aligned to 16 bytes");
    simt::require_aligned(from, 16,
                          "the source of cp.async must be aligned to 16 bytes");
    if (valid) { /* out of bounds shows here, at its line */
        volatile uint32_t probe = static_cast<const uint4 *>(from)->w;
        (void)probe;
    }
    *reinterpret_cast<uint4 *>(to) = make_uint4(~0u, ~0u, ~0u, ~0u);
    simt::async_issue(to, valid ? from : nullptr);
}

inline void
cp_async_commit()
{
    simt::async_commit();
}

template <int N>
void
cp_async_wait()
{
    const void *from;
    void *to;

    while (simt::async_next(N, &to, &from)) {
        *static_cast<uint4 *>(to) = from != nullptr ? *static_cast<const uint4 *>(from)
                                                    : make_uint4(0, 0, 0, 0);
    }
}

inline void
st_shared_128(smem at, uint4 value)
{
    simt::require_aligned(at, 16, "st.shared.v4 must be aligned to 16 bytes");
    *reinterpret_cast<uint4 *>(at) = value;
}

inline void
st_shared_f32(smem at, float value)
{
    simt::require_aligned(at, 4, "st.shared.f32 must be aligned to 4 bytes");
    *reinterpret_cast<float *>(at) = value;
}

inline float2
ld_shared_2f32(smem at)
{
    simt::require_aligned(at, 8, "ld.shared.v2.f32 must be aligned to 8 bytes");
    return *reinterpret_cast<float2 *>(at);
}

/* NaN becomes 0x7FFF, the canonical one of cvt. */
inline uint32_t
cvt_rn_f16_f32(float value)
{
    return value != value ? 0x7FFF : tfast_to_f16(value);
}

inline float
cvt_f32_f16(uint32_t half)
{
    return tfast_from_f16(uint16_t(half));
}

inline uint32_t
pack_f16(float low, float high)
{
    return cvt_rn_f16_f32(low) | cvt_rn_f16_f32(high) << 16;
}

inline uint32_t
pack_bf16(float low, float high)
{
    const uint32_t l = low != low ? 0x7FFF : tfast_to_bf16(low);
    const uint32_t h = high != high ? 0x7FFF : tfast_to_bf16(high);

    return l | h << 16;
}

inline float2
unpack_f16(uint32_t pair)
{
    return {cvt_f32_f16(pair & 0xFFFF), cvt_f32_f16(pair >> 16)};
}

/* Flushes subnormals, as the device's, which is within 2 ulp. */
inline float
ex2_approx(float x)
{
    const float y = exp2f(x);

    return y < 0x1p-126f ? 0 : y;
}

#endif
