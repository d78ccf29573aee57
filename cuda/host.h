/* What the host files of cuda/ share. */
#ifndef TFAST_HOST_H
#define TFAST_HOST_H

#include "arguments.h"
#include "driver.h"
#include "kernels.h"

/* Sets the message of the core that opened this library. */
extern tfast_fail_function tfast_cuda_fail;

/* ---- driver.c: the driver -------------------------------------------------------- */

/* Filled by tfast_cuda_unusable(). */
extern tfast_driver tfast_cuda_driver;

/* Why CUDA cannot be used in this process, or NULL. */
const char *tfast_cuda_unusable(void);

/* TFAST_OK, or TFAST_ECUDA with a message that names the call. */
tfast_status tfast_cuda_status(CUresult error, const char *call);

/* CU_TRY(cuMemFree, (pointer)): returns from the function when the call fails. */
#define CU_TRY(call, arguments)                                                        \
    do {                                                                               \
        const tfast_status status_ =                                                   \
            tfast_cuda_status(tfast_cuda_driver.call arguments, #call);                \
        if (status_ != TFAST_OK) {                                                     \
            return status_;                                                            \
        }                                                                              \
    } while (0)

/* What a thread had current before tfast_enter_device(). */
typedef struct {
    CUcontext before;    /* NULL: none */
    int mode;            /* of captures */
    bool moved, relaxed; /* what is to be undone */
} tfast_device_scope;

/* Makes a context of the device current. Until tfast_leave_device(), which must follow
 * even a failure, the thread may allocate, ask events and load kernels even while a
 * stream, of this or another thread, captures: those calls touch no captured work. */
tfast_status tfast_enter_device(tfast_device_scope *scope, int device);
void tfast_leave_device(tfast_device_scope *scope);

/* ---- launch.c: kernels ----------------------------------------------------------- */

/* All of these are for the current context's device, inside of a scope. */

/* Which of the paths of kernels.h the device takes: 75 or 80. */
tfast_status tfast_kernel_path(int *path);

/* Rows that a block of the kernel does at a time. */
int tfast_kernel_rows(int kernel);

/* How many blocks of the kernel, a KERNEL_ of kernels.h, fill the device. Loads it. */
tfast_status tfast_full_grid(int *blocks, int kernel);

/* Asynchronous. `bytes` must be those of the kernel's arguments. */
tfast_status tfast_launch(int kernel, int64_t blocks, void *stream,
                          const void *arguments, size_t bytes);

#define LAUNCH(kernel, blocks, stream, call)                                           \
    tfast_launch(kernel, blocks, stream, &(call), sizeof(call))

/* ---- The backend's entries, each in the file of its name ------------------------- */

extern const tfast_backend tfast_cuda_backend;

tfast_status tfast_cuda_adamw(const tfast_adamw_args *args);
tfast_status tfast_cuda_adamw_prepare(const tfast_adamw_args *args);
tfast_status tfast_cuda_amp_grads(const tfast_amp_grads_args *args);
tfast_status tfast_cuda_amp_update(const tfast_amp_update_args *args);
tfast_status tfast_cuda_attention(const tfast_attention_args *args);
tfast_status tfast_cuda_attention_backward(const tfast_attention_args *args);
tfast_status tfast_cuda_attention_scratch(int64_t *bytes,
                                          const tfast_attention_args *args,
                                          bool backward);
tfast_status tfast_cuda_gemm(const tfast_gemm_args *args);
tfast_status tfast_cuda_neighbours_scratch(int64_t *bytes,
                                           const tfast_neighbours_args *args);
tfast_status tfast_cuda_neighbours_count(tfast_neighbours_plan **plan,
                                         tfast_neighbours_args *args);
tfast_status tfast_cuda_trajectory_scratch(int64_t *bytes,
                                           const tfast_trajectory_args *args);
tfast_status tfast_cuda_trajectory(const tfast_trajectory_args *args);

#endif
