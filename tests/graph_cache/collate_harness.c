/* Collating and prefetching by themselves, for sanitizers: writes a cache of random
 * graphs, then collates batches of it on several threads at once and compares them with
 * what one thread gives. Usage: harness PATH THREADS VERIFY PREAD */
#include "graph_cache/batch.h"
#include "graph_cache/io.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simd/graph_loops.h"

/* Sanitizers' allocators leave locks held in a child. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MAY_FORK = 0 };
#else
enum { MAY_FORK = 1 };
#endif

enum { GRAPHS = 300, BATCHES = 120, BATCH = 16, FIELDS = 4, COUNTS = 2 };

const tfast_graph_kernels *
tfast_graph_kernels_in_use(void)
{
    return &graph_kernels;
}

static void
must(tfast_status status)
{
    if (status != TFAST_OK) {
        fprintf(stderr, "%s\n", tfast_message());
        exit(1);
    }
}

static void
must_be(bool so, const char *what)
{
    if (!so) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

/* ---- A cache --------------------------------------------------------------------- */

/* x [nodes, 5] f32, edge_index [2, edges] i64, edge_attr [edges] u8, y [1] f32 */
static const struct {
    graph_schema_header header;
    graph_schema_count counts[COUNTS];
    graph_schema_field fields[FIELDS];
    char names[32];
} schema = {
    {COUNTS, FIELDS, 21, {0, 0}},
    {{GRAPH_NODES, {0}, GRAPH_NONE, GRAPH_NONE, 0, {0}},
     {GRAPH_EDGES, {0}, 0, 0, 0, {0}}},
    {{.name_bytes = 1,
      .dtype = GRAPH_F32,
      .rank = 2,
      .add = {GRAPH_NONE, GRAPH_NONE},
      .dims = {-1, 5}},
     {.name_bytes = 10,
      .type = 1,
      .dtype = GRAPH_I64,
      .rank = 2,
      .cat_dim = 1,
      .add_mode = GRAPH_ADD_COUNT,
      .add = {0, GRAPH_NONE},
      .dims = {2, -2}},
     {.name_bytes = 9,
      .type = 1,
      .dtype = GRAPH_U8,
      .rank = 1,
      .add = {GRAPH_NONE, GRAPH_NONE},
      .dims = {-2}},
     {.name_bytes = 1,
      .type = GRAPH_NONE,
      .dtype = GRAPH_F32,
      .rank = 1,
      .add = {GRAPH_NONE, GRAPH_NONE},
      .dims = {1}}},
    "xedge_indexedge_attry",
};

static void
write_cache(const char *path)
{
    tfast_graph_writer *writer;
    float x[64 * 5], y[1];
    int64_t edge_index[2 * 256], counts[COUNTS] = {-1, -1};
    uint8_t edge_attr[256];
    int misfit;

    must(tfast_graph_writer_open(&writer, path, &schema, sizeof schema, false));
    for (int g = 0; g < GRAPHS; g++) {
        const int64_t nodes = 1 + rand() % 63, edges = rand() % 256;
        const int64_t shape_x[] = {nodes, 5}, shape_edges[] = {2, edges}, one[] = {1};
        const int64_t strides_x[] = {5, 1}, strides_edges[] = {edges, 1};

        for (int i = 0; i < nodes * 5; i++) {
            x[i] = (float)(g * 1000 + i);
        }
        for (int i = 0; i < 2 * edges; i++) {
            edge_index[i] = rand() % nodes;
        }
        for (int i = 0; i < edges; i++) {
            edge_attr[i] = (uint8_t)rand();
        }
        y[0] = (float)g;
        const tfast_graph_value values[FIELDS] = {
            {x, true, GRAPH_F32, 2, shape_x, strides_x},
            {edge_index, true, GRAPH_I64, 2, shape_edges, strides_edges},
            {edge_attr, true, GRAPH_U8, 1, &shape_edges[1], one},
            {y, true, GRAPH_F32, 1, one, one},
        };
        must(tfast_graph_writer_append(writer, values, counts, NULL, &misfit));
    }
    must(tfast_graph_writer_close(writer));
    tfast_graph_writer_free(writer);
}

/* ---- What one thread gives, and what many do ------------------------------------- */

static const uint16_t fields[FIELDS] = {0, 1, 2, 3};
static const uint16_t batch_of[1] = {0};
static const tfast_graph_selection selection = {
    .fields = fields, .n_fields = FIELDS, .batch_of = batch_of, .n_batch_of = 1};

static int64_t indices[BATCHES][BATCH];
static uint32_t expected[BATCHES];

static uint32_t
array_crc(uint32_t crc, const tfast_graph_batch *batch, size_t at, size_t bytes)
{
    return graph_crc32c(crc, batch->arena + at, bytes);
}

/* Of all arrays; the gaps between them may hold anything. */
static uint32_t
batch_crc(const tfast_graph_batch *batch)
{
    const int64_t nodes = batch->totals[0], edges = batch->totals[1];
    const size_t slots = (size_t)batch->n_slots + 1;
    uint32_t crc = 0;

    crc = array_crc(crc, batch, batch->field_at[0], (size_t)nodes * 20);
    crc = array_crc(crc, batch, batch->field_at[1], (size_t)edges * 16);
    crc = array_crc(crc, batch, batch->field_at[2], (size_t)edges);
    crc = array_crc(crc, batch, batch->field_at[3], (size_t)batch->n_slots * 4);
    crc = array_crc(crc, batch, batch->ptr_at[0], slots * 8);
    crc = array_crc(crc, batch, batch->ptr_at[1], slots * 8);
    return array_crc(crc, batch, batch->batch_at[0], (size_t)nodes * 8);
}

static void
expect(tfast_graph_cache *cache)
{
    for (int b = 0; b < BATCHES; b++) {
        tfast_graph_batch *batch;

        for (int i = 0; i < BATCH; i++) {
            indices[b][i] = rand() % GRAPHS;
        }
        must(tfast_graph_collate(cache, &selection, indices[b], BATCH, true, &batch));
        expected[b] = batch_crc(batch);
        tfast_graph_batch_release(batch);
    }
}

static tfast_graph_batch *
next(tfast_graph_prefetch *prefetch, int64_t expected_tag)
{
    tfast_graph_batch *batch = NULL;
    int64_t tag;

    while (batch == NULL) {
        must(tfast_graph_prefetch_next(prefetch, 0.001, &batch, &tag));
    }
    must_be(tag == expected_tag, "a batch must have its tag");
    return batch;
}

/* A prefetch that starts its threads at the next submit: its first batch took long. */
static tfast_graph_prefetch *
prefetch_awake(tfast_graph_cache *cache, int threads)
{
    static int64_t many[20 * GRAPHS];
    tfast_graph_prefetch *prefetch;

    for (int i = 0; i < 20 * GRAPHS; i++) {
        many[i] = i % GRAPHS;
    }
    must(tfast_graph_prefetch_new(&prefetch, cache, &selection, threads));
    must(tfast_graph_prefetch_submit(prefetch, many, 20 * GRAPHS, 7));
    tfast_graph_batch_release(next(prefetch, 7));
    return prefetch;
}

/* Batches come in order, whatever is held, each with its tag; every seventh is held to
 * the end. */
static void
drain(tfast_graph_cache *cache, int threads)
{
    tfast_graph_batch *held[BATCHES];
    tfast_graph_prefetch *prefetch = prefetch_awake(cache, threads);
    int n_held = 0, submitted = 0;

    for (int b = 0; b < BATCHES; b++) {
        tfast_graph_batch *batch;

        while (submitted < BATCHES && submitted < b + 6) {
            must(tfast_graph_prefetch_submit(prefetch, indices[submitted], BATCH,
                                             -submitted));
            submitted++;
        }
        batch = next(prefetch, -b);
        must_be(batch_crc(batch) == expected[b], "a batch must come in its turn");
        if (b % 7 == 0) {
            held[n_held++] = batch;
        } else {
            tfast_graph_batch_release(batch);
        }
    }
    must_be(tfast_graph_prefetch_pending(prefetch) == 0, "nothing may be left");
    tfast_graph_prefetch_free(prefetch);
    for (int i = 0; i < n_held; i++) {
        must_be(batch_crc(held[i]) == expected[i * 7], "a held batch must not change");
        tfast_graph_batch_release(held[i]);
    }
}

/* An error belongs to its batch, and what comes after it is right. */
static void
fail_one(tfast_graph_cache *cache, int threads)
{
    const int64_t wrong[1] = {GRAPHS};
    tfast_graph_prefetch *prefetch = prefetch_awake(cache, threads);
    tfast_graph_batch *batch;
    tfast_status status;
    int64_t tag;

    must(tfast_graph_prefetch_submit(prefetch, indices[0], BATCH, 0));
    must(tfast_graph_prefetch_submit(prefetch, wrong, 1, 1));
    must(tfast_graph_prefetch_submit(prefetch, indices[1], BATCH, 2));
    batch = next(prefetch, 0);
    must_be(batch_crc(batch) == expected[0], "the batch before an error must be right");
    tfast_graph_batch_release(batch);
    do {
        status = tfast_graph_prefetch_next(prefetch, 0.001, &batch, &tag);
    } while (status == TFAST_OK && batch == NULL);
    must_be(status == TFAST_EINVAL, "the error must come in its turn");
    must_be(strstr(tfast_message(), "index") != NULL, "and say what is wrong");
    batch = next(prefetch, 2);
    must_be(batch_crc(batch) == expected[1], "the batch after an error must be right");
    tfast_graph_batch_release(batch);
    tfast_graph_prefetch_free(prefetch);
}

/* Threads stop with batches still waiting, begun and delivered. */
static void
stop_early(tfast_graph_cache *cache, int threads)
{
    for (int taken = 0; taken < 5; taken++) {
        tfast_graph_prefetch *prefetch = prefetch_awake(cache, threads);

        for (int b = 0; b < 10; b++) {
            must(tfast_graph_prefetch_submit(prefetch, indices[b], BATCH, b));
        }
        for (int b = 0; b < taken; b++) {
            tfast_graph_batch_release(next(prefetch, b));
        }
        must_be(tfast_graph_prefetch_pending(prefetch) == 10 - taken, "10 are pending");
        tfast_graph_prefetch_free(prefetch);
    }
}

/* A forked child gets an error, not a dead-lock, and may collate by itself. */
static void
fork_while_busy(tfast_graph_cache *cache, int threads)
{
    tfast_graph_prefetch *prefetch = prefetch_awake(cache, threads);
    tfast_graph_batch *batch;
    pid_t child;
    int state;

    for (int b = 0; b < BATCHES; b++) {
        must(tfast_graph_prefetch_submit(prefetch, indices[b], BATCH, b));
    }
    child = fork();
    if (child == 0) {
        alarm(20);
        int64_t tag;
        bool right =
            tfast_graph_prefetch_submit(prefetch, indices[0], 1, 0) != TFAST_OK &&
            tfast_graph_prefetch_next(prefetch, 9, &batch, &tag) != TFAST_OK;
        tfast_graph_prefetch_free(prefetch);
        must(tfast_graph_collate(cache, &selection, indices[3], BATCH, true, &batch));
        right = right && batch_crc(batch) == expected[3];
        tfast_graph_batch_release(batch);
        _exit(right ? 0 : 1);
    }
    must_be(waitpid(child, &state, 0) == child && state == 0, "a child must work");
    for (int b = 0; b < BATCHES; b++) {
        batch = next(prefetch, b);
        must_be(batch_crc(batch) == expected[b], "the parent's batches must be right");
        tfast_graph_batch_release(batch);
    }
    tfast_graph_prefetch_free(prefetch);
}

/* Batches that are large enough for several threads. */
static void
collate_shared(tfast_graph_cache *cache)
{
    static int64_t many[5 * GRAPHS];

    for (int turn = 0; turn < 20; turn++) {
        const int64_t n = (turn + 1) * GRAPHS / 4;
        tfast_graph_batch *alone, *shared;

        for (int64_t i = 0; i < n; i++) {
            many[i] = rand() % GRAPHS;
        }
        must(tfast_graph_collate(cache, &selection, many, n, true, &alone));
        must(tfast_graph_collate(cache, &selection, many, n, false, &shared));
        must_be(batch_crc(alone) == batch_crc(shared), "a shared batch must be right");
        tfast_graph_batch_release(alone);
        tfast_graph_batch_release(shared);
    }
}

/* Several threads collate, and give back what others have collated. */
static void *
collate_all(void *context)
{
    for (int b = 0; b < BATCHES; b++) {
        tfast_graph_batch *batch;

        must(tfast_graph_collate(context, &selection, indices[b], BATCH, true, &batch));
        must_be(batch_crc(batch) == expected[b], "batches of threads must be right");
        tfast_graph_batch_retain(batch);
        tfast_graph_batch_release(batch);
        tfast_graph_batch_release(batch);
    }
    return NULL;
}

int
main(int count, char **arguments)
{
    const int threads = count > 2 ? atoi(arguments[2]) : 2;
    const tfast_graph_open_options options = {count > 3 ? atoi(arguments[3]) : 1,
                                              count > 4 && atoi(arguments[4]) != 0,
                                              false};
    tfast_graph_cache *cache, *fresh;
    pthread_t others[4];

    write_cache(arguments[1]);
    must(tfast_graph_cache_open(&cache, arguments[1], &options));
    expect(cache);
    tfast_graph_cache_release(cache);
    must(tfast_graph_cache_open(&fresh, arguments[1], &options));
    for (int i = 0; i < 4; i++) {
        pthread_create(&others[i], NULL, collate_all, fresh);
    }
    drain(fresh, threads);
    for (int i = 0; i < 4; i++) {
        pthread_join(others[i], NULL);
    }
    collate_shared(fresh);
    fail_one(fresh, threads);
    stop_early(fresh, threads);
    if (MAY_FORK) {
        fork_while_busy(fresh, threads);
    }
    tfast_graph_cache_release(fresh);
    puts("passed");
    return 0;
}
