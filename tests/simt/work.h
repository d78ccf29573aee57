/* What the twin of the driver has its devices do: memory, copies and launches. */
#ifndef TFAST_SIMT_WORK_H
#define TFAST_SIMT_WORK_H

#include "simt.h"

#include <mutex>

namespace simt {

/* Of all that threads share, here and in driver_twin.cpp. */
extern std::recursive_mutex work_lock;

/* A call that the documentation forbids while any stream captures, but in relaxed mode,
 * 2, which the thread sets by exchange_mode(); and one that has nothing to wait for. */
void unsafe_call(const char *name);
void synchronising_call(const char *name); /* counted */
bool is_capturing();
int exchange_mode(int mode); /* gives the mode before */

enum memory { DEVICE_MEMORY, PINNED_MEMORY, MEMORIES };

/* Null where there is none left. */
void *allocate(memory kind, size_t bytes);
void release(memory kind, void *pointer);
void count_allocation();

/* Records it while a stream captures. */
void issue_copy(void *to, const void *from, size_t bytes);
void issue_launch(dim3 grid, dim3 block, size_t dynamic, size_t allowed,
                  std::function<void()> body);

uint64_t issued_work();        /* pieces, so far */
bool is_done(uint64_t pieces); /* the first so many */
void finish_work();            /* all of it */

} // namespace simt

#endif
