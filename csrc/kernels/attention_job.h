/* Attention: what the tasks of one call share. */

/* ---- Backward -------------------------------------------------------------------- */

/* A chain is one head of k and v with the heads of q that share it; where the gradient
 * of a bias is summed over items or heads, these one after the other: its steps.
 *
 * With few chains a step's blocks of keys are dealt out to `parts * turns` lists, a
 * task each. Each part has its own sums of dq, and where `turns` lists add to the same
 * sums, the call has as many phases: in each, a list visits the tiles of queries that
 * no other list of its part visits. Sizes alone say how many parts and turns there are,
 * so that the sums do not depend on the number of threads. */
typedef struct {
    const tfast_attention_args *args;
    char *room; /* of all threads */
    size_t room_bytes;
    int parts, turns;
    int64_t chains;
    bool join_batch, join_heads; /* one chain adds up what shares a bias' gradient */
    int groups;        /* of items, each with sums of such a gradient of its own */
    bool writes_dbias; /* each place is visited: first written, then added to */
    size_t dbias_bytes;
    char *dbias;      /* [groups - 1][dbias_bytes], for several groups */
    void *dq;         /* [parts][chains][group][n_q][width], if split; without the first
                         part where the output holds sums */
    void *dk, *dv;    /* [chains][n_k][width], with turns where outputs hold no sums */
    double *dalibi;   /* [parts * turns][batch][heads]; NULL: not wanted */
    double *dsinks;   /* [batch][heads]; NULL: not wanted */
    _Atomic int *odd; /* [chains]: a gradient of the step is not finite; if split */
    int64_t step;     /* of the chains, if split */
    int phase;
    bool careful; /* only the odd chains, see multiply_careful */
    bool look_ahead;
    int64_t tasks;
    _Atomic int64_t next;
} attention_back_job;

/* Items and heads of k and v, one after the other, and a list of blocks of each. */
typedef struct {
    int64_t chain, batch, end_batch, head, end_head;
    int list;
    void *dbias; /* where the gradient of the bias is summed */
} attention_back_task;

/* Blocks of keys that pass over the queries together, so that a tile of queries is made
 * ready once for all of them: as many as a cache of 512 KB holds with their sums. */
enum { ATTENTION_BACK_BLOCKS = 4 };

static inline int64_t
attention_back_blocks(const tfast_attention_args *args)
{
    const int64_t dim = attention_max(args->dim, args->dim_v);
    const int64_t all = (args->n_k + ATTENTION_BACK_KEYS - 1) / ATTENTION_BACK_KEYS;
    const int64_t most = attention_min(ATTENTION_BACK_BLOCKS, all);

    return attention_max(1, attention_min(64 * ATTENTION_BACK_BLOCKS / dim, most));
}

static inline bool
attention_is_split(const attention_back_job *job)
{
    return job->parts * job->turns > 1;
}

/* To and fro: under a causal mask the first blocks have most queries. */
static inline int
attention_list_of(int64_t block, int lists)
{
    const int place = (int)(block % (2 * lists));

    return place < lists ? place : 2 * lists - 1 - place;
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
