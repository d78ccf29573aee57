/* Room that a call needs only while it runs, kept for the next call: fresh pages cost
 * more than small problems do. */
#ifndef TFAST_SCRATCH_H
#define TFAST_SCRATCH_H

#include <stddef.h>

/* At least `bytes`, aligned to 64, of any contents; NULL with no memory. */
void *tfast_scratch_take(size_t bytes);

/* Gives it back; NULL is fine. */
void tfast_scratch_give(void *scratch);

#endif
