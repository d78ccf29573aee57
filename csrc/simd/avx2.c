#if defined(__x86_64__)
#    include "../cpuid.h"
#    include "cpu_backend.h"

extern const tfast_type_kernels tfast_avx2_f32, tfast_avx2_f64;
extern const tfast_neighbour_kernels tfast_avx2_neighbours;

static const tfast_type_kernels *
kernels_for(bool is_float64)
{
    return is_float64 ? &tfast_avx2_f64 : &tfast_avx2_f32;
}

static const tfast_neighbour_kernels *
neighbour_kernels(void)
{
    return &tfast_avx2_neighbours;
}

static const char *
unusable(void)
{
    return tfast_cpu_features() & TFAST_CPU_AVX2
               ? NULL
               : "this CPU has no AVX2, FMA, F16C and PCLMUL";
}

extern const tfast_backend tfast_backend_avx2;
const tfast_backend tfast_backend_avx2 = CPU_BACKEND("avx2");
#endif
