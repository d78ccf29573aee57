/* What kernels need of the C library, and what NVRTC, which comes without its headers,
 * has in their place. */
#ifndef TFAST_LIBC_H
#define TFAST_LIBC_H

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#    define INFINITY __int_as_float(0x7F800000)
#else
#    include <math.h>
#    include <stdbool.h>
#    include <stddef.h>
#    include <stdint.h>
#endif

#ifdef __CUDACC__
#    define TFAST_HOST_DEVICE __host__ __device__
#else
#    define TFAST_HOST_DEVICE
#endif

#endif
