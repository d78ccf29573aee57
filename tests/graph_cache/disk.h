/* A disk in memory behind the graph cache's table of I/O. It keeps what has been made
 * durable apart from what has only been written, so that it can lose power: then each
 * write since the last sync may be there, or not, or have left garbage in its sectors,
 * and each name since the directory's last sync may be there or not. It can also be
 * full, fail a sync, write and read less than asked, and be interrupted.
 *
 * Two directories, /c and /r. Errors of this file itself end the program. */
#include "graph_cache/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

enum {
    MAX_FILES = 512,
    MAX_NAMES = 64,
    MAX_CHANGES = 512,
    MAX_HANDLES = 32,
    N_DIRS = 2
};

static char doing[128]; /* for messages */

#define MUST(condition)                                                                \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: must hold: %s (%s; %s)\n", __FILE__, __LINE__,     \
                    #condition, doing, tfast_message());                               \
            exit(2);                                                                   \
        }                                                                              \
    } while (0)

/* ---- State ----------------------------------------------------------------------- */

typedef struct {
    int64_t at;
    size_t bytes;
    uint8_t *data; /* NULL: truncated to `at` */
} disk_write;

typedef struct {
    uint8_t *now, *safe;
    size_t now_bytes, safe_bytes;
    disk_write writes[MAX_CHANGES]; /* since the last sync */
    int n_writes;
    int exclusive, shared; /* handle that holds the lock; how many share it */
} disk_file;

typedef struct {
    char name[64];
    int file;
} disk_name;

/* A file gets a name (from ""), loses it (to ""), or changes it. */
typedef struct {
    char from[64], to[64];
    int file;
} disk_rename;

typedef struct {
    bool now, safe;
    disk_name names[MAX_NAMES], safe_names[MAX_NAMES];
    int n_names, n_safe;
    disk_rename renames[MAX_CHANGES];
    int n_renames;
} disk_directory;

typedef struct {
    bool used;
    int file;      /* -1: a directory, */
    int directory; /* this one, N_DIRS: their parent */
    int locked;    /* 0, LOCK_SH or LOCK_EX */
} disk_handle;

static struct {
    disk_file files[MAX_FILES];
    int n_files;
    disk_directory directories[N_DIRS];
    disk_handle handles[MAX_HANDLES];
    uint64_t random;
    /* Faults; numbers count from 1, 0: never. */
    int64_t changes, dies_at; /* the change at which power fails */
    int64_t pwrites, full_at; /* the write from which on the disk is full */
    int64_t syncs, sync_fails_at;
    bool ragged; /* short counts, and EINTR */
    bool dead;
} disk;

static uint64_t
disk_random(void) /* splitmix64 */
{
    uint64_t z = disk.random += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static bool
one_in(uint64_t n)
{
    return disk_random() % n == 0;
}

/* memcpy() of nothing must not be given NULL. */
static void
copy_bytes(uint8_t *to, const void *from, size_t bytes)
{
    if (bytes > 0) {
        memcpy(to, from, bytes);
    }
}

static void
forget_writes(disk_file *f)
{
    for (int i = 0; i < f->n_writes; i++) {
        free(f->writes[i].data);
    }
    f->n_writes = 0;
}

static void
disk_clear(uint64_t seed)
{
    for (int i = 0; i < disk.n_files; i++) {
        forget_writes(&disk.files[i]);
        free(disk.files[i].now);
        free(disk.files[i].safe);
    }
    memset(&disk, 0, sizeof disk);
    disk.random = seed;
}

/* True, with nothing done, when power fails here or has failed before. */
static bool
power_fails(void)
{
    disk.changes++;
    disk.dead = disk.dead || disk.changes == disk.dies_at;
    return disk.dead;
}

/* ---- Names ----------------------------------------------------------------------- */

/* "/c", "/c/name", "/c/..": the directory, and the name in it ("" for itself). */
static int
split(const char *path, const char **name)
{
    int directory = path[1] == 'c' ? 0 : 1;

    MUST(path[0] == '/' && (path[1] == 'c' || path[1] == 'r'));
    MUST(path[2] == '\0' || path[2] == '/');
    *name = path[2] == '/' ? path + 3 : "";
    return directory;
}

static int
find_name(const disk_name *names, int n, const char *name)
{
    for (int i = 0; i < n; i++) {
        if (strcmp(names[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

static void
apply_rename(disk_name *names, int *n, const disk_rename *r)
{
    int at = find_name(names, *n, r->from);

    if (r->from[0] != '\0' && at >= 0) {
        names[at] = names[--*n];
    }
    if (r->to[0] == '\0') {
        return;
    }
    at = find_name(names, *n, r->to);
    if (at < 0) {
        MUST(*n < MAX_NAMES);
        at = (*n)++;
        strcpy(names[at].name, r->to);
    }
    names[at].file = r->file;
}

static void
change_name(int directory, const char *from, const char *to, int file)
{
    disk_directory *d = &disk.directories[directory];
    disk_rename *r = &d->renames[d->n_renames++];

    MUST(d->n_renames < MAX_CHANGES && strlen(from) < 64 && strlen(to) < 64);
    strcpy(r->from, from);
    strcpy(r->to, to);
    r->file = file;
    apply_rename(d->names, &d->n_names, r);
}

/* ---- The table ------------------------------------------------------------------- */

static int
new_handle(int file, int directory)
{
    for (int i = 0; i < MAX_HANDLES; i++) {
        if (!disk.handles[i].used) {
            disk.handles[i] = (disk_handle){true, file, directory, 0};
            return i;
        }
    }
    MUST(!"handles are closed");
    return -1;
}

static disk_file *
file_of(int handle)
{
    MUST(handle >= 0 && handle < MAX_HANDLES && disk.handles[handle].used);
    MUST(disk.handles[handle].file >= 0);
    return &disk.files[disk.handles[handle].file];
}

static int
disk_open(const char *path, int flags)
{
    const char *name;
    int directory = split(path, &name), at;
    disk_directory *d = &disk.directories[directory];

    if (disk.dead) {
        return -EIO;
    }
    if (!d->now) {
        return -ENOENT;
    }
    if (*name == '\0' || strcmp(name, "..") == 0) {
        return new_handle(-1, *name == '\0' ? directory : N_DIRS);
    }
    at = find_name(d->names, d->n_names, name);
    if (at >= 0) {
        return flags & O_EXCL ? -EEXIST : new_handle(d->names[at].file, directory);
    }
    if (!(flags & O_CREAT)) {
        return -ENOENT;
    }
    if (power_fails()) {
        return -EIO;
    }
    MUST(disk.n_files < MAX_FILES);
    change_name(directory, "", name, disk.n_files);
    return new_handle(disk.n_files++, directory);
}

static void
unlock(disk_handle *h)
{
    disk_file *f = &disk.files[h->file];

    f->exclusive -= h->locked == LOCK_EX;
    f->shared -= h->locked == LOCK_SH;
    h->locked = 0;
}

static int
disk_close(int handle)
{
    MUST(handle >= 0 && handle < MAX_HANDLES && disk.handles[handle].used);
    if (disk.handles[handle].file >= 0) {
        unlock(&disk.handles[handle]);
    }
    disk.handles[handle].used = false;
    return 0;
}

static int
disk_lock(int handle, int how)
{
    disk_handle *h = &disk.handles[handle];
    disk_file *f = file_of(handle);

    if (disk.dead) {
        return -EIO;
    }
    unlock(h);
    if (how & LOCK_UN) {
        return 0;
    }
    if (f->exclusive > 0 || ((how & LOCK_EX) && f->shared > 0)) {
        MUST(how & LOCK_NB); /* nobody else is there to wait for */
        return -EWOULDBLOCK;
    }
    h->locked = how & LOCK_EX ? LOCK_EX : LOCK_SH;
    f->exclusive += h->locked == LOCK_EX;
    f->shared += h->locked == LOCK_SH;
    return 0;
}

static int64_t
disk_pread(int handle, void *data, size_t bytes, int64_t at)
{
    disk_file *f = file_of(handle);

    if (disk.dead) {
        return -EIO;
    }
    if ((size_t)at >= f->now_bytes) {
        return 0;
    }
    if (disk.ragged && one_in(5)) {
        return -EINTR;
    }
    bytes = bytes < f->now_bytes - (size_t)at ? bytes : f->now_bytes - (size_t)at;
    bytes = disk.ragged ? 1 + disk_random() % bytes : bytes;
    memcpy(data, f->now + at, bytes);
    return (int64_t)bytes;
}

static void
resize(uint8_t **data, size_t *bytes, size_t wanted)
{
    uint8_t *more = realloc(*data, wanted + 1);

    MUST(more != NULL);
    if (wanted > *bytes) {
        memset(more + *bytes, 0, wanted - *bytes);
    }
    *data = more;
    *bytes = wanted;
}

static void
apply_write(uint8_t **data, size_t *bytes, const disk_write *w)
{
    size_t end = (size_t)w->at + w->bytes;

    if (w->data == NULL || end > *bytes) {
        resize(data, bytes, end);
    }
    if (w->data != NULL) {
        memcpy(*data + w->at, w->data, w->bytes);
    }
}

static void
change_file(disk_file *f, const void *data, size_t bytes, int64_t at)
{
    disk_write *w = &f->writes[f->n_writes++];

    MUST(f->n_writes < MAX_CHANGES);
    *w = (disk_write){at, bytes, NULL};
    if (data != NULL) {
        w->data = malloc(bytes + 1);
        MUST(w->data != NULL);
        memcpy(w->data, data, bytes);
    }
    apply_write(&f->now, &f->now_bytes, w);
}

static int64_t
disk_pwrite(int handle, const void *data, size_t bytes, int64_t at)
{
    disk_file *f = file_of(handle);

    if (power_fails()) {
        return -EIO;
    }
    if (disk.ragged && one_in(5)) {
        return -EINTR;
    }
    if (disk.full_at > 0 && ++disk.pwrites >= disk.full_at) {
        if (disk.pwrites > disk.full_at || bytes < 2) {
            return -ENOSPC;
        }
        bytes /= 2; /* some of it still fits */
    }
    bytes = disk.ragged && bytes > 1 ? 1 + disk_random() % bytes : bytes;
    change_file(f, data, bytes, at);
    return (int64_t)bytes;
}

static int64_t
disk_size(int handle)
{
    return disk.dead ? -EIO : (int64_t)file_of(handle)->now_bytes;
}

static int
disk_truncate(int handle, int64_t bytes)
{
    if (power_fails()) {
        return -EIO;
    }
    change_file(file_of(handle), NULL, 0, bytes);
    return 0;
}

/* Of a sync that fails some has been written, and the rest never will be, unless it is
 * written again: the system takes it for written now. */
static void
sync_file(disk_file *f, bool fails)
{
    for (int i = 0; i < f->n_writes; i++) {
        if (!fails || one_in(2)) {
            apply_write(&f->safe, &f->safe_bytes, &f->writes[i]);
        }
    }
    forget_writes(f);
}

static int
disk_sync(int handle)
{
    disk_handle *h = &disk.handles[handle];

    if (power_fails()) {
        return -EIO;
    }
    if (++disk.syncs == disk.sync_fails_at) {
        if (h->file >= 0) {
            sync_file(&disk.files[h->file], true);
        }
        return -EIO;
    }
    if (h->file >= 0) {
        sync_file(&disk.files[h->file], false);
    } else if (h->directory == N_DIRS) {
        for (int i = 0; i < N_DIRS; i++) {
            disk.directories[i].safe = disk.directories[i].now;
        }
    } else {
        disk_directory *d = &disk.directories[h->directory];

        memcpy(d->safe_names, d->names, sizeof d->names);
        d->n_safe = d->n_names;
        d->n_renames = 0;
    }
    return 0;
}

static void
disk_forget(int handle)
{
    disk_file *f = file_of(handle);

    resize(&f->now, &f->now_bytes, f->safe_bytes);
    copy_bytes(f->now, f->safe, f->safe_bytes);
    for (int i = 0; i < f->n_writes; i++) {
        apply_write(&f->now, &f->now_bytes, &f->writes[i]);
    }
}

static int
disk_rename_file(const char *from, const char *to)
{
    const char *old, *new;
    int directory = split(from, &old);
    disk_directory *d = &disk.directories[directory];
    int at;

    MUST(split(to, &new) == directory);
    if (power_fails()) {
        return -EIO;
    }
    at = find_name(d->names, d->n_names, old);
    if (at < 0) {
        return -ENOENT;
    }
    change_name(directory, old, new, d->names[at].file);
    return 0;
}

static int
disk_unlink(const char *path)
{
    const char *name;
    int directory = split(path, &name), at;
    disk_directory *d = &disk.directories[directory];

    if (power_fails()) {
        return -EIO;
    }
    at = find_name(d->names, d->n_names, name);
    if (at < 0) {
        return -ENOENT;
    }
    change_name(directory, name, "", d->names[at].file);
    return 0;
}

static int
disk_mkdir(const char *path)
{
    const char *name;
    int directory = split(path, &name);

    if (disk.directories[directory].now) {
        return -EEXIST;
    }
    if (power_fails()) {
        return -EIO;
    }
    disk.directories[directory].now = true;
    return 0;
}

static int
disk_list(const char *path, void (*visit)(void *context, const char *name),
          void *context)
{
    const char *name;
    int directory = split(path, &name);
    disk_directory *d = &disk.directories[directory];

    if (disk.dead || !d->now) {
        return disk.dead ? -EIO : -ENOENT;
    }
    for (int i = 0; i < d->n_names; i++) {
        visit(context, d->names[i].name);
    }
    return 0;
}

/* A copy of its own, so that the sanitizer sees reads outside and maps left behind. */
static const void *
disk_map(int handle, int64_t bytes, int *error)
{
    uint8_t *map = malloc((size_t)bytes);

    *error = -EIO;
    if (disk.dead) {
        free(map);
        return NULL;
    }
    MUST(map != NULL && (size_t)bytes <= file_of(handle)->now_bytes);
    memcpy(map, file_of(handle)->now, (size_t)bytes);
    return map;
}

static void
disk_unmap(const void *map, int64_t bytes)
{
    (void)bytes;
    free((void *)(uintptr_t)map);
}

static int
disk_draw(void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        ((uint8_t *)data)[i] = (uint8_t)disk_random();
    }
    return 0;
}

static int64_t
disk_file_system(const char *path)
{
    (void)path;
    return 0;
}

static const graph_io disk_table = {
    disk_open, disk_close, disk_pread,  disk_pwrite,      disk_size,   disk_truncate,
    disk_sync, disk_sync,  disk_forget, disk_rename_file, disk_unlink, disk_mkdir,
    disk_lock, disk_list,  disk_map,    disk_unmap,       disk_draw,   disk_file_system,
};
