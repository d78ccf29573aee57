/* What the harnesses of the graph cache put in the place of the rest of the core: plain
 * kernels, and memory that can run out. After disk.h. */
#include "graph_kernels.h"
#include "simd/graph_loops.h"

const tfast_graph_kernels *
tfast_graph_kernels_in_use(void)
{
    return &graph_kernels;
}

/* ---- Memory that runs out -------------------------------------------------------- */

/* The sources under test call these (see the -D of the build), a prefetch's threads
 * too. */
static _Atomic(int64_t) allocations;
static int64_t allocation_fails;
static bool and_all_after;
static size_t most_bytes; /* more than this is an error of the sources; 0: any number */

static bool
no_memory(size_t bytes)
{
    const int64_t n = ++allocations;

    MUST(most_bytes == 0 || bytes <= most_bytes);
    return allocation_fails > 0 &&
           (and_all_after ? n >= allocation_fails : n == allocation_fails);
}

void *
tested_malloc(size_t bytes)
{
    return no_memory(bytes) ? NULL : malloc(bytes);
}

void *
tested_calloc(size_t n, size_t bytes)
{
    return no_memory(n * bytes) ? NULL : calloc(n, bytes);
}

void *
tested_realloc(void *data, size_t bytes)
{
    return no_memory(bytes) ? NULL : realloc(data, bytes);
}

int
tested_posix_memalign(void **data, size_t alignment, size_t bytes)
{
    return no_memory(bytes) ? ENOMEM : posix_memalign(data, alignment, bytes);
}

void *
tested_aligned_alloc(size_t alignment, size_t bytes)
{
    return no_memory(bytes) ? NULL : aligned_alloc(alignment, bytes);
}
