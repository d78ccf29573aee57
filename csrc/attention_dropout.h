/* The random numbers of dropout: Philox4x32-10 (Salmon et al., "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011), indexed as tfast.h defines. Shared by all
 * backends. */
#ifndef TFAST_ATTENTION_DROPOUT_H
#define TFAST_ATTENTION_DROPOUT_H

#include "libc.h"

#if defined(__CUDACC__)
#    define TFAST_INLINE static __host__ __device__ __forceinline__
#else
#    define TFAST_INLINE static inline __attribute__((always_inline))
#endif

/* Ten rounds in place: word[0..3] is the counter, then the result. */
TFAST_INLINE void
tfast_philox(uint32_t *word, uint32_t key0, uint32_t key1)
{
    for (int round = 0; round < 10; round++) {
        const uint64_t first = (uint64_t)0xD2511F53u * word[0];
        const uint64_t second = (uint64_t)0xCD9E8D57u * word[2];

        word[0] = (uint32_t)(second >> 32) ^ word[1] ^ key0;
        word[1] = (uint32_t)second;
        word[2] = (uint32_t)(first >> 32) ^ word[3] ^ key1;
        word[3] = (uint32_t)first;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

/* Elements whose 16-bit random number is below this are dropped. */
TFAST_INLINE uint32_t
tfast_dropout_threshold(double dropout_p)
{
    return (uint32_t)(dropout_p * 65536 + 0.5);
}

/* The factor of the elements that are kept. */
TFAST_INLINE double
tfast_dropout_scale(uint32_t threshold)
{
    return 65536.0 / (65536.0 - threshold);
}

#undef TFAST_INLINE
#endif
