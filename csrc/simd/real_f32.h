/* `real`, the arithmetic type of the kernels that are included next: float32. */
#ifndef REAL_F32_H
#define REAL_F32_H

#include "../tfast.h"

#include <float.h>

typedef float real;
#define REAL_DTYPE TFAST_F32
#define REAL_IS_F32 1
#define REAL_MAX FLT_MAX
#define REAL_MIN FLT_MIN

#endif
