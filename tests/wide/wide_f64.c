#include "vec_wide_f64.h"

#include "simd/type_unit.h"

extern const tfast_type_kernels tfast_wide_f64;
const tfast_type_kernels tfast_wide_f64 = TYPE_KERNELS;
