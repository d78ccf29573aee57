#include "adamw_kernel.cuh"

TFAST_EXPORT(adamw)
