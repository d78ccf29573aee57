/* The parts of DLPack's ABI that are used here (https://dmlc.github.io/dlpack,
 * version 1.3). Struct layouts are the standard's; names are this project's. */
#ifndef PY_DLPACK_H
#define PY_DLPACK_H

#include <stdint.h>

enum {
    DLPACK_CPU = 1,
    DLPACK_CUDA = 2,
    DLPACK_CUDA_HOST = 3,     /* pinned host memory */
    DLPACK_CUDA_MANAGED = 13, /* reachable from CPU and GPU */
    DLPACK_INT = 0,
    DLPACK_UINT = 1,
    DLPACK_FLOAT = 2,
    DLPACK_BFLOAT = 4,
    DLPACK_COMPLEX = 5,
    DLPACK_BOOL = 6,
    DLPACK_FLOAT8_E4M3FN = 10,
    DLPACK_FLOAT8_E5M2 = 12,
    DLPACK_READ_ONLY = 1, /* flags of a versioned tensor */
    DLPACK_IS_COPIED = 2
};

typedef struct {
    uint32_t major;
    uint32_t minor;
} dlpack_version;

typedef struct {
    void *data;
    struct {
        int32_t type;
        int32_t index;
    } device;
    int32_t ndim;
    struct {
        uint8_t code;
        uint8_t bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL (before 1.2): C order */
    uint64_t byte_offset;
} dlpack_tensor;

/* The pointer in a capsule "dltensor", of DLPack before 1.0. */
typedef struct dlpack_managed {
    dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct dlpack_managed *);
} dlpack_managed;

/* The pointer in a capsule "dltensor_versioned", of DLPack 1.0 and later. */
typedef struct dlpack_versioned {
    dlpack_version version;
    void *context;
    void (*deleter)(struct dlpack_versioned *);
    uint64_t flags;
    dlpack_tensor tensor;
} dlpack_versioned;

/* The pointer in a capsule "dlpack_exchange_api", an attribute of an array type. The
 * functions that are not used here are declared as void pointers. */
typedef struct dlpack_exchange {
    dlpack_version version;
    struct dlpack_exchange *previous; /* for an older major version */
    void *allocate;
    void *managed_from_object;
    /* Makes an object that owns the tensor and calls its deleter at the end. Returns 0,
     * or -1 with a Python exception. */
    int (*managed_to_object)(dlpack_versioned *tensor, void **object);
    /* Fills a view that is valid while the object lives. Returns 0, or -1 with a Python
     * exception. */
    int (*view_from_object)(void *object, dlpack_tensor *out);
    void *current_work_stream;
} dlpack_exchange;

#endif
