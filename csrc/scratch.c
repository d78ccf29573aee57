/* One free block is kept between calls; a concurrent call allocates another one. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* madvise */
#endif
#include "scratch.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#    include <sys/mman.h>
#endif

enum { ALIGNMENT = 64, KEPT_BYTES = 64 << 20, LARGE_PAGE = 2 << 20 };

/* Stands directly before the memory that the caller gets. */
typedef union {
    size_t bytes;         /* size of that memory */
    char room[ALIGNMENT]; /* pads the header, so that the memory behind is aligned */
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

void
tfast_hint_large_pages(void *data, size_t bytes)
{
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t begin = (uintptr_t)data, end = begin + bytes;
    const uintptr_t first = (begin + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    const uintptr_t last = end / LARGE_PAGE * LARGE_PAGE;

    if (bytes >= 2 * (size_t)LARGE_PAGE && first < last) {
        madvise((void *)first, last - first, MADV_HUGEPAGE); /* failure is harmless */
    }
#else
    (void)data;
    (void)bytes;
#endif
}
