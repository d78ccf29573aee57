/* Attention backward: where the gradient of a bias is summed. */

/* How many tasks are enough, how many items a group has at least, and how many bytes
 * the groups' sums have at most: joining them takes a small part of the time. */
enum {
    ATTENTION_GROUP_TASKS = 32,
    ATTENTION_GROUP_ITEMS = 8,
    ATTENTION_GROUP_BYTES = 4 << 20
};

/* Elements that the gradient has, and over which it lies. */
static void
attention_dbias_size(const tfast_attention_args *args, int64_t n[4], int64_t *elements,
                     int64_t *extent)
{
    const int64_t full[4] = {args->batch, args->heads, args->n_q, args->n_k};
    const int64_t *stride = args->dbias_stride;

    *elements = *extent = 1;
    for (int d = 0; d < 4; d++) {
        n[d] = stride[d] == 0 ? 1 : full[d];
        *elements *= n[d];
        *extent += (n[d] - 1) * stride[d];
    }
}

/* Into how many groups the items are dealt out where all share the bias: each times
 * `heads` makes tasks. Sizes alone say it, as the sums depend on it. */
static int
attention_dbias_groups(const tfast_attention_args *args, int64_t heads, size_t *bytes)
{
    const int64_t size = args->dtype == TFAST_F64 ? 8 : 4;
    int64_t n[4], elements, extent, most, least = 0;

    if (args->dbias == NULL || args->dbias_stride[0] != 0 || heads == 0) {
        return 1;
    }
    for (int d = 1; d < 4; d++) {
        least = attention_min(least, args->dbias_stride[d]);
    }
    attention_dbias_size(args, n, &elements, &extent);
    if (least < 0 || elements == 0 || elements != extent ||
        extent > ATTENTION_GROUP_BYTES / size) {
        return 1;
    }
    *bytes = (size_t)attention_round_up(extent * size, 64);
    most = attention_min(1 + ATTENTION_GROUP_BYTES / (int64_t)*bytes,
                         args->batch / ATTENTION_GROUP_ITEMS);
    return (int)attention_max(1, attention_min(ATTENTION_GROUP_TASKS / heads, most));
}

static void
attention_hint_dbias(const tfast_attention_args *args)
{
    int64_t n[4], elements, extent;

    attention_dbias_size(args, n, &elements, &extent);
    if (elements > 0 && extent > 0) {
        tfast_hint_large_pages(args->dbias,
                               (size_t)extent * (args->dtype == TFAST_F64 ? 8 : 4));
    }
}

/* Whether every query looks at every key, and the bias has an element for each. Without
 * a task nobody visits it. */
static bool
attention_writes_dbias(const tfast_attention_args *args)
{
    const bool bounded = args->is_causal || args->window_left >= 0 ||
                         args->window_right >= 0 || args->cu_seqlens_q != NULL ||
                         args->kv_lens != NULL || args->mask.data != NULL;

    return args->dbias != NULL && args->dbias_stride[2] != 0 &&
           args->dbias_stride[3] != 0 && !bounded && args->batch > 0 &&
           args->kv_heads > 0;
}

/* Zeros in the gradient of the bias. Its dimensions that are broadcast have one place.
 */
static void
attention_clear_part(void *context, int part, int parts)
{
    const attention_back_job *job = context;
    const tfast_attention_args *args = job->args;
    const size_t size = args->dtype == TFAST_F64 ? 8 : 4;
    const int64_t *stride = args->dbias_stride;
    int64_t n[4], elements, extent;

    attention_dbias_size(args, n, &elements, &extent);
    for (int64_t at = n[0] * n[1] * n[2] * part / parts;
         at < n[0] * n[1] * n[2] * (part + 1) / parts; at++) {
        const int64_t b = at / n[2] / n[1], h = at / n[2] % n[1], i = at % n[2];
        char *row = (char *)args->dbias +
                    size * (size_t)(b * stride[0] + h * stride[1] + i * stride[2]);

        for (int64_t j = 0; j < n[3] && stride[3] > 1; j++) {
            memset(row + size * (size_t)(j * stride[3]), 0, size);
        }
        if (stride[3] <= 1) {
            memset(row, 0, size * (size_t)n[3]);
        }
    }
}

/* Adds up the groups' sums, in order. They lie as the gradient does, without gaps. */
static void
attention_join_groups(void *context, int part, int parts)
{
    const attention_back_job *job = context;
    const tfast_attention_args *args = job->args;
    int64_t n[4], elements, extent;

    attention_dbias_size(args, n, &elements, &extent);
    for (int group = 1; group < job->groups; group++) {
        const char *from = job->dbias + (size_t)(group - 1) * job->dbias_bytes;
        const int64_t end = extent * (part + 1) / parts;

        for (int64_t i = extent * part / parts; i < end; i++) {
            if (args->dtype == TFAST_F64) {
                ((double *)args->dbias)[i] += ((const double *)from)[i];
            } else {
                ((float *)args->dbias)[i] += ((const float *)from)[i];
            }
        }
    }
}
