/* The entry points of cuBLAS that trainfast calls, with their constants, from the
 * documentation of major versions 12 and 13 (https://docs.nvidia.com/cuda/cublas/). The
 * library is opened at run time, so its headers are not needed. */
#ifndef TFAST_CUBLAS_H
#define TFAST_CUBLAS_H

enum { CUBLAS_OLDEST = 12, CUBLAS_NEWEST = 13 }; /* supported major versions */

typedef struct cublasContext *cublas_handle;

enum { CUBLAS_STATUS_SUCCESS = 0 };
enum { CUBLAS_OP_N = 0 };          /* cublasOperation_t */
enum { CUBLAS_GEMM_DEFAULT = -1 }; /* cublasGemmAlgo_t */
/* cublasComputeType_t: the type of the accumulator. */
enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum { CUDA_R_32F_ = 0, CUDA_R_16F_ = 2, CUDA_R_16BF_ = 14 }; /* cudaDataType */

/* Each function returns a cublasStatus_t. */
typedef struct {
    int (*create)(cublas_handle *handle);
    int (*get_version)(cublas_handle handle, int *version); /* handle may be null */
    int (*set_stream)(cublas_handle handle, void *stream);
    /* Matrices are column-major: row i of column j is at i + j * ld. alpha and beta
     * have the accumulator's type. */
    int (*gemm)(cublas_handle handle, int op_a, int op_b, int m, int n, int k,
                const void *alpha, const void *a, int a_type, int lda, const void *b,
                int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                int compute, int algorithm);
    const char *(*status_string)(int status);
} tfast_cublas;

#endif
