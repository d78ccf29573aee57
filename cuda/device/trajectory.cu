/* Trajectory metrics, with the bits of csrc/kernels/trajectory.h: a warp takes an agent
 * and two of its modes at a time, a half of the warp each. Lane l of a half adds up the
 * distances of steps l, l + 16, ... */
#include "element.cuh"

enum { HALF = 16, METRICS = TFAST_TRAJECTORY_METRICS, BLOCK = TFAST_TRAJECTORY_BLOCK };
enum {
    BY_FDE = 1 << TFAST_FDE | 1 << TFAST_MIN_FDE | 1 << TFAST_BRIER_MIN_FDE,
    BY_ADE = 1 << TFAST_MIN_ADE | 1 << TFAST_BRIER_MIN_ADE,
    BRIER = 1 << TFAST_BRIER_MIN_ADE | 1 << TFAST_BRIER_MIN_FDE
};

/* As the CPU's NAN. */
DEVICE double
not_a_number()
{
    return __longlong_as_double(0x7FF8000000000000);
}

/* ---- Steps and probabilities ----------------------------------------------------- */

struct agent {
    int64_t number;
    int64_t counted; /* steps that count */
    int64_t end;     /* one past the last step that counts */
    int64_t final;   /* the final step; -1: it does not count */
};

DEVICE bool
counts(const tfast_trajectory_args &args, int64_t number, int64_t step)
{
    return args.mask == nullptr ||
           args.mask[number * args.mask_stride[0] + step * args.mask_stride[1]];
}

DEVICE agent
agent_of(const tfast_trajectory_args &args, int64_t number)
{
    const int lane = threadIdx.x % 32;
    agent a = {number, args.steps, args.steps, 0};

    if (args.mask != nullptr) {
        a.counted = a.end = 0;
        for (int64_t t = lane; t - lane < args.steps; t += 32) {
            const bool own = t < args.steps && counts(args, number, t);

            a.counted += __popc(__ballot_sync(~0u, own));
            a.end = own ? t + 1 : a.end;
        }
        for (int by = 1; by < 32; by *= 2) {
            const int64_t other = __shfl_xor_sync(~0u, a.end, by);

            a.end = other > a.end ? other : a.end;
        }
    }
    a.final = args.strict_final && a.end < args.steps ? -1 : a.end - 1;
    return a;
}

/* The metrics that the agent has, a bit for each. */
DEVICE int
found_of(const tfast_trajectory_args &args, const agent &a)
{
    int found = (1 << METRICS) - 1;

    if (a.counted == 0) {
        return 0;
    }
    if (args.probabilities == nullptr) {
        found &= ~BRIER;
    }
    if (a.final < 0) {
        found &= ~BY_FDE;
        found &= args.definition == TFAST_TRAJECTORY_NUSCENES ? ~0 : ~(1 << TFAST_MISS);
        found &= args.definition == TFAST_TRAJECTORY_AV2 ? ~BY_ADE : ~0;
    }
    return found;
}

DEVICE double
probability(const tfast_trajectory_args &args, int64_t number, int64_t mode)
{
    return read_element<double>(args.probabilities, args.probability_dtype,
                                number * args.probability_stride[0] +
                                    mode * args.probability_stride[1]);
}

/* The first of the largest probability, or -1 if one of them is none. */
DEVICE int64_t
most_probable(const tfast_trajectory_args &args, int64_t number)
{
    double most = -1;
    int64_t found = 0;

    for (int64_t mode = 0; args.probabilities != nullptr && mode < args.modes; mode++) {
        const double p = probability(args, number, mode);

        if (!(p >= 0 && p <= 1)) {
            return -1;
        }
        if (p > most) {
            most = p;
            found = mode;
        }
    }
    return found;
}

/* Whether a mode is one of the top_k most probable. */
DEVICE bool
is_top(const tfast_trajectory_args &args, int64_t number, int64_t mode)
{
    int64_t before = 0;

    if (args.top_k == 0 || args.top_k >= args.modes) {
        return true;
    }
    const double p = probability(args, number, mode);
    for (int64_t other = 0; other < args.modes; other++) {
        const double q = probability(args, number, other);

        before += q > p || (q == p && other < mode);
    }
    return before < args.top_k;
}

/* ---- One mode -------------------------------------------------------------------- */

template <typename REAL>
DEVICE REAL
distance_at(const tfast_trajectory_args &args, int64_t pred, int64_t target)
{
    REAL sum = 0;

#pragma unroll
    for (int d = 0; d < 3; d++) {
        if (d < args.dim) {
            const REAL gap = read_element<REAL>(args.pred, args.pred_dtype,
                                                pred + d * args.pred_stride[3]) -
                             read_element<REAL>(args.target, args.target_dtype,
                                                target + d * args.target_stride[2]);

            sum += gap * gap;
        }
    }
    return sqrt(sum);
}

/* Errors of one mode. */
struct mode_errors {
    double ade, fde, largest;
};

/* By half a warp; both halves call it. Without `is_there` nothing is read. */
template <typename REAL>
DEVICE mode_errors
measure(const tfast_trajectory_args &args, const agent &a, int64_t mode, bool is_there)
{
    const int l = threadIdx.x % HALF;
    const int64_t pred = a.number * args.pred_stride[0] + mode * args.pred_stride[1];
    const int64_t target = a.number * args.target_stride[0];
    const bool masked = a.counted < a.end;
    double sum = 0;
    REAL largest = 0, fde = (REAL)not_a_number();

    for (int64_t t = l; is_there && t < a.end; t += HALF) {
        REAL d = distance_at<REAL>(args, pred + t * args.pred_stride[2],
                                   target + t * args.target_stride[1]);

        if (masked && !counts(args, a.number, t)) {
            d = 0;
        }
        sum += (double)d;
        largest = d > largest ? d : largest;
        fde = t == a.final ? d : fde;
    }
    for (int by = HALF / 2; by > 0; by /= 2) {
        const REAL other = __shfl_xor_sync(~0u, largest, by);

        sum += __shfl_xor_sync(~0u, sum, by);
        largest = other > largest ? other : largest;
    }
    fde =
        __shfl_sync(~0u, fde, (int)(threadIdx.x & HALF) | (int)(a.final & (HALF - 1)));
    return {sum / (double)a.counted, (double)fde, (double)largest};
}

/* ---- One agent ------------------------------------------------------------------- */

/* The least errors of the modes so far, the same in all lanes. */
struct least_errors {
    mode_errors least;
    double ade_of_fde; /* of the mode with the least FDE */
    int64_t of_ade, of_fde;
    double ade, fde; /* of the most probable mode */
    bool valid;      /* no number was NaN */
};

DEVICE void
take_mode(least_errors *so_far, const mode_errors &errors, int64_t mode, int64_t most)
{
    if (errors.ade != errors.ade) {
        so_far->valid = false;
    }
    if (mode == most) {
        so_far->ade = errors.ade;
        so_far->fde = errors.fde;
    }
    if (errors.ade < so_far->least.ade) {
        so_far->least.ade = errors.ade;
        so_far->of_ade = mode;
    }
    if (errors.fde < so_far->least.fde) {
        so_far->least.fde = errors.fde;
        so_far->ade_of_fde = errors.ade;
        so_far->of_fde = mode;
    }
    if (errors.largest < so_far->least.largest) {
        so_far->least.largest = errors.largest;
    }
}

template <typename REAL>
DEVICE least_errors
measure_modes(const tfast_trajectory_args &args, const agent &a)
{
    const int64_t most = most_probable(args, a.number);
    const int half = threadIdx.x % 32 / HALF;
    least_errors so_far = {
        {INFINITY, INFINITY, INFINITY}, INFINITY, most, most, 0, 0, most >= 0};

    for (int64_t first = 0; first < args.modes && so_far.valid; first += 2) {
        const int64_t mode = first + half;
        const bool own = mode < args.modes && is_top(args, a.number, mode);
        const mode_errors errors = measure<REAL>(args, a, mode, own);

#pragma unroll
        for (int h = 0; h < 2; h++) {
            const mode_errors of_half = {__shfl_sync(~0u, errors.ade, h * HALF),
                                         __shfl_sync(~0u, errors.fde, h * HALF),
                                         __shfl_sync(~0u, errors.largest, h * HALF)};

            if (__shfl_sync(~0u, (int)own, h * HALF) != 0) {
                take_mode(&so_far, of_half, first + h, most);
            }
        }
    }
    return so_far;
}

/* Writes the metrics of an agent, NaN for those that it lacks, and which it has. */
template <typename REAL>
DEVICE void
measure_agent(double *values, int *found_at, const tfast_trajectory_args &args,
              int64_t number)
{
    const agent a = agent_of(args, number);
    const int found = found_of(args, a);
    const bool by_fde = args.definition == TFAST_TRAJECTORY_AV2;
    least_errors e = {};
    double brier_ade = 0, brier_fde = 0;

    if (found != 0) {
        e = measure_modes<REAL>(args, a);
    }
    if (threadIdx.x % 32 != 0) {
        return;
    }
    *found_at = found;
    if (by_fde) {
        e.least.ade = e.ade_of_fde;
        e.of_ade = e.of_fde;
    }
    if (args.probabilities != nullptr && e.valid) {
        brier_ade = 1 - probability(args, number, e.of_ade);
        brier_fde = 1 - probability(args, number, e.of_fde);
    }
    values[TFAST_ADE] = e.ade;
    values[TFAST_FDE] = e.fde;
    values[TFAST_MIN_ADE] = e.least.ade;
    values[TFAST_MIN_FDE] = e.least.fde;
    values[TFAST_BRIER_MIN_ADE] = e.least.ade + brier_ade * brier_ade;
    values[TFAST_BRIER_MIN_FDE] = e.least.fde + brier_fde * brier_fde;
    values[TFAST_MISS] = args.definition == TFAST_TRAJECTORY_NUSCENES
                             ? e.least.largest >= args.miss_threshold
                         : by_fde ? e.least.fde > args.miss_threshold
                                  : e.fde > args.miss_threshold;
    for (int m = 0; m < METRICS; m++) {
        if (!e.valid || (found >> m & 1) == 0) {
            values[m] = not_a_number();
        }
    }
}

/* ---- All agents ------------------------------------------------------------------ */

template <typename REAL>
TFAST_KERNEL(TRAJECTORY_THREADS, 3)
trajectory_agents(const __grid_constant__ trajectory_call call)
{
    SHARED(double, values, BLOCK *METRICS);
    SHARED(int, found, BLOCK);
    const tfast_trajectory_args &args = call.args;
    const int m = threadIdx.x;

    for (int64_t block = blockIdx.x; block < call.n_blocks; block += gridDim.x) {
        const int64_t first = block * BLOCK, left = args.n - first;
        const int n = left < BLOCK ? (int)left : BLOCK;

        for (int i = threadIdx.x / 32; i < n; i += TRAJECTORY_WARPS) {
            measure_agent<REAL>(values + i * METRICS, found + i, args, first + i);
        }
        __syncthreads();
        if (m < METRICS) { /* in order, as on the CPU */
            double sum = 0, count = 0;

            for (int i = 0; i < n; i++) {
                if ((found[i] >> m & 1) != 0) {
                    sum += values[i * METRICS + m];
                    count += 1;
                }
            }
            call.blocks[block].sum[m] = sum;
            call.blocks[block].count[m] = count;
        }
        for (int i = m; args.agents != nullptr && i < n * METRICS; i += blockDim.x) {
            args.agents[first * METRICS + i] = values[i];
        }
        __syncthreads(); /* all have read them */
    }
}

/* By one warp: a lane a sum or count. */
TFAST_KERNEL(32, 1)
trajectory_total(const __grid_constant__ trajectory_call call)
{
    double total = 0;

    if (threadIdx.x < 2 * METRICS) {
        for (int64_t i = 0; i < call.n_blocks; i++) {
            total += ((const double *)&call.blocks[i])[threadIdx.x];
        }
        call.args.totals[threadIdx.x] = total;
    }
}

TFAST_EXPORT(trajectory)
