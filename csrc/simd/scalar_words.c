#include "vec_scalar_words.h"

#include "../kernels/philox.h"

void
tfast_scalar_philox(uint32_t to[][4][PHILOX_PAIRS], philox_row row)
{
    philox_store(to, row);
}
