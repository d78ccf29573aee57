/* Fuzzing of the graph cache in C: test_crash.py builds this with sanitizers and runs
 * it on the caches in corpus/. Each input is a cache of the corpus with a few fields
 * changed and, mostly, its checksums made right again, on disk.h's disk, where a map is
 * exactly as long as its file. Opening, reading, verifying, collating, adopting and
 * repairing it may fail in any way but by crashing, by asking for memory that the files
 * do not justify, or by giving indices out of range. Arguments: seconds, the
 * first input's number, directories. Prints one line of JSON. */
#include "disk.h"

#include "graph_cache/graph_cache.h"
#include "graph_cache/segment.h"
#include "harness.h"

#include <dirent.h>
#include <time.h>

enum { MOST_BYTES = 64 << 20, MAX_SEEDS = 32, MAX_PIECES = 256 };
enum { LEAST = 1000 }; /* inputs, however slow the machine is */

/* ---- The corpus ------------------------------------------------------------------ */

typedef struct {
    size_t at, bytes;
} piece;

/* A file, and what of it is worth changing. Taken from the intact file, so that it can
 * be sealed again whatever has been changed. */
typedef struct {
    char name[64];
    uint8_t *data;
    size_t bytes;
    piece pieces[MAX_PIECES];
    int n_pieces;
    size_t records[MAX_PIECES], heads[MAX_PIECES], sizes[MAX_PIECES];
    int n_records;
    size_t commits[MAX_PIECES];
    int n_commits;
    size_t index, index_bytes, schema_bytes;
} sample_file;

typedef struct {
    sample_file files[4];
    int n_files;
} sample;

static sample seeds[MAX_SEEDS];
static int n_seeds;

static void
add_piece(sample_file *f, size_t at, size_t bytes)
{
    MUST(f->n_pieces < MAX_PIECES && at + bytes <= f->bytes);
    f->pieces[f->n_pieces++] = (piece){at, bytes};
}

static void
find_frames(sample_file *f, size_t record_head)
{
    size_t at = graph_align(sizeof(graph_header) + f->schema_bytes, GRAPH_BLOCK);

    while (at < f->index) {
        graph_record record;

        memcpy(&record, f->data + at, sizeof record);
        if (record.magic == GRAPH_COMMIT_MAGIC) {
            f->commits[f->n_commits++] = at;
            add_piece(f, at, sizeof(graph_commit));
            at += (size_t)graph_commit_bytes((int64_t)at);
        } else {
            size_t bytes = (size_t)record.units * GRAPH_UNIT;

            f->records[f->n_records] = at;
            f->heads[f->n_records] = record_head;
            f->sizes[f->n_records++] = bytes;
            add_piece(f, at, record_head);
            add_piece(f, at + record_head, bytes - record_head);
            at += bytes;
        }
    }
}

static void
find_pieces(sample_file *f)
{
    graph_header header;
    graph_schema_header schema;
    graph_trailer trailer;

    if (f->name[0] != 's') {
        add_piece(f, 0, f->bytes);
        return;
    }
    memcpy(&header, f->data, sizeof header);
    memcpy(&schema, f->data + sizeof header, sizeof schema);
    memcpy(&trailer, f->data + f->bytes - sizeof trailer, sizeof trailer);
    f->schema_bytes = header.schema_bytes;
    f->index = trailer.index_offset;
    f->index_bytes = trailer.index_bytes;
    add_piece(f, 0, sizeof header);
    add_piece(f, sizeof header, f->schema_bytes);
    add_piece(f, sizeof header, sizeof schema);
    add_piece(f, f->index, f->index_bytes);
    add_piece(f, f->bytes - sizeof trailer, sizeof trailer);
    find_frames(f, graph_align(sizeof(graph_record) + 4 * (size_t)schema.n_counts +
                                   schema.n_fields,
                               GRAPH_UNIT));
}

static void
load_file(sample *s, const char *folder, const char *name)
{
    sample_file *f = &s->files[s->n_files++];
    char path[1024];
    FILE *in;

    MUST(s->n_files <= 4 && strlen(name) < sizeof f->name);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    in = fopen(path, "rb");
    MUST(in != NULL && fseek(in, 0, SEEK_END) == 0);
    f->bytes = (size_t)ftell(in);
    f->data = malloc(f->bytes + 1);
    MUST(f->data != NULL && fseek(in, 0, SEEK_SET) == 0);
    MUST(fread(f->data, 1, f->bytes, in) == f->bytes);
    fclose(in);
    strcpy(f->name, name);
    find_pieces(f);
}

static void
load_sample(const char *folder)
{
    DIR *directory = opendir(folder);
    struct dirent *entry;

    MUST(directory != NULL && n_seeds < MAX_SEEDS);
    while ((entry = readdir(directory)) != NULL) {
        if (entry->d_name[0] == 'm' || entry->d_name[0] == 's') {
            load_file(&seeds[n_seeds], folder, entry->d_name);
        }
    }
    closedir(directory);
    n_seeds++;
}

/* ---- Damage ---------------------------------------------------------------------- */

static uint64_t
interesting(void)
{
    static const uint64_t values[] = {
        0,   1,   2,    3,    7,      8,      16,    19,         20,      127,
        128, 255, 4096, 4097, 0x7fff, 0xfffe, 65535, 0x7fffffff, 1u << 31};
    uint64_t power = UINT64_C(1) << disk_random() % 64;

    switch (disk_random() % 4) {
    case 0:
        return power - disk_random() % 3;
    case 1:
        return disk_random();
    default:
        return values[disk_random() % (sizeof values / sizeof *values)];
    }
}

static void
change(uint8_t *data, piece p)
{
    size_t size = (size_t)1 << disk_random() % 4, at;
    uint64_t value = 0;

    if (p.bytes < size) {
        return;
    }
    at = p.at + disk_random() % (p.bytes / size) * size;
    memcpy(&value, data + at, size);
    switch (disk_random() % 3) {
    case 0:
        value += disk_random() % 33 - 16;
        break;
    case 1:
        value ^= UINT64_C(1) << disk_random() % (8 * size);
        break;
    default:
        value = interesting();
    }
    memcpy(data + at, &value, size);
}

static void
put(uint8_t *data, size_t at, uint32_t value)
{
    memcpy(data + at, &value, sizeof value);
}

static void
seal_frames(const sample_file *f, uint8_t *data)
{
    uint32_t seed = graph_crc(data + offsetof(graph_header, uuid), 16);
    size_t previous = 0;

    for (int i = 0; i < f->n_records; i++) {
        uint8_t *record = data + f->records[i];
        size_t head = f->heads[i];

        put(record, 8, graph_crc(record + head, f->sizes[i] - head));
        put(record, 4, graph_crc_more(seed, record + 8, head - 8));
    }
    for (int i = 0; i < f->n_commits; i++) {
        uint8_t *commit = data + f->commits[i];
        uint32_t group = 0;

        for (int k = 0; k < f->n_records; k++) {
            if (f->records[k] > previous && f->records[k] < f->commits[i]) {
                group = graph_crc_more(group, data + f->records[k] + 4, 4);
            }
        }
        put(commit, offsetof(graph_commit, group_crc), group);
        put(commit, 4, graph_crc_more(seed, commit + 8, sizeof(graph_commit) - 8));
        previous = f->commits[i];
    }
}

static void
seal_file(const sample_file *f, uint8_t *data)
{
    uint8_t *trailer = data + f->bytes - sizeof(graph_trailer);

    put(data, offsetof(graph_header, crc), 0);
    put(data, offsetof(graph_header, crc),
        graph_crc(data, sizeof(graph_header) + f->schema_bytes));
    seal_frames(f, data);
    put(trailer, 4, graph_crc(data + f->index, f->index_bytes));
    put(trailer, 0, graph_crc(trailer + 4, sizeof(graph_trailer) - 4));
}

/* Names and checksums of the manifest follow the segments. */
static void
seal_manifest(uint8_t *manifest, size_t bytes, const sample *s, uint8_t *const *data)
{
    for (int i = 0; i < s->n_files; i++) {
        const sample_file *f = &s->files[i];

        for (size_t at = sizeof(graph_manifest);
             f->name[0] == 's' && at + sizeof(graph_manifest_segment) <= bytes;
             at += sizeof(graph_manifest_segment)) {
            if (memcmp(manifest + at, data[i] + offsetof(graph_header, uuid), 16) ==
                0) {
                memcpy(manifest + at + offsetof(graph_manifest_segment, trailer_crc),
                       data[i] + f->bytes - sizeof(graph_trailer), 4);
            }
        }
    }
    put(manifest, 12, graph_crc(manifest + 16, bytes - 16));
}

static void
place(const char *name, uint8_t *data, size_t bytes)
{
    disk_file *f = &disk.files[disk.n_files];

    f->now = data;
    f->now_bytes = bytes;
    change_name(0, "", name, disk.n_files++);
}

/* One input: a sample, damaged, lies in /c. */
static void
make_input(const sample *s)
{
    uint8_t *data[4] = {NULL};
    int manifest = 0, n = 1 + (int)(disk_random() % 3);

    for (int i = 0; i < s->n_files; i++) {
        data[i] = malloc(s->files[i].bytes + 1);
        MUST(data[i] != NULL);
        memcpy(data[i], s->files[i].data, s->files[i].bytes);
        manifest = s->files[i].name[0] == 'm' ? i : manifest;
    }
    for (int k = 0; k < n; k++) {
        int i = (int)(disk_random() % (uint64_t)s->n_files);
        const sample_file *f = &s->files[i];

        change(data[i], f->pieces[disk_random() % (uint64_t)f->n_pieces]);
    }
    for (int i = 0; i < s->n_files; i++) {
        if (i != manifest && !one_in(10)) {
            seal_file(&s->files[i], data[i]);
        }
    }
    if (!one_in(20)) {
        seal_manifest(data[manifest], s->files[manifest].bytes, s, data);
    }
    disk.directories[0].now = true;
    for (int i = 0; i < s->n_files; i++) {
        char name[64];
        bool open = i != manifest && one_in(8);
        size_t bytes = s->files[i].bytes;

        snprintf(name, sizeof name, "%s%s", open ? "open" : "",
                 s->files[i].name + (open ? strlen("segment") : 0));
        place(name, data[i], one_in(16) ? disk_random() % bytes : bytes);
    }
}

/* ---- Use ------------------------------------------------------------------------- */

static int64_t inputs, opened, graphs, batches, adopted, repaired, reports;
static volatile uint8_t sink;

static void
touch(const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        sink ^= ((const uint8_t *)data)[i];
    }
}

static void
count_report(void *context, int64_t i, const char *message)
{
    (void)context;
    (void)i;
    reports += *message != '\0';
}

static void
ignore_line(void *context, const char *text)
{
    (void)context;
    (void)text;
}

static void
read_graphs(tfast_graph_cache *cache, const tfast_graph_schema *schema)
{
    tfast_graph_array *a = calloc(schema->header.n_fields + 1u, sizeof *a);
    int64_t n = tfast_graph_cache_len(cache);

    MUST(a != NULL);
    for (int64_t i = -1; i <= n && i < 32; i++) {
        void *owned;

        if (tfast_graph_cache_get(cache, i, a, &owned) != TFAST_OK) {
            continue;
        }
        for (int f = 0; f < schema->header.n_fields; f++) {
            int bytes = graph_stored_bytes(schema->fields[f].dtype, a[f].stored);

            touch(a[f].data, (size_t)a[f].numel * (size_t)bytes);
        }
        graphs++;
        free(owned);
    }
    free(a);
}

/* Every index of the batch must point at something in it. */
static void
check_indices(const tfast_graph_schema *schema, const tfast_graph_batch *batch, int f)
{
    const graph_schema_field *field = &schema->fields[f];
    const int64_t *values = (const int64_t *)(batch->arena + batch->field_at[f]);
    int64_t numel = 1;

    if (field->add_mode != GRAPH_ADD_COUNT || field->dtype != GRAPH_I64 ||
        schema->counts[field->add[0]].role > GRAPH_EDGES) {
        return;
    }
    for (int d = 0; d < batch->ranks[f]; d++) {
        numel *= batch->shapes[f][d];
    }
    for (int64_t i = 0; i < numel; i++) {
        MUST(values[i] >= 0 && values[i] < batch->totals[field->add[0]]);
    }
}

static void
collate(tfast_graph_cache *cache, const tfast_graph_schema *schema, bool verified)
{
    int64_t indices[4], n = tfast_graph_cache_len(cache);
    uint16_t fields[GRAPH_MAX_FIELDS], batch_of[1] = {0};
    tfast_graph_selection selection = {.fields = fields, .batch_of = batch_of};
    tfast_graph_batch *batch;

    selection.n_fields = schema->header.n_fields;
    selection.n_batch_of = schema->header.n_counts > 0;
    for (int i = 0; i < selection.n_fields; i++) {
        fields[i] = (uint16_t)i;
    }
    for (int i = 0; i < 4; i++) {
        indices[i] = (int64_t)(disk_random() % (uint64_t)n);
    }
    if (tfast_graph_collate(cache, &selection, indices, 4, true, &batch) != TFAST_OK) {
        return;
    }
    batches++;
    touch(batch->arena, batch->bytes);
    for (int f = 0; f < selection.n_fields && verified; f++) {
        check_indices(schema, batch, f);
    }
    tfast_graph_batch_release(batch);
}

static void
read_all(const char *path)
{
    tfast_graph_open_options options = {(int)(disk_random() % 3), one_in(3), one_in(3)};
    const tfast_graph_schema *schema;
    tfast_graph_cache *cache;
    int64_t n, *counts;

    if (tfast_graph_cache_open(&cache, path, &options) != TFAST_OK) {
        return;
    }
    opened++;
    n = tfast_graph_cache_len(cache);
    schema = tfast_graph_cache_schema(cache);
    counts = malloc((size_t)n * 16 + 1);
    MUST(counts != NULL);
    tfast_graph_cache_frame_bytes(cache, counts);
    tfast_graph_cache_keys(cache, (uint8_t *)counts);
    for (int k = 0; n > 0 && k < schema->header.n_counts; k++) {
        tfast_graph_cache_counts(cache, k, counts);
    }
    free(counts);
    if (n > 0) {
        read_graphs(cache, schema);
        collate(cache, schema, options.verify != TFAST_GRAPH_VERIFY_NEVER);
    }
    tfast_graph_cache_verify(cache, 0, n, true, count_report, NULL);
    tfast_graph_cache_release(cache);
}

/* What repair has made can be read, all of it. */
static void
must_read(const char *path, int64_t kept)
{
    tfast_graph_open_options options = {TFAST_GRAPH_VERIFY_ALWAYS, false, false};
    tfast_graph_array *a = calloc(GRAPH_MAX_FIELDS, sizeof *a);
    tfast_graph_cache *cache;

    MUST(a != NULL);
    MUST(tfast_graph_cache_open(&cache, path, &options) == TFAST_OK);
    MUST(tfast_graph_cache_len(cache) == kept);
    for (int64_t i = 0; i < kept; i++) {
        void *owned;

        MUST(tfast_graph_cache_get(cache, i, a, &owned) == TFAST_OK);
    }
    tfast_graph_cache_release(cache);
    free(a);
}

static void
use_input(void)
{
    tfast_graph_repair_report report;
    int64_t kept, lost;

    read_all("/c");
    if (one_in(3) &&
        tfast_graph_repair("/c", "/r", &report, ignore_line, NULL) == TFAST_OK) {
        repaired++;
        must_read("/r", report.kept);
    }
    if (one_in(3) && tfast_graph_adopt("/c", &kept, &lost) == TFAST_OK) {
        adopted++;
        read_all("/c");
    }
}

int
main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 1;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    time_t end = time(NULL) + (time_t)seconds;

    graph_io_table = &disk_table;
    most_bytes = MOST_BYTES;
    for (int i = 3; i < argc; i++) {
        load_sample(argv[i]);
    }
    MUST(n_seeds > 0);
    for (uint64_t number = first; inputs < LEAST || time(NULL) <= end;
         number++, inputs++) {
        snprintf(doing, sizeof doing, "input %llu", (unsigned long long)number);
        disk_clear(number * UINT64_C(0x9e3779b97f4a7c15));
        make_input(&seeds[disk_random() % (uint64_t)n_seeds]);
        use_input();
    }
    disk_clear(0);
    for (int i = 0; i < n_seeds; i++) {
        for (int k = 0; k < seeds[i].n_files; k++) {
            free(seeds[i].files[k].data);
        }
    }
    printf("{\"inputs\": %lld, \"opened\": %lld, \"graphs\": %lld, \"batches\": %lld, "
           "\"damage_reported\": %lld, \"adopted\": %lld, \"repaired\": %lld}\n",
           (long long)inputs, (long long)opened, (long long)graphs, (long long)batches,
           (long long)reports, (long long)adopted, (long long)repaired);
    return 0;
}
