/* Threads for the loops of the CPU. */
#ifndef TFAST_THREADS_H
#define TFAST_THREADS_H

/* Runs body(context, part, parts) once for each part in 0 .. parts - 1, on up to
 * `parts` threads, and returns when all parts are done. Uses the OpenMP runtime that
 * the process (torch) has loaded, otherwise, and in a forked child, a pool of our own.
 */
void tfast_parallel(int parts, void (*body)(void *context, int part, int parts),
                    void *context);

/* How many threads a call from this thread may use: torch.set_num_threads or
 * OMP_NUM_THREADS where there is an OpenMP runtime, otherwise OMP_NUM_THREADS, the
 * affinity mask and the cgroup quota. */
int tfast_num_threads(void);

/* "openmp (path)" or "own", for reports. */
const char *tfast_thread_runtime(void);

#endif
