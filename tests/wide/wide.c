/* The backend `wide`: the code paths of 16 lanes on any machine. tests/wide/build.py
 * makes a library of it, with copies of the core's threads and scratch memory, and
 * csrc/backend.c opens the library. */
#include "cpuid.h"
#include "simd/cpu_backend.h"

#include <stdarg.h>
#include <stdio.h>

extern const tfast_type_kernels tfast_wide_f32, tfast_wide_f64;
extern const tfast_neighbour_kernels tfast_wide_neighbours;

static const tfast_type_kernels *
kernels_for(bool is_float64)
{
    return is_float64 ? &tfast_wide_f64 : &tfast_wide_f32;
}

static const tfast_neighbour_kernels *
neighbour_kernels(void)
{
    return &tfast_wide_neighbours;
}

static const char *
unusable(void)
{
#if defined(__x86_64__) /* compiled for AVX2 there */
    if (!(tfast_cpu_features() & TFAST_CPU_AVX2)) {
        return "this CPU has no AVX2, FMA, F16C and PCLMUL";
    }
#endif
    return NULL;
}

static const tfast_backend backend = CPU_BACKEND("wide");
static tfast_fail_function fail_in_core;

tfast_status
tfast_fail(tfast_status status, const char *format, ...)
{
    char message[TFAST_MESSAGE_BYTES];
    va_list values;

    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return fail_in_core(status, "%s", message);
}

__attribute__((visibility("default"))) const tfast_backend *
tfast_library_open(uint32_t abi, tfast_fail_function fail);

const tfast_backend *
tfast_library_open(uint32_t abi, tfast_fail_function fail)
{
    fail_in_core = fail;
    return abi == TFAST_ABI ? &backend : NULL;
}
