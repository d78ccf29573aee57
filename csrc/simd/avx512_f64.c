#if defined(__x86_64__)
#    include "vec_avx512_f64.h"

#    include "../kernels/neighbours.h"
#    include "type_unit.h"

extern const tfast_type_kernels tfast_avx512_f64;
const tfast_type_kernels tfast_avx512_f64 = TYPE_KERNELS;

extern const tfast_neighbour_kernels tfast_avx512_neighbours;
const tfast_neighbour_kernels tfast_avx512_neighbours = NEIGHBOUR_KERNELS;
#endif
