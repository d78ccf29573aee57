/* Stands in for cuBLAS in tests of the code that opens and calls it: the same entry
 * points, and a product computed in double, element by element. Built with
 * -DVERSION=130100; -DFAILING=STREAM makes a function return an error, and
 * -DWITHOUT_PRODUCT leaves one out. It refuses what cuBLAS refuses. */
#define _POSIX_C_SOURCE 199309L /* nanosleep */
#include "../csrc/half.h"

#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { OK = 0, ALLOC_FAILED = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

typedef struct {
    void *stream;
} handle;

/* What this process has called, for tests. */
struct {
    int64_t made, products, compute;
    void *stream;
} stub_seen;

static handle handles[8];

enum { NOTHING, CREATE, VERSION_ASKED, STREAM, PRODUCT };
#ifndef FAILING
#    define FAILING NOTHING
#endif

/* Lets another thread run in between, unless a lock keeps it out. */
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
cublasGetVersion_v2(handle *of, int *version)
{
    (void)of;
    *version = VERSION;
    return FAILING == VERSION_ASKED ? INVALID_VALUE : OK;
}

int
cublasSetStream_v2(handle *of, void *stream)
{
    of->stream = stream;
    dawdle();
    return FAILING == STREAM ? INVALID_VALUE : OK;
}

const char *
cublasGetStatusString(int status)
{
    return status == ALLOC_FAILED ? "no memory, says the stub" : "no, says the stub";
}

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

#ifndef WITHOUT_PRODUCT
int
cublasGemmEx(handle *of, int op_a, int op_b, int m, int n, int k, const float *alpha,
             const void *a, int a_type, int lda, const void *b, int b_type, int ldb,
             const float *beta, void *c, int c_type, int ldc, int compute,
             int algorithm)
{
    if (FAILING == PRODUCT || op_a != 0 || op_b != 0 || a_type != b_type ||
        b_type != c_type || (a_type != 0 && a_type != 2 && a_type != 14) ||
        (compute != 68 && compute != 77) || algorithm != -1 || *beta != 0) {
        return NOT_SUPPORTED;
    }
    if (of == NULL || m < 0 || n < 0 || k < 0 || lda < m || ldb < k || ldc < m) {
        return INVALID_VALUE;
    }
    stub_seen.products++;
    stub_seen.compute = compute;
    stub_seen.stream = of->stream;
    for (int64_t at = 0; at < (int64_t)m * n; at++) {
        const int64_t j = at / m, i = at % m;
        double sum = 0;
        for (int64_t p = 0; p < k; p++) {
            sum += load(a, p * lda + i, a_type) * load(b, j * ldb + p, b_type);
        }
        store(c, j * ldc + i, c_type, *alpha * sum);
    }
    return OK;
}
#endif
