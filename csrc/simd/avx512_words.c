#if defined(__x86_64__)
#    include "vec_avx512_words.h"

#    include "../kernels/philox.h"

void
tfast_avx512_philox(uint32_t to[][4][PHILOX_PAIRS], philox_row row)
{
    philox_store(to, row);
}
#endif
