#include "cpu_backend.h"

extern const tfast_type_kernels tfast_scalar_f32, tfast_scalar_f64;
extern const tfast_neighbour_kernels tfast_scalar_neighbours;

static const tfast_type_kernels *
kernels_for(bool is_float64)
{
    return is_float64 ? &tfast_scalar_f64 : &tfast_scalar_f32;
}

static const tfast_neighbour_kernels *
neighbour_kernels(void)
{
    return &tfast_scalar_neighbours;
}

static const char *
unusable(void)
{
    return NULL;
}

extern const tfast_backend tfast_backend_scalar;
const tfast_backend tfast_backend_scalar = CPU_BACKEND("scalar");
