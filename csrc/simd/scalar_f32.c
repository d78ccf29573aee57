#include "vec_scalar_f32.h"

#include "type_unit.h"

extern const tfast_type_kernels tfast_scalar_f32;
const tfast_type_kernels tfast_scalar_f32 = TYPE_KERNELS;
