/* Every call of the graph cache to the operating system goes through this table, so
 * that tests can simulate a disk that loses power, fills up, or returns errors.
 *
 * Functions return 0 (or a number of bytes, or a descriptor), or -errno on failure.
 * Like the system calls they may transfer fewer bytes or fail with EINTR;
 * graph_read_all() and graph_write_all() handle both. */
#ifndef GRAPH_CACHE_IO_H
#define GRAPH_CACHE_IO_H

#include "../tfast.h"

typedef struct graph_io {
    int (*open)(const char *path, int flags); /* O_CLOEXEC is added; mode 0666 */
    int (*close)(int file);
    int64_t (*pread)(int file, void *data, size_t bytes, int64_t at);
    int64_t (*pwrite)(int file, const void *data, size_t bytes, int64_t at);
    int64_t (*size)(int file);
    int (*truncate)(int file, int64_t bytes);
    int (*datasync)(int file);
    int (*sync)(int file);    /* fsync(), also of a directory */
    void (*forget)(int file); /* drops the file's clean pages from the page cache */
    int (*rename)(const char *from, const char *to);
    int (*unlink)(const char *path);
    int (*mkdir)(const char *path);
    int (*lock)(int file, int how); /* flock(): LOCK_EX, LOCK_SH, LOCK_NB */
    /* Calls visit(context, name) for each name in the directory except . and .. */
    int (*list)(const char *path, void (*visit)(void *context, const char *name),
                void *context);
    /* Maps a file for reading; NULL with *error = -errno. */
    const void *(*map)(int file, int64_t bytes, int *error);
    void (*unmap)(const void *map, int64_t bytes);
    int (*random)(void *data, size_t bytes);
    int64_t (*file_system)(const char *path); /* f_type from statfs() */
} graph_io;

/* The table in use: the operating system, unless a test has set another. */
extern const graph_io *graph_io_table;

/* Called when a signal has interrupted a wait for a lock. True ends the wait with
 * TFAST_EINTR. Set by the binding; NULL: the wait continues. */
extern bool (*graph_interrupted)(void);

/* Sets `status` to the result of a call and jumps to the label `fail:` if it is an
 * error. The code at `fail:` frees what the function holds and returns `status`;
 * success usually falls through to the same label. */
#define TRY(call)                                                                      \
    do {                                                                               \
        status = (call);                                                               \
        if (status != TFAST_OK) {                                                      \
            goto fail;                                                                 \
        }                                                                              \
    } while (0)

/* ---- Errors ---------------------------------------------------------------------- */

/* Returns TFAST_EIO (TFAST_ENOMEM for ENOMEM) with the message "cannot *what* *path*:
 * *strerror*". `error` is an errno or -errno; graph_errno() returns the errno, this
 * thread's last, for Python's OSError. */
tfast_status graph_io_error(const char *what, const char *path, int error);
int graph_errno(void);

/* Returns TFAST_EIO with a message for damaged contents; sets graph_errno() to 0. */
tfast_status graph_damage(const char *format, ...) TFAST_PRINTF(1, 2);

/* A saved error, to return it later or from another thread. graph_keep_error() saves
 * `status` with this thread's error number and message; graph_return_error() makes them
 * the current thread's error again and returns the status. */
typedef struct {
    tfast_status status;
    int number;
    char message[TFAST_MESSAGE_BYTES];
} graph_error;
void graph_keep_error(graph_error *error, tfast_status status);
tfast_status graph_return_error(const graph_error *error);

/* ---- Memory ---------------------------------------------------------------------- */

/* Allocates `n` zeroed elements of `bytes` each. `out`: the address of a pointer, which
 * becomes NULL after an error and is not NULL for n = 0. The caller calls free(). */
tfast_status graph_alloc(void *out, uint64_t n, size_t bytes);

/* Ensures capacity for element `n` of an array that has n elements of `bytes` each and
 * began as NULL with n = 0. `array`: the address of its pointer, unchanged after an
 * error. */
tfast_status graph_grow(void *array, int64_t n, size_t bytes);

/* Copies a zero-terminated text; the caller calls free(). */
tfast_status graph_copy_text(char **out, const char *text);

/* ---- Files ----------------------------------------------------------------------- */

/* The table's functions with statuses, and with messages that name `path`. */
tfast_status graph_open(const char *path, int flags, int *file);
tfast_status graph_size(int file, const char *path, int64_t *bytes);
tfast_status graph_sync(int file, const char *path);
tfast_status graph_datasync(int file, const char *path);
tfast_status graph_rename(const char *from, const char *to);
tfast_status graph_unlink(const char *path);
tfast_status graph_draw_uuid(uint8_t uuid[16], const char *directory);

/* Transfer all bytes or fail. A file that ends too early is damage: TFAST_EIO. */
tfast_status graph_read_all(int file, const char *path, void *data, size_t bytes,
                            int64_t at);
tfast_status graph_write_all(int file, const char *path, const void *data, size_t bytes,
                             int64_t at);

/* Whether `path` is on a network file system or on FUSE, which usually is one; false if
 * the file system is not known. */
bool graph_is_remote(const char *path);

/* *joined = directory/name. */
enum { GRAPH_PATH_BYTES = 4096 };
tfast_status graph_join(char joined[GRAPH_PATH_BYTES], const char *directory,
                        const char *name);

#endif
