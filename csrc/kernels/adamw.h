/* AdamW on the CPU, once for every instruction set and for float32 and float64
 * arithmetic (REAL is the arithmetic's type, vr a vector of it). The formula stands at
 * tfast_adamw() in tfast.h; the order of roundings here is the definition that
 * cuda/adamw.cu repeats. */

/* The step's scalars, rounded to REAL. */
typedef struct {
    REAL unscale, sign, l2, decay, rest1, beta2, rest2, step_size, inv_root_bias, eps;
    bool from_grad; /* beta1 <= 0.5: m = g - beta1 * (g - m), so that beta1 = 0 gives m
                       = g */
    bool write_back;
} R(adamw_scalars);

static R(adamw_scalars) R(adamw_round)(const tfast_adamw_coef *coef, bool write_back)
{
    const bool from_grad = coef->beta1 <= 0.5;

    return (R(adamw_scalars)){
        .unscale = (REAL)coef->unscale,
        .sign = (REAL)coef->sign,
        .l2 = (REAL)coef->l2,
        .decay = (REAL)coef->decay,
        .rest1 = (REAL)(from_grad ? -coef->beta1 : coef->rest1),
        .beta2 = (REAL)coef->beta2,
        .rest2 = (REAL)coef->rest2,
        .step_size = (REAL)coef->step_size,
        .inv_root_bias = (REAL)coef->inv_root_bias,
        .eps = (REAL)coef->eps,
        .from_grad = from_grad,
        .write_back = write_back,
    };
}

/* n elements from `first` on, a multiple of VR_WIDTH. The last three are compile-time
 * constants: the dtype of parameter and gradient, that of the state, and `plain`, true
 * where there is no amsgrad, L2 term, write-back or beta1 <= 0.5, so that the usual
 * loops have no branches. */
static inline __attribute__((always_inline)) void
R(adamw_loop)(const tfast_adamw_slot *slot, int64_t first, int64_t n,
              const R(adamw_scalars) * s, tfast_dtype dtype, tfast_dtype state,
              bool plain)
{
    /* in locals, since a store through them might change the slot */
    void *const param = slot->param, *const grad = slot->grad;
    void *const exp_avg = slot->exp_avg, *const exp_avg_sq = slot->exp_avg_sq;
    void *const top = plain ? NULL : slot->max_exp_avg_sq;
    const vr unscale = vr_set1(s->unscale), sign = vr_set1(s->sign);
    const vr l2 = vr_set1(s->l2), decay = vr_set1(s->decay);
    const vr rest1 = vr_set1(s->rest1), rest2 = vr_set1(s->rest2);
    const vr beta2 = vr_set1(s->beta2), eps = vr_set1(s->eps);
    const vr step_size = vr_set1(s->step_size);
    const vr inv_root_bias = vr_set1(s->inv_root_bias);

    for (int64_t i = first; i < first + n; i += VR_WIDTH) {
        if (plain && i + PREFETCH < first + n) {
            R(prefetch)(param, dtype, i + PREFETCH);
            R(prefetch)(grad, dtype, i + PREFETCH);
            R(prefetch)(exp_avg, state, i + PREFETCH);
            R(prefetch)(exp_avg_sq, state, i + PREFETCH);
        }
        vr p = R(vector_read)(param, dtype, i);
        vr g = vr_mul(R(vector_read)(grad, dtype, i), unscale);
        vr m = R(vector_read)(exp_avg, state, i);
        vr v = R(vector_read)(exp_avg_sq, state, i);

        if (!plain && s->write_back) {
            R(vector_write)(grad, dtype, i, g);
        }
        g = vr_mul(g, sign);
        if (!plain && s->l2 != 0) {
            g = vr_fma(l2, p, g);
        }
        p = vr_mul(p, decay);
        m = vr_fma(rest1, vr_sub(g, m), !plain && s->from_grad ? g : m);
        v = vr_fma(beta2, v, vr_mul(vr_mul(rest2, g), g));
        R(vector_write)(exp_avg, state, i, m);
        R(vector_write)(exp_avg_sq, state, i, v);
        if (top != NULL) {
            v = vr_max(R(vector_read)(top, state, i), v);
            R(vector_write)(top, state, i, v);
        }
        const vr denom = vr_fma(vr_sqrt(v), inv_root_bias, eps);
        p = vr_sub(p, vr_div(vr_mul(step_size, m), denom));
        R(vector_write)(param, dtype, i, p);
    }
}

/* The same where there is a loop for these dtypes: all REAL, or plain steps of the half
 * types that people train in. False where there is none. */
static bool
R(adamw_vectors)(const tfast_adamw_slot *slot, int64_t first, int64_t n,
                 const R(adamw_scalars) * s)
{
    const tfast_dtype dtype = slot->param_dtype, state = slot->state_dtype;
    const bool plain =
        slot->max_exp_avg_sq == NULL && !s->write_back && s->l2 == 0 && !s->from_grad;

    if (slot->grad_dtype != dtype) {
        return false;
    }
    if (dtype == REAL_DTYPE && state == REAL_DTYPE) {
        if (plain) {
            R(adamw_loop)(slot, first, n, s, REAL_DTYPE, REAL_DTYPE, true);
        } else {
            R(adamw_loop)(slot, first, n, s, REAL_DTYPE, REAL_DTYPE, false);
        }
        return true;
    }
#if REAL_IS_F32
    if (plain && dtype == TFAST_BF16 && state == TFAST_BF16) {
        R(adamw_loop)(slot, first, n, s, TFAST_BF16, TFAST_BF16, true);
        return true;
    }
    if (plain && dtype == TFAST_BF16 && state == TFAST_F32) {
        R(adamw_loop)(slot, first, n, s, TFAST_BF16, TFAST_F32, true);
        return true;
    }
    if (plain && dtype == TFAST_F16 && state == TFAST_F16) {
        R(adamw_loop)(slot, first, n, s, TFAST_F16, TFAST_F16, true);
        return true;
    }
    if (plain && dtype == TFAST_F16 && state == TFAST_F32) {
        R(adamw_loop)(slot, first, n, s, TFAST_F16, TFAST_F32, true);
        return true;
    }
#endif
    return false;
}

/* n elements from `first` on, of any dtypes, tile by tile. */
static void
R(adamw_tiles)(const tfast_adamw_slot *slot, int64_t first, int64_t n,
               const R(adamw_scalars) * s)
{
    _Alignas(64) REAL tile[5][TILE];
    const tfast_dtype param_dtype = slot->param_dtype, grad_dtype = slot->grad_dtype;
    const tfast_dtype state_dtype = slot->state_dtype;
    void *top = slot->max_exp_avg_sq;

    for (const int64_t end = first + n; first < end; first += TILE) {
        const int count = (int)(end - first < TILE ? end - first : TILE);
        const int padded = (count + VR_WIDTH - 1) / VR_WIDTH * VR_WIDTH;
        REAL *p = R(tile_open)(tile[0], slot->param, param_dtype, first, count);
        REAL *g = R(tile_open)(tile[1], slot->grad, grad_dtype, first, count);
        REAL *m = R(tile_open)(tile[2], slot->exp_avg, state_dtype, first, count);
        REAL *v = R(tile_open)(tile[3], slot->exp_avg_sq, state_dtype, first, count);
        REAL *t = NULL;

        if (top != NULL) {
            t = R(tile_open)(tile[4], top, state_dtype, first, count);
        }
        R(adamw_vectors)
        (&(tfast_adamw_slot){p, g, m, v, t, NULL, padded, REAL_DTYPE, REAL_DTYPE,
                             REAL_DTYPE},
         0, padded, s);
        R(tile_close)(p, tile[0], slot->param, param_dtype, first, count);
        R(tile_close)(m, tile[2], slot->exp_avg, state_dtype, first, count);
        R(tile_close)(v, tile[3], slot->exp_avg_sq, state_dtype, first, count);
        if (top != NULL) {
            R(tile_close)(t, tile[4], top, state_dtype, first, count);
        }
        if (s->write_back) {
            R(tile_close)(g, tile[1], slot->grad, grad_dtype, first, count);
        }
    }
}

/* n elements from `first` on: in place where there is a loop for it, but for a last
 * vector that is not full. */
static void
R(adamw_span)(const tfast_adamw_slot *slot, int64_t first, int64_t n,
              const tfast_adamw_coef *coef, bool write_back)
{
    const R(adamw_scalars) s = R(adamw_round)(coef, write_back);
    int64_t whole = n / VR_WIDTH * VR_WIDTH;

    if (!R(adamw_vectors)(slot, first, whole, &s)) {
        whole = 0;
    }
    if (whole < n) {
        R(adamw_tiles)(slot, first + whole, n - whole, &s);
    }
}
