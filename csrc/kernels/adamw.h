/* AdamW on the CPU, once for every instruction set and for float32 and float64
 * arithmetic (REAL is the arithmetic's type, vr a vector of it). The formula stands at
 * tfast_adamw() in tfast.h; the order of roundings here is the definition that
 * cuda/adamw.cu repeats. */

/* The step's scalars, rounded to REAL. */
typedef struct {
    REAL unscale, sign, l2, decay, rest1, beta2, rest2, step_size, inv_root_bias, eps;
    REAL ema_rest;
    bool from_grad; /* beta1 <= 0.5: m = g - beta1 * (g - m), so that beta1 = 0 gives m
                       = g */
    bool ema_is_param; /* ema_decay 0 */
    bool write_back, zero_grad;
} R(adamw_scalars);

static R(adamw_scalars)
    R(adamw_round)(const tfast_adamw_coef *coef, const tfast_adamw_args *args)
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
        .ema_rest = (REAL)coef->ema_rest,
        .from_grad = from_grad,
        .ema_is_param = coef->ema_rest == 1,
        .write_back = args->write_back_grads,
        .zero_grad = args->zero_grad,
    };
}

/* Asks the cache for the elements i of a slot, as far as they are read. */
static inline __attribute__((always_inline)) void
R(adamw_prefetch)(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
                  int64_t i, tfast_dtype dtype, tfast_dtype grad, tfast_dtype state,
                  bool plain)
{
    R(prefetch)(slot->param, dtype, i);
    R(prefetch)(slot->grad, grad, i);
    R(prefetch)(slot->exp_avg, state, i);
    R(prefetch)(slot->exp_avg_sq, state, i);
    if (!plain && slot->max_exp_avg_sq != NULL) {
        R(prefetch)(slot->max_exp_avg_sq, state, i);
    }
    if (!plain && extra->ema != NULL) {
        R(prefetch)(extra->ema, REAL_DTYPE, i);
    }
}

/* What extras hold, from the new parameter. The copy's dtype is known at run time. To
 * write a bfloat16 copy past the cache (AVX-512, a Zen 5, 40,000 elements a tensor)
 * gained 1 % of a step of 300 tensors and 5 of 100, also where the copy is read next;
 * of 25 it gained 13, and lost 5 where the copy is read next. */
static inline __attribute__((always_inline)) void
R(adamw_extras)(const tfast_adamw_extra *extra, int64_t i, vr p,
                const R(adamw_scalars) * s)
{
    if (extra->ema != NULL) {
        vr ema = R(vector_read)(extra->ema, REAL_DTYPE, i);
        ema = s->ema_is_param ? p : vr_fma(vr_set1(s->ema_rest), vr_sub(p, ema), ema);
        R(vector_write)(extra->ema, REAL_DTYPE, i, ema);
    }
    if (extra->copy != NULL) {
        R(vector_write)(extra->copy, extra->copy_dtype, i, p);
    }
}

/* n elements from `first` on, a multiple of VR_WIDTH. The last four are compile-time
 * constants: the dtypes of parameter, gradient and state, and `plain`, true where there
 * is no amsgrad, L2 term, beta1 <= 0.5, extra, or writing of gradients, so that the
 * usual loops have no branches. */
static inline __attribute__((always_inline)) void
R(adamw_loop)(const tfast_adamw_slot *slots, const tfast_adamw_extra *extras,
              int64_t first, int64_t n, const R(adamw_scalars) * scalars,
              tfast_dtype dtype, tfast_dtype grad_dtype, tfast_dtype state, bool plain)
{
    /* copies, since a store through an array might change the originals */
    const tfast_adamw_slot slot = *slots;
    const tfast_adamw_extra extra = *extras;
    const R(adamw_scalars) s = *scalars;
    void *const top = plain ? NULL : slot.max_exp_avg_sq;
    const vr unscale = vr_set1(s.unscale), sign = vr_set1(s.sign);
    const vr l2 = vr_set1(s.l2), decay = vr_set1(s.decay);
    const vr rest1 = vr_set1(s.rest1), rest2 = vr_set1(s.rest2);
    const vr beta2 = vr_set1(s.beta2), eps = vr_set1(s.eps);
    const vr step_size = vr_set1(s.step_size);
    const vr inv_root_bias = vr_set1(s.inv_root_bias);

    for (int64_t i = first; i < first + n; i += VR_WIDTH) {
        if (i + PREFETCH < first + n) {
            R(adamw_prefetch)
            (&slot, &extra, i + PREFETCH, dtype, grad_dtype, state, plain);
        }
        vr p = R(vector_read)(slot.param, dtype, i);
        vr g = vr_mul(R(vector_read)(slot.grad, grad_dtype, i), unscale);
        vr m = R(vector_read)(slot.exp_avg, state, i);
        vr v = R(vector_read)(slot.exp_avg_sq, state, i);

        if (!plain && (s.write_back || s.zero_grad)) {
            R(vector_write)(slot.grad, grad_dtype, i, s.zero_grad ? vr_set1(0) : g);
        }
        g = vr_mul(g, sign);
        if (!plain && s.l2 != 0) {
            g = vr_fma(l2, p, g);
        }
        p = vr_mul(p, decay);
        m = vr_fma(rest1, vr_sub(g, m), !plain && s.from_grad ? g : m);
        v = vr_fma(beta2, v, vr_mul(vr_mul(rest2, g), g));
        R(vector_write)(slot.exp_avg, state, i, m);
        R(vector_write)(slot.exp_avg_sq, state, i, v);
        if (top != NULL) {
            v = vr_max(R(vector_read)(top, state, i), v);
            R(vector_write)(top, state, i, v);
        }
        const vr denom = vr_fma(vr_sqrt(v), inv_root_bias, eps);
        p = vr_sub(p, vr_div(vr_mul(step_size, m), denom));
        R(vector_write)(slot.param, dtype, i, p);
        if (!plain) {
            R(adamw_extras)(&extra, i, p, &s);
        }
    }
}

/* Whether the loops below take what else is to be written. */
static bool
R(adamw_takes)(const tfast_adamw_extra *extra)
{
    const bool half = extra->copy_dtype == TFAST_BF16 || extra->copy_dtype == TFAST_F16;

    return (extra->ema == NULL || extra->ema_dtype == REAL_DTYPE) &&
           (extra->copy == NULL || extra->copy_dtype == REAL_DTYPE ||
            (REAL_IS_F32 && half));
}

/* The same where there is a loop for these dtypes: all REAL, the half types that people
 * train in, and their gradients for float32 master weights, which always come with a
 * copy and so have no plain loop. False where there is none. Dtypes known only at run
 * time were 15 to 35 % slower for half types. */
static bool
R(adamw_vectors)(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
                 int64_t first, int64_t n, const R(adamw_scalars) * s)
{
    const tfast_dtype dtype = slot->param_dtype, grad = slot->grad_dtype;
    const tfast_dtype state = slot->state_dtype;
    const bool plain = slot->max_exp_avg_sq == NULL && !s->write_back &&
                       !s->zero_grad && s->l2 == 0 && !s->from_grad &&
                       extra->ema == NULL && extra->copy == NULL;

#define LOOP(PLAIN, PARAM, GRAD, STATE)                                                \
    if ((plain || !PLAIN) && dtype == PARAM && grad == GRAD && state == STATE) {       \
        R(adamw_loop)(slot, extra, first, n, s, PARAM, GRAD, STATE, PLAIN);            \
        return true;                                                                   \
    }

    if (!R(adamw_takes)(extra)) {
        return false;
    }
    LOOP(true, REAL_DTYPE, REAL_DTYPE, REAL_DTYPE)
    LOOP(false, REAL_DTYPE, REAL_DTYPE, REAL_DTYPE)
#if REAL_IS_F32
    LOOP(true, TFAST_BF16, TFAST_BF16, TFAST_BF16)
    LOOP(true, TFAST_BF16, TFAST_BF16, TFAST_F32)
    LOOP(true, TFAST_F16, TFAST_F16, TFAST_F16)
    LOOP(true, TFAST_F16, TFAST_F16, TFAST_F32)
    LOOP(false, TFAST_BF16, TFAST_BF16, TFAST_BF16)
    LOOP(false, TFAST_BF16, TFAST_BF16, TFAST_F32)
    LOOP(false, TFAST_F16, TFAST_F16, TFAST_F16)
    LOOP(false, TFAST_F16, TFAST_F16, TFAST_F32)
    LOOP(false, TFAST_F32, TFAST_BF16, TFAST_F32)
    LOOP(false, TFAST_F32, TFAST_F16, TFAST_F32)
#endif
    return false;
#undef LOOP
}

/* n elements from `first` on, of any dtypes, tile by tile. */
static void
R(adamw_tiles)(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
               int64_t first, int64_t n, const R(adamw_scalars) * s)
{
    _Alignas(64) REAL tile[6][TILE];
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
        REAL *t = NULL, *e = NULL;

        if (top != NULL) {
            t = R(tile_open)(tile[4], top, state_dtype, first, count);
        }
        if (extra->ema != NULL) {
            e = R(tile_open)(tile[5], extra->ema, extra->ema_dtype, first, count);
        }
        R(adamw_vectors)
        (&(tfast_adamw_slot){p, g, m, v, t, NULL, padded, REAL_DTYPE, REAL_DTYPE,
                             REAL_DTYPE},
         &(tfast_adamw_extra){e, NULL, REAL_DTYPE, REAL_DTYPE}, 0, padded, s);
        R(tile_close)(p, tile[0], slot->param, param_dtype, first, count);
        R(tile_close)(m, tile[2], slot->exp_avg, state_dtype, first, count);
        R(tile_close)(v, tile[3], slot->exp_avg_sq, state_dtype, first, count);
        if (top != NULL) {
            R(tile_close)(t, tile[4], top, state_dtype, first, count);
        }
        if (s->write_back || s->zero_grad) {
            R(tile_close)(g, tile[1], slot->grad, grad_dtype, first, count);
        }
        if (e != NULL) {
            R(tile_close)(e, tile[5], extra->ema, extra->ema_dtype, first, count);
        }
        if (extra->copy != NULL) {
            R(tile_write)(extra->copy, p, extra->copy_dtype, first, count);
        }
    }
}

/* n elements from `first` on: in place where there is a loop for it, but for a last
 * vector that is not full. */
static void
R(adamw_span)(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
              int64_t first, int64_t n, const tfast_adamw_coef *coef,
              const tfast_adamw_args *args)
{
    const R(adamw_scalars) s = R(adamw_round)(coef, args);
    int64_t whole = n / VR_WIDTH * VR_WIDTH;

    if (!R(adamw_vectors)(slot, extra, first, whole, &s)) {
        whole = 0;
    }
    if (whole < n) {
        R(adamw_tiles)(slot, extra, first + whole, n - whole, &s);
    }
}
