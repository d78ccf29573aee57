/* AdamW on a range of elements of one slot. tfast_adamw() in tfast.h has the formula.
 * The order of operations here defines the rounding; cuda/device/adamw_kernel.cuh
 * repeats it. */
#ifndef ADAMW_H
#define ADAMW_H

#include "../adamw_coef.h"
#include "tile.h"
#if REAL_IS_F32
#    include "adamw_codes.h"
#    include "adamw_half.h"
#endif

/* The step's scalars, rounded to `real`. */
typedef struct {
    real unscale, sign, l2, decay, rest1, beta2, rest2, step_size, inv_root_bias, eps;
    real ema_rest;
    bool from_grad; /* beta1 <= 0.5: m = g - beta1 * (g - m), so that beta1 = 0 gives m
                       = g */
    bool ema_is_param; /* ema_decay is 0: ema = param */
    bool write_back, zero_grad;
} adamw_scalars;

static adamw_scalars
adamw_round(const tfast_adamw_coef *coef, const tfast_adamw_args *args)
{
    const bool from_grad = coef->beta1 <= 0.5;

    return (adamw_scalars){
        .unscale = (real)coef->unscale,
        .sign = (real)coef->sign,
        .l2 = (real)coef->l2,
        .decay = (real)coef->decay,
        .rest1 = (real)(from_grad ? -coef->beta1 : coef->rest1),
        .beta2 = (real)coef->beta2,
        .rest2 = (real)coef->rest2,
        .step_size = (real)coef->step_size,
        .inv_root_bias = (real)coef->inv_root_bias,
        .eps = (real)coef->eps,
        .ema_rest = (real)coef->ema_rest,
        .from_grad = from_grad,
        .ema_is_param = coef->ema_rest == 1,
        .write_back = args->write_back_grads,
        .zero_grad = args->zero_grad,
    };
}

/* Elements that the loop prefetches ahead: 2 KB of each array. With 1 KB bfloat16 is
 * 20 % slower, with 4 KB float32 8 %. */
static inline __attribute__((always_inline)) int64_t
ahead(tfast_dtype dtype)
{
    return 2048 / (int64_t)tfast_dtype_size(dtype);
}

/* Prefetches what is ahead of element i in each array that the loop reads. */
static inline __attribute__((always_inline)) void
adamw_prefetch(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra, int64_t i,
               tfast_dtype dtype, tfast_dtype grad, tfast_dtype state, bool plain)
{
    prefetch(slot->param, dtype, i + ahead(dtype));
    prefetch(slot->grad, grad, i + ahead(grad));
    prefetch(slot->exp_avg, state, i + ahead(state));
    prefetch(slot->exp_avg_sq, state, i + ahead(state));
    if (!plain && slot->max_exp_avg_sq != NULL) {
        prefetch(slot->max_exp_avg_sq, state, i + ahead(state));
    }
    if (!plain && extra->ema != NULL) {
        prefetch(extra->ema, REAL_DTYPE, i + ahead(REAL_DTYPE));
    }
}

/* Writes the EMA and the copy of the new parameter p. The copy's dtype is not a
 * compile-time constant. */
static inline __attribute__((always_inline)) void
adamw_extras(const tfast_adamw_extra *extra, int64_t i, vr p, const adamw_scalars *s)
{
    if (extra->ema != NULL) {
        vr ema = vector_read(extra->ema, REAL_DTYPE, i);
        ema = s->ema_is_param ? p : vr_fma(vr_set1(s->ema_rest), vr_sub(p, ema), ema);
        vector_write(extra->ema, REAL_DTYPE, i, ema);
    }
    if (extra->copy != NULL) {
        vector_write(extra->copy, extra->copy_dtype, i, p);
    }
}

/* Vectors of a round of the plain loop, in which a gradient has its parameter's
 * dtype. */
static inline __attribute__((always_inline)) int
adamw_at_once(tfast_dtype dtype, tfast_dtype state)
{
    return dtype == TFAST_BF16 && state == TFAST_BF16 ? BF16_VECTORS : 1;
}

/* Steps n elements from `first` on; n is a multiple of a round. The last four
 * arguments are compile-time constants: the dtypes of parameter, gradient and state,
 * and `plain`. It is true without amsgrad, L2 term, beta1 <= 0.5, extras and writing of
 * gradients, and removes their branches from the loop. */
static inline __attribute__((always_inline)) void
adamw_loop(const tfast_adamw_slot *slots, const tfast_adamw_extra *extras,
           int64_t first, int64_t n, const adamw_scalars *scalars, tfast_dtype dtype,
           tfast_dtype grad_dtype, tfast_dtype state, bool plain)
{
    /* copies, because the compiler must assume that stores to arrays change *slots */
    const tfast_adamw_slot slot = *slots;
    const tfast_adamw_extra extra = *extras;
    const adamw_scalars s = *scalars;
    void *const top = plain ? NULL : slot.max_exp_avg_sq;
    const vr unscale = vr_set1(s.unscale), sign = vr_set1(s.sign);
    const vr l2 = vr_set1(s.l2), decay = vr_set1(s.decay);
    const vr rest1 = vr_set1(s.rest1), rest2 = vr_set1(s.rest2);
    const vr beta2 = vr_set1(s.beta2), eps = vr_set1(s.eps);
    const vr step_size = vr_set1(s.step_size);
    const vr inv_root_bias = vr_set1(s.inv_root_bias);
    const int vectors = plain ? adamw_at_once(dtype, state) : 1;

    for (int64_t i = first; i < first + n; i += vectors * VR_WIDTH) {
        vr params[2], grads[2], avgs[2], avg_sqs[2];

        if (i + ahead(dtype) < slot.numel) {
            adamw_prefetch(&slot, &extra, i, dtype, grad_dtype, state, plain);
        }
        vectors_read(params, slot.param, dtype, i, vectors);
        vectors_read(grads, slot.grad, grad_dtype, i, vectors);
        vectors_read(avgs, slot.exp_avg, state, i, vectors);
        vectors_read(avg_sqs, slot.exp_avg_sq, state, i, vectors);
        for (int k = 0; k < vectors; k++) {
            vr p = params[k], g = vr_mul(grads[k], unscale), m = avgs[k];
            vr v = avg_sqs[k];

            if (!plain && (s.write_back || s.zero_grad)) {
                vector_write(slot.grad, grad_dtype, i, s.zero_grad ? vr_set1(0) : g);
            }
            g = vr_mul(g, sign);
            if (!plain && s.l2 != 0) {
                g = vr_fma(l2, p, g);
            }
            p = vr_mul(p, decay);
            m = vr_fma(rest1, vr_sub(g, m), !plain && s.from_grad ? g : m);
            v = vr_fma(beta2, v, vr_mul(vr_mul(rest2, g), g));
            avgs[k] = m;
            avg_sqs[k] = v;
            if (top != NULL) {
                v = vr_max(vector_read(top, state, i), v);
                vector_write(top, state, i, v);
            }
            const vr denom = vr_fma(vr_sqrt(v), inv_root_bias, eps);
            params[k] = vr_sub(p, vr_div(vr_mul(step_size, m), denom));
        }
        vectors_write(slot.exp_avg, state, i, avgs, vectors);
        vectors_write(slot.exp_avg_sq, state, i, avg_sqs, vectors);
        vectors_write(slot.param, dtype, i, params, vectors);
        if (!plain) {
            adamw_extras(&extra, i, params[0], &s);
        }
    }
}

/* Whether adamw_vectors() can write extras of these dtypes. */
static bool
adamw_takes(const tfast_adamw_extra *extra)
{
    const bool half = extra->copy_dtype == TFAST_BF16 || extra->copy_dtype == TFAST_F16;

    return (extra->ema == NULL || extra->ema_dtype == REAL_DTYPE) &&
           (extra->copy == NULL || extra->copy_dtype == REAL_DTYPE ||
            (REAL_IS_F32 && half));
}

/* Steps n elements if there is a loop for these dtypes, else returns false. There are
 * loops if all arrays are `real`, if parameter and gradient are of one half type, with
 * a state of it or float32, and for float32 parameters with half gradients. The last
 * are master weights, or weights of adamw_half.h: a plain loop would save little. */
static bool
adamw_vectors(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
              int64_t first, int64_t n, const adamw_scalars *s)
{
    const tfast_dtype dtype = slot->param_dtype, grad = slot->grad_dtype;
    const tfast_dtype state = slot->state_dtype;
    const bool plain = slot->max_exp_avg_sq == NULL && !s->write_back &&
                       !s->zero_grad && s->l2 == 0 && !s->from_grad &&
                       extra->ema == NULL && extra->copy == NULL;

#define LOOP(PLAIN, PARAM, GRAD, STATE)                                                \
    if ((plain || !PLAIN) && dtype == PARAM && grad == GRAD && state == STATE) {       \
        adamw_loop(slot, extra, first, n, s, PARAM, GRAD, STATE, PLAIN);               \
        return true;                                                                   \
    }

    if (!adamw_takes(extra)) {
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
    LOOP(false, TFAST_F32, TFAST_BF16, TFAST_BF16)
#endif
    return false;
#undef LOOP
}

/* Steps n elements from `first` on, of any dtypes, through tiles of `real`. */
static void
adamw_tiles(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra, int64_t first,
            int64_t n, const adamw_scalars *s)
{
    _Alignas(64) real tile[6][TILE];
    const tfast_dtype param_dtype = slot->param_dtype, grad_dtype = slot->grad_dtype;
    const tfast_dtype state_dtype = slot->state_dtype;
    void *top = slot->max_exp_avg_sq;

    for (const int64_t end = first + n; first < end; first += TILE) {
        const int count = (int)(end - first < TILE ? end - first : TILE);
        const int padded = (count + VR_WIDTH - 1) / VR_WIDTH * VR_WIDTH;
        real *p = tile_open(tile[0], slot->param, param_dtype, first, count);
        real *g = tile_open(tile[1], slot->grad, grad_dtype, first, count);
        real *m = tile_open(tile[2], slot->exp_avg, state_dtype, first, count);
        real *v = tile_open(tile[3], slot->exp_avg_sq, state_dtype, first, count);
        real *t = NULL, *e = NULL;

        if (top != NULL) {
            t = tile_open(tile[4], top, state_dtype, first, count);
        }
        if (extra->ema != NULL) {
            e = tile_open(tile[5], extra->ema, extra->ema_dtype, first, count);
        }
        adamw_vectors(&(tfast_adamw_slot){p, g, m, v, t, NULL, padded, REAL_DTYPE,
                                          REAL_DTYPE, REAL_DTYPE, NULL},
                      &(tfast_adamw_extra){.ema = e, .ema_dtype = REAL_DTYPE}, 0,
                      padded, s);
        tile_close(p, tile[0], slot->param, param_dtype, first, count);
        tile_close(m, tile[2], slot->exp_avg, state_dtype, first, count);
        tile_close(v, tile[3], slot->exp_avg_sq, state_dtype, first, count);
        if (top != NULL) {
            tile_close(t, tile[4], top, state_dtype, first, count);
        }
        if (s->write_back || s->zero_grad) {
            tile_close(g, tile[1], slot->grad, grad_dtype, first, count);
        }
        if (e != NULL) {
            tile_close(e, tile[5], extra->ema, extra->ema_dtype, first, count);
        }
        if (extra->copy != NULL) {
            tile_write(extra->copy, p, extra->copy_dtype, first, count);
        }
    }
}

/* Steps n elements from `first` on, with float state: whole vectors in place if
 * adamw_vectors() has a loop for the dtypes, all others through tiles. */
static void
adamw_floats(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
             int64_t first, int64_t n, const adamw_scalars *s)
{
    const int round = VR_WIDTH * adamw_at_once(slot->param_dtype, slot->state_dtype);
    int64_t whole = n / round * round;

    if (!adamw_vectors(slot, extra, first, whole, s)) {
        whole = 0;
    }
    if (whole < n) {
        adamw_tiles(slot, extra, first + whole, n - whole, s);
    }
}

#if REAL_IS_F32
/* The address of element i of an array that may be NULL. */
static void *
element(void *array, int dtype, int64_t i)
{
    const int64_t bytes = i * (int64_t)tfast_dtype_size((tfast_dtype)dtype);

    return array == NULL ? NULL : (char *)array + bytes;
}

/* Elements `first` and on of a slot and its extra; with 8-bit state a multiple of
 * BLOCK. */
static tfast_adamw_slot
slot_from(const tfast_adamw_slot *slot, int64_t first)
{
    const bool codes = slot->scales != NULL;
    const int columns =
        slot->max_exp_avg_sq != NULL ? TFAST_CODE_SCALES_AMSGRAD : TFAST_CODE_SCALES;
    tfast_adamw_slot part = *slot;

    part.numel = slot->numel - first;
    part.param = element(slot->param, slot->param_dtype, first);
    part.grad = element(slot->grad, slot->grad_dtype, first);
    if (codes) {
        part.exp_avg = (uint8_t *)slot->exp_avg + first;
        part.exp_avg_sq = (uint8_t *)slot->exp_avg_sq + first;
        part.max_exp_avg_sq =
            slot->max_exp_avg_sq ? (uint8_t *)slot->max_exp_avg_sq + first : NULL;
        part.scales = slot->scales + first / BLOCK * columns;
    } else {
        part.exp_avg = element(slot->exp_avg, slot->state_dtype, first);
        part.exp_avg_sq = element(slot->exp_avg_sq, slot->state_dtype, first);
        part.max_exp_avg_sq = element(slot->max_exp_avg_sq, slot->state_dtype, first);
    }
    return part;
}

static tfast_adamw_extra
extra_from(const tfast_adamw_extra *extra, int64_t first)
{
    tfast_adamw_extra part = *extra;

    part.ema = element(extra->ema, extra->ema_dtype, first);
    part.copy = element(extra->copy, extra->copy_dtype, first);
    return part;
}

/* Steps the first n elements of a slot with 8-bit state, at most a CHUNK. */
static void
adamw_codes(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra, int n,
            const adamw_scalars *s)
{
    _Alignas(64) real m[CHUNK], v[CHUNK], top[CHUNK];
    const bool amsgrad = slot->max_exp_avg_sq != NULL;
    const int columns = amsgrad ? TFAST_CODE_SCALES_AMSGRAD : TFAST_CODE_SCALES;
    tfast_adamw_slot floats = *slot;

    floats.exp_avg = m;
    floats.exp_avg_sq = v;
    floats.max_exp_avg_sq = amsgrad ? top : NULL;
    decode_chunk(m, slot->exp_avg, n, slot->scales, columns, 0);
    decode_chunk(v, slot->exp_avg_sq, n, slot->scales, columns, 1);
    if (amsgrad) {
        decode_chunk(top, slot->max_exp_avg_sq, n, slot->scales, columns, 3);
    }
    adamw_floats(&floats, extra, 0, n, s);
    encode_chunk(slot->exp_avg, m, n, slot->scales, columns, 0);
    encode_chunk(slot->exp_avg_sq, v, n, slot->scales, columns, 1);
    if (amsgrad) {
        encode_chunk(slot->max_exp_avg_sq, top, n, slot->scales, columns, 3);
    }
}

/* Steps n elements from `first` on, a multiple of BLOCK, of a slot with 8-bit state, or
 * whose parameter is not rounded to nearest, or both. */
static void
adamw_chunks(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra,
             int64_t first, int64_t n, const adamw_scalars *s,
             const half_random *random)
{
    _Alignas(64) real weights[CHUNK];

    for (const int64_t end = first + n; first < end; first += CHUNK) {
        const int count = (int)(end - first < CHUNK ? end - first : CHUNK);
        const tfast_adamw_extra extras = extra_from(extra, first);
        tfast_adamw_slot part = slot_from(slot, first);

        if (extra->rounding != TFAST_NEAREST) {
            read_weights(weights, slot, extra, first, count);
            part.param = weights;
            part.param_dtype = TFAST_F32;
        }
        if (slot->scales != NULL) {
            adamw_codes(&part, &extras, count, s);
        } else {
            adamw_floats(&part, &extras, 0, count, s);
        }
        if (extra->rounding != TFAST_NEAREST) {
            write_weights(slot, extra, weights, first, count, random);
        }
    }
}
#endif

/* Steps n elements of a slot from `first` on. */
static void
adamw_span(const tfast_adamw_slot *slot, const tfast_adamw_extra *extra, int64_t first,
           int64_t n, const tfast_adamw_coef *coef, const tfast_adamw_args *args)
{
    const adamw_scalars s = adamw_round(coef, args);

#if REAL_IS_F32
    if (slot->scales != NULL || extra->rounding != TFAST_NEAREST) {
        const half_random random = {args->seed, coef->step};
        adamw_chunks(slot, extra, first, n, &s, &random);
        return;
    }
#endif
    adamw_floats(slot, extra, first, n, &s);
}

#endif
