/* Temporary memory of a call. The CPU's is kept for the next call, because the page
 * faults of fresh memory would take longer than a small problem. */
#ifndef TFAST_SCRATCH_H
#define TFAST_SCRATCH_H

#include "tfast.h"

/* Returns at least `bytes` of uninitialised memory, aligned to 64, or NULL. */
void *tfast_scratch_take(size_t bytes);

/* Returns memory from tfast_scratch_take(); NULL is allowed. */
void tfast_scratch_give(void *scratch);

/* Requests large pages (MADV_HUGEPAGE) for an array that is about to be written for the
 * first time, because page faults of 4 KB each are slow. Does nothing for less than 4
 * MB or on systems without large pages. */
void tfast_hint_large_pages(void *data, size_t bytes);

#endif
