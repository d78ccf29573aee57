/* What a tfast_workspace holds for one kind of call: the call's table, on the host and
 * in device memory, kept as long as the arrays stay the same, so that a warm call is
 * one launch. Calls are made inside of a tfast_device_scope. */
#ifndef TFAST_WORKSPACE_H
#define TFAST_WORKSPACE_H

#include "host.h"

/* Copies in flight before the host waits for the oldest. */
enum { TFAST_HELD_RING = 4 };

/* Memory that lives as long as what is held: of a captured copy, which a graph may
 * repeat at any time, or outgrown but perhaps still in use. */
typedef struct tfast_held_kept {
    struct tfast_held_kept *next;
    CUdeviceptr device; /* these two 0 or NULL where there is none */
    void *pinned;
    size_t bytes; /* of a captured table; 0: outgrown */
} tfast_held_kept;

typedef enum { TFAST_HELD_ADAMW, TFAST_HELD_AMP } tfast_held_kind;

/* How the data of every kind begins, and all of it that needs to be freed. A workspace
 * has a list of them, one for each kind, device and stream: a table that two streams
 * shared could be read before its upload has ended, or overwritten while it is read. */
typedef struct tfast_held {
    struct tfast_held *next;
    tfast_held_kind kind;
    int device;
    CUstream stream;
    void *host;           /* what the next call's table must be */
    size_t host_capacity; /* bytes of it */
    CUdeviceptr table;    /* in device memory */
    size_t capacity;
    struct tfast_held_pinned {
        void *data;
        size_t capacity;
        CUevent copied; /* until then the copy may still read `data` */
    } ring[TFAST_HELD_RING];
    int next_pinned;
    tfast_held_kept *kept;
    bool uploaded;  /* the device's table is the host's */
    bool temporary; /* of a call without a workspace */
} tfast_held;

/* The workspace's data of this kind, device and stream, otherwise that many fresh bytes
 * of zeros behind a tfast_held. Without a workspace (NULL) they last until
 * tfast_held_close(). */
tfast_status tfast_held_open(tfast_held **held, tfast_workspace *workspace,
                             tfast_held_kind kind, size_t bytes, int device,
                             void *stream);

/* Ends the call. NULL where nothing was opened. */
void tfast_held_close(tfast_held *held);

/* Makes `host` that large, for a table that is about to change. */
tfast_status tfast_held_resize(tfast_held *held, size_t bytes);

/* Where the table lies in device memory by the time a kernel launched next on the
 * stream runs, with `scratch` bytes behind it. */
tfast_status tfast_held_place(void **device, tfast_held *held, size_t bytes,
                              size_t scratch);

/* Takes the memory that the same tfast_held_place() will need. */
tfast_status tfast_held_prepare(tfast_held *held, size_t bytes, size_t scratch);

/* Frees all that a workspace holds, waiting for the devices. */
void tfast_held_clear(void *data);

#endif
