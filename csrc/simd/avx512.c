#if defined(__x86_64__)
#    include "../cpuid.h"
#    include "vec_avx512.h"

#    include "crc_avx512.h"
#    define NAME avx512
#    define UNUSABLE                                                                   \
        tfast_cpu_features() & TFAST_CPU_AVX512                                        \
            ? NULL                                                                     \
            : "this CPU has no AVX-512 F, BW, DQ and VL"
#    include "cpu_backend.h"
#endif
