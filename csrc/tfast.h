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

#include "graph_kernels.h"

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
    TFAST_ECUDA,        /* RuntimeError: the CUDA runtime said no */
    TFAST_EINTR         /* a signal's handler has raised its exception: see io.h */
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
 * threads at once, nor on two streams whose work is not ordered. */
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
 * gradient may be shared with another slot, nor it where it is written. */
typedef struct {
    void *param;
    void *grad; /* written only with write_back_grads or zero_grad */
    void *exp_avg;
    void *exp_avg_sq;
    void *max_exp_avg_sq; /* NULL without amsgrad */
    float *step; /* steps done so far, advanced by the call; NULL: args->step */
    int64_t numel;
    uint8_t param_dtype; /* tfast_dtype each, free of one another */
    uint8_t grad_dtype;
    uint8_t state_dtype; /* of exp_avg, exp_avg_sq and max_exp_avg_sq */
} tfast_adamw_slot;

/* What else the step writes for one slot, in its own pass over the elements. Arrays as
 * in the slot; NULL where not wanted. With float32 master weights the master is the
 * slot's param, and the parameter that the model reads is the copy. */
typedef struct {
    void *ema;  /* ema <- ema + (1 - ema_decay) * (param - ema), with the new param */
    void *copy; /* the new param, rounded to copy_dtype */
    uint8_t ema_dtype;
    uint8_t copy_dtype;
} tfast_adamw_extra;

/* One optimizer step over a list of slots on one device. */
typedef struct {
    const tfast_adamw_slot *slots;
    const tfast_adamw_extra *extras; /* NULL, or one for each slot */
    int64_t n_slots;
    tfast_device device;
    tfast_workspace *workspace; /* NULL: a temporary one (CUDA then synchronises, and
                                   refuses a stream that captures) */
    int64_t step;        /* this step's number, from 1, for slots without a counter */
    double lr;           /* finite, >= 0; ignored with lr_device */
    double beta1;        /* in [0, 1) */
    double beta2;        /* in [0, 1) */
    double eps;          /* finite, >= 0 */
    double weight_decay; /* finite, >= 0 */
    double ema_decay;    /* in [0, 1); used where there is an ema */
    bool maximize;
    bool decoupled_weight_decay; /* AdamW; false adds weight_decay * param to the
                                    gradient */
    bool write_back_grads;       /* store grad * clip_coef / grad_scale in grad */
    bool zero_grad;              /* store 0 in grad, also where the step is skipped;
                                    excludes write_back_grads */
    const float *lr_device;  /* these four: NULL, or one number on the slots' device */
    const float *grad_scale; /* gradients are divided by it; NULL: 1 */
    const float *found_inf; /* any non-zero value: nothing changes, counters included */
    const double *clip_coef; /* gradients are multiplied by it; NULL: 1 */
    void *stream;            /* cudaStream_t; ignored on the CPU */
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
 * line uses m and v, and what extras hold uses p, as they were before that rounding.
 * Same inputs give the same bits on every backend. */
tfast_status tfast_adamw(const tfast_adamw_args *args);

/* What tfast_adamw() does before it writes, for a caller with several lists, all of
 * which must be ready before the first is stepped: checks the arguments, and takes the
 * memory that the step will need into the workspace. tfast_adamw() with the same
 * arguments, addresses included, then takes none. Without a workspace it only checks.
 */
tfast_status tfast_adamw_prepare(const tfast_adamw_args *args);

/* ---- AMP: passes over gradients, and the loss scale ------------------------------ */

/* A dense array, aligned to its element size. */
typedef struct {
    void *data;
    int64_t numel;
    uint8_t dtype; /* tfast_dtype */
} tfast_amp_tensor;

typedef enum {
    TFAST_AMP_READ = 0, /* leave the elements as they are */
    TFAST_AMP_MULTIPLY, /* by factor / grad_scale; not written where that is 1 */
    TFAST_AMP_CLAMP     /* to [-clip_value, clip_value]; NaN stays */
} tfast_amp_rewrite;

/* One pass over a list of tensors on one device, which reads each element once: looks
 * for infinities and NaNs, sums up the norm, and rewrites. A result that is NULL is not
 * wanted; with none of the first four only the rewriting is done. */
typedef struct {
    const tfast_amp_tensor *tensors;
    int64_t n_tensors;
    tfast_device device;
    tfast_workspace *workspace; /* NULL: a temporary one (CUDA then synchronises, and
                                   refuses a stream that captures) */
    float *found_inf;  /* the results are on the tensors' device. 1 where an element, as
                         it was read, is not finite, else 0 */
    float *total_norm; /* of all elements / grad_scale, before factor */
    double *total_norm_f64; /* the same; its presence forms clip_coef in float64 */
    double *clip_coef;      /* min(1, max_norm / (total norm + 1e-6)) */
    double norm_type; /* p, any but 0 and NaN: (sum |x|^p)^(1/p); infinity: the largest,
                         -infinity: the smallest |x| */
    double max_norm;  /* any number */
    double clip_value;
    tfast_amp_rewrite rewrite;
    const float *grad_scale; /* on the tensors' device; NULL: 1 */
    const double *factor;    /* on the tensors' device; NULL: 1 */
    void *stream;
} tfast_amp_grads_args;

/* Norms as torch.nn.utils.get_total_norm gives them, clipping as clip_grad_norm_. The
 * 2-norm is summed up in an order that depends only on the tensors' sizes (see
 * amp_sum.h), in float32 inside fixed chunks and float64 between them, so that the
 * same inputs give the same bits for any number of threads and on every backend; so
 * does every norm but those whose p needs pow(). */
tfast_status tfast_amp_grads(const tfast_amp_grads_args *args);

enum { TFAST_AMP_MAX_FOUND = 16 };

/* The loss scale at the end of an iteration. All pointers are on `device`. */
typedef struct {
    float *scale;
    int32_t *growth_tracker;     /* steps since the scale or this last changed */
    int32_t *hysteresis_tracker; /* overflows until the scale backs off; NULL: 1 */
    const float *found_infs[TFAST_AMP_MAX_FOUND]; /* any non-zero value: an overflow */
    int32_t n_found_infs;                         /* 1 .. TFAST_AMP_MAX_FOUND */
    int32_t growth_interval;
    int32_t hysteresis; /* >= 1: what hysteresis_tracker is set to */
    double growth_factor;
    double backoff_factor;
    double min_scale; /* what backing off stops at; 0: nothing */
    double max_scale; /* what growing stops at; infinity: float32's range */
    tfast_device device;
    void *stream;
} tfast_amp_update_args;

/* The rule of torch.amp.GradScaler.update(), with bounds and hysteresis:
 *
 *   overflow:  with hysteresis_tracker - 1 still > 0 only the growth tracker becomes 0;
 *              else scale <- max(scale * backoff_factor, min_scale), tracker <- 0
 *   otherwise: the hysteresis tracker is set back, and after growth_interval steps
 *              scale <- min(scale * growth_factor, max_scale), tracker <- 0
 *
 * Products are formed in double and rounded to float32; one that is not finite leaves
 * the scale. A scale already beyond a bound is not moved by that bound alone. */
tfast_status tfast_amp_update(const tfast_amp_update_args *args);

/* ---- Attention ------------------------------------------------------------------- */

/* Rows of one tensor, of one dtype with all others of the call. Element d of row n of
 * head h of batch item b is data[b * batch + h * head + n * row + d]. */
typedef struct {
    void *data;
    int64_t batch, head, row; /* in elements, >= 0 */
} tfast_attention_rows;

enum { TFAST_BOOL = TFAST_N_DTYPES }; /* one byte, 0 or 1; only for masks */

/* An array that broadcasts to the scores, [batch, head, query, key]. */
typedef struct {
    const void *data;  /* NULL: none */
    int64_t stride[4]; /* in elements; 0 where it is broadcast */
    uint8_t dtype;     /* tfast_dtype, or TFAST_BOOL: 0 forbids the key */
} tfast_attention_term;

/* softmax(q k^T) v, one head of q at a time, and what it takes to go back. With
 * variable lengths (cu_seqlens) batch strides of q, k, v, out and their gradients are
 * ignored: the rows of item b are cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of all. */
typedef struct {
    tfast_attention_rows q, k, v;
    tfast_attention_rows out; /* forward writes it, backward reads it */
    void *lse;                /* [batch, heads, n_q] or [heads, total]: the logarithm of
                                 each row's sum, -infinity for a row without a key.
                                 float32, or float64 where dtype is. NULL: not
                                 wanted by the forward */
    int64_t lse_batch, lse_head; /* its strides; the row's is 1 */

    int64_t batch, heads, kv_heads; /* heads is a multiple of kv_heads */
    int64_t n_q, n_k; /* with cu_seqlens: no item has more rows; as loose as the caller
                         likes, a backend gets the longest item on the CPU, on a GPU
                         at most total_q and total_k */
    int64_t dim, dim_v;                         /* 1 .. TFAST_ATTENTION_MAX_DIM */
    const int64_t *cu_seqlens_q, *cu_seqlens_k; /* [batch + 1]; both or none */
    int64_t total_q, total_k; /* with cu_seqlens: rows there are; those past the last
                                 item are not touched */
    const int64_t *kv_lens;   /* [batch], at most the item's keys: those past it are
                                 forbidden; NULL: none */

    tfast_attention_term mask; /* bool, or added to the scores */
    tfast_attention_term bias; /* added to the scores; may have a gradient */
    const void *alibi_slopes;  /* [batch or 1, heads], of lse's dtype; NULL: none */
    int64_t alibi_batch;       /* heads, or 0 where all items share them */
    const void *sinks;         /* [heads], of lse's dtype: a score without a value */
    bool is_causal;            /* keys past the query's diagonal are forbidden */
    bool bottom_right; /* the diagonal is key = query + n_k - n_q, not key = query */
    int64_t window_left, window_right; /* keys at most so far from the diagonal;
                                          negative: any */
    double scale;           /* of a size up to 1e37, or 1e300 where dtype is float64 */
    double softcap;         /* scores become softcap * tanh(score / softcap); 0: off;
                               otherwise it, and what scale is of it, in that range */
    double dropout_p;       /* in [0, 1) */
    int64_t seed;           /* of the dropout */
    const int64_t *seed_at; /* on the device, in place of seed; NULL: none */

    /* Backward only. A gradient with data NULL is not wanted. */
    tfast_attention_rows dout;
    const void *dlse; /* strides and dtype of lse; NULL: 0 */
    tfast_attention_rows dq, dk, dv;
    void *dbias;             /* of lse's dtype; written, not added to */
    int64_t dbias_stride[4]; /* 0 where the bias is broadcast: summed over it */
    void *dalibi;            /* as alibi_slopes */
    void *dsinks;            /* as sinks */

    void *scratch; /* on the device, for this call alone: what tfast_attention_scratch()
                      says, its contents of no matter; NULL where that is nothing */
    int64_t scratch_bytes; /* that it has */

    uint8_t dtype; /* of q, k, v, out, dout, dq, dk, dv */
    tfast_device device;
    void *stream;
} tfast_attention_args;

enum { TFAST_ATTENTION_MAX_DIM = 256 };

/* For each query i of a head, over the keys j that causal, window, kv_lens and a bool
 * mask allow:
 *
 *   s_j = scale * q_i . k_j                       softcap * tanh(s_j / softcap) if set
 *   s_j = s_j + mask_ij + bias_ij - alibi_slope * |i + shift - j|
 *   l   = sum_j exp(s_j) + exp(sink)              lse_i = log(l)
 *   out_i = sum_j keep_ij / (1 - dropout_p) * exp(s_j) / l * v_j
 *
 * where shift is 0, or with bottom_right n_k - n_q, of the item's own lengths (kv_lens,
 * cu_seqlens). Causal allows j <= i + shift, the window i + shift - window_left <= j <=
 * i + shift + window_right. A row without an allowed key has output 0, gradient 0 and
 * lse -infinity. Keys with a score, mask or bias of -infinity are forbidden; NaN or
 * infinity in a key or value reaches only queries that may look at it. Arithmetic is
 * float32 (float64 where dtype is), but for the weights and gradients of scores that
 * tensor cores, or a CPU's AVX512_BF16, multiply, which are of dtype; same inputs give
 * the same bits for any number of threads.
 *
 * Dropout drops element (b, h, i, j) where a 16-bit number is below
 * round(dropout_p * 65536): with r = i / 16 * 8 + i % 8 and c = j / 16 * 4 + j % 8 / 2,
 * of Philox4x32-10's words for counter (r, c, b * heads + h, 0) and key (seed's low 32
 * bits, its high ones), word i / 8 % 2 * 2 + j / 8 % 2, its high half for odd j. (Which
 * is how a tensor core's accumulator lies in threads.) The others are multiplied by
 * 65536 / (65536 - that number).
 *
 * The algorithm: Dao, arXiv:2307.08691. */
tfast_status tfast_attention(const tfast_attention_args *args);
tfast_status tfast_attention_backward(const tfast_attention_args *args);

/* The bytes that `scratch` must have for the call, 0 for none, aligned to
 * TFAST_SCRATCH_ALIGNMENT. They depend on the arguments' sizes and options, not on what
 * lies on the device. */
enum { TFAST_SCRATCH_ALIGNMENT = 16 };
tfast_status tfast_attention_scratch(int64_t *bytes, const tfast_attention_args *args,
                                     bool backward);

/* ---- Products of matrices -------------------------------------------------------- */

typedef struct {
    void *out;       /* [m, n], written */
    const void *a;   /* [m, k] */
    const void *b;   /* [k, n]; all three dense, row-major and of one dtype */
    int64_t m, n, k; /* 1 to 2^31 - 1 */
    bool allow_tf32; /* float32 inputs may be rounded to TF32 */
    uint8_t dtype;   /* float16, bfloat16 or float32 */
    tfast_device device;
    void *stream;
} tfast_gemm_args;

/* out = a b, accumulated in float32, by cuBLAS: its rate is the roof that `bench` and
 * `diagnose` compare a card with. CUDA arrays only. The first call opens cuBLAS (the
 * copy that the process has loaded, otherwise an installed one), and the first call on
 * a device creates a handle, which allocates: it must not happen during a capture. */
tfast_status tfast_gemm(const tfast_gemm_args *args);

/* ---- Backends -------------------------------------------------------------------- */

/* Changes whenever a struct in this file does: a CUDA library of another version is
 * refused. */
#define TFAST_ABI 8

/* What a backend offers: one function an operation, NULL where it has none. Entries
 * validate before they call, so a backend may trust its arguments. */
typedef struct tfast_backend {
    uint32_t abi;                  /* TFAST_ABI */
    const char *name;              /* "avx2" */
    int32_t device;                /* TFAST_CPU or TFAST_CUDA */
    const char *(*unusable)(void); /* NULL where it can run here, otherwise why not */
    void (*workspace_clear)(void *data);
    tfast_status (*adamw)(const tfast_adamw_args *args);
    tfast_status (*adamw_prepare)(const tfast_adamw_args *args); /* NULL: needs none */
    tfast_status (*amp_grads)(const tfast_amp_grads_args *args);
    tfast_status (*amp_update)(const tfast_amp_update_args *args);
    tfast_status (*attention)(const tfast_attention_args *args);
    tfast_status (*attention_backward)(const tfast_attention_args *args);
    tfast_status (*attention_scratch)(int64_t *bytes, const tfast_attention_args *args,
                                      bool backward); /* NULL: none is needed */
    tfast_status (*gemm)(const tfast_gemm_args *args);
} tfast_backend;

/* The one symbol that a library with a backend exports: the CUDA library, and `simt`
 * and `wide` of the tests. It calls `fail` to set a message, and returns NULL unless
 * `abi` is its own TFAST_ABI. */
typedef tfast_status (*tfast_fail_function)(tfast_status, const char *, ...);
typedef const tfast_backend *(*tfast_library_open_function)(uint32_t abi,
                                                            tfast_fail_function fail);
#define TFAST_LIBRARY_OPEN "tfast_library_open"

/* Makes the choice for the CPU: the best usable backend, or the one that the
 * environment variable TRAINFAST_BACKEND names. Called once, when the module is loaded.
 */
tfast_status tfast_backend_init(void);

/* The backend for arrays on this kind of device, or NULL with the message set. The
 * first call for TFAST_CUDA opens the CUDA library. */
const tfast_backend *tfast_backend_for(int32_t device_type);

/* The graph cache's kernels for this CPU's best instruction set, or for the one whose
 * backend is forced. Never NULL. */
const tfast_graph_kernels *tfast_graph_kernels_in_use(void);

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
