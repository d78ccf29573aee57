/* One block is kept between calls; calls at the same time get blocks of their own. */
#include "scratch.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

enum { ALIGNMENT = 64, KEPT_BYTES = 64 << 20 };

/* Lies just before what the caller gets. */
typedef union {
    size_t bytes;
    char room[ALIGNMENT];
} header;

static _Atomic(header *) kept;

void *
tfast_scratch_take(size_t bytes)
{
    header *block = atomic_exchange(&kept, NULL);

    if (bytes > SIZE_MAX - 4 * ALIGNMENT) {
        tfast_scratch_give(block == NULL ? NULL : block + 1);
        return NULL;
    }
    if (block == NULL || block->bytes < bytes) {
        free(block);
        bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        block = aligned_alloc(ALIGNMENT, sizeof *block + bytes);
        if (block == NULL) {
            return NULL;
        }
        block->bytes = bytes;
    }
    return block + 1;
}

void
tfast_scratch_give(void *scratch)
{
    header *block = scratch == NULL ? NULL : (header *)scratch - 1;

    if (block != NULL && block->bytes <= KEPT_BYTES) {
        block = atomic_exchange(&kept, block);
    }
    free(block);
}
