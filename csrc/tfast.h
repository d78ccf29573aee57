/* The contract of the trainfast core: what a caller may pass, what it gets back, who
 * owns what. C11, no Python, no CUDA headers. Read top to bottom, it is the manual.
 *
 * Conventions
 *   Order of parameters: outputs, in-outs, inputs, sizes, scalars, stream.
 *   int64_t counts elements, size_t counts bytes.
 *   The caller owns every array and keeps it alive until the call returns (CPU) or
 *   until the work it enqueued on `stream` has run (CUDA).
 *   A function that can fail returns tfast_status and validates before it writes: on
 *   any status but TFAST_OK no array has changed. Inner loops cannot fail.
 */
#ifndef TFAST_H
#define TFAST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ---------------------------------------------------------------------- */

typedef enum {
    TFAST_OK = 0,
    TFAST_EINVAL,       /* ValueError: a value or shape breaks a rule */
    TFAST_ETYPE,        /* TypeError: not the kind of object that is wanted */
    TFAST_EUNSUPPORTED, /* NotImplementedError: right, but nothing here computes it */
    TFAST_ENOMEM,       /* MemoryError */
    TFAST_EIO,          /* OSError */
    TFAST_ECUDA         /* RuntimeError: the CUDA runtime said no */
} tfast_status;

#define TFAST_MESSAGE_BYTES 512

#if defined(__GNUC__)
#    define TFAST_PRINTF(at, first) __attribute__((format(printf, at, first)))
#else
#    define TFAST_PRINTF(at, first)
#endif

/* Sets this thread's message and returns `status`, so that a fault is reported where it
 * is found: return tfast_fail(TFAST_EINVAL, "lr must be finite and >= 0, got %g", lr).
 * Messages read "*argument* must *rule*, got *value*". */
tfast_status tfast_fail(tfast_status status, const char *format, ...)
    TFAST_PRINTF(2, 3);

/* This thread's last message. Valid until the thread's next tfast_fail(). */
const char *tfast_message(void);

/* ---- Arrays ---------------------------------------------------------------------- */

typedef enum {
    TFAST_F32 = 0,
    TFAST_F64,
    TFAST_F16,
    TFAST_BF16,
    TFAST_N_DTYPES
} tfast_dtype;

/* Bytes of one element. */
static inline size_t
tfast_dtype_size(tfast_dtype dtype)
{
    return dtype == TFAST_F64 ? 8 : dtype == TFAST_F32 ? 4 : 2;
}

/* "float32" and so on. */
const char *tfast_dtype_name(tfast_dtype dtype);

enum { TFAST_CPU = 1, TFAST_CUDA = 2 }; /* DLPack's numbers */

typedef struct {
    int32_t type;  /* TFAST_CPU or TFAST_CUDA */
    int32_t index; /* of the GPU; 0 for the CPU */
} tfast_device;

/* ---- Workspace ------------------------------------------------------------------- */

/* What one optimizer keeps between its steps so that a warm step allocates nothing: a
 * CUDA backend hangs its device-resident table here. `backend` and `data` are the
 * backend's own; zero-initialised means empty. One workspace must not be used by two
 * threads at once. */
typedef struct {
    const struct tfast_backend *backend;
    void *data;
} tfast_workspace;

/* Gives back what a workspace holds; afterwards it is empty. Captured CUDA graphs that
 * used it must not be replayed any more. */
void tfast_workspace_clear(tfast_workspace *workspace);

/* ---- AdamW ----------------------------------------------------------------------- */

/* One parameter tensor with its gradient and state. All arrays hold `numel` elements,
 * dense and in the same dimension order, aligned to their element size; none but the
 * gradient may be shared with another slot. */
typedef struct {
    void *param;
    void *grad; /* written only with write_back_grads */
    void *exp_avg;
    void *exp_avg_sq;
    void *max_exp_avg_sq; /* NULL without amsgrad */
    float *step; /* steps done so far, advanced by the call; NULL: args->step */
    int64_t numel;
    uint8_t param_dtype; /* tfast_dtype each, free of one another */
    uint8_t grad_dtype;
    uint8_t state_dtype; /* of exp_avg, exp_avg_sq and max_exp_avg_sq */
} tfast_adamw_slot;

/* One optimizer step over a list of slots on one device. */
typedef struct {
    const tfast_adamw_slot *slots;
    int64_t n_slots;
    tfast_device device;
    tfast_workspace *workspace; /* NULL: a temporary one (CUDA then synchronises) */
    int64_t step;        /* this step's number, from 1, for slots without a counter */
    double lr;           /* finite, >= 0; ignored with lr_device */
    double beta1;        /* in [0, 1) */
    double beta2;        /* in [0, 1) */
    double eps;          /* finite, >= 0 */
    double weight_decay; /* finite, >= 0 */
    bool maximize;
    bool decoupled_weight_decay; /* AdamW; false adds weight_decay * param to the
                                    gradient */
    bool write_back_grads;       /* store grad / grad_scale in grad */
    const float *lr_device;  /* all three: NULL or one float32 on the slots' device */
    const float *grad_scale; /* gradients are divided by it; NULL: 1 */
    const float *found_inf; /* any non-zero value: nothing changes, counters included */
    void *stream;           /* cudaStream_t; ignored on the CPU */
} tfast_adamw_args;

/* AdamW as in torch.optim.AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm
 * 2). With t the slot's step and g the gradient (negated for maximize):
 *
 *   p <- p * (1 - lr * weight_decay)        if decoupled, otherwise
 *   g <- g + weight_decay * p
 *   m <- m + (1 - beta1) * (g - m)
 *   v <- beta2 * v + (1 - beta2) * g^2
 *   p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *
 * and with amsgrad the running maximum of v in place of v in the last line.
 * Coefficients are formed in double and rounded once. Arithmetic is float32, or float64
 * where the parameter or its state is; every store rounds to nearest even, and the last
 * line uses m and v as they were before that rounding. Same inputs give the same bits
 * on every backend. */
tfast_status tfast_adamw(const tfast_adamw_args *args);

/* ---- Backends -------------------------------------------------------------------- */

/* Changes whenever a struct in this file does: a CUDA library of another version is
 * refused. */
#define TFAST_ABI 1

/* What a backend offers: one function an operation, NULL where it has none. Entries
 * validate before they call, so a backend may trust its arguments. */
typedef struct tfast_backend {
    uint32_t abi;                  /* TFAST_ABI */
    const char *name;              /* "avx2" */
    int32_t device;                /* TFAST_CPU or TFAST_CUDA */
    const char *(*unusable)(void); /* NULL where it can run here, otherwise why not */
    void (*workspace_clear)(void *data);
    tfast_status (*adamw)(const tfast_adamw_args *args);
} tfast_backend;

/* The one symbol of the CUDA library, and of its twin on the CPU. `fail` becomes the
 * library's way to set a message. Returns NULL when `abi` is not its own. */
typedef tfast_status (*tfast_fail_function)(tfast_status, const char *, ...);
typedef const tfast_backend *(*tfast_cuda_open_function)(uint32_t abi,
                                                         tfast_fail_function fail);
#define TFAST_CUDA_OPEN "tfast_cuda_open"

/* Makes the choice for the CPU: the best usable backend, or the one that the
 * environment variable TRAINFAST_BACKEND names. Called once, when the module is loaded.
 */
tfast_status tfast_backend_init(void);

/* The backend for arrays on this kind of device, or NULL with the message set. The
 * first call for TFAST_CUDA opens the CUDA library. */
const tfast_backend *tfast_backend_for(int32_t device_type);

/* Forces one backend by name, for tests and bug reports; NULL goes back to the best. An
 * unknown or unusable name fails and changes nothing. */
tfast_status tfast_backend_use(const char *name);

/* The i-th backend's name, best first, with why it cannot run here (NULL if it can) and
 * whether it is the one in use. False past the end. Opens the CUDA library. */
bool tfast_backend_describe(int i, const char **name, const char **unusable,
                            bool *in_use);

/* ---- Threads --------------------------------------------------------------------- */

/* Runs body(context, part, parts) once for each part of 0..parts-1, on up to that many
 * threads, and returns when all are done. Enters the OpenMP runtime that the process
 * (torch) has already loaded, otherwise an own pool; a forked child gets a pool of its
 * own. */
void tfast_parallel(int parts, void (*body)(void *context, int part, int parts),
                    void *context);

/* How many threads a call from this thread may use: torch.set_num_threads or
 * OMP_NUM_THREADS where there is an OpenMP runtime, otherwise OMP_NUM_THREADS, the
 * affinity mask and the cgroup quota. */
int tfast_num_threads(void);

/* "openmp (path)" or "own", for reports. */
const char *tfast_thread_runtime(void);

#ifdef __cplusplus
}
#endif
#endif
