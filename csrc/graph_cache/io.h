/* Every call of the graph cache to the operating system goes through this table, so
 * that tests can put a disk behind it that loses power, fills up, or returns errors.
 *
 * Functions return 0 (or a count, or a descriptor) and on failure -errno. They behave
 * as the system calls, with short counts and EINTR; graph_read_all() and
 * graph_write_all() handle those. */
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
    int (*sync)(int file);    /* of a file or a directory opened with O_DIRECTORY */
    void (*forget)(int file); /* what memory holds of its synced bytes, if it can */
    int (*rename)(const char *from, const char *to);
    int (*unlink)(const char *path);
    int (*mkdir)(const char *path);
    int (*lock)(int file, int how); /* flock(): LOCK_EX, LOCK_SH, LOCK_NB */
    /* Calls visit(context, name) for each name in the directory but . and .. */
    int (*list)(const char *path, void (*visit)(void *context, const char *name),
                void *context);
    /* Maps a file for reading; NULL with *error = -errno. */
    const void *(*map)(int file, int64_t bytes, int *error);
    void (*unmap)(const void *map, int64_t bytes);
    int (*random)(void *data, size_t bytes);
    int64_t (*file_system)(const char *path); /* its f_type, of statfs() */
} graph_io;

/* The table in use: the operating system, unless a test has set another. */
extern const graph_io *graph_io_table;

/* Asked when a signal has interrupted a wait for a lock: true ends the wait with
 * TFAST_EINTR, and nothing has changed. The binding sets it; NULL: waits go on. */
extern bool (*graph_interrupted)(void);

/* Runs a fallible call inside a function that has a `status` and a label `fail:`. After
 * an error the function goes on at `fail:`, which frees what it holds and returns
 * `status`; success falls through to the same label. */
#define TRY(call)                                                                      \
    do {                                                                               \
        status = (call);                                                               \
        if (status != TFAST_OK) {                                                      \
            goto fail;                                                                 \
        }                                                                              \
    } while (0)

/* ---- Errors ---------------------------------------------------------------------- */

/* TFAST_EIO, or ENOMEM, with the message "cannot *what* *path*: *strerror*". The error
 * number is kept for graph_errno(), so that Python's OSError carries it. */
tfast_status graph_io_error(const char *what, const char *path, int error);
int graph_errno(void);

/* TFAST_EIO for damaged contents of a file: a message, and graph_errno() 0. */
tfast_status graph_damage(const char *format, ...) TFAST_PRINTF(1, 2);

/* An error that waits to be returned, from another thread or until other work is done:
 * graph_keep_error() keeps status, error number and message, graph_return_error() makes
 * them the current thread's error again. */
typedef struct {
    tfast_status status;
    int number;
    char message[TFAST_MESSAGE_BYTES];
} graph_error;
void graph_keep_error(graph_error *error, tfast_status status);
tfast_status graph_return_error(const graph_error *error);

/* ---- Memory ---------------------------------------------------------------------- */

/* `n` zeroed elements of `bytes` each, also for n = 0. `out` is the address of the
 * pointer that gets them; NULL after an error. The caller frees them. */
tfast_status graph_alloc(void *out, uint64_t n, size_t bytes);

/* Makes room for element number `n` of an array of `bytes` each that grows one by one
 * from NULL. `array` is the address of the pointer; after an error it is unchanged. */
tfast_status graph_grow(void *array, int64_t n, size_t bytes);

/* A copy of a text, as graph_alloc(). */
tfast_status graph_copy_text(char **out, const char *text);

/* ---- Files ----------------------------------------------------------------------- */

/* The table's functions as statuses, with messages that name `path`. */
tfast_status graph_open(const char *path, int flags, int *file);
tfast_status graph_size(int file, const char *path, int64_t *bytes);
tfast_status graph_sync(int file, const char *path);
tfast_status graph_datasync(int file, const char *path);
tfast_status graph_rename(const char *from, const char *to);
tfast_status graph_unlink(const char *path);
tfast_status graph_draw_uuid(uint8_t uuid[16], const char *directory);

/* All bytes, or an error. Reading past the end is TFAST_EIO ("... must have ...
 * bytes"). */
tfast_status graph_read_all(int file, const char *path, void *data, size_t bytes,
                            int64_t at);
tfast_status graph_write_all(int file, const char *path, const void *data, size_t bytes,
                             int64_t at);

/* Whether `path` lies on a network file system or on FUSE, which is mostly one; false
 * where the system does not say. */
bool graph_is_remote(const char *path);

/* *joined = directory/name. */
enum { GRAPH_PATH_BYTES = 4096 };
tfast_status graph_join(char joined[GRAPH_PATH_BYTES], const char *directory,
                        const char *name);

#endif
