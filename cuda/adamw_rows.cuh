/* The list of slots as the AdamW kernel reads it: one row a slot, and where each slot's
 * work items begin. A work item is what one warp does at a time: about ITEM elements of
 * one slot, cut where all of the slot's arrays are aligned for vectors. */
#ifndef TFAST_ADAMW_ROWS_CUH
#define TFAST_ADAMW_ROWS_CUH

#include "common.cuh"

/* Elements of a work item: enough to hide the look-up of its row, few enough that the
 * last round of warps ends together (50 million elements are 6 rounds on an H200). A
 * multiple of every vector. */
enum { ITEM = 2048 }; /* 2^31 of them would be 4 * 10^12 elements: an int counts them */

enum { NO_VECTORS = 255 }; /* an adamw_row.head */

struct alignas(16) adamw_row {
    void *param;
    void *grad;
    void *exp_avg;
    void *exp_avg_sq;
    void *max_exp_avg_sq; /* null without amsgrad */
    void *ema;            /* these two null where not wanted */
    void *copy;
    float *step; /* null: the launch's own */
    int64_t numel;
    int first_item; /* counted over all rows */
    int end_item;
    uint8_t param_dtype;
    uint8_t grad_dtype;
    uint8_t state_dtype;
    uint8_t ema_dtype;
    uint8_t copy_dtype;
    uint8_t head; /* elements before the first aligned vector, or NO_VECTORS */
};

/* In device memory, with as many rows as there are slots. */
struct alignas(16) adamw_table {
    uint32_t blocks_done; /* of the running launch; 0 between launches */
    adamw_row rows[1];
};

/* The dtypes in a list decide the kernel. Each has its reason:
 *   ALL_F32   the common case: no conversion, addresses by constant strides
 *   ALL_BF16  the common half case: 8 elements a vector keep accesses 16 bytes wide
 *   NARROW    any mix in float32 arithmetic, dtypes at run time, 4 elements a vector
 *   WIDE      float64 arithmetic somewhere: keeps its registers out of NARROW
 * Extras make a list NARROW or WIDE: their arrays would cost ALL_F32 its 64 registers
 * and so a block a multiprocessor, while NARROW has room for them. */
enum adamw_mix { ALL_F32, ALL_BF16, NARROW, WIDE, N_MIXES };

/* Of one row: its arithmetic is float64. */
template <typename SLOT>
static inline __host__ __device__ bool
adamw_is_wide(const SLOT *slot)
{
    return slot->param_dtype == TFAST_F64 || slot->state_dtype == TFAST_F64;
}

adamw_mix adamw_mix_of(const tfast_adamw_args *args);

/* Bytes of a table of n slots. */
static inline size_t
adamw_table_bytes(int64_t n)
{
    return offsetof(adamw_table, rows) + sizeof(adamw_row) * (size_t)n;
}

/* Fills a table, every byte of it, and returns how many work items it has. */
int adamw_fill_table(adamw_table *table, const tfast_adamw_args *args, adamw_mix mix);

/* Whether the table's rows, as many as there are slots, are those of the arguments. */
bool adamw_same_rows(const adamw_table *table, const tfast_adamw_args *args);

#endif
