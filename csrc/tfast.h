/* The public interface of the trainfast core: arguments, results and ownership. C11, no
 * Python, no CUDA headers.
 *
 * Conventions
 *   Order of parameters: outputs, in-outs, inputs, sizes, scalars, stream.
 *   int64_t counts elements, size_t counts bytes.
 *   The caller owns every array and keeps it alive until the call returns (CPU) or
 *   until the work it enqueued on `stream` has run (CUDA).
 *   A function that can fail returns tfast_status and validates before it writes: on
 *   any status but TFAST_OK no array has changed. Kernels have no error path.
 */
#ifndef TFAST_H
#define TFAST_H

#include "graph_kernels.h"
#include "libc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ---------------------------------------------------------------------- */

typedef enum {
    TFAST_OK = 0,
    TFAST_EINVAL,       /* ValueError: a value or shape breaks a rule */
    TFAST_ETYPE,        /* TypeError: an object of the wrong type */
    TFAST_EUNSUPPORTED, /* NotImplementedError: valid, but no backend implements it */
    TFAST_ENOMEM,       /* MemoryError */
    TFAST_EIO,          /* OSError */
    TFAST_ECUDA,        /* RuntimeError: a CUDA call failed */
    TFAST_EINTR         /* the exception of a Python signal handler, raised while
                           the call waited for a file lock (see graph_cache/io.h) */
} tfast_status;

#define TFAST_MESSAGE_BYTES 512

#if defined(__GNUC__)
#    define TFAST_PRINTF(at, first) __attribute__((format(printf, at, first)))
#else
#    define TFAST_PRINTF(at, first)
#endif

/* Sets this thread's error message and returns `status`:
 * return tfast_fail(TFAST_EINVAL, "lr must be finite and >= 0, got %g", lr).
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

enum { TFAST_CPU = 1, TFAST_CUDA = 2 }; /* DLPack's device types */

typedef struct {
    int32_t type;  /* TFAST_CPU or TFAST_CUDA */
    int32_t index; /* of the GPU; 0 for the CPU */
} tfast_device;

/* ---- Workspace ------------------------------------------------------------------- */

/* Memory that one optimizer keeps between its steps, so that a warm step allocates
 * nothing; the CUDA backend keeps its table of tensors on the device here. Both
 * fields belong to the backend; zero-initialised means empty. A workspace must not be
 * used by two threads at once, nor on two streams whose work is not ordered. */
typedef struct {
    const struct tfast_backend *backend;
    void *data;
} tfast_workspace;

/* Frees the memory of a workspace, which is empty afterwards. CUDA graphs captured with
 * this workspace must not be replayed any more. */
void tfast_workspace_clear(tfast_workspace *workspace);

/* ---- AdamW ----------------------------------------------------------------------- */

/* One parameter tensor with its gradient and optimizer state. All arrays hold `numel`
 * elements, dense and in the same dimension order, aligned to their element size. Slots
 * must not share arrays, except gradients that the call does not write. */
typedef struct {
    void *param;
    void *grad; /* written only with write_back_grads or zero_grad */
    void *exp_avg;
    void *exp_avg_sq;
    void *max_exp_avg_sq; /* NULL without amsgrad */
    float *step;          /* steps done so far; the call adds 1; NULL: use args->step */
    int64_t numel;
    uint8_t param_dtype; /* a tfast_dtype; the three dtypes are independent */
    uint8_t grad_dtype;
    uint8_t state_dtype; /* of exp_avg, exp_avg_sq and max_exp_avg_sq */
    float *scales; /* NULL, or the state is 8-bit codes: see adamw_codes.h; state_dtype
                      is then TFAST_F32, and param_dtype not float64 */
} tfast_adamw_slot;

/* Optional outputs for one slot, written in the same pass over the elements. The rules
 * for the slot's arrays apply; NULL: not wanted. With float32 master weights, the
 * slot's param is the master and `copy` is the parameter that the model reads. */
typedef struct {
    void *ema;  /* ema <- ema + (1 - ema_decay) * (param - ema), with the new param */
    void *copy; /* the new param, rounded to copy_dtype */
    /* How a half param is rounded: see adamw_half.h. */
    void *tail;
    int64_t place, row, row_stride; /* of a shard: see tfast_half_place(); else 0 */
    uint32_t index;                 /* of the parameter in its optimizer */
    uint8_t rounding;               /* a tfast_rounding; 0: to nearest */
    uint8_t ema_dtype;
    uint8_t copy_dtype;
} tfast_adamw_extra;

/* One optimizer step over a list of slots on one device. */
typedef struct {
    const tfast_adamw_slot *slots;
    const tfast_adamw_extra *extras; /* [n_slots], or NULL */
    int64_t n_slots;
    tfast_device device;
    tfast_workspace *workspace; /* NULL: a temporary one (CUDA then synchronises, and
                                   fails on a capturing stream) */
    int64_t step;        /* >= 1: the number of this step, for slots with step NULL */
    uint64_t seed;       /* of TFAST_STOCHASTIC */
    double lr;           /* finite, >= 0; ignored with lr_device */
    double beta1;        /* in [0, 1) */
    double beta2;        /* in [0, 1) */
    double eps;          /* finite, >= 0 */
    double weight_decay; /* finite, >= 0 */
    double ema_decay;    /* in [0, 1); used for slots with an ema */
    bool maximize;
    bool decoupled_weight_decay; /* AdamW; false adds weight_decay * param to the
                                    gradient */
    bool write_back_grads;       /* store grad * clip_coef / grad_scale in grad */
    bool zero_grad;              /* store 0 in grad, even if found_inf skips the step;
                                    excludes write_back_grads */
    /* NULL, or the address of one number on the slots' device: */
    const float *lr_device;  /* replaces lr */
    const float *grad_scale; /* gradients are divided by it; NULL: 1 */
    const float *found_inf;  /* non-zero skips the step: parameters, state and counters
                                keep their values */
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
 * With amsgrad the last line uses the running maximum of v. Coefficients are computed
 * in double and rounded once. Arithmetic is float64 if the parameter or its state is
 * float64, else float32. Stores round to nearest even, also to 8-bit codes, unless an
 * extra says otherwise; the last line uses m and v, and the extras use p, before that
 * rounding. The same inputs give
 * the same bits on every backend. */
tfast_status tfast_adamw(const tfast_adamw_args *args);

/* For a caller that steps several lists of slots and must not fail after the first:
 * validates the arguments and allocates the workspace memory of the step. A later
 * tfast_adamw() with the same arguments, addresses included, allocates nothing. With
 * workspace NULL the function only validates. */
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
    TFAST_AMP_MULTIPLY, /* by factor / grad_scale; if that is 1, nothing is written */
    TFAST_AMP_CLAMP     /* to [-clip_value, clip_value]; NaN stays NaN */
} tfast_amp_rewrite;

/* One pass over a list of tensors on one device, which reads each element once: checks
 * for infinities and NaNs, computes the norm of all elements, and rewrites them. A
 * result that is NULL is not computed; without any result the call only rewrites. */
typedef struct {
    const tfast_amp_tensor *tensors;
    int64_t n_tensors;
    tfast_device device;
    tfast_workspace *workspace; /* NULL: a temporary one (CUDA then synchronises, and
                                   fails on a capturing stream) */
    /* Four results on the tensors' device, each NULL or the address of one number: */
    float *found_inf;       /* 1 if an element was infinite or NaN when read, else 0 */
    float *total_norm;      /* of all elements / grad_scale, without factor */
    double *total_norm_f64; /* the same; if wanted, clip_coef is computed in float64 */
    double *clip_coef;      /* min(1, max_norm / (total norm + 1e-6)) */
    double norm_type; /* p, not 0 or NaN: (sum |x|^p)^(1/p); infinity: the largest |x|,
                         -infinity: the smallest |x| */
    double max_norm;  /* for clip_coef; any number */
    double clip_value;
    tfast_amp_rewrite rewrite;
    const float *grad_scale; /* on the tensors' device; NULL: 1 */
    const double *factor;    /* on the tensors' device; NULL: 1 */
    void *stream;
} tfast_amp_grads_args;

/* Norms as in torch.nn.utils.get_total_norm, clipping as in clip_grad_norm_. Sums are
 * added in an order that depends only on the tensors' sizes (see amp_sum.h), in float32
 * inside fixed chunks and float64 between them. The same inputs therefore give the same
 * bits for any number of threads and on every backend, except for a p that needs pow().
 */
tfast_status tfast_amp_grads(const tfast_amp_grads_args *args);

enum { TFAST_AMP_MAX_FOUND = 16 };

/* Arguments of tfast_amp_update(), which updates the loss scale at the end of an
 * iteration. Pointers to float and int32_t are addresses in `device` memory. */
typedef struct {
    float *scale;
    int32_t *growth_tracker;     /* steps since the last overflow or growth */
    int32_t *hysteresis_tracker; /* overflows until the scale backs off (0 acts as 1);
                                    NULL: every overflow backs off */
    const float *found_infs[TFAST_AMP_MAX_FOUND]; /* non-zero: an overflow */
    int32_t n_found_infs;                         /* 1 .. TFAST_AMP_MAX_FOUND */
    int32_t growth_interval;
    int32_t hysteresis; /* >= 1: the value that a step without overflow gives
                           hysteresis_tracker */
    double growth_factor;
    double backoff_factor;
    double min_scale; /* lower bound of backing off; 0: none */
    double max_scale; /* upper bound of growing; infinity: float32's range */
    tfast_device device;
    void *stream;
} tfast_amp_update_args;

/* The rule of torch.amp.GradScaler.update(), with bounds and hysteresis:
 *
 *   overflow:  growth_tracker <- 0 and hysteresis_tracker <- hysteresis_tracker - 1, at
 *              least 0; at 0 scale <- max(scale * backoff_factor, min_scale)
 *   otherwise: hysteresis_tracker <- hysteresis; after growth_interval such steps
 *              scale <- min(scale * growth_factor, max_scale), growth_tracker <- 0
 *
 * Products are computed in double and rounded to float32; if a product is not finite,
 * the scale is kept. Backing off never raises the scale, and growing never lowers it,
 * even if the scale is already beyond a bound. */
tfast_status tfast_amp_update(const tfast_amp_update_args *args);

/* ---- Attention ------------------------------------------------------------------- */

/* One tensor of args->dtype. Element d of row n of head h of batch item b is
 * data[b * batch + h * head + n * row + d]. */
typedef struct {
    void *data;
    int64_t batch, head, row; /* in elements, >= 0 */
} tfast_attention_rows;

enum { TFAST_BOOL = TFAST_N_DTYPES }; /* a dtype of masks only: one byte, 0 or 1 */

/* A mask or bias, broadcast to the scores [batch, head, query, key]. */
typedef struct {
    const void *data;  /* NULL: none */
    int64_t stride[4]; /* in elements; 0 in a broadcast dimension */
    uint8_t dtype;     /* tfast_dtype, or TFAST_BOOL: 0 forbids the key */
} tfast_attention_term;

/* Scaled dot-product attention, forward and backward. With variable lengths the batch
 * strides of q, k, v, out and their gradients are ignored: batch item b has the rows
 * cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of the packed tensor. */
typedef struct {
    tfast_attention_rows q, k, v;
    tfast_attention_rows out; /* forward writes it, backward reads it */
    void *lse;                /* [batch, heads, n_q] or [heads, total_q]: log-sum-exp of
                                 each row of scores, -infinity for a row without an
                                 allowed key. float64 if dtype is, else float32. NULL:
                                 not wanted (forward only) */
    int64_t lse_batch, lse_head; /* strides of lse; its rows have stride 1 */

    int64_t batch, heads, kv_heads; /* heads is a multiple of kv_heads */
    int64_t n_q, n_k;   /* with cu_seqlens: upper bounds of an item's rows. The entry
                         reduces them before it calls the backend: to the longest item
                         on the CPU, to at most total_q and total_k on a GPU */
    int64_t dim, dim_v; /* 1 .. TFAST_ATTENTION_MAX_DIM */
    const int64_t *cu_seqlens_q, *cu_seqlens_k; /* [batch + 1]; both or neither */
    int64_t total_q, total_k; /* with cu_seqlens: rows of the packed tensors; rows past
                                 the last item are neither read nor written */
    const int64_t *kv_lens;   /* [batch]: how many of the item's keys are allowed, at
                                 most all; NULL: all */

    tfast_attention_term mask; /* bool, or added to the scores */
    tfast_attention_term bias; /* added to the scores; may have a gradient */
    const void *alibi_slopes;  /* [batch or 1, heads], of lse's dtype; NULL: none */
    int64_t alibi_batch;       /* batch stride: heads, or 0 if items share slopes */
    const void *sinks;         /* [heads], of lse's dtype: one more score in each row's
                                  softmax, without a value; NULL: none */
    bool is_causal;            /* keys past the query's diagonal are forbidden */
    bool bottom_right; /* the diagonal is key = query + n_k - n_q, not key = query */
    int64_t window_left, window_right; /* largest distance of a key from the diagonal;
                                          negative: unlimited */
    double scale;           /* |scale| <= 1e37, or 1e300 if dtype is float64 */
    double softcap;         /* scores become softcap * tanh(score / softcap); 0: off;
                               else softcap, 1 / softcap and |scale| / softcap must be
                               within the bound of scale */
    double dropout_p;       /* in [0, 65535 / 65536] */
    int64_t seed;           /* of dropout */
    const int64_t *seed_at; /* on the device, replaces seed; NULL: use seed */

    /* Backward only. A gradient with data NULL is not wanted. */
    tfast_attention_rows dout;
    const void *dlse; /* strides and dtype of lse; NULL: 0 */
    tfast_attention_rows dq, dk, dv;
    void *dbias;             /* of lse's dtype; overwritten, not accumulated */
    int64_t dbias_stride[4]; /* 0: sum the gradient over this broadcast dimension */
    void *dalibi;            /* shape and dtype of alibi_slopes */
    void *dsinks;            /* shape and dtype of sinks */

    void *scratch; /* uninitialised memory on the device that no concurrent call uses,
                      of the size that tfast_attention_scratch() returns; NULL if 0 */
    int64_t scratch_bytes; /* size of `scratch` */

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
 * where shift is 0, or with bottom_right n_k - n_q, with the item's own lengths
 * (kv_lens, cu_seqlens). Causal allows j <= i + shift; the window allows i + shift -
 * window_left <= j <= i + shift + window_right. A row without an allowed key has output
 * 0, gradient 0 and lse -infinity. A score, mask or bias of -infinity forbids the key.
 * NaN or infinity in a key or value affects only queries for which the key is allowed,
 * or forbidden by an infinity in q or k alone.
 * Arithmetic is float32, or float64 if dtype is; but the probabilities and gradients of
 * scores that tensor cores or AVX512_BF16 multiply are rounded to dtype. The same
 * inputs give the same bits for any number of threads.
 *
 * Dropout drops element (b, h, i, j) if its 16-bit random number is below
 * t = round(dropout_p * 65536), and multiplies the others by 65536 / (65536 - t). The
 * random number is a half of word i / 8 % 2 * 2 + j / 8 % 2 of Philox4x32-10 with
 * counter (i / 16 * 8 + i % 8, j / 16 * 4 + j % 8 / 2, b * heads + h, 0) and key (low
 * 32 bits of seed, high 32 bits): the high half for odd j, else the low half. One
 * counter serves the 8 elements that a GPU thread holds in two m16n8 accumulators.
 *
 * The algorithm: Dao, arXiv:2307.08691. */
tfast_status tfast_attention(const tfast_attention_args *args);
tfast_status tfast_attention_backward(const tfast_attention_args *args);

/* Sets *bytes to the size that `scratch` must have for the call (0: none), aligned to
 * TFAST_SCRATCH_ALIGNMENT. The size depends on the sizes and options in `args`, not on
 * the contents of arrays. */
enum { TFAST_SCRATCH_ALIGNMENT = 16 };
tfast_status tfast_attention_scratch(int64_t *bytes, const tfast_attention_args *args,
                                     bool backward);

/* ---- Matrix product -------------------------------------------------------------- */

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

/* out = a b by cuBLAS, accumulated in float32, on CUDA arrays only. `bench` and
 * `diagnose` use its FLOP/s as the practical peak of a GPU. The first call opens cuBLAS
 * (the copy that the process has loaded, otherwise an installed one). The first call on
 * a device creates a handle, which allocates, so it must not be captured. */
tfast_status tfast_gemm(const tfast_gemm_args *args);

/* ---- Neighbours ------------------------------------------------------------------ */

enum { TFAST_MAX_POINT_DIM = 8 };

/* Points of several graphs, packed. Coordinate d of row i is
 * data[i * row + d * column]; graph g has the rows ptr[g] .. ptr[g + 1] - 1. */
typedef struct {
    const void *data;
    int64_t row, column; /* strides in elements */
    int64_t n;
    const int64_t *ptr; /* [n_graphs + 1], from 0 to n, not decreasing */
} tfast_points;

/* A search for neighbours: for each centre, the points of its graph that are within
 * `radius`. tfast_neighbours_count() sets n_edges; the caller then provides the arrays
 * that tfast_neighbours_fill() writes. */
typedef struct {
    /* [n_edges], ordered by centre, then by neighbour: */
    void *neighbour, *centre; /* rows of `points` and of `centres`: int64, or int32
                                 with short_indices */
    void *distance;           /* of dtype; NULL: not wanted, also below */
    void *relative_position;  /* [n_edges, dim]: the neighbour's minus the centre's */
    void *unit_vector;        /* [n_edges, dim]: that divided by distance, 0 for 0 */
    int64_t n_edges;

    tfast_points points;
    tfast_points centres; /* data NULL: the points are the centres */
    int64_t n_graphs;
    int64_t dim;   /* 1 .. TFAST_MAX_POINT_DIM */
    double radius; /* >= 0 or infinity */
    int64_t most;  /* at most so many neighbours of a centre, the nearest, of equally
                      near ones those in front; negative: all */
    bool below;    /* distance < radius instead of <= */
    bool first;    /* of too many neighbours keep those in front, not the nearest */
    bool loop;     /* where the points are the centres: each is its own neighbour,
                      beside the others that `most` counts */
    bool unit;     /* points are divided by their norms first: order by angle */
    bool short_indices;
    uint8_t dtype;
    void *scratch; /* as tfast_attention_args has it, kept until the search has ended */
    int64_t scratch_bytes;
    tfast_device device; /* of the points, but every ptr is on the CPU */
    void *stream;
} tfast_neighbours_args;

typedef struct tfast_neighbours_plan tfast_neighbours_plan;

/* The squared distance is the sum, in the order of dimensions, of squared differences
 * of coordinates, all in float64; it is compared with radius * radius in float64. Thus
 * the same input gives the same edges on every backend and for any number of threads.
 *
 * TFAST_EINVAL for coordinates that are not finite. On success the caller ends the plan
 * with tfast_neighbours_end(), whether it fills or not. Counting waits for a GPU, on a
 * stream that does not capture. */
tfast_status tfast_neighbours_scratch(int64_t *bytes,
                                      const tfast_neighbours_args *args);
tfast_status tfast_neighbours_count(tfast_neighbours_plan **plan,
                                    tfast_neighbours_args *args);
tfast_status tfast_neighbours_fill(tfast_neighbours_plan *plan,
                                   const tfast_neighbours_args *args);
void tfast_neighbours_end(tfast_neighbours_plan *plan); /* NULL is allowed */

/* ---- Trajectory metrics ---------------------------------------------------------- */

/* What the metrics mean; see tfast_trajectory(). */
typedef enum {
    TFAST_TRAJECTORY_SEED = 0,
    TFAST_TRAJECTORY_AV2,
    TFAST_TRAJECTORY_NUSCENES
} tfast_trajectory_definition;

/* Columns of the results. */
enum {
    TFAST_ADE = 0,
    TFAST_FDE,
    TFAST_MIN_ADE,
    TFAST_MIN_FDE,
    TFAST_MISS,
    TFAST_BRIER_MIN_ADE,
    TFAST_BRIER_MIN_FDE,
    TFAST_TRAJECTORY_METRICS
};
enum { TFAST_TRAJECTORY_BLOCK = 64 }; /* agents that are added up before blocks are */

/* Predicted trajectories of `n` agents and what happened. Strides are in elements and
 * may have any sign. */
typedef struct {
    double *totals; /* [2, METRICS], dense: sums over agents, then how many agents each
                       sum has */
    double *agents; /* [n, METRICS], dense; NaN where an agent lacks a metric; NULL:
                       not wanted */
    const void *pred;          /* [n, modes, steps, dim] */
    const void *target;        /* [n, steps, dim] */
    const bool *mask;          /* [n, steps]: true: the step counts; NULL: all do */
    const void *probabilities; /* [n, modes], in [0, 1] or NaN; NULL: none */
    int64_t pred_stride[4], target_stride[3], mask_stride[2], probability_stride[2];
    int64_t n, modes, steps;
    int64_t dim;           /* 2 or 3 */
    int64_t top_k;         /* min_ and miss look at this many most probable modes; 0:
                              at all; below `modes` only with probabilities */
    double miss_threshold; /* >= 0 */
    tfast_trajectory_definition definition;
    bool strict_final; /* the final step is the last one, and agents for which it does
                          not count have no FDE; else the last step that counts */
    uint8_t pred_dtype, target_dtype, probability_dtype; /* tfast_dtype */
    void *scratch; /* as tfast_attention_args has it */
    int64_t scratch_bytes;
    tfast_device device;
    void *stream;
} tfast_trajectory_args;

/* Of one agent, with d the distance between prediction and target at a step, ade the
 * mean of d over the steps that count, fde the d of the final step, largest the largest
 * d, p the probability of a mode, and the most probable mode the first one without
 * probabilities (of equal ones the first, here and in top_k):
 *
 *   ADE, FDE        ade and fde of the most probable mode
 *   minADE, minFDE  least ade and least fde; av2: ade of the mode with the least fde
 *   miss            1 or 0: FDE > threshold; av2: minFDE > threshold; nuscenes: the
 *                   least `largest` >= threshold
 *   brier-minADE    minADE + (1 - p)^2 of the mode that minADE is of; brier-minFDE
 *                   likewise; absent without probabilities
 *
 * An agent without a step that counts has no metric. One whose final step does not
 * count lacks FDE, minFDE, brier-minFDE and seed's and av2's miss, with av2 also minADE
 * and brier-minADE. NaN in a step that counts (or inf - inf) of a mode that is looked
 * at, or in a probability, makes all metrics of the agent NaN; steps that do not count
 * and modes that are not looked at are not read, or have no effect.
 *
 * Distances are float32, or float64 if pred or target is, with a relative error below
 * 2^-22 (2^-51) while squares neither overflow nor underflow. Sums are float64, in an
 * order that depends on n and steps alone: the same inputs give the same bits for any
 * number of threads and on every backend. On a GPU a probability outside of [0, 1] is
 * as NaN; on the CPU it is TFAST_EINVAL. */
tfast_status tfast_trajectory_scratch(int64_t *bytes,
                                      const tfast_trajectory_args *args);
tfast_status tfast_trajectory(const tfast_trajectory_args *args);

/* ---- Backends -------------------------------------------------------------------- */

/* Raise it whenever a struct in this file changes: a backend library that was built
 * with another value is refused. */
#define TFAST_ABI 13

/* A backend: one function for each operation, NULL if it lacks the operation. The
 * tfast_ functions validate the arguments before they call a backend. */
typedef struct tfast_backend {
    uint32_t abi;                  /* TFAST_ABI */
    const char *name;              /* "avx2" */
    int32_t device;                /* TFAST_CPU or TFAST_CUDA */
    const char *(*unusable)(void); /* NULL if it can run here, else the reason */
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
    tfast_status (*neighbours_scratch)(
        int64_t *bytes, const tfast_neighbours_args *args); /* the same */
    tfast_status (*neighbours_count)(tfast_neighbours_plan **plan,
                                     tfast_neighbours_args *args);
    tfast_status (*trajectory_scratch)(
        int64_t *bytes, const tfast_trajectory_args *args); /* the same */
    tfast_status (*trajectory)(const tfast_trajectory_args *args);
} tfast_backend;

/* The function that a backend library exports (the CUDA library; `simt` and `wide` of
 * the tests). It returns its backend, or NULL unless `abi` is the TFAST_ABI that the
 * library was built with. The library sets error messages through `fail`. */
typedef tfast_status (*tfast_fail_function)(tfast_status, const char *, ...);
typedef const tfast_backend *(*tfast_library_open_function)(uint32_t abi,
                                                            tfast_fail_function fail);
#define TFAST_LIBRARY_OPEN "tfast_library_open"

#ifdef __cplusplus
}
#endif
#endif
