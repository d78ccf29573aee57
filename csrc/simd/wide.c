#include "../cpuid.h"
#include "vec_wide.h"
#define NAME wide
#if defined(__x86_64__) /* this object is built for AVX2 there */
#    define UNUSABLE                                                                   \
        tfast_cpu_features() & TFAST_CPU_AVX2                                          \
            ? NULL                                                                     \
            : "this CPU has no AVX2, FMA, F16C and PCLMUL"
#else
#    define UNUSABLE NULL
#endif
#include "cpu_backend.h"
