#if defined(__x86_64__)
#    include "vec_avx512_f64.h"

#    include "type_unit.h"

extern const tfast_type_kernels tfast_avx512_f64;
const tfast_type_kernels tfast_avx512_f64 = TYPE_KERNELS;
#endif
