#if defined(__x86_64__)
#    include "../cpuid.h"
#    include "vec_avx2.h"
#    define NAME avx2
#    define UNUSABLE                                                                   \
        tfast_cpu_features() & TFAST_CPU_AVX2                                          \
            ? NULL                                                                     \
            : "this CPU has no AVX2, FMA, F16C and PCLMUL"
#    include "cpu_backend.h"
#endif
