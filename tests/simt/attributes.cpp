/* The one attribute of kernels that has a twin: how much dynamic shared memory they may
 * ask for. Built without the sanitizers' instrumentation, as the rest of the runner. */
#include "simt.h"

#include <map>
#include <mutex>

static std::mutex lock;
static std::map<const void *, size_t> shared_of_kernels;

cudaError_t
simt_set_shared(const void *kernel, int bytes)
{
    const std::lock_guard<std::mutex> guard(lock);

    if (bytes < 0 || size_t(bytes) > simt::shared_limit) {
        return cudaErrorInvalidValue;
    }
    shared_of_kernels[kernel] = size_t(bytes);
    return cudaSuccess;
}

size_t
simt::shared_set(const void *kernel)
{
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = shared_of_kernels.find(kernel);

    return found == shared_of_kernels.end() ? 0 : found->second;
}
