/* The public functions of attention: validate sizes, scalars and lengths, then call the
 * backend. The binding has validated the arrays. */
#include "backend.h"

#include <math.h>

static tfast_status
check_sizes(const tfast_attention_args *args)
{
    const int64_t most = TFAST_ATTENTION_MAX_DIM;

    if (args->batch < 0 || args->heads < 0 || args->n_q < 0 || args->n_k < 0) {
        return tfast_fail(TFAST_EINVAL,
                          "sizes must be >= 0, got [%lld, %lld, %lld x "
                          "%lld]",
                          (long long)args->batch, (long long)args->heads,
                          (long long)args->n_q, (long long)args->n_k);
    }
    if (args->dim < 1 || args->dim > most) {
        return tfast_fail(TFAST_EINVAL, "q's dim must be 1 to %lld, got %lld",
                          (long long)most, (long long)args->dim);
    }
    if (args->dim_v < 1 || args->dim_v > most) {
        return tfast_fail(TFAST_EINVAL, "v's dim must be 1 to %lld, got %lld",
                          (long long)most, (long long)args->dim_v);
    }
    if (args->kv_heads < 1 ? args->heads > 0 : args->heads % args->kv_heads != 0) {
        return tfast_fail(TFAST_EINVAL, "heads must be a multiple of %lld, got %lld",
                          (long long)args->kv_heads, (long long)args->heads);
    }
    if (args->heads == 0 && args->kv_heads > 0) { /* kernels divide by the ratio */
        return tfast_fail(TFAST_EINVAL, "q must have heads where k has %lld, got 0",
                          (long long)args->kv_heads);
    }
    return TFAST_OK;
}

/* Kernels compute position + window and batch * heads * rows in int64_t; neither may
 * overflow. */
static tfast_status
check_reach(const tfast_attention_args *args)
{
    const int64_t most = INT64_MAX / 4;
    const double rows = (double)(args->n_q > args->n_k ? args->n_q : args->n_k);
    const double all = rows * (double)args->batch * (double)args->heads;
    const struct {
        const char *name;
        int64_t value;
    } checked[] = {{"n_q", args->n_q},
                   {"n_k", args->n_k},
                   {"window_left", args->window_left},
                   {"window_right", args->window_right}};

    for (int i = 0; i < 4; i++) {
        if (checked[i].value > most) {
            return tfast_fail(TFAST_EINVAL, "%s must be at most %lld, got %lld",
                              checked[i].name, (long long)most,
                              (long long)checked[i].value);
        }
    }
    if (all > (double)most) {
        return tfast_fail(TFAST_EINVAL,
                          "batch * heads * rows must be at most %lld, got %lld * %lld "
                          "* %.0f",
                          (long long)most, (long long)args->batch,
                          (long long)args->heads, rows);
    }
    return TFAST_OK;
}

/* scale, softcap and their quotient must stay finite in the kernel's arithmetic type
 * after a multiplication by log2(e), and 1 / softcap must be finite. */
static tfast_status
check_scales(const tfast_attention_args *args)
{
    const double most = args->dtype == TFAST_F64 ? 1e300 : 1e37;
    const double scale = fabs(args->scale), softcap = args->softcap;

    if (!isfinite(scale)) {
        return tfast_fail(TFAST_EINVAL, "scale must be finite, got %g", args->scale);
    }
    if (scale > most) {
        return tfast_fail(TFAST_EINVAL, "scale must be -%g to %g, got %g", most, most,
                          args->scale);
    }
    if (!(isfinite(softcap) && softcap >= 0)) {
        return tfast_fail(TFAST_EINVAL, "softcap must be finite and >= 0, got %g",
                          softcap);
    }
    if (softcap != 0 && (softcap < 1 / most || softcap > most)) {
        return tfast_fail(TFAST_EINVAL, "softcap must be 0, or %g to %g, got %g",
                          1 / most, most, softcap);
    }
    if (softcap != 0 && scale / softcap > most) {
        return tfast_fail(TFAST_EINVAL,
                          "scale / softcap must be -%g to %g, got %g / %g", most, most,
                          args->scale, softcap);
    }
    return TFAST_OK;
}

static tfast_status
check_numbers(const tfast_attention_args *args)
{
    const tfast_status status = check_scales(args);

    if (status != TFAST_OK) {
        return status;
    }
    if (!(args->dropout_p >= 0 && args->dropout_p < 1)) {
        return tfast_fail(TFAST_EINVAL, "dropout_p must be in [0, 1), got %g",
                          args->dropout_p);
    }
    if (args->dropout_p > 65535.0 / 65536) {
        return tfast_fail(TFAST_EINVAL,
                          "dropout_p must be at most 65535 / 65536, its last step "
                          "before 1, got %.17g",
                          args->dropout_p);
    }
    return TFAST_OK;
}

static tfast_status
check_cu_seqlens(const char *name, const int64_t *at, int64_t batch, int64_t total,
                 int64_t longest)
{
    if (at[0] != 0) {
        return tfast_fail(TFAST_EINVAL, "%s must start at 0, got %lld", name,
                          (long long)at[0]);
    }
    for (int64_t b = 0; b < batch; b++) {
        if (at[b + 1] < at[b]) {
            return tfast_fail(TFAST_EINVAL, "%s must not decrease, got %lld after %lld",
                              name, (long long)at[b + 1], (long long)at[b]);
        }
        if (at[b + 1] - at[b] > longest) {
            return tfast_fail(TFAST_EINVAL,
                              "%s must have items of at most %lld rows, got %lld", name,
                              (long long)longest, (long long)(at[b + 1] - at[b]));
        }
    }
    if (at[batch] > total) {
        return tfast_fail(TFAST_EINVAL, "%s must end within the %lld rows, got %lld",
                          name, (long long)total, (long long)at[batch]);
    }
    return TFAST_OK;
}

/* Lengths on a GPU are not checked: reading them would synchronise the stream. */
static tfast_status
check_lengths(const tfast_attention_args *args)
{
    const int64_t *cu_seqlens_k = args->cu_seqlens_k;
    tfast_status status = TFAST_OK;

    if ((args->cu_seqlens_q == NULL) != (cu_seqlens_k == NULL)) {
        return tfast_fail(TFAST_EINVAL,
                          "cu_seqlens_q and cu_seqlens_k must be given together");
    }
    if (args->device.type != TFAST_CPU) {
        return TFAST_OK;
    }
    if (cu_seqlens_k != NULL) {
        status = check_cu_seqlens("cu_seqlens_q", args->cu_seqlens_q, args->batch,
                                  args->total_q, args->n_q);
        if (status == TFAST_OK) {
            status = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, args->batch,
                                      args->total_k, args->n_k);
        }
    }
    for (int64_t b = 0; status == TFAST_OK && args->kv_lens != NULL && b < args->batch;
         b++) {
        const int64_t keys =
            cu_seqlens_k == NULL ? args->n_k : cu_seqlens_k[b + 1] - cu_seqlens_k[b];

        if (args->kv_lens[b] < 0 || args->kv_lens[b] > keys) {
            return tfast_fail(TFAST_EINVAL,
                              "kv_lens[%lld] must be 0 to %lld, its item's keys, got "
                              "%lld",
                              (long long)b, (long long)keys,
                              (long long)args->kv_lens[b]);
        }
    }
    return status;
}

/* The length of the longest item on the CPU. On a GPU reading the lengths would
 * synchronise; `total` is returned, an upper bound. */
static int64_t
longest_item(const tfast_attention_args *args, const int64_t *at, int64_t total)
{
    int64_t longest = 0;

    if (args->device.type != TFAST_CPU) {
        return total;
    }
    for (int64_t b = 0; b < args->batch; b++) {
        longest = at[b + 1] - at[b] > longest ? at[b + 1] - at[b] : longest;
    }
    return longest;
}

/* Backends create tasks for n_q and n_k rows of each item. With variable lengths n_q
 * and n_k are the caller's max_seqlen, which may be far larger than any item, so they
 * are reduced to longest_item(). If dbias has a query or key dimension, n_q or n_k is
 * its size and is kept, because all of dbias must be written. */
static void
tighten(tfast_attention_args *args)
{
    if (args->cu_seqlens_q == NULL) {
        return;
    }
    if (args->dbias == NULL || args->dbias_stride[2] == 0) {
        const int64_t n_q = longest_item(args, args->cu_seqlens_q, args->total_q);
        args->n_q = args->n_q < n_q ? args->n_q : n_q;
    }
    if (args->dbias == NULL || args->dbias_stride[3] == 0) {
        const int64_t n_k = longest_item(args, args->cu_seqlens_k, args->total_k);
        args->n_k = args->n_k < n_k ? args->n_k : n_k;
    }
}

/* Validates `args` and copies them to `own`, the arguments that the backend gets. */
static tfast_status
check(const tfast_attention_args *args, tfast_attention_args *own)
{
    tfast_status status = check_sizes(args);

    if (status == TFAST_OK) {
        status = check_numbers(args);
    }
    if (status == TFAST_OK) {
        status = check_lengths(args);
    }
    if (status != TFAST_OK) {
        return status;
    }
    *own = *args;
    tighten(own);
    return check_reach(own);
}

tfast_status
tfast_attention_scratch(int64_t *bytes, const tfast_attention_args *args, bool backward)
{
    const tfast_backend *backend = tfast_backend_for(args->device.type);
    tfast_attention_args own;
    tfast_status status;

    *bytes = 0;
    if (backend == NULL || backend->attention_scratch == NULL) {
        return TFAST_OK; /* the call itself reports the error */
    }
    status = check(args, &own);
    return status == TFAST_OK ? backend->attention_scratch(bytes, &own, backward)
                              : status;
}

/* The backend of a valid call, which must have the operation and get its scratch. */
static tfast_status
find_backend(const tfast_backend **backend, const tfast_attention_args *args,
             bool backward)
{
    tfast_status status = TFAST_OK;
    int64_t bytes = 0;

    *backend = tfast_backend_for(args->device.type);
    if (*backend == NULL) {
        return TFAST_EUNSUPPORTED;
    }
    if ((backward ? (*backend)->attention_backward : (*backend)->attention) == NULL) {
        return tfast_fail(TFAST_EUNSUPPORTED, "backend %s has no attention%s",
                          (*backend)->name, backward ? "_backward" : "");
    }
    if (args->scratch == NULL && (*backend)->attention_scratch != NULL) {
        status = (*backend)->attention_scratch(&bytes, args, backward);
    }
    return status == TFAST_OK
               ? tfast_backend_check_scratch(*backend, bytes, args->scratch_bytes)
               : status;
}

tfast_status
tfast_attention(const tfast_attention_args *args)
{
    const tfast_backend *backend;
    tfast_attention_args own;
    tfast_status status = check(args, &own);

    if (status != TFAST_OK) {
        return status;
    }
    if (own.batch == 0 || own.heads == 0 || own.n_q == 0) {
        return TFAST_OK; /* no row to compute */
    }
    status = find_backend(&backend, &own, false);
    return status == TFAST_OK ? backend->attention(&own) : status;
}

/* Unlike the forward pass, this calls the backend even if there are no query rows: dk,
 * dv and dbias must then be set to 0. */
tfast_status
tfast_attention_backward(const tfast_attention_args *args)
{
    const tfast_backend *backend;
    tfast_attention_args own;
    tfast_status status = check(args, &own);

    if (status == TFAST_OK) {
        status = find_backend(&backend, &own, true);
    }
    return status == TFAST_OK ? backend->attention_backward(&own) : status;
}
