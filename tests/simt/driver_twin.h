/* The calls of the CUDA driver that cuda/ makes, on the CPU: host pointers are device
 * pointers, and work of all streams runs in the order of its calls. Synchronising
 * calls, allocations, copies and launches are counted, and asynchrony is modelled where
 * a mistake would hide: a copy reads its source only when the next launch or
 * synchronisation makes it, and while a capture is on, copies and launches are only
 * recorded, and what a capture forbids aborts. Loading a module is such a call, and so
 * is the first request for each of its kernels, which a driver loads one by one.
 *
 * There are two devices, which have a primary context from the first call that retains
 * it on. A thread has none current at first. Streams, events, modules and kernels are
 * of one device and refused while another is current. After a fork only the parent can
 * use them.
 *
 * TRAINFAST_SIMT_DRIVER=n   the driver's version, 13000 by default; 0: there is none
 * TRAINFAST_SIMT_DEVICE=n   what the devices are, such as 75
 * TRAINFAST_SIMT_PTX=n      75 or 80: what they are where that is not said, 80 by
 *                           default; and images for the other are refused
 *
 * The last two may change while a process runs: then the devices are others, with
 * contexts of their own. */
#ifndef TFAST_SIMT_DRIVER_TWIN_H
#define TFAST_SIMT_DRIVER_TWIN_H

#include <stddef.h>
#include <stdint.h>

enum { SIMT_DEVICES = 2 };

extern "C" {
/* What cuda/driver.c calls in place of dlsym(): the twin of the driver's `symbol`. */
void *simt_driver_call(const char *symbol);

/* For tests, exported from the library. */
void
tfast_simt_counts(int64_t counts[3]); /* synchronising calls, allocations, launches */
int64_t tfast_simt_copies();
void tfast_simt_reset(); /* counts from zero */
/* 8 x 8 matrices that ldmatrix read, and the wavefronts it took: never reset. */
void tfast_simt_matrices(uint64_t counts[2]);
void tfast_simt_seed(uint64_t seed);
void tfast_simt_fail_allocations(int64_t after); /* n more succeed; negative: all do */
/* With this CUresult; 0: they succeed. */
void tfast_simt_fail_launches(int error);
void tfast_simt_fail_loads(int error);
/* Grids have at most so many blocks, as where a kernel loops over what is past its
 * grid's limit; 0: any number. */
void tfast_simt_most_blocks(unsigned blocks);
/* The device of the calling thread's current context, -1 for none. */
int tfast_simt_current();
void tfast_simt_set_current(int device);
int tfast_simt_contexts(); /* bit d: device d has a context */
/* A stream of that device; null and what these do not name are the current one's. */
void *tfast_simt_stream(int device);
void tfast_simt_capture_begin();
void tfast_simt_capture_end();
void tfast_simt_replay(); /* what was captured last */
}

#endif
