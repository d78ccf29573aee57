/* The public function of the matrix product: validates, then calls the backend. */
#include "backend.h"

tfast_status
tfast_gemm(const tfast_gemm_args *args)
{
    const tfast_backend *backend = tfast_backend_for(args->device.type);
    const int64_t sizes[] = {args->m, args->n, args->k};

    if (backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    if (backend->gemm == NULL) {
        return tfast_fail(TFAST_EUNSUPPORTED,
                          "gemm needs CUDA arrays, got backend %s; on the CPU use "
                          "NumPy's or torch's matmul",
                          backend->name);
    }
    if (args->dtype == TFAST_F64) {
        return tfast_fail(TFAST_EUNSUPPORTED,
                          "out must be float16, bfloat16 or float32, got float64");
    }
    for (int i = 0; i < 3; i++) {
        if (sizes[i] < 1 || sizes[i] > INT32_MAX) {
            return tfast_fail(TFAST_EINVAL, "%c must be 1 to %lld, got %lld", "mnk"[i],
                              (long long)INT32_MAX, (long long)sizes[i]);
        }
    }
    return backend->gemm(args);
}
