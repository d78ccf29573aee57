/* Stands in for cuBLAS in tests of what opens and calls it: the same entry points, and
 * products in double, one element after the other. Built with -DVERSION=130100, and
 * with -DFAILING=cublas... one of them returns an error, with -DWITHOUT_... one is not
 * there. It refuses what cuBLAS would. */
#define _POSIX_C_SOURCE 199309L /* nanosleep */
#include "../csrc/half.h"

#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { OK = 0, ALLOC_FAILED = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

typedef struct {
    void *stream, *workspace;
    size_t bytes;
    int math_mode;
} handle;

/* What has been done so far, for tests. */
struct {
    int64_t made, destroyed, products;
    int64_t compute, math_mode, workspace_bytes;
    void *stream;
} stub_seen;

static handle handles[8];

enum { NOTHING, CREATE, VERSION_ASKED, STREAM, WORKSPACE, MATH_MODE, PRODUCT };
#ifndef FAILING
#    define FAILING NOTHING
#endif

/* Lets another thread come between, if nothing keeps it out. */
static void
dawdle(void)
{
    const struct timespec little = {0, 2000000};

    nanosleep(&little, NULL);
}

int
cublasCreate_v2(handle **out)
{
    dawdle();
    if (FAILING == CREATE || stub_seen.made == 8) {
        return ALLOC_FAILED;
    }
    *out = &handles[stub_seen.made++];
    return OK;
}

int
cublasDestroy_v2(handle *of)
{
    stub_seen.destroyed++;
    return of == NULL ? INVALID_VALUE : OK;
}

#ifndef WITHOUT_VERSION
int
cublasGetVersion_v2(handle *of, int *version)
{
    (void)of;
    *version = VERSION;
    return FAILING == VERSION_ASKED ? INVALID_VALUE : OK;
}
#endif

/* Puts the workspace back, as the real one does. */
int
cublasSetStream_v2(handle *of, void *stream)
{
    of->stream = stream;
    of->workspace = NULL;
    return FAILING == STREAM ? INVALID_VALUE : OK;
}

int
cublasSetWorkspace_v2(handle *of, void *workspace, size_t bytes)
{
    of->workspace = workspace;
    of->bytes = bytes;
    dawdle();
    return FAILING == WORKSPACE || (uintptr_t)workspace % 256 != 0 ? INVALID_VALUE : OK;
}

int
cublasSetMathMode(handle *of, int mode)
{
    of->math_mode = mode;
    return FAILING == MATH_MODE ? INVALID_VALUE : OK;
}

#ifndef WITHOUT_STATUS_STRING
const char *
cublasGetStatusString(int status)
{
    return status == ALLOC_FAILED ? "no memory, says the stub" : "no, says the stub";
}
#endif

/* cudaDataType: float32 0, float16 2, bfloat16 14. */
static double
load(const void *data, int64_t at, int type)
{
    return type == 0   ? ((const float *)data)[at]
           : type == 2 ? tfast_from_f16(((const uint16_t *)data)[at])
                       : tfast_from_bf16(((const uint16_t *)data)[at]);
}

static void
store(void *data, int64_t at, int type, double value)
{
    if (type == 0) {
        ((float *)data)[at] = (float)value;
    } else {
        ((uint16_t *)data)[at] =
            type == 2 ? tfast_to_f16((float)value) : tfast_to_bf16((float)value);
    }
}

static int
check(const handle *of, int op_a, int op_b, int m, int n, int k, int lda, int ldb,
      int ldc, int type, int compute)
{
    const int rows_a = op_a == 0 ? m : k, rows_b = op_b == 0 ? k : n;

    if (of == NULL || of->workspace == NULL || of->bytes < 16384) {
        return ALLOC_FAILED;
    }
    if (m < 0 || n < 0 || k < 0 || lda < 1 || lda < rows_a || ldb < 1 || ldb < rows_b ||
        ldc < 1 || ldc < m || op_a < 0 || op_a > 1 || op_b < 0 || op_b > 1) {
        return INVALID_VALUE;
    }
    if ((type != 0 && type != 2 && type != 14) || (compute != 68 && compute != 77)) {
        return NOT_SUPPORTED;
    }
    return FAILING == PRODUCT ? NOT_SUPPORTED : OK;
}

#ifndef WITHOUT_PRODUCT
int
cublasGemmStridedBatchedEx(handle *of, int op_a, int op_b, int m, int n, int k,
                           const float *alpha, const void *a, int a_type, int lda,
                           long long stride_a, const void *b, int b_type, int ldb,
                           long long stride_b, const float *beta, void *c, int c_type,
                           int ldc, long long stride_c, int batch, int compute,
                           int algorithm)
{
    const int status =
        a_type == b_type && b_type == c_type && algorithm == -1
            ? check(of, op_a, op_b, m, n, k, lda, ldb, ldc, a_type, compute)
            : NOT_SUPPORTED;

    if (status != OK) {
        return status;
    }
    stub_seen.products++;
    stub_seen.compute = compute;
    stub_seen.math_mode = of->math_mode;
    stub_seen.workspace_bytes = (int64_t)of->bytes;
    stub_seen.stream = of->stream;
    ((char *)of->workspace)[0] = ((char *)of->workspace)[of->bytes - 1] = 1;
    for (int64_t at = 0; at < (int64_t)batch * m * n; at++) {
        const int64_t item = at / n / m, j = at / m % n, i = at % m;
        const int64_t to = item * stride_c + j * ldc + i;
        double sum = 0;
        for (int64_t p = 0; p < k; p++) {
            sum += load(a, item * stride_a + (op_a == 0 ? p * lda + i : i * lda + p),
                        a_type) *
                   load(b, item * stride_b + (op_b == 0 ? j * ldb + p : p * ldb + j),
                        b_type);
        }
        store(c, to, c_type,
              *alpha * sum + (*beta == 0 ? 0 : *beta * load(c, to, c_type)));
    }
    return OK;
}
#endif
