/* The graph cache's calls to the operating system: the table of io.h for Linux, and
 * functions that turn its results into statuses. */
#if !defined(_DEFAULT_SOURCE)
#    define _DEFAULT_SOURCE /* flock, getrandom */
#endif
#if !defined(_POSIX_C_SOURCE)
#    define _POSIX_C_SOURCE 200809L
#endif
#include "io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static _Thread_local int last_error; /* what graph_errno() returns */

static int
result(int value)
{
    return value < 0 ? -errno : value;
}

/* O_NONBLOCK and O_NOCTTY: a pipe with the name of a cache's file must not block the
 * process, and a terminal with such a name must not become its terminal. */
static int
os_open(const char *path, int flags)
{
    return result(open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666));
}

static int
os_close(int file)
{
    return result(close(file));
}

static int64_t
os_pread(int file, void *data, size_t bytes, int64_t at)
{
    ssize_t n = pread(file, data, bytes, (off_t)at);

    return n < 0 ? -errno : n;
}

static int64_t
os_pwrite(int file, const void *data, size_t bytes, int64_t at)
{
    ssize_t n = pwrite(file, data, bytes, (off_t)at);

    return n < 0 ? -errno : n;
}

static int64_t
os_size(int file)
{
    struct stat status;

    return fstat(file, &status) < 0 ? -errno : (int64_t)status.st_size;
}

static int
os_truncate(int file, int64_t bytes)
{
    return result(ftruncate(file, (off_t)bytes));
}

static int
os_datasync(int file)
{
    return result(fdatasync(file));
}

static int
os_sync(int file)
{
    return result(fsync(file));
}

static void
os_forget(int file)
{
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
}

static int
os_rename(const char *from, const char *to)
{
    return result(rename(from, to));
}

static int
os_unlink(const char *path)
{
    return result(unlink(path));
}

static int
os_mkdir(const char *path)
{
    return result(mkdir(path, 0777));
}

static int
os_lock(int file, int how)
{
    return result(flock(file, how));
}

static int
os_list(const char *path, void (*visit)(void *context, const char *name), void *context)
{
    DIR *directory = opendir(path);
    struct dirent *entry;
    int error;

    if (directory == NULL) {
        return -errno;
    }
    for (;;) {
        errno = 0;
        entry = readdir(directory);
        if (entry == NULL) {
            break;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            visit(context, entry->d_name);
        }
    }
    error = -errno;
    closedir(directory);
    return error;
}

static const void *
os_map(int file, int64_t bytes, int *error)
{
    void *map = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, file, 0);

    if (map == MAP_FAILED) {
        *error = -errno;
        return NULL;
    }
    return map;
}

static void
os_unmap(const void *map, int64_t bytes)
{
    munmap((void *)(uintptr_t)map, (size_t)bytes);
}

static int
os_random(void *data, size_t bytes)
{
    return getrandom(data, bytes, 0) == (ssize_t)bytes ? 0 : -EIO;
}

static int64_t
os_file_system(const char *path)
{
    struct statfs status;

    return statfs(path, &status) < 0 ? -errno : (int64_t)(uint32_t)status.f_type;
}

static const graph_io operating_system = {
    os_open,     os_close, os_pread,  os_pwrite, os_size,   os_truncate,
    os_datasync, os_sync,  os_forget, os_rename, os_unlink, os_mkdir,
    os_lock,     os_list,  os_map,    os_unmap,  os_random, os_file_system,
};

const graph_io *graph_io_table = &operating_system;

bool (*graph_interrupted)(void);

tfast_status
graph_io_error(const char *what, const char *path, int error)
{
    char text[128] = "unknown error";

    error = error < 0 ? -error : error;
    if (strerror_r(error, text, sizeof text) != 0) {
        snprintf(text, sizeof text, "error %d", error);
    }
    last_error = error;
    return tfast_fail(error == ENOMEM ? TFAST_ENOMEM : TFAST_EIO, "cannot %s %s: %s",
                      what, path, text);
}

int
graph_errno(void)
{
    return last_error;
}

tfast_status
graph_damage(const char *format, ...)
{
    char text[TFAST_MESSAGE_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    last_error = 0;
    return tfast_fail(TFAST_EIO, "%s", text);
}

void
graph_keep_error(graph_error *error, tfast_status status)
{
    error->status = status;
    error->number = last_error;
    snprintf(error->message, sizeof error->message, "%s", tfast_message());
}

tfast_status
graph_return_error(const graph_error *error)
{
    if (error->status == TFAST_OK) {
        return TFAST_OK;
    }
    last_error = error->number;
    return tfast_fail(error->status, "%s", error->message);
}

/* ---- Memory ---------------------------------------------------------------------- */

static tfast_status
no_memory(uint64_t n, size_t bytes)
{
    return tfast_fail(TFAST_ENOMEM, "no memory for %llu times %zu bytes",
                      (unsigned long long)n, bytes);
}

tfast_status
graph_alloc(void *out, uint64_t n, size_t bytes)
{
    void *made = n < SIZE_MAX ? calloc((size_t)n + (n == 0), bytes) : NULL;

    memcpy(out, &made, sizeof made);
    return made == NULL ? no_memory(n, bytes) : TFAST_OK;
}

/* The capacity is a power of two, so the array is full if n is 0 or a power of two. */
tfast_status
graph_grow(void *array, int64_t n, size_t bytes)
{
    void *data;

    if ((n & (n - 1)) != 0) {
        return TFAST_OK;
    }
    memcpy(&data, array, sizeof data);
    data = realloc(data, (size_t)(n == 0 ? 1 : 2 * n) * bytes);
    if (data == NULL) {
        return no_memory(2 * (uint64_t)n, bytes);
    }
    memcpy(array, &data, sizeof data);
    return TFAST_OK;
}

tfast_status
graph_copy_text(char **out, const char *text)
{
    const size_t bytes = strlen(text) + 1;
    const tfast_status status = graph_alloc(out, bytes, 1);

    if (status == TFAST_OK) {
        memcpy(*out, text, bytes);
    }
    return status;
}

/* ---- Files ----------------------------------------------------------------------- */

static tfast_status
checked(int error, const char *what, const char *path)
{
    return error < 0 ? graph_io_error(what, path, error) : TFAST_OK;
}

tfast_status
graph_open(const char *path, int flags, int *file)
{
    do {
        *file = graph_io_table->open(path, flags);
    } while (*file == -EINTR); /* FUSE */
    return checked(*file, (flags & O_CREAT) != 0 ? "create" : "open", path);
}

tfast_status
graph_size(int file, const char *path, int64_t *bytes)
{
    *bytes = graph_io_table->size(file);
    return checked(*bytes < 0 ? (int)*bytes : 0, "read", path);
}

tfast_status
graph_sync(int file, const char *path)
{
    int error;

    do {
        error = graph_io_table->sync(file);
    } while (error == -EINTR);
    return checked(error, "sync", path);
}

tfast_status
graph_datasync(int file, const char *path)
{
    int error;

    do {
        error = graph_io_table->datasync(file);
    } while (error == -EINTR);
    return checked(error, "sync", path);
}

tfast_status
graph_rename(const char *from, const char *to)
{
    return checked(graph_io_table->rename(from, to), "rename", from);
}

tfast_status
graph_unlink(const char *path)
{
    return checked(graph_io_table->unlink(path), "delete", path);
}

tfast_status
graph_draw_uuid(uint8_t uuid[16], const char *directory)
{
    return checked(graph_io_table->random(uuid, 16), "draw a name in", directory);
}

bool
graph_is_remote(const char *path)
{
    static const uint32_t remote[] = {
        /* f_type of statfs(), from linux/magic.h or the file systems' sources */
        0x6969,     /* NFS */
        0x517b,     /* SMB */
        0xff534d42, /* CIFS */
        0xfe534d42, /* SMB 2 and later */
        0x65735546, /* FUSE: gcsfuse, s3fs, sshfs, virtiofs */
        0x01021997, /* 9p */
        0x0bd00bd0, /* Lustre */
        0x00c36400, /* Ceph */
        0x47504653, /* GPFS */
        0x19830326, /* BeeGFS */
        0x20030528, /* OrangeFS */
        0x5346414f, /* OpenAFS */
        0x6b414653, /* the kernel's AFS */
        0x73757245, /* Coda */
        0x786f4256, /* VirtualBox's shared folders */
    };
    const int64_t type = graph_io_table->file_system(path);

    for (size_t i = 0; i < sizeof remote / sizeof *remote; i++) {
        if (type == remote[i]) {
            return true;
        }
    }
    return false;
}

tfast_status
graph_join(char joined[GRAPH_PATH_BYTES], const char *directory, const char *name)
{
    int n = snprintf(joined, GRAPH_PATH_BYTES, "%s/%s", directory, name);

    if (n < 0 || n >= GRAPH_PATH_BYTES) {
        return tfast_fail(TFAST_EINVAL,
                          "path must have fewer than %d bytes, got %zu; use a shorter "
                          "or relative path",
                          GRAPH_PATH_BYTES, strlen(directory));
    }
    return TFAST_OK;
}

tfast_status
graph_read_all(int file, const char *path, void *data, size_t bytes, int64_t at)
{
    size_t done = 0;

    while (done < bytes) {
        int64_t n = graph_io_table->pread(file, (char *)data + done, bytes - done,
                                          at + (int64_t)done);

        if (n == -EINTR) {
            continue;
        }
        if (n < 0) {
            return graph_io_error("read", path, (int)n);
        }
        if (n == 0) {
            return graph_damage("%s must have %lld bytes, got %lld", path,
                                (long long)at + (long long)bytes,
                                (long long)at + (long long)done);
        }
        done += (size_t)n;
    }
    return TFAST_OK;
}

tfast_status
graph_write_all(int file, const char *path, const void *data, size_t bytes, int64_t at)
{
    size_t done = 0;

    while (done < bytes) {
        int64_t n = graph_io_table->pwrite(file, (const char *)data + done,
                                           bytes - done, at + (int64_t)done);

        if (n == -EINTR) {
            continue;
        }
        if (n <= 0) { /* 0: a full disk without an error number */
            return graph_io_error("write", path, n == 0 ? ENOSPC : (int)n);
        }
        done += (size_t)n;
    }
    return TFAST_OK;
}
