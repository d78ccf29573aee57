/* A table that a kernel reads from device memory, kept there between calls. */
#ifndef TFAST_TABLE_CUH
#define TFAST_TABLE_CUH

#include "common.cuh"

/* Copies in flight before the host waits for the oldest. */
enum { TFAST_TABLE_RING = 4 };

/* Memory that lives as long as the table: of a captured copy, which a graph may repeat
 * at any time, or outgrown but perhaps still in use. */
struct tfast_table_kept {
    tfast_table_kept *next;
    void *device;
    void *pinned;
    size_t bytes; /* of a captured table; 0: outgrown */
};

/* Zero-initialised means empty. Belongs to the device that is current when it is
 * filled. Calls are made inside of a tfast_device_scope. */
struct tfast_table {
    void *device;
    size_t capacity;
    struct {
        void *pinned;
        size_t capacity;
        cudaEvent_t copied; /* until then the copy may still read `pinned` */
    } ring[TFAST_TABLE_RING];
    int next;
    tfast_table_kept *kept;
};

/* Puts a copy of `bytes` where `device` then points, with room for `scratch` bytes
 * behind it, in the stream's order, without synchronising unless TFAST_TABLE_RING
 * copies are in flight. */
tfast_status tfast_table_upload(tfast_table *table, const void *data, size_t bytes,
                                size_t scratch, cudaStream_t stream);

/* For a stream that captures: what a node of its graph can copy the same bytes from,
 * which is never written again, and to, which no other call writes. The same bytes must
 * come with the same scratch. */
tfast_status tfast_table_keep(tfast_table_kept **kept, tfast_table *table,
                              const void *data, size_t bytes, size_t scratch);

/* Frees everything, waiting for the device. */
void tfast_table_clear(tfast_table *table);

#endif
