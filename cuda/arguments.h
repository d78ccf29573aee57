/* What kernels are called with, as host and device see it: C11 and C++17. A kernel
 * takes one of these structs by value. */
#ifndef TFAST_ARGUMENTS_H
#define TFAST_ARGUMENTS_H

#include "tfast.h"

#define ALIGNED_16 __attribute__((aligned(16)))

/* ---- AdamW ----------------------------------------------------------------------- */

enum { ADAMW_THREADS = 256, ADAMW_WARPS = ADAMW_THREADS / 32 };

/* Elements of a work item: enough to hide the look-up of its row, few enough that the
 * last round of warps ends together (50 million elements are 6 rounds on an H200). A
 * multiple of every vector. */
enum { ITEM = 2048 }; /* 2^31 of them would be 4 * 10^12 elements: an int counts them */

enum { NO_VECTORS = 255 }; /* an adamw_row.head */

/* One slot, and which of the work items are its own. A work item is what one warp does
 * at a time: about ITEM elements, cut where all of the slot's arrays are aligned for
 * vectors. */
typedef struct ALIGNED_16 {
    void *param;
    void *grad;
    void *exp_avg;
    void *exp_avg_sq;
    void *max_exp_avg_sq; /* null without amsgrad */
    float *step;          /* null: the launch's own */
    float *scales;        /* null: float state */
    tfast_adamw_extra extra;
    int64_t numel;
    int first_item; /* counted over all rows */
    int end_item;
    uint8_t param_dtype;
    uint8_t grad_dtype;
    uint8_t state_dtype;
    uint8_t head; /* elements before the first aligned vector, or NO_VECTORS */
} adamw_row;

/* In device memory, with as many rows as there are slots. */
typedef struct ALIGNED_16 {
    uint32_t blocks_done; /* of the running launch; 0 between launches */
    adamw_row rows[1];
} adamw_table;

/* The dtypes in a list decide the kernel. Each has its reason:
 *   ALL_F32   the common case: no conversion, addresses by constant strides
 *   ALL_BF16  the common half case: 8 elements a vector keep accesses 16 bytes wide
 *   NARROW    any mix in float32 arithmetic, dtypes at run time, 4 elements a vector
 *   WIDE      float64 arithmetic somewhere: keeps its registers out of NARROW
 *   BLOCKS    8-bit state or parameters that are not rounded to nearest somewhere; its
 *             other slots are any mix
 * Extras make a list NARROW or WIDE: their arrays would cost ALL_F32 its 64 registers
 * and so a block a multiprocessor, while NARROW has room for them. */
typedef enum { ALL_F32, ALL_BF16, NARROW, WIDE, BLOCKS } adamw_mix;

typedef struct {
    tfast_adamw_args args;
    adamw_table *table;
    int n_items;
} adamw_call;

/* ---- AMP ------------------------------------------------------------------------- */

enum {
    AMP_THREADS = 256,
    AMP_WARPS = AMP_THREADS / 32,
    QUAD = 4 /* elements of a lane in a row */
};

typedef struct ALIGNED_16 {
    void *data;
    int64_t numel;
    int first_item; /* chunks, counted over all rows */
    int end_item;
    uint8_t dtype;
    bool vectors; /* aligned for them */
} amp_row;

/* In device memory, with as many rows as there are tensors, and behind them a double a
 * chunk. */
typedef struct ALIGNED_16 {
    uint32_t blocks_done; /* of the running launch; both 0 between launches */
    uint32_t found;       /* an element that is not finite */
    amp_row rows[1];
} amp_table;

/* What is done with the elements, besides rewriting. */
typedef enum {
    AMP_NOTHING,
    AMP_FINITE, /* only looks for infinities and NaNs */
    AMP_SQUARES,
    AMP_ABS,
    AMP_LARGEST,
    AMP_SMALLEST,
    AMP_POWERS
} amp_kind;

typedef struct {
    tfast_amp_grads_args args;
    amp_table *table;
    double *totals;
    int n_items;
    amp_kind kind;
} amp_call;

/* ---- Attention by plain multiply-adds -------------------------------------------- */

enum { PLAIN_TILE = 64, PLAIN_THREADS = 256 };

/* [batch, heads, n_q, n_k] with stride 0 where the term is broadcast. */
typedef struct {
    void *data; /* NULL where no gradient is wanted */
    int64_t stride[4];
    bool alibi; /* gradients are weighted with minus the distance */
} attention_term;

typedef struct {
    tfast_attention_args args;
    int64_t n_works;
    attention_term term;   /* these two of a term's gradient alone */
    int64_t term_tiles[4]; /* of the term, in each dimension */
} plain_call;

/* ---- Attention by tensor cores --------------------------------------------------- */

enum { EXPONENT_Q, EXPONENT_K, EXPONENT_V, EXPONENT_DOUT, EXPONENTS };
enum { EXPONENT_PARTS = 32, EXPONENT_THREADS = 128 };
enum { DELTA_ROWS = 64, DELTA_THREADS = 128, POWERS_THREADS = 256 };
enum { FAR_ROWS = 64, FAR_THREADS = 128 };

/* Exponents of one head of q: for dk and dv. */
typedef struct {
    int32_t bound;  /* of its gradients of scores, at least */
    int32_t weight; /* weights are multiplied by 2^weight, 0 or less */
    int32_t dk, dv; /* what sums are in units of, the same for all heads of a group */
} mma_head_powers;

/* The pointers are to scratch; those behind the first are the backward's. */
typedef struct {
    tfast_attention_args args;
    int32_t *exponents;      /* of bfloat16 that is multiplied as float16, or NULL */
    float *delta;            /* dout . out - dlse of each query: see number_row() */
    float *shares;           /* of each query: see share_of(); NULL: all 1 */
    int32_t *bounds;         /* of each query: its exponent */
    mma_head_powers *powers; /* [batch, heads] */
    bool chunks;             /* all rows that are read begin at multiples of 16 bytes */
    bool whole;              /* chunks, and dims are multiples of 8 */
    bool pairs;              /* all rows that are written, of 4 bytes */
} mma_call;

typedef struct {
    mma_call mma;
    int tensors; /* the first so many: EXPONENT_V + 1 or EXPONENTS */
} exponents_call;

enum { TERM_TILE = 64, SUM_THREADS = 256, SINKS_THREADS = 256 };

/* The gradient of one term. */
typedef struct {
    mma_call mma;
    attention_term term;
    int64_t tiles[4]; /* of the term, in each dimension: 1 where it is broadcast */
    int64_t walks[4]; /* over what a block walks in each dimension: 1 elsewhere */
    int64_t n_tiles, n_walks; /* in all; walks but for those over keys */
    int rows, columns; /* of a tile when it is summed up: 1 where it is broadcast */
    int64_t splits;    /* blocks that share a tile's walks */
    float *parts;      /* [splits, n_tiles, rows, columns], their sums; in scratch */
} mma_term_call;

/* ---- Attention of few queries and many keys -------------------------------------- */

enum { DECODE_ROWS = 16, COMBINE_THREADS = 256 };

/* How a call is divided: by its sizes alone, so that its results have the same bits
 * however many multiprocessors there are. */
typedef struct {
    int64_t rows;   /* of one head of keys: queries of all heads that share it */
    int64_t tiles;  /* of DECODE_ROWS of them */
    int64_t splits; /* of the keys */
    int64_t pitch;  /* from one row of sums to the next: dim_v, up to a multiple of 4 */
} decode_plan;

#ifdef __cplusplus
struct float2;
#else
typedef struct __attribute__((aligned(8))) {
    float x, y;
} float2;
#endif

/* sums: [batch, kv_heads, rows, splits, pitch], relative to the row's largest score in
 * the split. numbers: [batch, kv_heads, rows, splits], that score and the weights' sum,
 * with 0 of which the sums are not written. */
typedef struct {
    mma_call mma;
    decode_plan plan;
    float *sums;
    float2 *numbers;
} decode_call;

/* ---- Neighbours ------------------------------------------------------------------ */

enum { NEIGHBOUR_THREADS = 128, NEIGHBOUR_WARPS = NEIGHBOUR_THREADS / 32 };
enum { SCAN_THREADS = 1024 };

/* What the host reads when edges are counted. */
typedef struct {
    unsigned long long bad_point, bad_centre; /* n minus the first row that is not
                                                 finite; 0: all are */
    int64_t n_edges;
} neighbours_found;

/* The pointers are to scratch. */
typedef struct {
    tfast_neighbours_args args;
    double limit; /* of squares of distances, inclusive */
    int64_t n_centres;
    neighbours_found *found;
    const int64_t *ptr, *centres_ptr; /* copies of those in args */
    int64_t *offsets;                 /* [n_centres + 1]: each centre's first edge */
    void *points;   /* [n, 4 or 8] float; double for float64 points and for angles */
    void *centres;  /* [n_centres, 4 or 8]: the points, or like them */
    uint64_t *keys; /* these two [warps, room], for the nearest only */
    uint32_t *numbers;
    uint32_t room;
} neighbours_call;

/* ---- Trajectory metrics ---------------------------------------------------------- */

enum { TRAJECTORY_THREADS = 256, TRAJECTORY_WARPS = TRAJECTORY_THREADS / 32 };

/* Of TFAST_TRAJECTORY_BLOCK agents, as the totals: how many agents each sum has. */
typedef struct {
    double sum[TFAST_TRAJECTORY_METRICS], count[TFAST_TRAJECTORY_METRICS];
} trajectory_sums;

typedef struct {
    tfast_trajectory_args args;
    trajectory_sums *blocks; /* [n_blocks] in scratch */
    int64_t n_blocks;
} trajectory_call;

#endif
