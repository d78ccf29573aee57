/* The list of kernels, for host and device: C11 and C++17. A list calls
 *
 *   K(path, id, arguments, rows, threads, shared, name...)
 *
 *   path       75: for GPUs below sm_80; 80: for the others; 0: for all of them
 *   id         of KERNEL_<id> below
 *   arguments  the struct that the kernel takes, of arguments.h
 *   rows       that a block does at a time; 1 where it has no meaning
 *   threads    of a block
 *   shared     bytes of dynamic shared memory of a block
 *   name       in C++, with commas
 *
 * for every kernel of a file of cuda/device/. Kernels with a shape, which the device's
 * code computes from path and dims, stand in lists of their own, which call SHAPE(K,
 * path, type, dims, ..., rows, threads, shared): CHECK_SHAPE() compares the two. */
#ifndef TFAST_KERNELS_H
#define TFAST_KERNELS_H

/* ---- Shapes ---------------------------------------------------------------------- */

/* dims, whether there are options, then rows, threads, shared. */
#define FORWARD_75(SHAPE, K, type)                                                     \
    SHAPE(K, 75, type, 32, 0, 128, 128, 8192)                                          \
    SHAPE(K, 75, type, 32, 1, 64, 128, 8192)                                           \
    SHAPE(K, 75, type, 64, 0, 128, 128, 12288)                                         \
    SHAPE(K, 75, type, 64, 1, 64, 128, 16384)                                          \
    SHAPE(K, 75, type, 96, 0, 128, 256, 24576)                                         \
    SHAPE(K, 75, type, 96, 1, 64, 128, 24576)                                          \
    SHAPE(K, 75, type, 128, 0, 128, 256, 32768)                                        \
    SHAPE(K, 75, type, 128, 1, 64, 128, 16384)                                         \
    SHAPE(K, 75, type, 192, 0, 128, 256, 24576)                                        \
    SHAPE(K, 75, type, 192, 1, 64, 128, 12288)                                         \
    SHAPE(K, 75, type, 256, 0, 128, 256, 49152)                                        \
    SHAPE(K, 75, type, 256, 1, 64, 128, 49152)

#define FORWARD_80(SHAPE, K, type)                                                     \
    SHAPE(K, 80, type, 32, 0, 128, 128, 12288)                                         \
    SHAPE(K, 80, type, 32, 1, 64, 128, 12288)                                          \
    SHAPE(K, 80, type, 64, 0, 128, 128, 18432)                                         \
    SHAPE(K, 80, type, 64, 1, 64, 128, 24576)                                          \
    SHAPE(K, 80, type, 96, 0, 128, 256, 61440)                                         \
    SHAPE(K, 80, type, 96, 1, 64, 128, 36864)                                          \
    SHAPE(K, 80, type, 128, 0, 128, 128, 49152)                                        \
    SHAPE(K, 80, type, 128, 1, 64, 128, 49152)                                         \
    SHAPE(K, 80, type, 192, 0, 128, 256, 90112)                                        \
    SHAPE(K, 80, type, 192, 1, 64, 128, 36864)                                         \
    SHAPE(K, 80, type, 256, 0, 128, 256, 81920)                                        \
    SHAPE(K, 80, type, 256, 1, 64, 128, 40960)

/* dims, whether a block owns keys (dk, dv) or queries (dq), whether there are options.
 * On sm_75 96 dims with options spilled registers: 128 do them. */
#define BACKWARD_75_64(SHAPE, K, type)                                                 \
    SHAPE(K, 75, type, 32, 1, 0, 64, 128, 8704)                                        \
    SHAPE(K, 75, type, 32, 0, 0, 64, 128, 8192)                                        \
    SHAPE(K, 75, type, 32, 1, 1, 64, 128, 8704)                                        \
    SHAPE(K, 75, type, 32, 0, 1, 64, 128, 8192)                                        \
    SHAPE(K, 75, type, 64, 1, 0, 64, 128, 16896)                                       \
    SHAPE(K, 75, type, 64, 0, 0, 64, 128, 16384)                                       \
    SHAPE(K, 75, type, 64, 1, 1, 64, 128, 16896)                                       \
    SHAPE(K, 75, type, 64, 0, 1, 64, 128, 16384)

#define BACKWARD_75_128(SHAPE, K, type)                                                \
    SHAPE(K, 75, type, 96, 1, 0, 64, 128, 49664)                                       \
    SHAPE(K, 75, type, 96, 0, 0, 64, 128, 49152)                                       \
    SHAPE(K, 75, type, 128, 1, 0, 64, 128, 49408)                                      \
    SHAPE(K, 75, type, 128, 0, 0, 64, 128, 49152)                                      \
    SHAPE(K, 75, type, 128, 1, 1, 64, 256, 57600)                                      \
    SHAPE(K, 75, type, 128, 0, 1, 64, 128, 49152)

#define BACKWARD_75_256(SHAPE, K, type)                                                \
    SHAPE(K, 75, type, 192, 1, 0, 32, 128, 53504)                                      \
    SHAPE(K, 75, type, 192, 0, 0, 32, 128, 28672)                                      \
    SHAPE(K, 75, type, 192, 1, 1, 32, 128, 53504)                                      \
    SHAPE(K, 75, type, 192, 0, 1, 32, 128, 28672)                                      \
    SHAPE(K, 75, type, 256, 1, 0, 32, 128, 53504)                                      \
    SHAPE(K, 75, type, 256, 0, 0, 64, 256, 40960)                                      \
    SHAPE(K, 75, type, 256, 1, 1, 32, 128, 53504)                                      \
    SHAPE(K, 75, type, 256, 0, 1, 64, 256, 40960)

#define BACKWARD_80_64(SHAPE, K, type)                                                 \
    SHAPE(K, 80, type, 32, 1, 0, 64, 128, 8704)                                        \
    SHAPE(K, 80, type, 32, 0, 0, 64, 128, 8192)                                        \
    SHAPE(K, 80, type, 32, 1, 1, 64, 128, 8704)                                        \
    SHAPE(K, 80, type, 32, 0, 1, 64, 128, 8192)                                        \
    SHAPE(K, 80, type, 64, 1, 0, 64, 128, 16896)                                       \
    SHAPE(K, 80, type, 64, 0, 0, 64, 128, 16384)                                       \
    SHAPE(K, 80, type, 64, 1, 1, 64, 128, 16896)                                       \
    SHAPE(K, 80, type, 64, 0, 1, 64, 128, 16384)

#define BACKWARD_80_128(SHAPE, K, type)                                                \
    SHAPE(K, 80, type, 96, 1, 0, 64, 128, 49664)                                       \
    SHAPE(K, 80, type, 96, 0, 0, 64, 128, 49152)                                       \
    SHAPE(K, 80, type, 128, 1, 0, 64, 128, 66048)                                      \
    SHAPE(K, 80, type, 128, 0, 0, 64, 128, 65536)                                      \
    SHAPE(K, 80, type, 128, 1, 1, 64, 128, 49408)                                      \
    SHAPE(K, 80, type, 128, 0, 1, 64, 128, 49152)

#define BACKWARD_80_256(SHAPE, K, type)                                                \
    SHAPE(K, 80, type, 192, 1, 0, 32, 128, 53504)                                      \
    SHAPE(K, 80, type, 192, 0, 0, 32, 128, 28672)                                      \
    SHAPE(K, 80, type, 192, 1, 1, 32, 128, 53504)                                      \
    SHAPE(K, 80, type, 192, 0, 1, 32, 128, 28672)                                      \
    SHAPE(K, 80, type, 256, 1, 0, 32, 128, 69888)                                      \
    SHAPE(K, 80, type, 256, 0, 0, 64, 256, 40960)                                      \
    SHAPE(K, 80, type, 256, 1, 1, 32, 128, 69888)                                      \
    SHAPE(K, 80, type, 256, 0, 1, 64, 256, 40960)

/* dims. */
#define DECODE_75(SHAPE, K, type)                                                      \
    SHAPE(K, 75, type, 64, 16, 128, 32768)                                             \
    SHAPE(K, 75, type, 128, 16, 128, 32768)                                            \
    SHAPE(K, 75, type, 192, 16, 96, 30720)                                             \
    SHAPE(K, 75, type, 256, 16, 128, 40960)

#define DECODE_80(SHAPE, K, type)                                                      \
    SHAPE(K, 80, type, 64, 16, 128, 65536)                                             \
    SHAPE(K, 80, type, 128, 16, 128, 65536)                                            \
    SHAPE(K, 80, type, 192, 16, 96, 55296)                                             \
    SHAPE(K, 80, type, 256, 16, 128, 73728)

/* Each for both types of a path. */
#define FORWARD_SHAPES(SHAPE, K)                                                       \
    FORWARD_75(SHAPE, K, mma_f16)                                                      \
    FORWARD_75(SHAPE, K, mma_bf16_as_f16)                                              \
    FORWARD_80(SHAPE, K, mma_f16)                                                      \
    FORWARD_80(SHAPE, K, mma_bf16)

#define BACKWARD_SHAPES_64(SHAPE, K)                                                   \
    BACKWARD_75_64(SHAPE, K, mma_f16)                                                  \
    BACKWARD_75_64(SHAPE, K, mma_bf16_as_f16)                                          \
    BACKWARD_80_64(SHAPE, K, mma_f16)                                                  \
    BACKWARD_80_64(SHAPE, K, mma_bf16)

#define BACKWARD_SHAPES_128(SHAPE, K)                                                  \
    BACKWARD_75_128(SHAPE, K, mma_f16)                                                 \
    BACKWARD_75_128(SHAPE, K, mma_bf16_as_f16)                                         \
    BACKWARD_80_128(SHAPE, K, mma_f16)                                                 \
    BACKWARD_80_128(SHAPE, K, mma_bf16)

#define BACKWARD_SHAPES_256(SHAPE, K)                                                  \
    BACKWARD_75_256(SHAPE, K, mma_f16)                                                 \
    BACKWARD_75_256(SHAPE, K, mma_bf16_as_f16)                                         \
    BACKWARD_80_256(SHAPE, K, mma_f16)                                                 \
    BACKWARD_80_256(SHAPE, K, mma_bf16)

#define DECODE_SHAPES(SHAPE, K)                                                        \
    DECODE_75(SHAPE, K, mma_f16)                                                       \
    DECODE_75(SHAPE, K, mma_bf16_as_f16)                                               \
    DECODE_80(SHAPE, K, mma_f16)                                                       \
    DECODE_80(SHAPE, K, mma_bf16)

#define TERM_SHAPES(SHAPE, K)                                                          \
    SHAPE(K, 75, mma_f16, 64, 128, 16640)                                              \
    SHAPE(K, 75, mma_bf16_as_f16, 64, 128, 16640)                                      \
    SHAPE(K, 80, mma_f16, 64, 128, 32768)                                              \
    SHAPE(K, 80, mma_bf16, 64, 128, 32768)

/* ---- Kernels of each file -------------------------------------------------------- */

#define KERNELS_OF_adamw(K)                                                            \
    K(0, adamw_ALL_F32, adamw_call, 1, ADAMW_THREADS, 0, adamw_kernel<ALL_F32>)        \
    K(0, adamw_ALL_BF16, adamw_call, 1, ADAMW_THREADS, 0, adamw_kernel<ALL_BF16>)      \
    K(0, adamw_NARROW, adamw_call, 1, ADAMW_THREADS, 0, adamw_kernel<NARROW>)          \
    K(0, adamw_WIDE, adamw_call, 1, ADAMW_THREADS, 0, adamw_kernel<WIDE>)              \
    K(0, adamw_BLOCKS, adamw_call, 1, ADAMW_THREADS, 0, adamw_kernel<BLOCKS>)

#define KERNELS_OF_amp(K)                                                              \
    K(0, amp, amp_call, 1, AMP_THREADS, 0, amp_kernel<false>)                          \
    K(0, amp_wide, amp_call, 1, AMP_THREADS, 0, amp_kernel<true>)                      \
    K(0, amp_update, tfast_amp_update_args, 1, 32, 0, amp_update_kernel)

#define PLAIN_KERNEL(K, what, real)                                                    \
    K(0, plain_##what##_##real, plain_call, PLAIN_TILE, PLAIN_THREADS, 0,              \
      attention_plain_##what<real>)
#define KERNELS_OF_attention_plain(K)                                                  \
    PLAIN_KERNEL(K, forward, float)                                                    \
    PLAIN_KERNEL(K, forward, double)                                                   \
    PLAIN_KERNEL(K, shares, float)                                                     \
    PLAIN_KERNEL(K, shares, double)                                                    \
    PLAIN_KERNEL(K, dq, float)                                                         \
    PLAIN_KERNEL(K, dq, double)                                                        \
    PLAIN_KERNEL(K, dkv, float)                                                        \
    PLAIN_KERNEL(K, dkv, double)                                                       \
    PLAIN_KERNEL(K, term, float)                                                       \
    PLAIN_KERNEL(K, term, double)                                                      \
    PLAIN_KERNEL(K, dsinks, float)                                                     \
    PLAIN_KERNEL(K, dsinks, double)

#define SHARES_KERNEL(K, path, type)                                                   \
    K(path, shares_##path##_##type, mma_call, FAR_ROWS, FAR_THREADS, 0,                \
      attention_mma_shares<path_##path, type>)
#define DELTA_KERNEL(K, path, type)                                                    \
    K(path, delta_##type, mma_call, DELTA_ROWS, DELTA_THREADS, 0,                      \
      attention_mma_delta<type>)
#define KERNELS_OF_attention_rows(K)                                                   \
    K(75, exponents, exponents_call, 1, EXPONENT_THREADS, 0, attention_mma_exponents)  \
    DELTA_KERNEL(K, 0, mma_f16)                                                        \
    DELTA_KERNEL(K, 75, mma_bf16_as_f16)                                               \
    DELTA_KERNEL(K, 80, mma_bf16)                                                      \
    K(75, powers, mma_call, 1, POWERS_THREADS, 0, attention_mma_powers)                \
    SHARES_KERNEL(K, 75, mma_f16)                                                      \
    SHARES_KERNEL(K, 75, mma_bf16_as_f16)                                              \
    SHARES_KERNEL(K, 80, mma_f16)                                                      \
    SHARES_KERNEL(K, 80, mma_bf16)

#define FORWARD_KERNEL(K, path, type, dims, options, rows, threads, shared)            \
    K(path, forward_##path##_##type##_##dims##_##options, mma_call, rows, threads,     \
      shared,                                                                          \
      attention_mma_forward<path_##path, type,                                         \
                            mma_forward_shape<path_##path, dims, options>>)
#define KERNELS_OF_attention_forward(K) FORWARD_SHAPES(FORWARD_KERNEL, K)

#define BACKWARD_KERNEL(K, path, type, dims, keys, options, rows, threads, shared)     \
    K(path, backward_##path##_##type##_##dims##_##keys##_##options, mma_call, rows,    \
      threads, shared,                                                                 \
      attention_mma_backward<path_##path, type,                                        \
                             mma_backward_shape<path_##path, dims, keys, options>>)
#define KERNELS_OF_attention_backward_64(K) BACKWARD_SHAPES_64(BACKWARD_KERNEL, K)
#define KERNELS_OF_attention_backward_128(K) BACKWARD_SHAPES_128(BACKWARD_KERNEL, K)
#define KERNELS_OF_attention_backward_256(K) BACKWARD_SHAPES_256(BACKWARD_KERNEL, K)

#define TERM_KERNEL(K, path, type, rows, threads, shared)                              \
    K(path, term_##path##_##type, mma_term_call, rows, threads, shared,                \
      attention_mma_term<path_##path, type>)
#define KERNELS_OF_attention_terms(K)                                                  \
    TERM_SHAPES(TERM_KERNEL, K)                                                        \
    K(0, term_sum, mma_term_call, SUM_THREADS, SUM_THREADS, 0, attention_mma_term_sum) \
    K(0, dsinks, mma_call, 1, SINKS_THREADS, 0, attention_mma_dsinks)

#define DECODE_KERNEL(K, path, type, dims, rows, threads, shared)                      \
    K(path, decode_##path##_##type##_##dims, decode_call, rows, threads, shared,       \
      attention_decode<path_##path, type, decode_shape<path_##path, dims>>)
#define KERNELS_OF_attention_decode(K)                                                 \
    DECODE_SHAPES(DECODE_KERNEL, K)                                                    \
    K(0, decode_combine, decode_call, 1, COMBINE_THREADS, 0, attention_decode_combine)

#define NEIGHBOUR_KERNELS(K, what)                                                     \
    K(0, neighbours_##what, neighbours_call, 1, NEIGHBOUR_THREADS, 0,                  \
      neighbours_##what<float>)                                                        \
    K(0, neighbours_##what##_wide, neighbours_call, 1, NEIGHBOUR_THREADS, 0,           \
      neighbours_##what<double>)
#define KERNELS_OF_neighbours(K)                                                       \
    NEIGHBOUR_KERNELS(K, prepare)                                                      \
    NEIGHBOUR_KERNELS(K, count)                                                        \
    K(0, neighbours_scan, neighbours_call, 1, SCAN_THREADS, 0, neighbours_scan)        \
    NEIGHBOUR_KERNELS(K, fill)                                                         \
    NEIGHBOUR_KERNELS(K, nearest)

#define KERNELS_OF_trajectory(K)                                                       \
    K(0, trajectory_agents, trajectory_call, 1, TRAJECTORY_THREADS, 0,                 \
      trajectory_agents<float>)                                                        \
    K(0, trajectory_agents_wide, trajectory_call, 1, TRAJECTORY_THREADS, 0,            \
      trajectory_agents<double>)                                                       \
    K(0, trajectory_total, trajectory_call, 1, 32, 0, trajectory_total)

/* ---- All files, all kernels ------------------------------------------------------ */

#define TFAST_DEVICE_FILES(FILE)                                                       \
    FILE(adamw)                                                                        \
    FILE(amp)                                                                          \
    FILE(attention_plain)                                                              \
    FILE(attention_rows)                                                               \
    FILE(attention_forward)                                                            \
    FILE(attention_backward_64)                                                        \
    FILE(attention_backward_128)                                                       \
    FILE(attention_backward_256)                                                       \
    FILE(attention_terms)                                                              \
    FILE(attention_decode)                                                             \
    FILE(neighbours)                                                                   \
    FILE(trajectory)

#define TFAST_KERNELS(K)                                                               \
    KERNELS_OF_adamw(K) KERNELS_OF_amp(K) KERNELS_OF_attention_plain(K)                \
        KERNELS_OF_attention_rows(K) KERNELS_OF_attention_forward(K)                   \
            KERNELS_OF_attention_backward_64(K) KERNELS_OF_attention_backward_128(K)   \
                KERNELS_OF_attention_backward_256(K) KERNELS_OF_attention_terms(K)     \
                    KERNELS_OF_attention_decode(K) KERNELS_OF_neighbours(K)            \
                        KERNELS_OF_trajectory(K)

#define TFAST_FILE_ID(file) FILE_##file,
enum { TFAST_DEVICE_FILES(TFAST_FILE_ID) N_FILES };

#define TFAST_KERNEL_ID(path, id, ...) KERNEL_##id,
enum { TFAST_KERNELS(TFAST_KERNEL_ID) N_KERNELS };

#endif
