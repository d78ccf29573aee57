#if defined(__x86_64__)
#    include "../cpuid.h"
#    include "cpu_backend.h"

extern const tfast_type_kernels tfast_avx512_f32, tfast_avx512_f64;
extern const tfast_neighbour_kernels tfast_avx512_neighbours;

static const tfast_type_kernels *
kernels_for(bool is_float64)
{
    return is_float64 ? &tfast_avx512_f64 : &tfast_avx512_f32;
}

static const tfast_neighbour_kernels *
neighbour_kernels(void)
{
    return &tfast_avx512_neighbours;
}

static const char *
unusable(void)
{
    return tfast_cpu_features() & TFAST_CPU_AVX512
               ? NULL
               : "this CPU has no AVX-512 F, BW, DQ and VL";
}

extern const tfast_backend tfast_backend_avx512;
const tfast_backend tfast_backend_avx512 = CPU_BACKEND("avx512");
#endif
