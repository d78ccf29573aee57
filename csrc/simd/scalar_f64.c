#include "vec_scalar_f64.h"

#include "type_unit.h"

extern const tfast_type_kernels tfast_scalar_f64;
const tfast_type_kernels tfast_scalar_f64 = TYPE_KERNELS;
