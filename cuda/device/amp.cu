#include "amp_kernel.cuh"

TFAST_EXPORT(amp)
