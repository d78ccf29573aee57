/* Every call of the graph cache to the operating system goes through this table, so
 * that tests can put a disk behind it that loses power, fills up, or returns errors.
 *
 * Functions return 0 (or a count, or a descriptor) and on failure -errno. They do what
 * the system call does, with short counts and EINTR: graph_read_all() and
 * graph_write_all() are the ones to use. */
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

/* All of it, or an error. Status with a message that names `path`. Reading past the end
 * is TFAST_EIO ("... must have ... bytes"). */
tfast_status graph_read_all(int file, const char *path, void *data, size_t bytes,
                            int64_t at);
tfast_status graph_write_all(int file, const char *path, const void *data, size_t bytes,
                             int64_t at);

/* TFAST_EIO, or ENOMEM, with the message "cannot *what* *path*: *strerror*". The error
 * number is kept for graph_errno(), so that Python's OSError carries it. */
tfast_status graph_io_error(const char *what, const char *path, int error);
int graph_errno(void);

/* TFAST_EIO for what a file holds: its message, and no error number. */
tfast_status graph_damage(const char *format, ...) TFAST_PRINTF(1, 2);

/* An error of another thread: its message, and what graph_errno() was there. */
tfast_status graph_fail_again(tfast_status status, int error, const char *message);

/* Whether `path` lies on a network file system, or on one that a process serves (FUSE),
 * which mostly is one; false where the system does not say. */
bool graph_is_remote(const char *path);

/* *joined = directory/name. */
enum { GRAPH_PATH_BYTES = 4096 };
tfast_status graph_join(char joined[GRAPH_PATH_BYTES], const char *directory,
                        const char *name);

#endif
