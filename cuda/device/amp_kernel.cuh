/* The kernels of AMP: one launch reads all gradients once, and the loss scale. Sums are
 * added up in the order of csrc/amp_sum.h, so that the GPU and the CPU give the same
 * bits.
 *
 * A work item is one chunk of TFAST_AMP_CHUNK elements, done by one warp: lane t of the
 * warp adds up residues 4t .. 4t + 3 of each row of TFAST_AMP_LANES elements, which
 * is one vector. The last block to finish adds up what the chunks gave. */
#ifndef TFAST_AMP_KERNEL_CUH
#define TFAST_AMP_KERNEL_CUH

#include "amp_scale.h"
#include "amp_sum.h"
#include "element.cuh"
#include "rows.cuh"

static_assert(AMP_THREADS == (int)TFAST_AMP_SUMS, "one sum over the chunks a thread");
static_assert((int)TFAST_AMP_LANES == 32 * QUAD, "a warp reads a row");

/* How elements change. */
template <typename REAL>
struct amp_change {
    REAL number; /* what they are multiplied by or held to */
    bool clamp;
    bool none;
};

/* ---- Four elements of a lane ----------------------------------------------------- */

template <int DTYPE>
struct amp_quad {
    typedef float real;
    enum { ROWS = 8 }; /* in flight together */
    raw_vector raw;

    __device__ __forceinline__ void read(const void *array, int i)
    {
        raw = read_vector<QUAD>(array, DTYPE, i);
    }
    __device__ __forceinline__ void write(void *array, int i) const
    {
        write_vector<QUAD>(array, DTYPE, i, raw);
    }
    __device__ __forceinline__ real get(int e) const
    {
        return get_element(raw, DTYPE, e);
    }
    __device__ __forceinline__ void set(int e, real x)
    {
        set_element(&raw, DTYPE, e, x);
    }
};

struct alignas(16) amp_pair {
    double x[2];
};

template <>
struct amp_quad<TFAST_F64> {
    typedef double real;
    enum { ROWS = 4 };
    amp_pair pair[2];

    __device__ __forceinline__ void read(const void *array, int i)
    {
        const amp_pair *from = (const amp_pair *)((const double *)array + i);
        pair[0] = from[0];
        pair[1] = from[1];
    }
    __device__ __forceinline__ void write(void *array, int i) const
    {
        amp_pair *to = (amp_pair *)((double *)array + i);
        to[0] = pair[0];
        to[1] = pair[1];
    }
    __device__ __forceinline__ real get(int e) const { return pair[e >> 1].x[e & 1]; }
    __device__ __forceinline__ void set(int e, real x) { pair[e >> 1].x[e & 1] = x; }
};

/* A chunk: n elements. */
struct amp_chunk {
    void *data;
    int n;
    bool vectors;
};

/* Elements i .. i + 3 of a chunk, 0 past its end. */
template <int DTYPE>
DEVICE amp_quad<DTYPE>
read_quad(const amp_chunk &chunk, int i)
{
    typedef typename amp_quad<DTYPE>::real real;
    amp_quad<DTYPE> quad = {};

    if (chunk.vectors && i + QUAD <= chunk.n) {
        quad.read(chunk.data, i);
    } else {
#pragma unroll
        for (int e = 0; e < QUAD; e++) {
            if (i + e < chunk.n) {
                quad.set(e, read_element<real>(chunk.data, DTYPE, i + e));
            }
        }
    }
    return quad;
}

template <int DTYPE>
DEVICE void
write_quad(const amp_chunk &chunk, int i, const amp_quad<DTYPE> &quad)
{
    if (chunk.vectors && i + QUAD <= chunk.n) {
        quad.write(chunk.data, i);
    } else {
#pragma unroll
        for (int e = 0; e < QUAD; e++) {
            if (i + e < chunk.n) {
                write_element(chunk.data, DTYPE, i + e, quad.get(e));
            }
        }
    }
}

/* ---- Sums ------------------------------------------------------------------------ */

/* Two sums or extremes, >= 0 or NaN, which stays. */
template <typename REAL>
DEVICE REAL
amp_combined(amp_kind kind, REAL a, REAL b)
{
    if (kind == AMP_LARGEST) {
        return b > a || b != b ? b : a;
    }
    if (kind == AMP_SMALLEST) {
        return b < a || b != b ? b : a;
    }
    return a + b;
}

/* An element joins. For AMP_FINITE the sum is 0, or NaN for ever. */
template <typename REAL>
DEVICE REAL
amp_joined(amp_kind kind, REAL sum, REAL x)
{
    if (kind == AMP_SQUARES) {
        return fused(x, x, sum);
    }
    return kind == AMP_FINITE ? fused(x, (REAL)0, sum)
                              : amp_combined(kind, sum, (REAL)fabs(x));
}

/* Halves the lanes until one is left, which every thread gets. */
template <typename REAL>
DEVICE REAL
amp_fold(amp_kind kind, REAL *sums)
{
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
#pragma unroll
        for (int e = 0; e < QUAD; e++) {
            const REAL other = __shfl_xor_sync(~0u, sums[e], half);
            sums[e] = amp_combined(kind, sums[e], other);
        }
    }
    sums[0] = amp_combined(kind, sums[0], sums[2]);
    sums[1] = amp_combined(kind, sums[1], sums[3]);
    return amp_combined(kind, sums[0], sums[1]);
}

/* A chunk in float64, with a look at each element: for what is asked for rarely, and
 * where a quick sum is not finite. By one warp. */
DEVICE_CALL double
amp_slow_sum(uint32_t *found, const void *data, int n, int dtype, amp_kind kind,
             double norm_type)
{
    const double start = kind == AMP_SMALLEST ? (double)INFINITY : 0;
    double sums[QUAD] = {start, start, start, start};
    bool finite = true;

#pragma unroll 1
    for (int i = threadIdx.x % 32 * QUAD; i < n; i += TFAST_AMP_LANES) {
#pragma unroll
        for (int e = 0; e < QUAD; e++) {
            if (i + e < n) {
                const double x = read_element<double>(data, dtype, i + e);
                finite = finite && isfinite(x);
                sums[e] = kind == AMP_POWERS ? sums[e] + pow(fabs(x), norm_type)
                                             : amp_joined(kind, sums[e], x);
            }
        }
    }
    if (__any_sync(~0u, !finite) && threadIdx.x % 32 == 0) {
        atomicExch(found, 1u);
    }
    return amp_fold(kind, sums);
}

/* ---- One chunk ------------------------------------------------------------------- */

template <typename REAL>
DEVICE REAL
amp_changed(REAL x, const amp_change<REAL> &change)
{
    const REAL least = -change.number;

    if (!change.clamp) {
        return x * change.number;
    }
    /* in this order NaN stays, and a negative bound is what everything becomes */
    x = least > x ? least : x;
    return change.number < x ? change.number : x;
}

/* Reads a chunk once; the elements join `sums` and are rewritten. */
template <int DTYPE>
DEVICE void
amp_pass(typename amp_quad<DTYPE>::real *sums, const amp_chunk &chunk, amp_kind kind,
         bool rewrite, const amp_change<typename amp_quad<DTYPE>::real> &change)
{
    enum { ROWS = amp_quad<DTYPE>::ROWS };

#pragma unroll 1
    for (int i = threadIdx.x % 32 * QUAD; i < chunk.n; i += ROWS * TFAST_AMP_LANES) {
        amp_quad<DTYPE> quads[ROWS];

#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            quads[row] = read_quad<DTYPE>(chunk, i + row * TFAST_AMP_LANES);
        }
#pragma unroll
        for (int row = 0; row < ROWS && kind != AMP_NOTHING; row++) {
#pragma unroll
            for (int e = 0; e < QUAD; e++) {
                sums[e] = amp_joined(kind, sums[e], quads[row].get(e));
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS && rewrite; row++) {
#pragma unroll
            for (int e = 0; e < QUAD; e++) {
                quads[row].set(e, amp_changed(quads[row].get(e), change));
            }
            write_quad(chunk, i + row * TFAST_AMP_LANES, quads[row]);
        }
    }
}

/* What a norm needs of a chunk is known only when all of it was read, and might have to
 * be read again: so then it is rewritten afterwards. Without a norm one pass does. */
template <int DTYPE>
DEVICE void
amp_run_chunk(uint32_t *found, double *total, const amp_chunk &chunk, amp_kind kind,
              const tfast_amp_grads_args &args, double number)
{
    typedef typename amp_quad<DTYPE>::real real;
    const bool norm = kind >= AMP_SQUARES, slow = kind >= AMP_SMALLEST;
    amp_change<real> change;
    real sums[QUAD] = {};
    double sum = 0;

    change.number = (real)number;
    /* torch: a bound that is NaN makes everything NaN */
    change.clamp = args.rewrite == TFAST_AMP_CLAMP && number == number;
    change.none =
        args.rewrite == TFAST_AMP_READ || (!change.clamp && change.number == 1);
    if (!slow && !(kind == AMP_NOTHING && change.none)) {
        amp_pass<DTYPE>(sums, chunk, kind, !norm && !change.none, change);
        sum = amp_fold(kind, sums);
    }
    if (norm) {
        if (slow || !isfinite(sum)) {
            sum = amp_slow_sum(found, chunk.data, chunk.n, DTYPE, kind, args.norm_type);
        }
        if (threadIdx.x % 32 == 0) {
            *total = sum;
        }
        if (!change.none) {
            amp_pass<DTYPE>(sums, chunk, AMP_NOTHING, true, change);
        }
    } else if (!isfinite(sum) && threadIdx.x % 32 == 0) {
        atomicExch(found, 1u);
    }
}

template <bool WIDE>
DEVICE void
amp_run_item(amp_table *table, double *totals, const amp_row *row, int item,
             amp_kind kind, const tfast_amp_grads_args &args, double number)
{
    const int64_t first = (int64_t)(item - row->first_item) * TFAST_AMP_CHUNK;
    const int64_t rest = row->numel - first;
    const int dtype = row->dtype;
    char *data = (char *)row->data + first * (dtype == TFAST_F64   ? 8
                                              : dtype == TFAST_F32 ? 4
                                                                   : 2);
    const amp_chunk chunk = {
        data, rest < TFAST_AMP_CHUNK ? (int)rest : (int)TFAST_AMP_CHUNK, row->vectors};
    uint32_t *found = &table->found;

    if (WIDE && dtype == TFAST_F64) {
        amp_run_chunk<TFAST_F64>(found, totals + item, chunk, kind, args, number);
    } else if (dtype == TFAST_F32) {
        amp_run_chunk<TFAST_F32>(found, totals + item, chunk, kind, args, number);
    } else if (dtype == TFAST_F16) {
        amp_run_chunk<TFAST_F16>(found, totals + item, chunk, kind, args, number);
    } else {
        amp_run_chunk<TFAST_BF16>(found, totals + item, chunk, kind, args, number);
    }
}

/* ---- The results ----------------------------------------------------------------- */

DEVICE double
amp_scale_of(const tfast_amp_grads_args &args)
{
    return args.grad_scale != nullptr ? *args.grad_scale : 1.0;
}

/* By one thread. */
DEVICE void
amp_write_results(amp_table *table, const tfast_amp_grads_args &args, double norm)
{
    if (args.found_inf != nullptr) {
        *args.found_inf = table->found != 0 ? 1.0f : 0.0f;
    }
    table->found = 0; /* for the next launch */
    if (args.total_norm != nullptr) {
        *args.total_norm = (float)norm;
    }
    if (args.total_norm_f64 != nullptr) {
        *args.total_norm_f64 = norm;
    }
    if (args.clip_coef != nullptr) {
        *args.clip_coef =
            tfast_amp_clip_coef(norm, args.max_norm, args.total_norm_f64 != nullptr);
    }
}

/* By the last block. Without elements the norm is 0 for every norm_type. */
DEVICE_CALL void
amp_finish(amp_table *table, const double *totals, int n_items, amp_kind kind,
           const tfast_amp_grads_args &args)
{
    SHARED(double, sums, TFAST_AMP_SUMS);
    const int k = threadIdx.x;
    double sum = kind == AMP_SMALLEST ? (double)INFINITY : 0;

    if (kind >= AMP_SQUARES) {
#pragma unroll 8
        for (int i = k; i < n_items; i += TFAST_AMP_SUMS) {
            sum = amp_combined(kind, sum, totals[i]);
        }
        sums[k] = sum;
        for (int half = TFAST_AMP_SUMS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (k < half) {
                sums[k] = amp_combined(kind, sums[k], sums[k + half]);
            }
        }
    }
    if (k == 0) {
        const bool none = n_items == 0 || kind < AMP_SQUARES;
        amp_write_results(
            table, args,
            none ? 0 : tfast_amp_norm(sums[0], args.norm_type, amp_scale_of(args)));
    }
}

/* ---- The kernels ----------------------------------------------------------------- */

/* One thread's double division a block, since GPUs that are not for computing are slow
 * at it. */
DEVICE double
amp_number(const tfast_amp_grads_args &args)
{
    SHARED(double, number, 1);

    if (args.rewrite != TFAST_AMP_MULTIPLY) {
        return args.clip_value;
    }
    if (threadIdx.x == 0) {
        const double factor = args.factor != nullptr ? *args.factor : 1.0;
        number[0] = tfast_amp_multiplier(factor, amp_scale_of(args));
    }
    __syncthreads();
    return number[0];
}

/* WIDE where there are float64 tensors: keeps their registers out of the usual one.
 * That one has 3 blocks a multiprocessor, since 4 of 64 registers each would spill, and
 * so 96 KiB of float32 in flight, more than 4.8 TB/s ask of a multiprocessor of an
 * H200. */
template <bool WIDE>
TFAST_KERNEL(AMP_THREADS, WIDE ? 2 : 3)
amp_kernel(const __grid_constant__ amp_call call)
{
    const tfast_amp_grads_args &args = call.args;
    amp_table *table = call.table;
    double *totals = call.totals;
    const int n_items = call.n_items;
    const amp_kind kind = call.kind;
    SHARED(amp_row, rows, AMP_WARPS); /* each warp's own */
    const int warp = threadIdx.x / 32;
    const double number = amp_number(args);
    amp_row *row = &rows[warp];
    int end_item = 0; /* the first item looks its row up */

    for (int item = blockIdx.x * AMP_WARPS + warp; item < n_items;
         item += gridDim.x * AMP_WARPS) {
        if (item >= end_item) {
            hold_row(row, table->rows, args.n_tensors, item);
            end_item = row->end_item;
        }
        amp_run_item<WIDE>(table, totals, row, item, kind, args, number);
    }
    if (kind != AMP_NOTHING && last_block(&table->blocks_done)) {
        amp_finish(table, totals, n_items, kind, args);
    }
}

/* By one thread. */
TFAST_KERNEL(32, 1)
amp_update_kernel(const __grid_constant__ tfast_amp_update_args args)
{
    if (threadIdx.x == 0) {
        tfast_amp_update_scale(&args);
    }
}

#endif
