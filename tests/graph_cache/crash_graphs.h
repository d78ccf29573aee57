/* Graphs that can be told from one another, and what a cache must show of them. */
#include "graph_cache/graph_cache.h"

/* ---- Graphs ---------------------------------------------------------------------- */

enum { N_IDS = 100, COLUMNS = 8, MAX_NODES = 60, LATER = 99 };

/* Of each graph: what its writer was told. Writers' graphs have numbers that begin with
 * the writer's own ten. */
static enum { NEVER, APPENDED, PROMISED } told[N_IDS];
static int64_t graph_nodes = 1; /* times as many, for graphs beyond the buffer */

typedef struct {
    graph_schema_header header;
    graph_schema_count counts[3];
    graph_schema_field fields[4];
    char names[16];
} schema_bytes;

static schema_bytes
make_schema(void)
{
    schema_bytes s = {.header = {.n_counts = 3, .n_fields = 4, .names_bytes = 16}};
    uint16_t none = GRAPH_NONE;

    s.counts[0] =
        (graph_schema_count){.role = GRAPH_NODES, .source = none, .target = none};
    s.counts[1] = (graph_schema_count){.role = GRAPH_EDGES};
    s.counts[2] =
        (graph_schema_count){.role = GRAPH_SIZE, .source = none, .target = none};
    s.fields[0] = (graph_schema_field){.name_bytes = 1,
                                       .dtype = GRAPH_F32,
                                       .rank = 2,
                                       .add = {none, none},
                                       .dims = {-1, COLUMNS}};
    s.fields[1] = (graph_schema_field){.name_bytes = 10,
                                       .type = 1,
                                       .dtype = GRAPH_I64,
                                       .rank = 2,
                                       .cat_dim = 1,
                                       .add = {0, none},
                                       .add_mode = GRAPH_ADD_COUNT,
                                       .dims = {2, -2}};
    s.fields[2] = (graph_schema_field){.name_bytes = 1,
                                       .type = none,
                                       .dtype = GRAPH_I64,
                                       .cat_dim = -1,
                                       .add = {none, none}};
    s.fields[3] = (graph_schema_field){.name_bytes = 4,
                                       .type = none,
                                       .dtype = GRAPH_STRING,
                                       .rank = 1,
                                       .add = {none, none},
                                       .dims = {-3}};
    memcpy(s.names, "xedge_indexyname", 16);
    return s;
}

/* Graph `id`, made from nothing else. */
typedef struct {
    int64_t nodes, edges, id, text;
    float *x;
    int64_t ends[2 * 3];
    char name[16];
} graph;

static graph
make_graph(int64_t id)
{
    graph g = {.nodes = (1 + id * 7 % MAX_NODES) * graph_nodes, .id = id};

    g.edges = id % 4;
    g.x = malloc((size_t)g.nodes * COLUMNS * sizeof *g.x);
    MUST(g.x != NULL);
    for (int64_t i = 0; i < g.nodes * COLUMNS; i++) {
        g.x[i] = (float)(id * 1000 + i % 1000);
    }
    for (int64_t i = 0; i < 2 * g.edges; i++) {
        g.ends[i] = (id + i) % g.nodes;
    }
    g.text = snprintf(g.name, sizeof g.name, "graph %d", (int)id);
    return g;
}

static tfast_status
append(tfast_graph_writer *w, int64_t id)
{
    graph g = make_graph(id);
    int64_t shapes[3][2] = {{g.nodes, COLUMNS}, {2, g.edges}, {g.text, 0}};
    tfast_graph_value values[4] = {
        {g.x, true, GRAPH_F32, 2, shapes[0], NULL},
        {g.ends, true, GRAPH_I64, 2, shapes[1], NULL},
        {&g.id, true, GRAPH_I64, 0, NULL, NULL},
        {g.name, true, GRAPH_STRING, 1, shapes[2], NULL},
    };
    uint8_t key[16] = {(uint8_t)id, 1};
    int misfit;
    tfast_status status = tfast_graph_writer_append(w, values, NULL, key, &misfit);

    free(g.x);
    told[id] = status == TFAST_OK ? APPENDED : told[id];
    return status;
}

static void
promise(int64_t writer, tfast_status status)
{
    for (int64_t id = writer; id < writer + 10 && status == TFAST_OK; id++) {
        told[id] = told[id] == APPENDED ? PROMISED : told[id];
    }
}

/* ---- Looking at a cache ---------------------------------------------------------- */

static int64_t
integer_of(const tfast_graph_array *a, int64_t i)
{
    const uint8_t *narrow = a->data;
    int64_t wide;

    if (a->stored == GRAPH_AS_U8) {
        return narrow[i];
    }
    MUST(a->stored == GRAPH_AS_IS);
    memcpy(&wide, narrow + 8 * i, 8);
    return wide;
}

/* The number of graph i, which must be as it was appended. */
static int64_t
check_graph(tfast_graph_cache *cache, int64_t i)
{
    tfast_graph_array a[4];
    void *owned;
    graph g;

    MUST(tfast_graph_cache_get(cache, i, a, &owned) == TFAST_OK);
    g = make_graph(integer_of(&a[2], 0));
    MUST(g.id >= 0 && g.id < N_IDS);
    MUST(a[0].numel == g.nodes * COLUMNS && a[1].numel == 2 * g.edges);
    MUST(memcmp(a[0].data, g.x, (size_t)a[0].numel * 4) == 0);
    for (int64_t k = 0; k < a[1].numel; k++) {
        MUST(integer_of(&a[1], k) == g.ends[k]);
    }
    MUST(a[3].numel == g.text && memcmp(a[3].data, g.name, (size_t)g.text) == 0);
    free(g.x);
    free(owned);
    return g.id;
}

static void
no_damage(void *context, int64_t i, const char *message)
{
    (void)context;
    fprintf(stderr, "graph %lld: %s\n", (long long)i, message);
    MUST(!"verified");
}

/* Opens what recovery has left, checks all of it, and says which graphs there are, in
 * order. False where there is no cache. */
static int64_t ids[N_IDS], n_ids;

static bool
look(const char *path)
{
    tfast_graph_open_options options = {TFAST_GRAPH_VERIFY_ALWAYS, one_in(2), false};
    tfast_graph_cache *cache;
    tfast_status status = tfast_graph_cache_open(&cache, path, &options);

    n_ids = 0;
    if (status != TFAST_OK && strstr(tfast_message(), "a complete cache") != NULL) {
        options.partial = true;
        status = tfast_graph_cache_open(&cache, path, &options);
    }
    if (status != TFAST_OK) {
        MUST(graph_errno() == ENOENT);
        return false;
    }
    MUST(tfast_graph_cache_verify(cache, 0, tfast_graph_cache_len(cache), true,
                                  no_damage, NULL) == TFAST_OK);
    for (int64_t i = 0; i < tfast_graph_cache_len(cache); i++) {
        MUST(n_ids < N_IDS);
        ids[n_ids++] = check_graph(cache, i);
    }
    tfast_graph_cache_release(cache);
    return true;
}

/* Each writer's graphs: all that were promised, and no others but the ones appended
 * next, in order and once. */
static void
check_promises(int64_t first, int64_t end)
{
    for (int64_t writer = first; writer < end; writer += 10) {
        int64_t next = writer;

        for (int64_t i = 0; i < n_ids; i++) {
            if (ids[i] / 10 * 10 == writer) {
                while (told[next] == NEVER && next < ids[i]) {
                    next++; /* appending it failed */
                }
                MUST(ids[i] == next && told[next] != NEVER);
                next++;
            }
        }
        for (; next < writer + 10; next++) {
            MUST(told[next] != PROMISED);
        }
    }
}
