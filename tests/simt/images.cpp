/* What a build with NVRTC generates, for the runner: every file's kernels as an image
 * for sm_75 and one for sm_80, which cuModuleLoadData's twin takes. */
#include "images.h"
#include "simt.h"

#define TABLE(file) extern const simt::kernel_table kernels_of_##file;
namespace simt {
TFAST_DEVICE_FILES(TABLE)
}

#define BOTH(file) {75, &simt::kernels_of_##file}, {80, &simt::kernels_of_##file},
static const simt::image images[] = {TFAST_DEVICE_FILES(BOTH)};

#define DESCRIBED(file)                                                                \
    {75, FILE_##file, false, &images[2 * FILE_##file], sizeof(simt::image)},           \
        {80, FILE_##file, false, &images[2 * FILE_##file + 1], sizeof(simt::image)},
extern const tfast_image tfast_images[] = {TFAST_DEVICE_FILES(DESCRIBED)};
extern const int tfast_n_images = 2 * N_FILES;

#define NAME(path, id, ...) #id,
extern const char *const tfast_kernel_names[N_KERNELS] = {TFAST_KERNELS(NAME)};

const simt::image *
simt::image_at(const void *data)
{
    for (const image &known : images) {
        if (data == &known) {
            return &known;
        }
    }
    return nullptr;
}
