#include "vec_scalar_f64.h"

#include "../kernels/neighbours.h"
#include "type_unit.h"

extern const tfast_type_kernels tfast_scalar_f64;
const tfast_type_kernels tfast_scalar_f64 = TYPE_KERNELS;

extern const tfast_neighbour_kernels tfast_scalar_neighbours;
const tfast_neighbour_kernels tfast_scalar_neighbours = NEIGHBOUR_KERNELS;
