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

/* n elements, a multiple of VR_WIDTH. `plain` is a compile-time constant: true where
 * there is no amsgrad, L2 term, write-back or beta1 <= 0.5, so that the usual loop has
 * no branches. */
static inline __attribute__((always_inline)) void
R(adamw_loop)(REAL *param, REAL *grad, REAL *exp_avg, REAL *exp_avg_sq,
              REAL *max_exp_avg_sq, int64_t n, const R(adamw_scalars) * s, bool plain)
{
    const vr unscale = vr_set1(s->unscale), sign = vr_set1(s->sign);
    const vr l2 = vr_set1(s->l2), decay = vr_set1(s->decay);
    const vr rest1 = vr_set1(s->rest1), rest2 = vr_set1(s->rest2);
    const vr beta2 = vr_set1(s->beta2), eps = vr_set1(s->eps);
    const vr step_size = vr_set1(s->step_size),
             inv_root_bias = vr_set1(s->inv_root_bias);

    for (int64_t i = 0; i < n; i += VR_WIDTH) {
        vr p = vr_load(param + i), g = vr_mul(vr_load(grad + i), unscale);
        vr m = vr_load(exp_avg + i), v = vr_load(exp_avg_sq + i);

        if (!plain && s->write_back) {
            vr_store(grad + i, g);
        }
        g = vr_mul(g, sign);
        if (!plain && s->l2 != 0) {
            g = vr_fma(l2, p, g);
        }
        p = vr_mul(p, decay);
        m = vr_fma(rest1, vr_sub(g, m), !plain && s->from_grad ? g : m);
        v = vr_fma(beta2, v, vr_mul(vr_mul(rest2, g), g));
        vr_store(exp_avg + i, m);
        vr_store(exp_avg_sq + i, v);
        if (!plain && max_exp_avg_sq != NULL) {
            v = vr_max(vr_load(max_exp_avg_sq + i), v);
            vr_store(max_exp_avg_sq + i, v);
        }
        const vr denom = vr_fma(vr_sqrt(v), inv_root_bias, eps);
        vr_store(param + i, vr_sub(p, vr_div(vr_mul(step_size, m), denom)));
    }
}

static void
R(adamw_vectors)(REAL *param, REAL *grad, REAL *exp_avg, REAL *exp_avg_sq,
                 REAL *max_exp_avg_sq, int64_t n, const R(adamw_scalars) * s)
{
    if (max_exp_avg_sq == NULL && !s->write_back && s->l2 == 0 && !s->from_grad) {
        R(adamw_loop)(param, grad, exp_avg, exp_avg_sq, NULL, n, s, true);
    } else {
        R(adamw_loop)(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, n, s, false);
    }
}

/* n elements from `first` on, tile by tile. */
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
        R(adamw_vectors)(p, g, m, v, t, padded, s);
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

/* n elements from `first` on: in place where every array is REAL, but for a last vector
 * that is not full. */
static void
R(adamw_span)(const tfast_adamw_slot *slot, int64_t first, int64_t n,
              const tfast_adamw_coef *coef, bool write_back)
{
    const R(adamw_scalars) s = R(adamw_round)(coef, write_back);
    int64_t whole = 0;

    if (slot->param_dtype == REAL_DTYPE && slot->grad_dtype == REAL_DTYPE &&
        slot->state_dtype == REAL_DTYPE) {
        REAL *top = slot->max_exp_avg_sq;

        whole = n / VR_WIDTH * VR_WIDTH;
        R(adamw_vectors)
        ((REAL *)slot->param + first, (REAL *)slot->grad + first,
         (REAL *)slot->exp_avg + first, (REAL *)slot->exp_avg_sq + first,
         top == NULL ? NULL : top + first, whole, &s);
    }
    if (whole < n) {
        R(adamw_tiles)(slot, first + whole, n - whole, &s);
    }
}
