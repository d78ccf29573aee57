/* All inline PTX, one function an instruction. A host compiler takes the twins of the
 * same names from tests/simt/ptx_twin.h; tests/simt/ptx_vectors.cu compares the two on
 * a GPU. */
#ifndef TFAST_PTX_CUH
#define TFAST_PTX_CUH

#ifndef __CUDACC__
#    include "simt.h"
#else
#    include "libc.h"

#    define PTX static __device__ __forceinline__

typedef uint32_t smem; /* an address in shared memory */

PTX smem
smem_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* at ^ bits: sets bits that the alignment of `at` leaves 0, or flips its own. */
PTX smem
smem_xor(smem at, int bits)
{
    return at ^ (uint32_t)bits;
}

/* x, as a value that the compiler cannot derive: it stays in its register instead of
 * being computed again at each use. */
template <typename X>
PTX X
opaque(X x)
{
    if constexpr (sizeof(X) == 8) {
        asm volatile("" : "+l"(x));
    } else {
        asm volatile("" : "+r"(x));
    }
    return x;
}

/* ---- Conversions ----------------------------------------------------------------- */

/* A float16 stands in the low half of a word. */
PTX uint32_t
cvt_rn_f16_f32(float value)
{
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

PTX float
cvt_f32_f16(uint32_t half)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)half));
    return value;
}

PTX uint32_t
pack_f16(float low, float high)
{
#    if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#    else
    return cvt_rn_f16_f32(low) | cvt_rn_f16_f32(high) << 16;
#    endif
}

PTX float2
unpack_f16(uint32_t pair)
{
    return make_float2(cvt_f32_f16(pair), cvt_f32_f16(pair >> 16));
}

/* ---- Arithmetic ------------------------------------------------------------------ */

PTX float
ex2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- Global memory --------------------------------------------------------------- */

/* As C++ these become a store of each word where the compiler knows the words apart. */
PTX void
st_global_128(void *to, uint4 value)
{
    asm volatile(
        "st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
        : "memory");
}

PTX void
st_global_64(void *to, uint2 value)
{
    asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(value.x), "r"(value.y)
                 : "memory");
}

/* ---- Shared memory --------------------------------------------------------------- */

PTX void
st_shared_128(smem at, uint4 value)
{
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

PTX void
st_shared_f32(smem at, float value)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

PTX float2
ld_shared_2f32(smem at)
{
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(at)
                 : "memory");
    return value;
}

/* ---- Matrices: fragments as in the PTX manual's "Matrix fragments for mma" ------- */

PTX void
ldmatrix_x1(uint32_t *r, smem at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(at)
                 : "memory");
}

PTX void
ldmatrix_x2(uint32_t *r, smem at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
}

PTX void
ldmatrix_x4(uint32_t *r, smem at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

PTX void
ldmatrix_x1_trans(uint32_t *r, smem at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(at)
                 : "memory");
}

PTX void
ldmatrix_x2_trans(uint32_t *r, smem at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
}

PTX void
ldmatrix_x4_trans(uint32_t *r, smem at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

PTX void
mma_m16n8k8_f16(float *c, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

#    if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

PTX void
mma_m16n8k16_f16(float *c, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

PTX void
mma_m16n8k16_bf16(float *c, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

PTX uint32_t
pack_bf16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Zeros where not valid; `from` must be readable address space either way. */
PTX void
cp_async_16(smem to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
}

PTX void
cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N>
PTX void
cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#    else /* sm_75 has none of these; kernels for it never call them, but still name   \
             them */

PTX void
mma_m16n8k16_f16(float *, const uint32_t *, const uint32_t *)
{
    __trap();
}

PTX void
mma_m16n8k16_bf16(float *, const uint32_t *, const uint32_t *)
{
    __trap();
}

PTX uint32_t
pack_bf16(float, float)
{
    __trap();
    return 0;
}

PTX void
cp_async_16(smem, const void *, bool)
{
    __trap();
}

PTX void
cp_async_commit()
{
    __trap();
}

template <int N>
PTX void
cp_async_wait()
{
    __trap();
}

#    endif
#endif
#endif
