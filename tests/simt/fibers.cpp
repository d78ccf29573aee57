/* Schedules the threads of a block as fibers on stacks of their own. A fiber runs until
 * it waits for its warp or its block; then the next ready lane of the warp runs, and
 * when none is left, the next warp. Built without the sanitizers' instrumentation, so
 * that only the kernels' own accesses are looked at, with SIMT_ADDRESS or SIMT_THREAD
 * to tell it which sanitizer to inform of its switches. */
#include "simt.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include <sys/mman.h>

#if !defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#    define SIMT_UCONTEXT /* portable, but each switch makes two system calls */
#endif
#ifdef SIMT_UCONTEXT
#    include <ucontext.h>
#endif

#ifdef SIMT_ADDRESS
extern "C" {
void __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void *save, const void **bottom, size_t *bytes);
void __asan_unpoison_memory_region(const void *address, size_t bytes);
}
#endif
#ifdef SIMT_THREAD
extern "C" {
void *__tsan_get_current_fiber();
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
}
#else
static void
__tsan_acquire(void *)
{
}
static void
__tsan_release(void *)
{
}
static void
AnnotateIgnoreWritesBegin(const char *, int)
{
}
static void
AnnotateIgnoreWritesEnd(const char *, int)
{
}
#endif

namespace simt {

enum { MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / 32, MAX_ARRAYS = 64 };
#if defined(SIMT_ADDRESS) || defined(SIMT_THREAD)
static const size_t STACK = 256 << 10;
#else
static const size_t STACK = 64 << 10;
#endif

enum state { READY, AT_WARP, AT_BLOCK, DONE };

struct fiber : thread {
    state now;
    char *stack;       /* of the host: its lowest address, as the sanitizer tells it */
    char *other_stack; /* of the ThreadSanitizer fiber that runs every other block */
    unsigned parity;   /* block_parity when `stack` was in use */
    size_t stack_bytes;
    void *context; /* its saved stack pointer, or its ucontext_t */
    void *fake;    /* AddressSanitizer's second stack */
    void *tsan[2]; /* by turns, so that threads of consecutive blocks are not one */
};

struct warp_state {
    const char *what; /* the operation that the arrived lanes wait in */
    uint32_t mask, arrived;
    void *arguments[32];
    int order[32], next;
    unsigned phase;
};

/* What barriers release and acquire, each by turns of two. New for every block: memory
 * that was freed has no ordering, and blocks must not be ordered by their own barriers.
 */
struct ordering {
    char block[2], warp[MAX_WARPS][2];
};

struct shared_block {
    const void *key;
    char *address;
};

thread *self;
dim3 block_index, block_size, grid_size;
size_t dynamic_bytes, shared_limit = 232448;
char dynamic_key;
statistics stats;

static fiber fibers[MAX_THREADS], host;
static warp_state warps[MAX_WARPS];
static shared_block arrays[MAX_ARRAYS];
static int n_arrays;
enum { UNASKED_SHARED = 48 << 10 };
static size_t shared_bytes, allowed_bytes; /* see run_grid() */
static int n_threads, alive, waiting; /* of this block: all, not done, at its barrier */
static int quantum; /* switches until a shuffled run leaves the warp */
static unsigned block_phase, block_parity;
static ordering *orderings;
static char start_ordering, end_ordering;
static bool votes[3];
static const std::function<void()> *body;
static std::mutex one_launch;

static fiber *
current()
{
    return static_cast<fiber *>(self);
}

void
fail(const char *what)
{
    fprintf(stderr, "simt: %s", what);
    if (self != nullptr && self != &host) {
        fprintf(stderr, "; block (%u,%u,%u) thread (%u,%u,%u)", block_index.x,
                block_index.y, block_index.z, self->index.x, self->index.y,
                self->index.z);
    }
    fprintf(stderr, "\n");
    for (const warp_state &warp : warps) {
        if (warp.arrived != 0) {
            fprintf(stderr, "  warp %d: %08x of %08x lanes wait in %s\n",
                    int(&warp - warps), warp.arrived, warp.mask, warp.what);
        }
    }
    if (waiting != 0) {
        fprintf(stderr, "  %d of %d threads wait in __syncthreads\n", waiting, alive);
    }
    fflush(stderr);
    abort();
}

/* ---- Order ----------------------------------------------------------------------- */

static bool shuffled, seeded;
static uint64_t random_state;

void
set_seed(uint64_t seed)
{
    shuffled = seed != 0;
    random_state = seed * 0x9E3779B97F4A7C15u | 1;
    seeded = true;
}

/* xorshift64* (Vigna, arXiv:1402.6246) */
static uint64_t
random_number()
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545F4914F6CDD1Du >> 33;
}

static void
shuffle_order(int *order, int n)
{
    for (int i = n - 1; shuffled && i > 0; i--) {
        std::swap(order[i], order[random_number() % uint64_t(i + 1)]);
    }
}

/* ---- Switching ------------------------------------------------------------------- */

static void run_fiber();

#ifdef SIMT_UCONTEXT
static void
prepare_context(fiber &f, char *top)
{
    ucontext_t *context = static_cast<ucontext_t *>(f.context);

    if (context == nullptr) {
        f.context = context = new ucontext_t;
    }
    getcontext(context);
    context->uc_stack.ss_sp = f.stack;
    context->uc_stack.ss_size = size_t(top - f.stack);
    makecontext(context, run_fiber, 0);
}

static void
switch_context(fiber *from, fiber *to)
{
    if (from->context == nullptr) {
        from->context = new ucontext_t; /* the host's */
    }
    swapcontext(static_cast<ucontext_t *>(from->context),
                static_cast<ucontext_t *>(to->context));
}
#else
/* Saves what the System V ABI has a callee save. */
__attribute__((naked, noinline)) static void
swap_stacks(void **, void *)
{
    asm("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
        "mov %rsp, (%rdi); mov %rsi, %rsp\n"
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}

/* A stack as if swap_stacks had been called by nobody from run_fiber's first byte. */
static void
prepare_context(fiber &f, char *top)
{
    void **stack = reinterpret_cast<void **>(top);

    *--stack = nullptr;
    *--stack = reinterpret_cast<void *>(run_fiber);
    for (int i = 0; i < 6; i++) {
        *--stack = nullptr;
    }
    f.context = stack;
}

static void
switch_context(fiber *from, fiber *to)
{
    swap_stacks(&from->context, to->context);
}
#endif

static void
switch_to(fiber *to)
{
    fiber *from = current();

    if (from == to) {
        return;
    }
    self = to;
#ifdef SIMT_THREAD
    __tsan_switch_to_fiber(to->tsan[block_parity], 1); /* 1: orders nothing */
#endif
#ifdef SIMT_ADDRESS
    __sanitizer_start_switch_fiber(from->now == DONE ? nullptr : &from->fake, to->stack,
                                   to->stack_bytes);
#endif
    switch_context(from, to);
#ifdef SIMT_ADDRESS
    __sanitizer_finish_switch_fiber(current()->fake, nullptr, nullptr);
#endif
}

/* To the next ready lane of this warp, or back to run_block. */
static void
yield()
{
    warp_state &warp = warps[self->warp];

    if (shuffled && --quantum < 0) {
        return switch_to(&host);
    }
    for (int i = 0; i < 32; i++) {
        const int next = self->warp * 32 + warp.order[warp.next++ & 31];
        if (next < n_threads && fibers[next].now == READY) {
            return switch_to(&fibers[next]);
        }
    }
    switch_to(&host);
}

static void
run_fiber()
{
#ifdef SIMT_ADDRESS
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (host.stack == nullptr) { /* the first fiber of a launch comes from the host */
        host.stack = static_cast<char *>(const_cast<void *>(bottom));
        host.stack_bytes = bytes;
    }
#endif
    __tsan_acquire(&start_ordering);
    (*body)();
    async_end();
    __tsan_release(&end_ordering);
    current()->now = DONE;
    alive--;
    if (alive > 0 && waiting == alive) {
        fail("a thread left while the others wait in __syncthreads");
    }
    yield();
}

static char *
new_stack()
{
    void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    require(stack != MAP_FAILED, "no memory for a thread's stack");
    mprotect(stack, 4096, PROT_NONE);
    return static_cast<char *>(stack);
}

static void
prepare_fiber(int i)
{
    fiber &f = fibers[i];

    if (f.stack == nullptr) {
        f.stack_bytes = STACK;
        f.stack = new_stack();
#ifdef SIMT_THREAD
        /* one each, since a stack that changed hands would look like a race */
        f.other_stack = new_stack();
        f.tsan[0] = __tsan_create_fiber(0);
        f.tsan[1] = __tsan_create_fiber(0);
#endif
    }
#ifdef SIMT_THREAD
    if (f.parity != block_parity) {
        std::swap(f.stack, f.other_stack);
        f.parity = block_parity;
    }
#endif
#ifdef SIMT_ADDRESS
    /* run_fiber never returned, and so never unpoisoned its frames */
    __asan_unpoison_memory_region(f.stack + 4096, STACK - 4096);
#endif
    /* Different multiples of 64 keep the stacks out of each other's cache sets. */
    prepare_context(f, f.stack + STACK - 64 - size_t(i % 61) * 64);
    f.index.x = i % block_size.x;
    f.index.y = i / block_size.x % block_size.y;
    f.index.z = i / block_size.x / block_size.y;
    f.lane = i % 32;
    f.warp = i / 32;
    f.n_votes = 0;
    f.fenced = false;
    f.n_atomics = 0;
    f.now = READY;
}

/* ---- Shared memory --------------------------------------------------------------- */

char *
shared_array(const void *key, size_t bytes)
{
    int i = 0;

    while (i < n_arrays && arrays[i].key != key) {
        i++;
    }
    if (i == n_arrays) {
        require(n_arrays < MAX_ARRAYS, "too many shared arrays in one kernel");
        shared_bytes += bytes;
        require(shared_bytes <= shared_limit, "more shared memory than the device has");
        void *fresh = nullptr;
        /* New to the race check, without ordering any threads. */
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
        require(posix_memalign(&fresh, 128, bytes) == 0, "no memory for shared arrays");
        memset(fresh, 0xFF, bytes); /* NaN in every float format */
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        arrays[n_arrays++] = {key, static_cast<char *>(fresh)};
    }
    require(shared_bytes <= UNASKED_SHARED || dynamic_bytes <= allowed_bytes,
            "more than 48 KB of shared memory, which the kernel's attribute does not "
            "allow");
    return arrays[i].address;
}

static void
free_shared()
{
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    free(orderings);
    while (n_arrays > 0) {
        free(arrays[--n_arrays].address);
    }
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    shared_bytes = 0;
}

/* ---- Blocks and grids ------------------------------------------------------------ */

/* Runs warp w until its lanes wait, are done, or its quantum is over. */
static bool
run_warp(int w)
{
    warp_state &warp = warps[w];

    shuffle_order(warp.order, 32);
    warp.next = 0;
    quantum = shuffled ? 1 << random_number() % 12 : 0;
    for (int lane : warp.order) {
        const int i = w * 32 + lane;
        if (i < n_threads && fibers[i].now == READY) {
            switch_to(&fibers[i]);
            return true;
        }
    }
    return false;
}

static void
run_block()
{
    int order[MAX_WARPS];
    const int n_warps = (n_threads + 31) / 32;

    block_parity ^= 1;
#ifdef SIMT_THREAD
    host.tsan[block_parity] = __tsan_get_current_fiber();
#endif
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    orderings = static_cast<ordering *>(malloc(sizeof *orderings));
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    require(orderings != nullptr, "no memory for a block");
    alive = n_threads;
    waiting = 0;
    votes[0] = votes[1] = votes[2] = false;
    if (dynamic_bytes > 0) {
        shared_array(&dynamic_key, dynamic_bytes);
    }
    for (int w = 0; w < n_warps; w++) {
        warps[w] = warp_state{};
        std::iota(warps[w].order, warps[w].order + 32, 0);
        order[w] = w;
    }
    for (int i = 0; i < n_threads; i++) {
        prepare_fiber(i);
    }
    while (alive > 0) {
        bool moved = false;
        shuffle_order(order, n_warps);
        for (int w = 0; w < n_warps; w++) {
            moved |= run_warp(order[w]);
        }
        require(alive == 0 || moved, "deadlock");
    }
    free_shared();
    stats.blocks++;
}

void
run_grid(dim3 grid, dim3 block, size_t dynamic, size_t allowed,
         const std::function<void()> &kernel)
{
    const std::lock_guard<std::mutex> lock(one_launch);
    const size_t threads = size_t(block.x) * block.y * block.z;
    std::vector<int> order(size_t(grid.x) * grid.y * grid.z);

    require(threads > 0 && threads <= MAX_THREADS && !order.empty() && grid.y < 65536 &&
                grid.z < 65536,
            "a launch of a shape that CUDA refuses");
    if (!seeded) {
        const char *seed = getenv("TRAINFAST_SIMT_SEED");
        set_seed(seed == nullptr ? 0 : strtoull(seed, nullptr, 0));
    }
    host.stack = nullptr; /* each launch may come from another thread */
    self = &host;
    body = &kernel;
    grid_size = grid;
    block_size = block;
    dynamic_bytes = dynamic;
    allowed_bytes = allowed;
    n_threads = int(threads);
    std::iota(order.begin(), order.end(), 0);
    shuffle_order(order.data(), int(order.size()));
    __tsan_release(&start_ordering);
    for (int i : order) {
        block_index = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        run_block();
    }
    __tsan_acquire(&end_ordering);
}

/* ---- Meeting points -------------------------------------------------------------- */

void
sync_threads()
{
    char *ordering = &orderings->block[block_phase & 1];

    require(alive == n_threads, "__syncthreads after a thread left");
    __tsan_release(ordering);
    if (++waiting == alive) {
        waiting = 0;
        block_phase++;
        for (int i = 0; i < n_threads; i++) {
            if (fibers[i].now == AT_BLOCK) {
                fibers[i].now = READY;
            }
        }
    } else {
        current()->now = AT_BLOCK;
        yield();
    }
    __tsan_acquire(ordering);
}

/* Votes go to three slots by turns: the one of the vote before is cleared when all have
 * read it and before anyone can use it again. */
bool
sync_threads_or(bool vote)
{
    const unsigned n = self->n_votes++;

    votes[n % 3] |= vote;
    sync_threads();
    votes[(n + 2) % 3] = false;
    return votes[n % 3];
}

void
collective(const char *what, uint32_t mask, void *argument, warp_function exec)
{
    warp_state &warp = warps[self->warp];
    const uint32_t bit = 1u << self->lane;

    require((mask & bit) != 0, "a lane is not in its own mask");
    if (warp.arrived == 0) {
        warp.what = what;
        warp.mask = mask;
    } else if ((warp.what != what && strcmp(warp.what, what) != 0) ||
               warp.mask != mask) {
        fprintf(stderr, "simt: %s with mask %08x meets %s with mask %08x\n", what, mask,
                warp.what, warp.mask);
        fail("a warp diverged");
    }
    warp.arguments[self->lane] = argument;
    warp.arrived |= bit;
    if (warp.arrived != warp.mask) {
        current()->now = AT_WARP;
        return yield();
    }
    exec(warp.arguments, mask);
    warp.arrived = 0;
    stats.collectives++;
    for (int lane = 0; lane < 32; lane++) {
        if ((mask >> lane & 1) != 0) {
            fibers[self->warp * 32 + lane].now = READY;
        }
    }
}

void
sync_warp(uint32_t mask)
{
    warp_state &warp = warps[self->warp];
    char *ordering = &orderings->warp[self->warp][warp.phase & 1];

    __tsan_release(ordering);
    collective("__syncwarp", mask, nullptr,
               [](void **, uint32_t) { warps[self->warp].phase++; });
    __tsan_acquire(ordering);
}

/* A fence before an atomic publishes what came before the fence, a fence after it takes
 * in what was published there. The sanitizer cannot keep the moment of the fence, so
 * what comes between the fence and the atomic counts as published too. */
void
note_atomic(const void *address)
{
    if (self->fenced) {
        __tsan_release(const_cast<void *>(address));
    }
    self->atomics[self->n_atomics++ % 8] = address;
}

void
thread_fence()
{
    const unsigned n = self->n_atomics < 8 ? self->n_atomics : 8;

    for (unsigned i = 0; i < n; i++) {
        __tsan_acquire(const_cast<void *>(self->atomics[i]));
    }
    self->n_atomics = 0;
    self->fenced = true;
}

} // namespace simt
