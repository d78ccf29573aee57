/* Attention's forward for few queries and many keys: which calls, how they are divided,
 * and their launches. */
#include "attention.h"

/* Enough blocks for two on each of 132 multiprocessors. With fewer keys a split than
 * the least, results would be a larger part of what is read and written. */
enum { DECODE_MAX_TILES = 4, DECODE_BLOCKS = 264, DECODE_LEAST_KEYS = 128 };

/* Whether the queries are so few that it pays to split the keys: where one tile of rows
 * does, where several read them less often than a block for every head, or where such
 * blocks would be few. `path` is tfast_mma_path()'s. */
static bool
is_taken(const tfast_attention_args *args, int path)
{
    const int64_t heads = args->batch * args->heads;
    int64_t group, tiles;

    if (path == 0 || args->n_q == 0 || args->n_k < 2 * DECODE_LEAST_KEYS ||
        heads > MMA_MAX_BLOCKS / args->n_q) {
        return false;
    }
    group = args->heads / args->kv_heads;
    tiles = divided_up(args->n_q * group, DECODE_ROWS);
    return tiles <= DECODE_MAX_TILES && (tiles <= group || heads < DECODE_BLOCKS / 2);
}

static decode_plan
plan_of(const tfast_attention_args *args)
{
    const int64_t rows = args->n_q * (args->heads / args->kv_heads);
    const int64_t tiles = divided_up(rows, DECODE_ROWS);
    const int64_t works = args->batch * args->kv_heads * tiles;
    const int64_t wanted = divided_up(DECODE_BLOCKS, works);
    const int64_t most = args->n_k / DECODE_LEAST_KEYS;

    return (decode_plan){rows, tiles, wanted < most ? wanted : most,
                         divided_up(args->dim_v, 4) * 4};
}

/* Rows of results: one for each row of queries and each split. */
static int64_t
results_of(const tfast_attention_args *args, decode_plan plan)
{
    return args->batch * args->kv_heads * plan.rows * plan.splits;
}

int64_t
tfast_decode_results(const tfast_attention_args *args, int path)
{
    if (!is_taken(args, path)) {
        return 0;
    }
    const decode_plan plan = plan_of(args);
    return results_of(args, plan) * (plan.pitch + 2) * (int64_t)sizeof(float);
}

static decode_call
call_of(const tfast_attention_args *args, int path)
{
    const attention_scratch scratch = tfast_attention_scratch_of(args, path, false);
    const decode_plan plan = plan_of(args);
    float *sums = (float *)((char *)args->scratch + scratch.results);

    return (decode_call){tfast_mma_forward_call(args, path), plan, sums,
                         (float2 *)(sums + results_of(args, plan) * plan.pitch)};
}

tfast_status
tfast_decode_attention(bool *taken, const tfast_attention_args *args)
{
    const int64_t dim = args->dim > args->dim_v ? args->dim : args->dim_v;
    const int64_t heads = args->batch * args->kv_heads;
    int path, kernel;
    tfast_status status = tfast_mma_path(&path, args);

    *taken = status == TFAST_OK && is_taken(args, path);
    if (!*taken) {
        return status;
    }
    const decode_call call = call_of(args, path);
    kernel = tfast_mma_kernel(
        args, path, KERNEL_decode_75_mma_f16_64, KERNEL_decode_75_mma_bf16_as_f16_64,
        KERNEL_decode_80_mma_f16_64, KERNEL_decode_80_mma_bf16_64);
    kernel += dim <= 64 ? 0 : (int)divided_up(dim, 64) - 1;
    status = tfast_mma_find_exponents(&call.mma, EXPONENT_V + 1);
    if (status == TFAST_OK) {
        status = LAUNCH(kernel, heads * call.plan.splits * call.plan.tiles,
                        args->stream, call);
    }
    if (status == TFAST_OK) {
        status =
            LAUNCH(KERNEL_decode_combine, heads * call.plan.rows, args->stream, call);
    }
    return status;
}
