/* A mapped file that somebody changes while it is read: what was checked must be what
 * is used. test_changes.py builds this with csrc/graph_cache and sanitizers. The
 * map is plain memory, which ends where the file does; kernels, which the core calls
 * between its steps, change it. Values may come out wrong, and errors are right, too:
 * only the sanitizers judge. */
#include "disk.h"
#include "graph_cache/batch.h"
#include "graph_cache/graph_cache.h"
#include "graph_kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "simd/graph_loops.h"

enum { GRAPHS = 5, FIELDS = 3, COUNTS = 3, NODES = 6, EDGES = 9, BYTES = 11 };

/* ---- Kernels that change the map ------------------------------------------------- */

typedef struct {
    size_t at;
    int bytes;
    uint64_t value;
} change;

static uint8_t *map; /* of the segment that is open */
static int64_t map_bytes;
static int calls, call_of_change; /* 0: none */
static change next_change;

static void
apply(change c)
{
    MUST(c.at + (size_t)c.bytes <= (size_t)map_bytes);
    memcpy(map + c.at, &c.value, (size_t)c.bytes);
}

static void
maybe_change(void)
{
    if (++calls == call_of_change) {
        apply(next_change);
    }
}

static uint32_t
crc_and_change(uint32_t crc, const void *data, size_t bytes)
{
    crc = graph_kernels.crc32c(crc, data, bytes);
    maybe_change();
    return crc;
}

static void
range_and_change(const void *in, int bytes, int is_signed, int64_t n, int64_t *low,
                 int64_t *high)
{
    graph_kernels.range(in, bytes, is_signed, n, low, high);
    maybe_change();
}

const tfast_graph_kernels *
tfast_graph_kernels_in_use(void)
{
    static tfast_graph_kernels kernels;

    kernels = graph_kernels;
    kernels.crc32c = crc_and_change;
    kernels.range = range_and_change;
    return &kernels;
}

static const void *
note_map(int handle, int64_t bytes, int *error)
{
    map = (uint8_t *)(uintptr_t)disk_map(handle, bytes, error);
    map_bytes = bytes;
    return map;
}

/* ---- A cache --------------------------------------------------------------------- */

/* x [nodes, 2] f32, edge_index [2, edges] i64, name [bytes] string */
static const struct {
    graph_schema_header header;
    graph_schema_count counts[COUNTS];
    graph_schema_field fields[FIELDS];
    char names[16];
} schema = {
    {COUNTS, FIELDS, 15, {0, 0}},
    {{GRAPH_NODES, {0}, GRAPH_NONE, GRAPH_NONE, 0, {0}},
     {GRAPH_EDGES, {0}, 0, 0, 0, {0}},
     {GRAPH_SIZE, {0}, GRAPH_NONE, GRAPH_NONE, 0, {0}}},
    {{.name_bytes = 1,
      .dtype = GRAPH_F32,
      .rank = 2,
      .add = {GRAPH_NONE, GRAPH_NONE},
      .dims = {-1, 2}},
     {.name_bytes = 10,
      .type = 1,
      .dtype = GRAPH_I64,
      .rank = 2,
      .cat_dim = 1,
      .add_mode = GRAPH_ADD_COUNT,
      .add = {0, GRAPH_NONE},
      .dims = {2, -2}},
     {.name_bytes = 4,
      .type = GRAPH_NONE,
      .dtype = GRAPH_STRING,
      .rank = 1,
      .add = {GRAPH_NONE, GRAPH_NONE},
      .dims = {-3}}},
    "xedge_indexname",
};

static void
write_cache(void)
{
    static const int64_t x_shape[] = {NODES, 2}, edge_shape[] = {2, EDGES};
    static const int64_t name_shape[] = {BYTES};
    float x[2 * NODES] = {0};
    int64_t edges[2 * EDGES];
    const tfast_graph_value values[FIELDS] = {
        {x, true, GRAPH_F32, 2, x_shape, NULL},
        {edges, true, GRAPH_I64, 2, edge_shape, NULL},
        {"hello there", true, GRAPH_STRING, 1, name_shape, NULL},
    };
    tfast_graph_writer *writer;
    int misfit;

    MUST(tfast_graph_writer_open(&writer, "/c", &schema, sizeof schema, false) ==
         TFAST_OK);
    for (int g = 0; g < GRAPHS; g++) {
        for (int i = 0; i < 2 * EDGES; i++) {
            edges[i] = (g + i) % NODES;
        }
        MUST(tfast_graph_writer_append(writer, values, NULL, NULL, &misfit) ==
             TFAST_OK);
    }
    MUST(tfast_graph_writer_close(writer) == TFAST_OK);
    tfast_graph_writer_free(writer);
}

static tfast_graph_cache *
open_cache(void)
{
    const tfast_graph_open_options options = {TFAST_GRAPH_VERIFY_ALWAYS,
                                              TFAST_GRAPH_MMAP, false};
    tfast_graph_cache *cache;

    MUST(tfast_graph_cache_open(&cache, "/c", &options) == TFAST_OK);
    return cache;
}

/* ---- Reading everything ---------------------------------------------------------- */

static int n_damaged;

static void
count_damaged(void *context, int64_t i, const char *message)
{
    (void)context;
    (void)i;
    (void)message;
    n_damaged++;
}

/* All bytes of the arrays, so that the sanitizer sees them. */
static uint32_t
touch(const tfast_graph_array *arrays)
{
    uint32_t crc = 0;

    for (int f = 0; f < FIELDS; f++) {
        const int bytes = graph_stored_bytes(schema.fields[f].dtype, arrays[f].stored);

        if (arrays[f].stored != GRAPH_ABSENT) {
            crc = graph_kernels.crc32c(crc, arrays[f].data,
                                       (size_t)(arrays[f].numel * bytes));
        }
    }
    return crc;
}

static tfast_status
read_graph(tfast_graph_cache *cache, int64_t i, uint32_t *crc)
{
    tfast_graph_array arrays[FIELDS];
    void *owned;
    tfast_status status = tfast_graph_cache_get(cache, i, arrays, &owned);

    *crc = status == TFAST_OK ? touch(arrays) : 0;
    MUST(owned == NULL); /* it is mapped */
    return status;
}

static tfast_status
read_batch(tfast_graph_cache *cache, uint32_t *crc)
{
    static const uint16_t fields[] = {0, 1}, batch_of[] = {0};
    static const int64_t indices[] = {0, 1, 2, 3, 4};
    const tfast_graph_selection selection = {
        .fields = fields, .n_fields = 2, .batch_of = batch_of, .n_batch_of = 1};
    tfast_graph_batch *batch;
    tfast_status status =
        tfast_graph_collate(cache, &selection, indices, GRAPHS, true, &batch);

    *crc = 0;
    if (status == TFAST_OK) {
        *crc = graph_kernels.crc32c(0, batch->arena + batch->field_at[1],
                                    sizeof(int64_t) * 2 * EDGES * GRAPHS);
    }
    tfast_graph_batch_release(batch);
    return status;
}

static void
read_all(tfast_graph_cache *cache)
{
    uint8_t keys[16 * GRAPHS];
    uint32_t crc;

    for (int i = 0; i < GRAPHS; i++) {
        read_graph(cache, i, &crc);
    }
    read_batch(cache, &crc);
    MUST(tfast_graph_cache_keys(cache, keys) == TFAST_OK);
    MUST(tfast_graph_cache_verify(cache, 0, GRAPHS, true, count_damaged, NULL) ==
         TFAST_OK);
}

/* ---- What changes ---------------------------------------------------------------- */

/* The index in the file is nobody's business after it has been read. */
static void
change_index(void)
{
    tfast_graph_cache *cache = open_cache();
    graph_trailer trailer;
    uint32_t batch, again, graph;

    MUST(read_batch(cache, &batch) == TFAST_OK);
    memcpy(&trailer, map + map_bytes - sizeof trailer, sizeof trailer);
    memset(map + trailer.index_offset, 0xff, trailer.index_bytes);
    MUST(read_batch(cache, &again) == TFAST_OK && again == batch);
    for (int i = 0; i < GRAPHS; i++) {
        MUST(read_graph(cache, i, &graph) == TFAST_OK);
    }
    n_damaged = 0;
    read_all(cache);
    MUST(n_damaged == 0);
    tfast_graph_cache_release(cache);
}

/* Graph 0 is found whole, and its length changes right after the last look at it. */
static void
change_after_the_checks(void)
{
    tfast_graph_cache *cache = open_cache();

    n_damaged = calls = call_of_change = 0;
    MUST(tfast_graph_cache_verify(cache, 0, 1, true, count_damaged, NULL) == TFAST_OK);
    next_change = (change){4096 + offsetof(graph_record, units), 4, UINT32_MAX};
    call_of_change = calls;
    calls = 0;
    MUST(tfast_graph_cache_verify(cache, 0, 1, true, count_damaged, NULL) == TFAST_OK);
    MUST(calls == call_of_change && n_damaged == 0);
    call_of_change = 0;
    tfast_graph_cache_release(cache);
}

/* One number of a record's head becomes another one at each of the kernels' calls. */
static void
change_heads(void)
{
    static const struct {
        size_t at;
        int bytes;
    } places[] = {
        {offsetof(graph_record, magic), 4}, {offsetof(graph_record, header_crc), 4},
        {offsetof(graph_record, units), 4}, {sizeof(graph_record), 4},
        {sizeof(graph_record) + 4, 4},      {sizeof(graph_record) + 8, 4},
        {sizeof(graph_record) + 12, 1},     {sizeof(graph_record) + 13, 1},
        {sizeof(graph_record) + 14, 1},
    };
    static const uint64_t values[] = {0, 1, 255, 0x7fffffff, 0xffffffff};

    for (size_t p = 0; p < sizeof places / sizeof *places; p++) {
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            bool more = true;

            for (int call = 1; more; call++) {
                tfast_graph_cache *cache;

                call_of_change = 0;
                cache = open_cache();
                next_change = (change){4096 + places[p].at, places[p].bytes, values[v]};
                snprintf(doing, sizeof doing, "byte %zu = %llx at call %d",
                         next_change.at, (unsigned long long)values[v], call);
                calls = 0;
                call_of_change = call;
                read_all(cache);
                more = calls >= call;
                tfast_graph_cache_release(cache);
            }
        }
    }
    call_of_change = 0;
}

/* Another thread changes what a check has just looked at. */
static _Atomic(bool) reading;

static void
pause_for(int turns)
{
    for (volatile int i = 0; i < turns; i++) {
    }
}

static void *
keep_changing(void *context)
{
    volatile uint32_t *units = context;
    const uint32_t right = *units;

    for (int i = 0; reading; i++) {
        *units = UINT32_MAX;
        pause_for(i % 8);
        *units = right;
        pause_for(i % 256);
    }
    return NULL;
}

static void
change_meanwhile(int reads)
{
    tfast_graph_cache *cache = open_cache();
    pthread_t other;
    uint32_t crc;

    reading = true;
    pthread_create(&other, NULL, keep_changing,
                   map + 4096 + offsetof(graph_record, units));
    for (int i = 0; i < reads; i++) {
        read_graph(cache, 0, &crc);
    }
    reading = false;
    pthread_join(other, NULL);
    tfast_graph_cache_release(cache);
}

/* A schema that a caller gives is an argument: the message is the schema's. */
static void
give_no_schema(void)
{
    tfast_graph_writer *writer;

    MUST(tfast_graph_writer_open(&writer, "/c", "short", 5, false) == TFAST_EINVAL);
    MUST(writer == NULL);
    MUST(strcmp(tfast_message(), "a schema must have at least 16 bytes, got 5") == 0);
}

int
main(int count, char **arguments)
{
    graph_io table = disk_table;

    table.map = note_map;
    graph_io_table = &table;
    disk_clear(1);
    write_cache();
    MUST(count > 2);
    switch (arguments[1][0]) {
    case 'i':
        change_index();
        break;
    case 'h':
        change_after_the_checks();
        change_heads();
        break;
    case 'm':
        change_meanwhile(atoi(arguments[2]));
        break;
    default:
        give_no_schema();
    }
    puts("passed");
    return 0;
}
