/* Attention: what the tasks of one call share. */

/* ---- Backward -------------------------------------------------------------------- */

/* A head's blocks of keys are dealt out to `parts` tasks, each with its own sums of dq
 * where there are several. How many parts depends on sizes alone, so that the sums do
 * not depend on the number of threads. */
typedef struct {
    const tfast_attention_args *args;
    char *room; /* of all threads */
    size_t room_bytes;
    int parts;
    bool join_batch, join_heads; /* one task adds up what shares a bias' gradient */
    int groups;        /* of items, each with sums of such a gradient of its own */
    bool writes_dbias; /* each place is visited: first written, then added to */
    size_t dbias_bytes;
    char *dbias;    /* [groups - 1][dbias_bytes], for several groups */
    int64_t rows;   /* of q, of all items */
    void *dq;       /* [parts][heads][rows][width], for several parts */
    double *dalibi; /* [parts][batch][heads]; NULL: not wanted */
    double *dsinks; /* [batch][heads]; NULL: not wanted */
    bool look_ahead;
    int64_t tasks;
    _Atomic int64_t next;
} attention_back_job;

/* Items and heads of k and v, one after the other, and a part of the keys of each. */
typedef struct {
    int64_t batch, end_batch, head, end_head;
    int part;
    void *dbias; /* where the gradient of the bias is summed */
} attention_back_task;

/* To and fro: under a causal mask the first blocks have most queries. */
static inline int
attention_part_of(int64_t block, int parts)
{
    const int place = (int)(block % (2 * parts));

    return place < parts ? place : 2 * parts - 1 - place;
}

static inline int64_t
attention_partial_row(const attention_back_job *job, const attention_head *h, int part)
{
    const tfast_attention_args *args = job->args;
    const int64_t first =
        args->cu_seqlens_q != NULL ? h->first_q : h->batch * args->n_q;

    return (part * args->heads + h->head) * job->rows + first;
}

/* ---- Decoding -------------------------------------------------------------------- */

/* A head's keys are dealt out to `splits` tasks of `keys` keys, as sizes alone say. */
typedef struct {
    const tfast_attention_args *args;
    char *room; /* of all threads */
    size_t room_bytes;
    int splits;
    int64_t keys;
    void *results; /* [splits][batch][heads][n_q][2 + width] */
    int64_t tasks;
    _Atomic int64_t next;
} attention_decode_job;
