/* The crash campaign of the graph cache: test_crash.py builds this with
 * csrc/graph_cache and runs it. Scripts of writers and builds run on disk.h's
 * disk, which loses power at every change that they make; after every loss, in many
 * variants of what was left of the unsynced writes, recovery must show each graph that
 * was acknowledged and nothing that was never appended. The same with a disk that is
 * full, syncs that fail and memory that runs out.
 *
 * Prints what it has tried as one line of JSON. The first argument is the number of
 * variants of each loss of power, the second a seed. */
#include "disk.h"

#include "power.h"

#include "crash_graphs.h"
#include "harness.h"

/* ---- Scripts --------------------------------------------------------------------- */

/* They go on after errors, as a program may whose other writers have not failed. */
static tfast_graph_writer *
start_as(bool durable)
{
    schema_bytes schema = make_schema();
    tfast_graph_writer *w;

    return tfast_graph_writer_open(&w, "/c", &schema, sizeof schema, durable) ==
                   TFAST_OK
               ? w
               : NULL;
}

static tfast_graph_writer *
start(void)
{
    return start_as(true);
}

static void
add(tfast_graph_writer *w, int64_t first, int64_t last)
{
    for (int64_t id = first; id <= last && w != NULL; id++) {
        append(w, id);
    }
}

static void
commit(tfast_graph_writer *w, int64_t writer)
{
    if (w != NULL) {
        promise(writer, tfast_graph_writer_commit(w));
    }
}

static bool
finish(tfast_graph_writer *w, int64_t writer)
{
    tfast_status status = w == NULL ? TFAST_EIO : tfast_graph_writer_close(w);

    promise(writer, status);
    tfast_graph_writer_free(w);
    return status == TFAST_OK;
}

static void
nothing(void)
{
}

static void
write_two(void)
{
    tfast_graph_writer *a = start(), *b;

    add(a, 0, 2);
    commit(a, 0);
    add(a, 3, 4);
    b = start();
    add(b, 10, 10);
    commit(b, 10);
    add(a, 5, 5);
    commit(a, 0);
    add(b, 11, 12);
    finish(a, 0);
    commit(b, 10);
    add(b, 13, 13);
    finish(b, 10);
}

static void
check_two(void)
{
    check_promises(0, 20);
}

/* More than the writer's buffer in one commit. */
static void
write_large(void)
{
    tfast_graph_writer *a = start();

    add(a, 0, 6);
    commit(a, 0);
    add(a, 7, 7);
    finish(a, 0);
}

static void
write_four(void)
{
    tfast_graph_writer *a = start();

    add(a, 0, 3);
    MUST(finish(a, 0));
}

/* A build that keeps nothing of what was there. */
static bool build_ended;

static void
rebuild(void)
{
    static const uint64_t order[] = {4, 5, 6, 7};
    tfast_graph_writer *a;

    build_ended = false;
    tfast_graph_build_begin("/c");
    a = start();
    add(a, 20, 22);
    commit(a, 20);
    add(a, 23, 23);
    if (finish(a, 20)) {
        build_ended = tfast_graph_build_end("/c", order, 4) == TFAST_OK;
    }
}

static void
check_rebuilt(void)
{
    if (n_ids > 0 && ids[0] / 10 == 2) { /* the new order is in force */
        MUST(told[23] == PROMISED && n_ids == 4);
        check_promises(20, 30);
    } else {
        MUST(!build_ended);
        check_promises(0, 30);
    }
}

/* What two writers have left is adopted. */
static void
leave_two(void)
{
    tfast_graph_writer *a = start(), *b = start();

    add(a, 0, 2);
    commit(a, 0);
    add(b, 10, 11);
    commit(b, 10);
    add(a, 3, 4);
    tfast_graph_writer_free(a);
    tfast_graph_writer_free(b);
}

static void
adopt(void)
{
    int64_t graphs, lost;

    tfast_graph_adopt("/c", &graphs, &lost);
}

/* A cache with an order gets more. */
static void
order_four(void)
{
    static const uint64_t order[] = {3, 2, 0}, again[] = {2, 1, 0};

    write_four();
    MUST(tfast_graph_build_begin("/c") == TFAST_OK);
    MUST(tfast_graph_build_end("/c", order, 3) == TFAST_OK);
    MUST(tfast_graph_build_begin("/c") == TFAST_OK);
    MUST(tfast_graph_build_end("/c", again, 3) == TFAST_OK);
    MUST(tfast_graph_build_end("/c", NULL, 0) == TFAST_OK);
}

static void
write_more(void)
{
    tfast_graph_writer *a = start();

    add(a, 30, 32);
    finish(a, 30);
}

/* What does not care to be durable endangers nothing that is. */
static void
write_scratch(void)
{
    tfast_graph_writer *a = start_as(false);

    add(a, 30, 32);
    if (a != NULL) {
        tfast_graph_writer_commit(a);
    }
    add(a, 33, 33);
    finish(a, 30);
}

static void
check_ordered(void)
{
    MUST(n_ids >= 3 && ids[0] == 0 && ids[1] == 2 && ids[2] == 3);
    check_promises(30, 40);
}

typedef struct {
    const char *name;
    void (*prepare)(void);
    void (*run)(void);
    void (*check)(void);
    int64_t graph_nodes;
    int share; /* one in so many variants is tried */
} script;

static const script scripts[] = {
    {"two writers", nothing, write_two, check_two, 1, 1},
    {"large graphs", nothing, write_large, check_two, 100, 8},
    {"rebuild", write_four, rebuild, check_rebuilt, 1, 1},
    {"adoption", leave_two, adopt, check_two, 1, 1},
    {"more", order_four, write_more, check_ordered, 1, 2},
    {"scratch", order_four, write_scratch, check_ordered, 1, 2},
};
enum { N_SCRIPTS = sizeof scripts / sizeof *scripts };

/* ---- Recovery -------------------------------------------------------------------- */

static int64_t losses, repairs, graphs_shown;

static void
ignore_line(void *context, const char *text)
{
    (void)context;
    (void)text;
}

/* Repair finds at least what was promised, and maybe some of what was not. */
static void
check_repair(const script *s)
{
    tfast_graph_repair_report report;
    bool shown[N_IDS] = {false};

    if (!disk.directories[0].now) {
        return;
    }
    MUST(tfast_graph_repair("/c", "/r", &report, ignore_line, NULL) == TFAST_OK);
    MUST(look("/r") && n_ids == report.kept);
    for (int64_t i = 0; i < n_ids; i++) {
        MUST(told[ids[i]] != NEVER && !shown[ids[i]]);
        shown[ids[i]] = true;
    }
    for (int64_t id = 0; id < N_IDS && s->check == check_two; id++) {
        MUST(shown[id] || told[id] != PROMISED);
    }
    repairs++;
}

static void
recover(const script *s)
{
    int64_t kept, lost, before;
    tfast_graph_writer *w;

    losses++;
    if (losses % 3 == 0) {
        check_repair(s);
    }
    if (tfast_graph_adopt("/c", &kept, &lost) != TFAST_OK) {
        MUST(graph_errno() == ENOENT || /* what was not durable may look broken */
             (s->run == write_scratch && graph_errno() == 0));
    }
    look("/c");
    s->check();
    before = n_ids;
    graphs_shown += n_ids;
    lose_power(NONE);
    look("/c");
    s->check();
    MUST(n_ids == before);
    if (losses % 2 == 0) { /* and life goes on */
        w = start();
        MUST(w != NULL);
        add(w, LATER, LATER);
        MUST(finish(w, LATER / 10 * 10));
        MUST(look("/c") && n_ids == before + 1 && ids[before] == LATER);
    }
}

static void
begin(const script *s, const char *fault, int64_t at, int64_t variant, uint64_t seed)
{
    snprintf(doing, sizeof doing, "%s, %s %lld, variant %lld", s->name, fault,
             (long long)at, (long long)variant);
    disk_clear(seed + (uint64_t)(at * 1000 + variant));
    memset(told, 0, sizeof told);
    graph_nodes = s->graph_nodes;
    s->prepare();
    lose_power(ALL);
    disk.changes = disk.pwrites = disk.syncs = 0;
}

static int64_t
count_promised(void)
{
    int64_t n = 0;

    for (int64_t id = 0; id < N_IDS; id++) {
        n += told[id] == PROMISED;
    }
    return n;
}

/* ---- Campaign -------------------------------------------------------------------- */

static int64_t
fail_power(const script *s, int64_t variants, uint64_t seed)
{
    int64_t promised;

    begin(s, "nothing fails", 0, 0, seed);
    s->run();
    promised = count_promised();
    for (int64_t point = 1;; point++) {
        bool died = true;

        for (int64_t v = 0; v < variants; v += s->share) {
            begin(s, "power fails at change", point, v, seed);
            disk.dies_at = point;
            disk.ragged = v / N_MODES % 2 == 1;
            s->run();
            died = disk.dead;
            MUST(died || count_promised() == promised); /* ragged or not */
            lose_power((int)(v % N_MODES));
            recover(s);
        }
        if (!died) {
            return point - 1;
        }
    }
}

static int64_t
fill_disk(const script *s, uint64_t seed)
{
    for (int64_t n = 1;; n++) {
        bool full = true;

        for (int mode = 0; mode < N_MODES; mode++) {
            begin(s, "disk full at write", n, mode, seed);
            disk.full_at = n;
            s->run();
            full = disk.pwrites >= n;
            lose_power(mode);
            recover(s);
        }
        if (!full) {
            return n - 1;
        }
    }
}

static int64_t
fail_syncs(const script *s, uint64_t seed)
{
    for (int64_t n = 1;; n++) {
        bool failed = true;

        for (int v = 0; v < 2 * N_MODES; v++) {
            begin(s, "sync fails", n, v, seed);
            disk.sync_fails_at = n;
            s->run();
            failed = disk.syncs >= n;
            if (v % 2 == 1) { /* power fails only after others have gone on */
                adopt();
            }
            lose_power(v / 2);
            recover(s);
        }
        if (!failed) {
            return n - 1;
        }
    }
}

static void
must_be_whole(tfast_status status)
{
    MUST(status == TFAST_OK || status == TFAST_ENOMEM);
}

/* Batches of what there is, now and ahead; one is given back after the cache. */
static void
batch_somehow(tfast_graph_cache *cache)
{
    static const uint16_t fields[] = {0, 1, 2}, nodes[] = {0};
    static const int64_t totals[] = {200, 40, -1}, first[] = {0, 0, 0};
    const tfast_graph_selection selection = {fields, 3, nodes, 1, 5, totals};
    tfast_graph_prefetch *prefetch;
    tfast_graph_batch *batch = NULL, *other;
    int64_t tag;

    must_be_whole(tfast_graph_collate(cache, &selection, first, 3, true, &batch));
    for (int threads = 0; threads < 2; threads++) {
        tfast_status status =
            tfast_graph_prefetch_new(&prefetch, cache, &selection, threads);

        must_be_whole(status);
        for (int i = 0; i < 3 && status == TFAST_OK; i++) {
            must_be_whole(tfast_graph_prefetch_submit(prefetch, first, 1 + i, i));
        }
        if (status == TFAST_OK) {
            must_be_whole(tfast_graph_prefetch_next(prefetch, 10, &other, &tag));
            tfast_graph_batch_release(other);
            tfast_graph_prefetch_free(prefetch);
        }
    }
    tfast_graph_cache_release(cache);
    tfast_graph_batch_release(batch);
}

/* Reading is part of it; what it returns is right, or it says what is missing. */
static void
read_somehow(void)
{
    tfast_graph_open_options options = {TFAST_GRAPH_VERIFY_ONCE, one_in(2), true};
    tfast_graph_cache *cache;
    tfast_graph_array a[4];
    void *owned;
    int64_t n;

    if (tfast_graph_cache_open(&cache, "/c", &options) != TFAST_OK) {
        return;
    }
    n = tfast_graph_cache_len(cache);
    for (int64_t i = 0; i < n; i++) {
        tfast_status status = tfast_graph_cache_get(cache, i, a, &owned);

        must_be_whole(status);
        free(status == TFAST_OK ? owned : NULL);
    }
    must_be_whole(tfast_graph_cache_verify(cache, 0, n, true, no_damage, NULL));
    if (n > 0) {
        batch_somehow(cache);
    } else {
        tfast_graph_cache_release(cache);
    }
}

static int64_t
fail_allocations(const script *s, uint64_t seed)
{
    for (int64_t n = 1;; n++) {
        tfast_graph_repair_report report;

        begin(s, "allocation fails", n, 0, seed);
        allocations = 0;
        allocation_fails = n / 2 + 1;
        and_all_after = n % 2 == 0;
        s->run();
        read_somehow();
        tfast_graph_repair("/c", "/r", &report, ignore_line, NULL);
        allocation_fails = 0;
        lose_power(ALL);
        memset(&disk.directories[1], 0, sizeof disk.directories[1]);
        recover(s);
        if (allocations < n / 2 + 1) {
            return n / 2;
        }
    }
}

int
main(int argc, char **argv)
{
    int64_t variants = argc > 1 ? atoll(argv[1]) : 16, points = 0, full = 0, syncs = 0;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    int64_t memory = 0;

    graph_io_table = &disk_table;
    for (int i = 0; i < N_SCRIPTS; i++) {
        points += fail_power(&scripts[i], variants, seed);
        full += fill_disk(&scripts[i], seed);
        syncs += fail_syncs(&scripts[i], seed);
        memory += scripts[i].graph_nodes == 1 ? fail_allocations(&scripts[i], seed) : 0;
    }
    disk_clear(0);
    printf("{\"crash_points\": %lld, \"full_disk\": %lld, \"failed_syncs\": %lld, "
           "\"failed_allocations\": %lld, \"recoveries\": %lld, \"repairs\": %lld, "
           "\"graphs_shown\": %lld}\n",
           (long long)points, (long long)full, (long long)syncs, (long long)memory,
           (long long)losses, (long long)repairs, (long long)graphs_shown);
    return 0;
}
