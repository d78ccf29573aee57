/* `real`, the arithmetic type of the kernels that are included next: float64. */
#ifndef REAL_F64_H
#define REAL_F64_H

#include "../tfast.h"

#include <float.h>

typedef double real;
#define REAL_DTYPE TFAST_F64
#define REAL_IS_F32 0
#define REAL_MAX DBL_MAX
#define REAL_MIN DBL_MIN

#endif
