/* Writers that close or die, somebody who adopts and begins builds, and readers, all at
 * once on one cache on a real file system: test_locks.py builds this with
 * csrc/graph_cache, also for ThreadSanitizer. Threads stand for processes: locks belong
 * to open files. Usage: harness PATH ROUNDS */
#include "graph_cache/graph_cache.h"
#include "graph_cache/io.h"
#include "graph_kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simd/graph_loops.h"

enum { WRITERS = 3, READERS = 2, MOST_ROUNDS = 500, GRAPHS = 3 };

static const char *path;
static int rounds;
static _Atomic(int) writing = WRITERS;

/* Graph (writer, round, i) has the number (writer * MOST_ROUNDS + round) * GRAPHS + i.
 * Of a round those below promised[writer][round] were committed. */
static int promised[WRITERS][MOST_ROUNDS];

const tfast_graph_kernels *
tfast_graph_kernels_in_use(void)
{
    return &graph_kernels;
}

#define MUST(condition)                                                                \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%d: must hold: %s (%s)\n", __LINE__, #condition,          \
                    tfast_message());                                                  \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

/* ---- Locks that take their time -------------------------------------------------- */

/* Others come between a file's making and its locking, and while it is locked. */
static graph_io slow;
static const graph_io *fast;

static int
slow_lock(int file, int how)
{
    static _Atomic(unsigned) calls;
    int result;

    usleep(calls++ * 37 % 300);
    result = fast->lock(file, how);
    usleep(calls++ * 53 % 300);
    return result;
}

/* A directory may have changed before what was listed is looked at. */
static int
slow_list(const char *directory, void (*visit)(void *context, const char *name),
          void *context)
{
    static _Atomic(unsigned) calls;
    int result = fast->list(directory, visit, context);

    usleep(calls++ * 997 % 6000);
    return result;
}

/* ---- Writing --------------------------------------------------------------------- */

/* y [] i64 */
static const struct {
    graph_schema_header header;
    graph_schema_field field;
    char name[16];
} schema = {
    {0, 1, 1, {0, 0}},
    {.name_bytes = 1,
     .type = GRAPH_NONE,
     .dtype = GRAPH_I64,
     .cat_dim = -1,
     .add = {GRAPH_NONE, GRAPH_NONE}},
    "y",
};

static void
append(tfast_graph_writer *writer, int64_t number)
{
    const tfast_graph_value value = {&number, true, GRAPH_I64, 0, NULL, NULL};
    int misfit;

    MUST(tfast_graph_writer_append(writer, &value, NULL, NULL, &misfit) == TFAST_OK);
}

/* Closes, or dies with all, some or none of its graphs committed. */
static void
write_round(int id, int round)
{
    const int64_t first = ((int64_t)id * MOST_ROUNDS + round) * GRAPHS;
    const int fate = (id + round) % 4;
    tfast_graph_writer *writer;

    MUST(tfast_graph_writer_open(&writer, path, &schema, sizeof schema, false) ==
         TFAST_OK);
    for (int i = 0; i < GRAPHS; i++) {
        append(writer, first + i);
        if (fate == 1 || (fate == 2 && i == 0)) {
            MUST(tfast_graph_writer_commit(writer) == TFAST_OK);
        }
    }
    if (fate == 0) {
        MUST(tfast_graph_writer_close(writer) == TFAST_OK);
    }
    promised[id][round] = (int)tfast_graph_writer_committed(writer);
    tfast_graph_writer_free(writer);
}

static void *
write_all(void *context)
{
    for (int round = 0; round < rounds; round++) {
        write_round(*(int *)context, round);
    }
    writing--;
    return NULL;
}

/* ---- Adopting and reading -------------------------------------------------------- */

static void *
adopt_all(void *unused)
{
    int64_t graphs, lost;

    while (writing > 0) {
        MUST(tfast_graph_adopt(path, &graphs, &lost) == TFAST_OK);
        MUST(tfast_graph_build_begin(path) == TFAST_OK);
        MUST(tfast_graph_build_end(path, NULL, 0) == TFAST_OK);
    }
    return unused;
}

static void
damaged(void *context, int64_t i, const char *message)
{
    (void)context;
    fprintf(stderr, "graph %lld: %s\n", (long long)i, message);
    exit(1);
}

/* Each graph is there once, and was appended; with `all`, exactly those committed. */
static void
check(tfast_graph_cache *cache, bool all)
{
    static const int64_t most = (int64_t)WRITERS * MOST_ROUNDS * GRAPHS;
    const int64_t n = tfast_graph_cache_len(cache);
    char *seen = calloc(1, (size_t)most);
    int64_t wanted = 0;

    MUST(seen != NULL);
    MUST(tfast_graph_cache_verify(cache, 0, n, true, damaged, NULL) == TFAST_OK);
    for (int64_t i = 0; i < n; i++) {
        tfast_graph_array y;
        int64_t number = 0;
        void *owned;

        MUST(tfast_graph_cache_get(cache, i, &y, &owned) == TFAST_OK);
        memcpy(&number, y.data, y.stored == GRAPH_AS_IS ? 8 : y.stored == 2 ? 1 : 2);
        free(owned);
        MUST(number < most && !seen[number]);
        seen[number] = 1;
        MUST(
            !all ||
            number % GRAPHS <
                promised[number / GRAPHS / MOST_ROUNDS][number / GRAPHS % MOST_ROUNDS]);
    }
    for (int i = 0; all && i < WRITERS * MOST_ROUNDS; i++) {
        wanted += promised[i / MOST_ROUNDS][i % MOST_ROUNDS];
    }
    MUST(!all || n == wanted);
    free(seen);
}

static void *
read_all(void *context)
{
    for (int i = 0; writing > 0; i++) {
        const tfast_graph_open_options options = {TFAST_GRAPH_VERIFY_ONCE,
                                                  *(int *)context % 2 == 1, i % 2 == 0};
        tfast_graph_cache *cache;
        tfast_status status = tfast_graph_cache_open(&cache, path, &options);

        if (status == TFAST_OK) {
            check(cache, false);
            tfast_graph_cache_release(cache);
        } else { /* while others write it may be refused as a whole */
            MUST(!options.partial);
            MUST(strstr(tfast_message(), "must be a complete cache") != NULL);
        }
    }
    return NULL;
}

/* ---- Builds that delete what was there ------------------------------------------- */

static void *
replace_all(void *unused)
{
    for (int round = 0; round < rounds; round++) {
        tfast_graph_open_options options = {TFAST_GRAPH_VERIFY_NEVER, false, true};
        tfast_graph_writer *writer;
        tfast_graph_cache *cache;
        uint64_t last;

        MUST(tfast_graph_build_begin(path) == TFAST_OK);
        MUST(tfast_graph_writer_open(&writer, path, &schema, sizeof schema, false) ==
             TFAST_OK);
        append(writer, round);
        MUST(tfast_graph_writer_close(writer) == TFAST_OK);
        tfast_graph_writer_free(writer);
        MUST(tfast_graph_cache_open(&cache, path, &options) == TFAST_OK);
        last = (uint64_t)tfast_graph_cache_len(cache) - 1;
        tfast_graph_cache_release(cache);
        MUST(tfast_graph_build_end(path, &last, 1) == TFAST_OK);
    }
    writing--;
    return unused;
}

/* A reader sees a build or what it has made, and nothing that is not closed. */
static void
look_meanwhile(void)
{
    const tfast_graph_open_options options = {TFAST_GRAPH_VERIFY_ALWAYS, false, false};
    tfast_graph_cache *cache;
    pthread_t builder;

    writing = 1;
    pthread_create(&builder, NULL, replace_all, NULL);
    while (writing > 0) {
        if (tfast_graph_cache_open(&cache, path, &options) == TFAST_OK) {
            MUST(tfast_graph_cache_verify(cache, 0, tfast_graph_cache_len(cache), true,
                                          damaged, NULL) == TFAST_OK);
            tfast_graph_cache_release(cache);
        } else {
            MUST(strstr(tfast_message(), "a complete cache") != NULL);
            MUST(strstr(tfast_message(), "without closing") == NULL);
        }
    }
    pthread_join(builder, NULL);
}

int
main(int count, char **arguments)
{
    const tfast_graph_open_options options = {TFAST_GRAPH_VERIFY_ALWAYS, false, false};
    static int numbers[WRITERS + READERS];
    pthread_t threads[WRITERS + READERS + 1];
    tfast_graph_cache *cache;
    int64_t graphs, lost;

    path = arguments[1];
    rounds = count > 2 ? atoi(arguments[2]) : 20;
    MUST(rounds <= MOST_ROUNDS);
    fast = graph_io_table;
    slow = *fast;
    slow.lock = slow_lock;
    slow.list = slow_list;
    graph_io_table = &slow;
    MUST(tfast_graph_build_begin(path) == TFAST_OK);
    MUST(tfast_graph_build_end(path, NULL, 0) == TFAST_OK);
    for (int i = 0; i < WRITERS + READERS; i++) {
        numbers[i] = i;
        pthread_create(&threads[i], NULL, i < WRITERS ? write_all : read_all,
                       &numbers[i]);
    }
    pthread_create(&threads[WRITERS + READERS], NULL, adopt_all, NULL);
    for (int i = 0; i < WRITERS + READERS + 1; i++) {
        pthread_join(threads[i], NULL);
    }
    MUST(tfast_graph_adopt(path, &graphs, &lost) == TFAST_OK);
    MUST(tfast_graph_cache_open(&cache, path, &options) == TFAST_OK);
    check(cache, true);
    tfast_graph_cache_release(cache);
    look_meanwhile();
    puts("passed");
    return 0;
}
