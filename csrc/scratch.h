/* Room that a call needs only while it runs, kept for the next call: fresh pages cost
 * more than small problems do. */
#ifndef TFAST_SCRATCH_H
#define TFAST_SCRATCH_H

#include <stddef.h>

/* At least `bytes`, aligned to 64, of any contents; NULL with no memory. */
void *tfast_scratch_take(size_t bytes);

/* Gives it back; NULL is fine. */
void tfast_scratch_give(void *scratch);

/* Asks the system for large pages where an array that is about to be written has none
 * at all yet: an output fresh from the system costs a page fault every 4 KB otherwise,
 * half of the time of small heads. Costs a microsecond where it is of no use;
 * does nothing for less than 4 MB and on systems without large pages. */
void tfast_hint_large_pages(void *data, size_t bytes);

#endif
