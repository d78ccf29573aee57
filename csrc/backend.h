/* Which backends there are, and which one is in use. */
#ifndef TFAST_BACKEND_H
#define TFAST_BACKEND_H

#include "tfast.h"

/* Selects the CPU backend: the best usable backend, or the backend that the environment
 * variable TRAINFAST_BACKEND names. Called once, when the module is loaded. */
tfast_status tfast_backend_init(void);

/* The backend for arrays on this type of device (TFAST_CPU or TFAST_CUDA), or NULL with
 * the message set. The first call for TFAST_CUDA opens the CUDA library. */
const tfast_backend *tfast_backend_for(int32_t device_type);

/* The graph cache's kernels for this CPU's best instruction set, or for the instruction
 * set that is forced as backend. Never NULL. */
const tfast_graph_kernels *tfast_graph_kernels_in_use(void);

/* Forces one backend by name, for tests and bug reports; NULL selects the best again.
 * An unknown or unusable name fails and changes nothing. */
tfast_status tfast_backend_use(const char *name);

/* The name of the i-th backend, best first, the reason why it cannot run here (NULL if
 * it can), and whether it is in use. False if there is no i-th backend. Opens the
 * backend's library if it has one. */
bool tfast_backend_describe(int i, const char **name, const char **unusable,
                            bool *in_use);

/* Fails if a call of this backend needs more memory of its caller than it got: after
 * asking how much, a caller may meet another backend, which another thread has forced.
 */
tfast_status tfast_backend_check_scratch(const tfast_backend *backend, int64_t needed,
                                         int64_t got);

#endif
