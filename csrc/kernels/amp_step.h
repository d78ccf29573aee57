/* One pass over a list of gradients on the CPU, and the loss scale. The gradients'
 * chunks, laid end to end, are cut into one contiguous run a thread; what a chunk sums
 * up to is kept, and added up in the order of amp_sum.h when all are there.
 *
 * A second pass over gradients goes the way of the first, though only their end can be
 * in the cache still. On a Zen 5 with 32 MB of last-level cache a step of 4 to 48 MB of
 * gradients was as fast from their end to their beginning, within 0.5 %. Clipping chunk
 * by chunk from the end was 1 to 3 % faster for 4 and 8 MB, and 6 to 14 % slower for 16
 * to 48; tensor by tensor from the last it was as fast. */

enum {
    TENSOR_COST = 256,     /* what entering a tensor costs, in elements */
    AMP_PART_COST = 131072 /* elements worth waking another thread */
};

typedef enum {
    AMP_SQUARES, /* also where only infinities and NaNs are looked for */
    AMP_ABS,
    AMP_LARGEST,
    AMP_SMALLEST,
    AMP_POWERS
} amp_kind;

typedef struct {
    const tfast_amp_grads_args *args;
    amp_kind kind;
    bool rewrites, clamp;
    double number; /* what elements are multiplied by or held to */
    double *sums;  /* one a chunk; NULL where no result is wanted */
    int64_t chunks;
    int64_t cost;      /* of all tensors */
    atomic_bool found; /* an element that is not finite */
} amp_job;

static int64_t
amp_chunks(int64_t numel)
{
    return (numel + TFAST_AMP_CHUNK - 1) / TFAST_AMP_CHUNK;
}

/* ---- Sums ------------------------------------------------------------------------ */

/* x, which is >= 0 or NaN, joins a sum or an extreme, which stays NaN. */
static inline double
amp_join(amp_kind kind, double sum, double x, double norm_type)
{
    switch (kind) {
    case AMP_SQUARES:
        return fma(x, x, sum);
    case AMP_ABS:
        return sum + x;
    case AMP_LARGEST:
        return x > sum || x != x ? x : sum;
    case AMP_SMALLEST:
        return x < sum || x != x ? x : sum;
    default:
        return sum + pow(x, norm_type);
    }
}

/* A chunk in float64, element by element, with a look at each: for powers, and where a
 * quick sum is not finite. */
static double
amp_slow_sum(amp_job *job, const tfast_amp_tensor *tensor, int64_t first, int n)
{
    const amp_kind kind = job->kind;
    double tile[TILE], lanes[TFAST_AMP_LANES];
    bool finite = true;

    for (int l = 0; l < TFAST_AMP_LANES; l++) {
        lanes[l] = kind == AMP_SMALLEST ? (double)INFINITY : 0;
    }
    for (int at = 0; at < n; at += TILE) {
        const int count = n - at < TILE ? n - at : TILE;

        tile_read_f64(tile, tensor->data, tensor->dtype, first + at, count);
        for (int i = 0; i < count; i++) {
            double *lane = &lanes[i % TFAST_AMP_LANES];
            *lane = amp_join(kind, *lane, fabs(tile[i]), job->args->norm_type);
            finite = finite && isfinite(tile[i]);
        }
    }
    if (!finite) {
        atomic_store_explicit(&job->found, true, memory_order_relaxed);
    }
    if (kind != AMP_LARGEST && kind != AMP_SMALLEST) {
        return amp_fold_f64(lanes);
    }
    for (int l = 1; l < TFAST_AMP_LANES; l++) {
        lanes[0] = amp_join(kind, lanes[0], lanes[l], 0);
    }
    return lanes[0];
}

static double
amp_chunk_sum(amp_job *job, const tfast_amp_tensor *tensor, int64_t first, int n)
{
    const bool wide = tensor->dtype == TFAST_F64;
    const bool largest = job->kind == AMP_LARGEST;
    double sum;

    switch (job->kind) {
    case AMP_SQUARES:
        sum = wide ? amp_squares_f64(tensor, first, n)
                   : amp_squares_f32(tensor, first, n);
        break;
    case AMP_ABS:
        sum = wide ? amp_abs_sum_f64(tensor, first, n)
                   : amp_abs_sum_f32(tensor, first, n);
        break;
    case AMP_LARGEST:
    case AMP_SMALLEST:
        sum = wide ? amp_extreme_f64(tensor, first, n, largest)
                   : amp_extreme_f32(tensor, first, n, largest);
        break;
    default:
        sum = (double)NAN;
    }
    return isfinite(sum) ? sum : amp_slow_sum(job, tensor, first, n);
}

/* The sum over all chunks. */
static double
amp_total(const amp_job *job)
{
    double sums[TFAST_AMP_SUMS] = {0};

    if (job->kind == AMP_LARGEST || job->kind == AMP_SMALLEST) {
        sums[0] = job->sums[0];
        for (int64_t i = 1; i < job->chunks; i++) {
            sums[0] = amp_join(job->kind, sums[0], job->sums[i], 0);
        }
        return sums[0];
    }
    for (int64_t i = 0; i < job->chunks; i++) {
        sums[i % TFAST_AMP_SUMS] += job->sums[i];
    }
    for (int half = TFAST_AMP_SUMS / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) {
            sums[k] += sums[k + half];
        }
    }
    return sums[0];
}

/* ---- The pass -------------------------------------------------------------------- */

/* Elements first .. end - 1, chunk by chunk, so that a chunk is still in the cache when
 * it is rewritten. The first chunk's number is `chunk`. */
static void
amp_span(amp_job *job, const tfast_amp_tensor *tensor, int64_t first, int64_t end,
         int64_t chunk)
{
    for (; first < end; first += TFAST_AMP_CHUNK, chunk++) {
        const int n =
            end - first < TFAST_AMP_CHUNK ? (int)(end - first) : TFAST_AMP_CHUNK;

        if (job->sums != NULL) {
            job->sums[chunk] = amp_chunk_sum(job, tensor, first, n);
        }
        if (job->rewrites && tensor->dtype == TFAST_F64) {
            amp_rewrite_f64(tensor, first, n, job->clamp, job->number);
        } else if (job->rewrites) {
            amp_rewrite_f32(tensor, first, n, job->clamp, job->number);
        }
    }
}

static void
amp_part(void *context, int part, int parts)
{
    amp_job *job = context;
    const tfast_amp_grads_args *args = job->args;
    const int64_t from = part_begin(job->cost, part, parts);
    const int64_t to = part_begin(job->cost, part + 1, parts);
    int64_t at = 0, chunk = 0;

    for (int64_t i = 0; i < args->n_tensors && at < to; i++) {
        const tfast_amp_tensor *tensor = &args->tensors[i];
        const int64_t first = part_cut(from - at, tensor->numel, TFAST_AMP_CHUNK);
        const int64_t end = part_cut(to - at, tensor->numel, TFAST_AMP_CHUNK);

        if (first < end) {
            amp_span(job, tensor, first, end, chunk + first / TFAST_AMP_CHUNK);
        }
        at += tensor->numel + TENSOR_COST;
        chunk += amp_chunks(tensor->numel);
    }
}

static amp_kind
amp_kind_of(const tfast_amp_grads_args *args)
{
    const double p = args->norm_type;

    if (args->total_norm == NULL && args->total_norm_f64 == NULL &&
        args->clip_coef == NULL) {
        return AMP_SQUARES;
    }
    if (isinf(p)) {
        return p > 0 ? AMP_LARGEST : AMP_SMALLEST;
    }
    return p == 2 ? AMP_SQUARES : p == 1 ? AMP_ABS : AMP_POWERS;
}

static amp_job
amp_job_of(const tfast_amp_grads_args *args, double factor, double scale)
{
    amp_job job = {.args = args, .kind = amp_kind_of(args)};

    job.rewrites = args->rewrite != TFAST_AMP_READ;
    /* torch: a bound that is NaN makes everything NaN */
    job.clamp = args->rewrite == TFAST_AMP_CLAMP && !isnan(args->clip_value);
    job.number = args->rewrite == TFAST_AMP_CLAMP ? args->clip_value
                                                  : tfast_amp_multiplier(factor, scale);
    for (int64_t i = 0; i < args->n_tensors; i++) {
        job.chunks += amp_chunks(args->tensors[i].numel);
        job.cost += args->tensors[i].numel + TENSOR_COST;
    }
    return job;
}

/* Without elements the norm is 0 for every norm_type. */
static void
amp_write_results(amp_job *job, double scale)
{
    const tfast_amp_grads_args *args = job->args;
    const double norm =
        job->chunks == 0 ? 0 : tfast_amp_norm(amp_total(job), args->norm_type, scale);

    if (args->found_inf != NULL) {
        *args->found_inf = atomic_load(&job->found) ? 1.0f : 0.0f;
    }
    if (args->total_norm != NULL) {
        *args->total_norm = (float)norm;
    }
    if (args->total_norm_f64 != NULL) {
        *args->total_norm_f64 = norm;
    }
    if (args->clip_coef != NULL) {
        *args->clip_coef =
            tfast_amp_clip_coef(norm, args->max_norm, args->total_norm_f64 != NULL);
    }
}

static tfast_status
amp_grads(const tfast_amp_grads_args *args)
{
    const double factor = args->factor != NULL ? *args->factor : 1.0;
    const double scale = args->grad_scale != NULL ? *args->grad_scale : 1.0;
    const bool wanted = args->found_inf != NULL || args->total_norm != NULL ||
                        args->total_norm_f64 != NULL || args->clip_coef != NULL;
    amp_job job = amp_job_of(args, factor, scale);

    if (wanted) {
        job.sums = tfast_scratch_take((size_t)(job.chunks + 1) * sizeof *job.sums);
        if (job.sums == NULL) {
            return tfast_fail(TFAST_ENOMEM, "no memory for the sums of %lld chunks",
                              (long long)job.chunks);
        }
    }
    if (wanted || job.rewrites) {
        tfast_parallel(parts_worth(job.cost, AMP_PART_COST), amp_part, &job);
    }
    if (wanted) {
        amp_write_results(&job, scale);
    }
    tfast_scratch_give(job.sums);
    return TFAST_OK;
}

static tfast_status
amp_update(const tfast_amp_update_args *args)
{
    tfast_amp_update_scale(args);
    return TFAST_OK;
}
