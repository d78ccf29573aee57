#include "vec_wide_f32.h"

#include "simd/type_unit.h"

extern const tfast_type_kernels tfast_wide_f32;
const tfast_type_kernels tfast_wide_f32 = TYPE_KERNELS;
