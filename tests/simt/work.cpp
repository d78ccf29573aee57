/* See work.h. Built without the sanitizers' instrumentation. */
#include "work.h"
#include "driver.h"
#include "driver_twin.h"
#include "tfast.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

namespace simt {

std::recursive_mutex work_lock;

namespace {

struct copy {
    void *to;
    const void *from;
    size_t bytes;
};

struct work { /* a copy, or a launch where `body` is set */
    copy memory;
    dim3 grid, block;
    size_t dynamic, allowed;
    std::function<void()> body;
};

std::map<const char *, size_t> blocks[MEMORIES];
std::vector<work> pending, captured;
uint64_t issued, done; /* pieces of work */
bool capturing;
std::atomic<int64_t> n_syncs, n_allocations, n_launches, n_copies;
std::atomic<int64_t> allocations_left{-1};
std::atomic<unsigned> most_blocks{0};

thread_local int capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool
inside(memory kind, const void *pointer, size_t bytes)
{
    const char *first = static_cast<const char *>(pointer);
    auto next = blocks[kind].upper_bound(first);

    if (next == blocks[kind].begin()) {
        return false;
    }
    --next;
    return first + bytes <= next->first + next->second;
}

void
perform(const work &piece)
{
    if (piece.body) {
        run_grid(piece.grid, piece.block, piece.dynamic, piece.allowed, piece.body);
        return;
    }
    require(inside(DEVICE_MEMORY, piece.memory.to, piece.memory.bytes),
            "a copy's target was freed before the copy ran");
    require(inside(PINNED_MEMORY, piece.memory.from, piece.memory.bytes),
            "a copy's source was freed before the copy ran");
    memcpy(piece.memory.to, piece.memory.from, piece.memory.bytes);
}

void
issue(work piece)
{
    (capturing ? captured : pending).push_back(std::move(piece));
    issued += !capturing;
}

} // namespace

/* ---- Captures -------------------------------------------------------------------- */

void
unsafe_call(const char *name)
{
    if (capturing && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
        fprintf(stderr, "simt: %s would invalidate the capture\n", name);
        fail("an unsafe call during a capture");
    }
}

void
synchronising_call(const char *name)
{
    unsafe_call(name);
    n_syncs++;
}

bool
is_capturing()
{
    return capturing;
}

int
exchange_mode(int mode)
{
    std::swap(mode, capture_mode);
    return mode;
}

/* ---- Memory ---------------------------------------------------------------------- */

void
count_allocation()
{
    n_allocations++;
}

void *
allocate(memory kind, size_t bytes)
{
    const std::lock_guard<std::recursive_mutex> guard(work_lock);
    void *pointer = nullptr;

    count_allocation();
    if (allocations_left == 0) {
        return nullptr;
    }
    if (allocations_left > 0) {
        allocations_left--;
    }
    if (posix_memalign(&pointer, 256, bytes) != 0) {
        return nullptr;
    }
    memset(pointer, 0xFF, bytes);
    blocks[kind][static_cast<char *>(pointer)] = bytes;
    return pointer;
}

void
release(memory kind, void *pointer)
{
    const std::lock_guard<std::recursive_mutex> guard(work_lock);

    finish_work();
    require(blocks[kind].erase(static_cast<char *>(pointer)) == 1,
            "a free of what was not allocated this way");
    free(pointer);
}

/* ---- Work ------------------------------------------------------------------------ */

void
issue_copy(void *to, const void *from, size_t bytes)
{
    const std::lock_guard<std::recursive_mutex> guard(work_lock);

    n_copies++;
    if (!inside(PINNED_MEMORY, from, bytes)) { /* the driver waits, and then reads it */
        synchronising_call("a copy from pageable memory");
        finish_work();
        memcpy(to, from, bytes);
        return;
    }
    require(inside(DEVICE_MEMORY, to, bytes), "a copy to what is no device memory");
    issue({{to, from, bytes}, {}, {}, 0, 0, nullptr});
}

void
issue_launch(dim3 grid, dim3 block, size_t dynamic, size_t allowed,
             std::function<void()> body)
{
    const std::lock_guard<std::recursive_mutex> guard(work_lock);
    const unsigned most = most_blocks;

    n_launches++;
    if (most > 0 && grid.x > most) {
        grid.x = most;
    }
    issue({{}, grid, block, dynamic, allowed, std::move(body)});
    if (!capturing) {
        finish_work();
    }
}

uint64_t
issued_work()
{
    return issued;
}

bool
is_done(uint64_t pieces)
{
    return pieces <= done;
}

void
finish_work()
{
    const std::lock_guard<std::recursive_mutex> guard(work_lock);

    for (const work &piece : pending) {
        perform(piece);
    }
    pending.clear();
    done = issued;
}

} // namespace simt

/* ---- For tests ------------------------------------------------------------------- */

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace simt;

extern "C" tfast_fail_function tfast_cuda_fail; /* of cuda/driver.c */

EXPORTED void *
tfast_simt_exchange_fail(void *fail)
{
    void *before = reinterpret_cast<void *>(tfast_cuda_fail);

    tfast_cuda_fail = reinterpret_cast<tfast_fail_function>(fail);
    return before;
}

EXPORTED void
tfast_simt_seed(uint64_t seed)
{
    set_seed(seed);
}

EXPORTED void
tfast_simt_counts(int64_t counts[3])
{
    counts[0] = n_syncs;
    counts[1] = n_allocations;
    counts[2] = n_launches;
}

EXPORTED int64_t
tfast_simt_copies()
{
    return n_copies;
}

EXPORTED void
tfast_simt_reset()
{
    n_syncs = n_allocations = n_launches = n_copies = 0;
}

EXPORTED void
tfast_simt_fail_allocations(int64_t after)
{
    allocations_left = after;
}

EXPORTED void
tfast_simt_most_blocks(unsigned blocks)
{
    most_blocks = blocks;
}

EXPORTED void
tfast_simt_capture_begin()
{
    const std::lock_guard<std::recursive_mutex> guard(work_lock);

    captured.clear();
    capturing = true;
}

EXPORTED void
tfast_simt_capture_end()
{
    capturing = false;
}

EXPORTED void
tfast_simt_replay()
{
    const std::lock_guard<std::recursive_mutex> guard(work_lock);

    for (const work &piece : captured) {
        perform(piece);
    }
}
