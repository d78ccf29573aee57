/* What the programs that compare kernels with plain loops share. Every array is an
 * allocation of its own that ends where the array does. */
#ifndef TFAST_HARNESS_H
#define TFAST_HARNESS_H

#include "driver_twin.h"
#include "half.h"
#include "tfast.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" const tfast_backend *tfast_library_open(uint32_t abi,
                                                   tfast_fail_function fail);

inline uint32_t random_state = 1;

/* In [-1, 1), from a linear congruential generator. */
inline float
random_value()
{
    random_state = random_state * 1664525 + 1013904223;
    return (float)(int32_t)random_state * 0x1p-31f;
}

inline double
get(const void *array, int dtype, int64_t i)
{
    switch (dtype) {
    case TFAST_F32:
        return static_cast<const float *>(array)[i];
    case TFAST_F64:
        return static_cast<const double *>(array)[i];
    case TFAST_F16:
        return tfast_from_f16(static_cast<const uint16_t *>(array)[i]);
    default:
        return tfast_from_bf16(static_cast<const uint16_t *>(array)[i]);
    }
}

inline void
set(void *array, int dtype, int64_t i, double value)
{
    switch (dtype) {
    case TFAST_F32:
        static_cast<float *>(array)[i] = (float)value;
        break;
    case TFAST_F64:
        static_cast<double *>(array)[i] = value;
        break;
    case TFAST_F16:
        static_cast<uint16_t *>(array)[i] = tfast_to_f16((float)value);
        break;
    default:
        static_cast<uint16_t *>(array)[i] = tfast_to_bf16((float)value);
    }
}

/* numel elements, the first of them `offset` elements from an aligned address. */
struct array {
    std::vector<char> bytes;
    size_t size, offset;
    int dtype;

    array(int dtype, int64_t numel, int offset, double low)
        : bytes((size_t)(numel + offset) * tfast_dtype_size((tfast_dtype)dtype)),
          size((size_t)numel), offset(offset * tfast_dtype_size((tfast_dtype)dtype)),
          dtype(dtype)
    {
        for (int64_t i = 0; i < numel; i++) {
            const float value = random_value();
            set(start(), dtype, i, low < 0 ? value : std::fabs(value) * 0.1f);
        }
    }

    void *start() { return bytes.data() + offset; }
};

inline tfast_status
fail(tfast_status status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    return status;
}

/* Chooses the problems, and the order in which blocks and warps run. */
inline void
seed_with(const char *number)
{
    random_state = (uint32_t)strtoul(number, nullptr, 0);
    tfast_simt_seed(random_state);
}

/* ---- Programs that solve random problems ----------------------------------------- */

inline const tfast_backend *backend;

inline int
random_below(int n)
{
    return (int)((random_value() + 1) / 2 * (float)n) % n;
}

/* The program: its arguments are the seed and the number of problems. */
inline int
solve_problems(int argc, char **argv, bool (*solve)(int number))
{
    bool right = true;

    if (argc != 3) {
        return 2;
    }
    seed_with(argv[1]);
    backend = tfast_library_open(TFAST_ABI, fail);
    if (backend == nullptr || backend->unusable() != nullptr) {
        return 2;
    }
    for (int i = 0; i < atoi(argv[2]); i++) {
        right &= solve(i);
    }
    return !right;
}

#endif
