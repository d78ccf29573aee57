/* The machine code that the library carries: made by the build, see build_cuda.py. */
#ifndef TFAST_IMAGES_H
#define TFAST_IMAGES_H

#include "kernels.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    int arch; /* 75, 80, ...; of PTX the least that runs it */
    int file; /* a FILE_ of kernels.h */
    bool is_ptx;
    const void *data;
    size_t bytes;
} tfast_image;

extern const tfast_image tfast_images[];
extern const int tfast_n_images;

/* The images in words, such as "sm_75, sm_90, PTX 80": for the library's own reader. */
extern const char tfast_library_code[];

/* What each kernel is called in them; NULL: it is in none. */
extern const char *const tfast_kernel_names[N_KERNELS];

#endif
