/* The few entry points of cuBLAS that are used, with the numbers they take, as its
 * documentation gives them for the major versions 12 and 13
 * (https://docs.nvidia.com/cuda/cublas/). The library is opened at run time, so nothing
 * here needs its headers. */
#ifndef TFAST_CUBLAS_H
#define TFAST_CUBLAS_H

#include <stddef.h>

enum { CUBLAS_OLDEST = 12, CUBLAS_NEWEST = 13 }; /* majors with these entry points */

typedef struct cublasContext *cublas_handle;

/* Of cublasStatus_t, cublasOperation_t and cublasGemmAlgo_t. */
enum { CUBLAS_STATUS_SUCCESS = 0 };
enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum { CUBLAS_GEMM_DEFAULT = -1 };

/* Of cublasComputeType_t: what is summed up in. */
enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };

/* Of cublasMath_t: what split products add up is of that type, too, not of c's. */
enum { CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16 };

/* Of cudaDataType. */
enum { CUBLAS_R_32F = 0, CUBLAS_R_16F = 2, CUBLAS_R_16BF = 14 };

/* All return a cublasStatus_t. */
typedef struct {
    int (*create)(cublas_handle *handle);
    int (*destroy)(cublas_handle handle);
    int (*get_version)(cublas_handle handle, int *version); /* takes no handle, too */
    int (*set_stream)(cublas_handle handle, void *stream);
    int (*set_workspace)(cublas_handle handle, void *workspace, size_t bytes);
    int (*set_math_mode)(cublas_handle handle, int mode);
    /* Matrices are stored by columns: row i of column j is at i + j * ld. alpha and
     * beta are of the type that is summed up in. */
    int (*gemm)(cublas_handle handle, int op_a, int op_b, int m, int n, int k,
                const void *alpha, const void *a, int a_type, int lda,
                long long stride_a, const void *b, int b_type, int ldb,
                long long stride_b, const void *beta, void *c, int c_type, int ldc,
                long long stride_c, int batch, int compute, int algorithm);
    const char *(*status_string)(int status); /* may be NULL */
} tfast_cublas;

#endif
