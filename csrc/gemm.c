/* The entry for products of matrices: validates, then hands over. */
#include "tfast.h"

static tfast_status
check_sizes(const tfast_gemm_args *args)
{
    const struct {
        const char *name;
        int64_t value, least;
    } sizes[] = {
        {"batch", args->batch, 0},
        {"m", args->m, 0},
        {"n", args->n, 0},
        {"k", args->k, 1},
    };

    for (int i = 0; i < 4; i++) {
        if (sizes[i].value < sizes[i].least || sizes[i].value > INT32_MAX) {
            return tfast_fail(TFAST_EINVAL, "%s must be %lld to %lld, got %lld",
                              sizes[i].name, (long long)sizes[i].least,
                              (long long)INT32_MAX, (long long)sizes[i].value);
        }
    }
    return TFAST_OK;
}

static tfast_status
check_matrix(const char *name, const tfast_gemm_matrix *matrix, int64_t columns)
{
    const int64_t least = columns > 1 ? columns : 1;

    if (matrix->row < least || matrix->row > INT32_MAX) {
        return tfast_fail(
            TFAST_EINVAL, "%s's rows must be %lld to %lld apart, got %lld", name,
            (long long)least, (long long)INT32_MAX, (long long)matrix->row);
    }
    if (matrix->batch < 0) {
        return tfast_fail(TFAST_EINVAL, "%s's items must be >= 0 apart, got %lld", name,
                          (long long)matrix->batch);
    }
    return TFAST_OK;
}

/* Items may lie one after another, or side by side within a row, as heads do. */
static tfast_status
check_out_is_apart(const tfast_gemm_args *args)
{
    const tfast_gemm_matrix *out = &args->out;

    if (args->batch <= 1 || out->batch >= (args->m - 1) * out->row + args->n) {
        return TFAST_OK;
    }
    if (out->batch >= args->n && out->row / args->batch >= out->batch) {
        return TFAST_OK;
    }
    return tfast_fail(TFAST_EINVAL, "out's items must not overlap, got %lld apart",
                      (long long)out->batch);
}

static tfast_status
check(const tfast_gemm_args *args)
{
    tfast_status status = check_sizes(args);

    if (status == TFAST_OK) {
        status = check_matrix("out", &args->out, args->n);
    }
    if (status == TFAST_OK) {
        status = check_matrix("a", &args->a, args->transpose_a ? args->m : args->k);
    }
    if (status == TFAST_OK) {
        status = check_matrix("b", &args->b, args->transpose_b ? args->k : args->n);
    }
    if (status == TFAST_OK && args->dtype == TFAST_F64) {
        return tfast_fail(TFAST_EUNSUPPORTED,
                          "out must be float16, bfloat16 or float32, got float64");
    }
    return status == TFAST_OK ? check_out_is_apart(args) : status;
}

tfast_status
tfast_gemm(const tfast_gemm_args *args)
{
    const tfast_backend *backend = tfast_backend_for(args->device.type);

    if (backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    if (backend->gemm == NULL) {
        return tfast_fail(TFAST_EUNSUPPORTED,
                          "gemm must have CUDA arrays, got them on backend %s",
                          backend->name);
    }
    const tfast_status status = check(args);
    if (status != TFAST_OK || args->batch == 0 || args->m == 0 || args->n == 0) {
        return status;
    }
    if (args->scratch == NULL ||
        (uintptr_t)args->scratch % TFAST_GEMM_SCRATCH_ALIGNMENT != 0) {
        return tfast_fail(
            TFAST_EINVAL, "scratch must be %d bytes aligned to %d, got %p",
            TFAST_GEMM_SCRATCH, TFAST_GEMM_SCRATCH_ALIGNMENT, args->scratch);
    }
    return backend->gemm(args);
}
