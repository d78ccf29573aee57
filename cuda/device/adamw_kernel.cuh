/* The AdamW kernel: one launch for a whole list of slots. The formula stands at
 * tfast_adamw() in csrc/tfast.h; the order of roundings is that of
 * csrc/kernels/adamw.h, so that the GPU and the CPU give the same bits.
 *
 * The grid fills the GPU once. Each warp takes every n-th work item (adamw_row)
 * and waits for no other warp, so that a slot of 64 elements costs a warp's time and
 * not a block's. Scalars depend on numbers in device memory (step, lr, grad_scale): the
 * kernel forms them, in double as the CPU does, once a block for the first slot's step,
 * which is mostly everyone's, and again only where a slot's step differs. */
#ifndef TFAST_ADAMW_KERNEL_CUH
#define TFAST_ADAMW_KERNEL_CUH

#include "adamw_coef.h"
#include "element.cuh"
#include "rows.cuh"

enum {
    THREADS = ADAMW_THREADS,
    WARPS = ADAMW_WARPS,
    BATCH = 8 /* counters that a thread advances at a time */
};

/* A row's arithmetic is float64. */
DEVICE bool
adamw_is_wide(const adamw_row *row)
{
    return row->param_dtype == TFAST_F64 || row->state_dtype == TFAST_F64;
}

/* ---- Arithmetic ------------------------------------------------------------------ */

DEVICE float
root(float x)
{
    return sqrtf(x);
}

DEVICE double
root(double x)
{
    return sqrt(x);
}

/* The step's scalars, rounded from double once. */
template <typename REAL>
struct scalars {
    REAL unscale, sign, l2, decay, rest1, beta2, rest2, step_size, inv_root_bias, eps;
    REAL ema_rest;
    bool from_grad; /* beta1 <= 0.5: m = g - beta1 * (g - m), so that 0 gives m = g */
    bool ema_is_param; /* ema_decay 0: exactly */
    bool store_grad;   /* unscaled, or 0 with zero_grad */
    bool zero_grad;
};

template <typename REAL>
DEVICE scalars<REAL>
round_scalars(const tfast_adamw_coef *coef, const tfast_adamw_args *args)
{
    scalars<REAL> s;

    s.from_grad = coef->beta1 <= 0.5;
    s.ema_is_param = coef->ema_rest == 1;
    s.store_grad = args->write_back_grads || args->zero_grad;
    s.zero_grad = args->zero_grad;
    s.unscale = (REAL)coef->unscale;
    s.sign = (REAL)coef->sign;
    s.l2 = (REAL)coef->l2;
    s.decay = (REAL)coef->decay;
    s.rest1 = (REAL)(s.from_grad ? -coef->beta1 : coef->rest1);
    s.beta2 = (REAL)coef->beta2;
    s.rest2 = (REAL)coef->rest2;
    s.step_size = (REAL)coef->step_size;
    s.inv_root_bias = (REAL)coef->inv_root_bias;
    s.eps = (REAL)coef->eps;
    s.ema_rest = (REAL)coef->ema_rest;
    return s;
}

/* One element: parameter, gradient (unscaled on return), moments, and with amsgrad the
 * maximum of the second. */
template <typename REAL>
DEVICE void
update(REAL *param, REAL *grad, REAL *exp_avg, REAL *exp_avg_sq, REAL *top,
       bool amsgrad, const scalars<REAL> &s)
{
    REAL p = *param, m = *exp_avg, v = *exp_avg_sq;
    REAL g = *grad * s.unscale;

    *grad = g;
    g = g * s.sign;
    if (s.l2 != 0) {
        g = fused(s.l2, p, g);
    }
    p = p * s.decay;
    m = fused(s.rest1, g - m, s.from_grad ? g : m);
    v = fused(s.beta2, v, s.rest2 * g * g);
    *exp_avg = m;
    *exp_avg_sq = v;
    if (amsgrad) {
        v = *top > v ? *top : v;
        *top = v;
    }
    *param = p - s.step_size * m / fused(root(v), s.inv_root_bias, s.eps);
}

template <typename REAL>
DEVICE REAL
averaged(REAL ema, REAL param, const scalars<REAL> &s)
{
    return s.ema_is_param ? param : fused(s.ema_rest, param - ema, ema);
}

/* ---- Spans of one slot, by one warp ---------------------------------------------- */

struct dtypes {
    int param, grad, state;
    bool extras; /* whether there may be any */
    int ema, copy;
};

/* Constants where the mix says what they are. */
template <adamw_mix MIX>
DEVICE dtypes
dtypes_of(const adamw_row *row)
{
    if (MIX == ALL_F32) {
        return {TFAST_F32, TFAST_F32, TFAST_F32, false, 0, 0};
    }
    if (MIX == ALL_BF16) {
        return {TFAST_BF16, TFAST_BF16, TFAST_BF16, false, 0, 0};
    }
    return {row->param_dtype,     row->grad_dtype,      row->state_dtype, true,
            row->extra.ema_dtype, row->extra.copy_dtype};
}

/* Element i, whatever its alignment. */
template <typename REAL>
DEVICE void
update_element(const adamw_row *row, const dtypes &d, int64_t i, const scalars<REAL> &s)
{
    const bool amsgrad = row->max_exp_avg_sq != nullptr;
    REAL p = read_element<REAL>(row->param, d.param, i);
    REAL g = read_element<REAL>(row->grad, d.grad, i);
    REAL m = read_element<REAL>(row->exp_avg, d.state, i);
    REAL v = read_element<REAL>(row->exp_avg_sq, d.state, i);
    REAL top = amsgrad ? read_element<REAL>(row->max_exp_avg_sq, d.state, i) : 0;

    update(&p, &g, &m, &v, &top, amsgrad, s);
    write_element(row->param, d.param, i, p);
    write_element(row->exp_avg, d.state, i, m);
    write_element(row->exp_avg_sq, d.state, i, v);
    if (amsgrad) {
        write_element(row->max_exp_avg_sq, d.state, i, top);
    }
    if (s.store_grad) {
        write_element(row->grad, d.grad, i, s.zero_grad ? (REAL)0 : g);
    }
    if (d.extras && row->extra.ema != nullptr) {
        const REAL ema = read_element<REAL>(row->extra.ema, d.ema, i);
        write_element(row->extra.ema, d.ema, i, averaged(ema, p, s));
    }
    if (d.extras && row->extra.copy != nullptr) {
        write_element(row->extra.copy, d.copy, i, p);
    }
}

/* N elements of each array, as loaded. */
struct raw_slot {
    raw_vector param, grad, exp_avg, exp_avg_sq, top, ema;
};

template <int N>
DEVICE void
read_slot(raw_slot *raw, const adamw_row *row, const dtypes &d, int64_t i)
{
    raw->param = read_vector<N>(row->param, d.param, i);
    raw->grad = read_vector<N>(row->grad, d.grad, i);
    raw->exp_avg = read_vector<N>(row->exp_avg, d.state, i);
    raw->exp_avg_sq = read_vector<N>(row->exp_avg_sq, d.state, i);
    if (row->max_exp_avg_sq != nullptr) {
        raw->top = read_vector<N>(row->max_exp_avg_sq, d.state, i);
    }
    if (d.extras && row->extra.ema != nullptr) {
        raw->ema = read_vector<N>(row->extra.ema, d.ema, i);
    }
}

template <int N>
DEVICE void
update_slot(raw_slot *raw, const adamw_row *row, const dtypes &d, int64_t i,
            const scalars<float> &s)
{
    const bool amsgrad = row->max_exp_avg_sq != nullptr;
    const bool ema = d.extras && row->extra.ema != nullptr;
    const bool copy = d.extras && row->extra.copy != nullptr;
    raw_vector copied;

#pragma unroll
    for (int e = 0; e < N; e++) {
        float p = get_element(raw->param, d.param, e);
        float g = get_element(raw->grad, d.grad, e);
        float m = get_element(raw->exp_avg, d.state, e);
        float v = get_element(raw->exp_avg_sq, d.state, e);
        float top = amsgrad ? get_element(raw->top, d.state, e) : 0;

        update(&p, &g, &m, &v, &top, amsgrad, s);
        set_element(&raw->param, d.param, e, p);
        set_element(&raw->grad, d.grad, e, g);
        set_element(&raw->exp_avg, d.state, e, m);
        set_element(&raw->exp_avg_sq, d.state, e, v);
        if (amsgrad) {
            set_element(&raw->top, d.state, e, top);
        }
        if (ema) {
            const float before = get_element(raw->ema, d.ema, e);
            set_element(&raw->ema, d.ema, e, averaged(before, p, s));
        }
        if (copy) {
            set_element(&copied, d.copy, e, p);
        }
    }
    write_vector<N>(row->param, d.param, i, raw->param);
    write_vector<N>(row->exp_avg, d.state, i, raw->exp_avg);
    write_vector<N>(row->exp_avg_sq, d.state, i, raw->exp_avg_sq);
    if (amsgrad) {
        write_vector<N>(row->max_exp_avg_sq, d.state, i, raw->top);
    }
    if (s.store_grad) {
        /* word by word: to choose between two vectors would put both into memory */
        for (uint32_t &word : raw->grad.word) {
            word = s.zero_grad ? 0 : word;
        }
        write_vector<N>(row->grad, d.grad, i, raw->grad);
    }
    if (ema) {
        write_vector<N>(row->extra.ema, d.ema, i, raw->ema);
    }
    if (copy) {
        write_vector<N>(row->extra.copy, d.copy, i, copied);
    }
}

/* Elements begin .. end - 1 by one warp: whole vectors from `aligned` on, the fewer
 * than N elements before and behind them one a lane. */
template <int N>
DEVICE void
update_vectors(const adamw_row *row, const dtypes &d, int64_t begin, int64_t aligned,
               int64_t end, const scalars<float> &s)
{
    const int lane = threadIdx.x % 32;
    const int64_t head = end < aligned ? end : aligned;
    const int whole = (int)(end - head) / N * N; /* at most ITEM */
    const int64_t odd = lane < 16 ? begin + lane : head + whole + lane - 16;

    if (odd < (lane < 16 ? head : end)) {
        update_element(row, d, odd, s);
    }
#pragma unroll 1
    for (int i = lane * N; i < whole; i += 32 * N) {
        raw_slot raw;
        read_slot<N>(&raw, row, d, head + i);
        update_slot<N>(&raw, row, d, head + i, s);
    }
}

template <typename REAL>
DEVICE void
update_elements(const adamw_row *row, const dtypes &d, int64_t begin, int64_t end,
                const scalars<REAL> &s)
{
#pragma unroll 1
    for (int64_t i = begin + threadIdx.x % 32; i < end; i += 32) {
        update_element(row, d, i, s);
    }
}

#include "adamw_blocks.cuh"

/* ---- The kernel ------------------------------------------------------------------ */

DEVICE int64_t
step_of(const adamw_row *row, const tfast_adamw_args *args)
{
    return row->step != nullptr ? (int64_t)(*row->step + 1.0f) : args->step;
}

/* The scalars of one step, in shared memory: registers are short, and the next
 * iteration of a loop over elements reads them again for little. */
struct held_scalars {
    int64_t step; /* -1: none yet */
    scalars<float> narrow;
    scalars<double> wide;
};

DEVICE tfast_adamw_coef
coef_of(const tfast_adamw_args *args, int64_t step)
{
    const double lr = args->lr_device != nullptr ? *args->lr_device : args->lr;
    const double scale = args->grad_scale != nullptr ? *args->grad_scale : 1.0;
    const double clip = args->clip_coef != nullptr ? *args->clip_coef : 1.0;

    return tfast_adamw_coef_at(args, step, lr, scale, clip);
}

/* A work item's elements: begin .. end - 1, whole vectors from `aligned` on. */
struct item_span {
    int64_t begin, aligned, end;
};

DEVICE item_span
span_of(const adamw_row *row, int item)
{
    const int64_t part = item - row->first_item;
    const int head = row->head == NO_VECTORS ? 0 : row->head;
    const int64_t aligned = head + part * ITEM, limit = aligned + ITEM;

    return {part == 0 ? 0 : aligned, aligned, limit < row->numel ? limit : row->numel};
}

template <adamw_mix MIX>
DEVICE void
run_item(const adamw_row *row, int item, const held_scalars *held, uint64_t seed)
{
    const dtypes d = dtypes_of<MIX>(row);
    const item_span span = span_of(row, item);

    if (MIX == BLOCKS &&
        (row->scales != nullptr || row->extra.rounding != TFAST_NEAREST)) {
        update_blocks(row, span.begin, span.end, &held->narrow, seed, held->step);
    } else if ((MIX == WIDE || MIX == BLOCKS) && adamw_is_wide(row)) {
        update_elements(row, d, span.begin, span.end, held->wide);
    } else if (row->head == NO_VECTORS) {
        update_elements(row, d, span.begin, span.end, held->narrow);
    } else if (MIX == NARROW && d.state == TFAST_F32 && d.grad == TFAST_BF16 &&
               d.param == TFAST_BF16 && row->extra.ema == nullptr &&
               row->extra.copy == nullptr) {
        /* the usual mix: on an H200 a quarter faster than with dtypes at run time */
        const dtypes constant = {TFAST_BF16, TFAST_BF16, TFAST_F32, false, 0, 0};
        update_vectors<4>(row, constant, span.begin, span.aligned, span.end,
                          held->narrow);
    } else {
        update_vectors<MIX == ALL_BF16 ? 8 : 4>(row, d, span.begin, span.aligned,
                                                span.end, held->narrow);
    }
}

/* Counters first, first + THREADS, ...: loads in flight together, since one block alone
 * does all of them. */
DEVICE void
advance_batch(const adamw_row *rows, int64_t first, int64_t n)
{
    float *steps[BATCH], done[BATCH];

#pragma unroll
    for (int k = 0; k < BATCH; k++) {
        steps[k] = first + k * THREADS < n ? rows[first + k * THREADS].step : nullptr;
    }
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
        done[k] = steps[k] != nullptr ? *steps[k] : 0;
    }
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
        if (steps[k] != nullptr) {
            *steps[k] = done[k] + 1.0f;
        }
    }
}

/* The last block to finish advances the counters: by then every block has read them. */
DEVICE_CALL void
advance_steps(adamw_table *table, int64_t n)
{
    if (last_block(&table->blocks_done)) {
        for (int64_t i = threadIdx.x; i < n; i += BATCH * THREADS) {
            advance_batch(table->rows, i, n);
        }
    }
}

/* By one thread. */
DEVICE_CALL void
hold_scalars(held_scalars *held, int64_t step, const tfast_adamw_args *args)
{
    const tfast_adamw_coef coef = coef_of(args, step);

    held->step = step;
    held->narrow = round_scalars<float>(&coef, args);
    held->wide = round_scalars<double>(&coef, args);
}

/* What is left of a step that is skipped, by each warp: zeros in the gradients. */
DEVICE_CALL void
zero_grads(adamw_row *row, const adamw_table *table, int64_t n, int n_items)
{
    int end_item = 0;

    for (int item = blockIdx.x * WARPS + threadIdx.x / 32; item < n_items;
         item += gridDim.x * WARPS) {
        if (item >= end_item) {
            hold_row(row, table->rows, n, item);
            end_item = row->end_item;
        }
        const item_span span = span_of(row, item);
        for (int64_t i = span.begin + threadIdx.x % 32; i < span.end; i += 32) {
            write_element(row->grad, row->grad_dtype, i, 0.0f);
        }
    }
}

/* At least 4 blocks a multiprocessor hold it to 64 registers; with dtypes at run time
 * that would spill. So would either on sm_120 and newer, where the compiler needs
 * more. */
#if __CUDA_ARCH__ >= 1200
enum { FEWER = 1 };
#else
enum { FEWER = 0 };
#endif

template <adamw_mix MIX>
TFAST_KERNEL(THREADS, (MIX == NARROW || MIX == WIDE ? 3 : 4) - FEWER)
adamw_kernel(const __grid_constant__ adamw_call call)
{
    const tfast_adamw_args &args = call.args;
    adamw_table *table = call.table;
    const int n_items = call.n_items;
    SHARED(adamw_row, rows, WARPS);        /* each warp's own */
    SHARED(held_scalars, held, WARPS + 1); /* each warp's own, and the block's */
    const int warp = threadIdx.x / 32;
    adamw_row *row = &rows[warp];
    held_scalars *own = &held[warp], *common = &held[WARPS], *used = common;

    if (args.found_inf != nullptr && *args.found_inf != 0) {
        if (args.zero_grad) {
            zero_grads(row, table, args.n_slots, n_items);
        }
        return;
    }
    if (threadIdx.x % 32 == 0) {
        own->step = -1;
        row->end_item = 0; /* the first item looks its row up */
        if (warp == 0) {
            hold_scalars(common, step_of(table->rows, &args), &args);
        }
    }
    __syncthreads();

    for (int item = blockIdx.x * WARPS + warp; item < n_items;
         item += gridDim.x * WARPS) {
        if (item >= row->end_item) {
            hold_row(row, table->rows, args.n_slots, item);
            const int64_t step = step_of(row, &args);
            used = step == common->step ? common : own;
            if (used->step != step) {
                __syncwarp(); /* all lanes have compared */
                if (threadIdx.x % 32 == 0) {
                    hold_scalars(own, step, &args);
                }
                __syncwarp();
            }
        }
        run_item<MIX>(row, item, used, args.seed);
    }
    advance_steps(table, args.n_slots);
}

#endif
