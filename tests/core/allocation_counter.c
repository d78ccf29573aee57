/* Preloaded, counts allocations of a process, and those of one library's own code. */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static atomic_bool counting, failing;
static atomic_long all, own;
static uintptr_t first, end; /* addresses of the library's code */

void
watch(uintptr_t from, uintptr_t to)
{
    first = from;
    end = to;
}

void
count(int on)
{
    if (on) {
        all = own = 0;
    }
    counting = on != 0;
}

/* Whether the library's kernels get no scratch memory, which is aligned. */
void
fail(int on)
{
    failing = on != 0;
}

long
counted(int only_own)
{
    return only_own ? own : all;
}

/* Notes a call; whether it came from the library. */
static bool
note(const void *caller)
{
    const bool mine = (uintptr_t)caller >= first && (uintptr_t)caller < end;

    all += counting;
    own += counting && mine;
    return mine;
}

#define NOTE() note(__builtin_return_address(0))

void *
malloc(size_t bytes)
{
    NOTE();
    return __libc_malloc(bytes);
}

void *
calloc(size_t n, size_t bytes)
{
    NOTE();
    return __libc_calloc(n, bytes);
}

void *
realloc(void *old, size_t bytes)
{
    NOTE();
    return __libc_realloc(old, bytes);
}

void *
aligned_alloc(size_t alignment, size_t bytes)
{
    return NOTE() && failing ? NULL : __libc_memalign(alignment, bytes);
}
