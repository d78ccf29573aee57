/* The attention entries: validate what no array layer can, then hand over. */
#include "tfast.h"

tfast_status
tfast_attention(const tfast_attention_args *args)
{
    const tfast_backend *backend = tfast_backend_for(args->device.type);

    if (backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    if (backend->attention == NULL) {
        return tfast_fail(TFAST_EUNSUPPORTED, "backend %s has no attention",
                          backend->name);
    }
    return backend->attention(args);
}

tfast_status
tfast_attention_backward(const tfast_attention_args *args)
{
    const tfast_backend *backend = tfast_backend_for(args->device.type);

    if (backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    if (backend->attention_backward == NULL) {
        return tfast_fail(TFAST_EUNSUPPORTED, "backend %s has no attention_backward",
                          backend->name);
    }
    return backend->attention_backward(args);
}
