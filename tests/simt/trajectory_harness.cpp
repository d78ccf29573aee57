/* The trajectory metrics of cuda/ on the runner, against plain loops: a program,
 * because the sanitizers do not get into a Python that runs already. Its arguments are
 * the seed and the number of problems. */
#include "harness.h"

#include <algorithm>
#include <memory>

namespace {

/* ---- A problem ------------------------------------------------------------------- */

/* vector<bool> has no addresses. */
typedef std::unique_ptr<bool[]> flags;

struct problem {
    std::unique_ptr<array> pred, target, probabilities;
    flags mask;
    tfast_trajectory_args args = {};

    problem();
};

problem::problem()
{
    static const int dtypes[] = {TFAST_F32, TFAST_F64, TFAST_F16, TFAST_BF16};
    const int64_t n = random_below(200), modes = 1 + random_below(7);
    const int64_t steps = 1 + random_below(40), dim = 2 + random_below(2);
    const int dtype = dtypes[random_below(4)];

    pred = std::make_unique<array>(dtype, n * modes * steps * dim, 0, -1);
    target = std::make_unique<array>(dtypes[random_below(4)], n * steps * dim, 0, -1);
    args = {};
    args.pred = pred->start();
    args.target = target->start();
    args.n = n;
    args.modes = modes;
    args.steps = steps;
    args.dim = dim;
    /* pred as [modes, n, steps, dim] in memory, target as [n, dim, steps] */
    const int64_t pred_stride[] = {steps * dim, n * steps * dim, dim, 1};
    const int64_t target_stride[] = {steps * dim, 1, steps};
    std::copy_n(pred_stride, 4, args.pred_stride);
    std::copy_n(target_stride, 3, args.target_stride);
    args.pred_dtype = (uint8_t)dtype;
    args.target_dtype = (uint8_t)target->dtype;
    args.definition = (tfast_trajectory_definition)random_below(3);
    args.strict_final = random_below(2) == 0;
    args.miss_threshold = 0.5;
    args.device = {TFAST_CPU, 0};
    if (random_below(2) == 0) {
        mask = flags(new bool[(size_t)(n * steps)]);
        for (int64_t i = 0; i < n * steps; i++) {
            mask[i] = random_below(3) != 0 && i / steps % 16 != 3;
        }
        args.mask = mask.get();
        args.mask_stride[0] = steps;
        args.mask_stride[1] = 1;
    }
    if (random_below(3) != 0) {
        probabilities = std::make_unique<array>(TFAST_F32, n * modes, 0, 0);
        for (int64_t i = 0; i < n * modes; i++) { /* many are equal */
            set(probabilities->start(), TFAST_F32, i, random_below(4) / 4.0);
        }
        args.probabilities = probabilities->start();
        args.probability_dtype = TFAST_F32;
        args.probability_stride[0] = modes;
        args.probability_stride[1] = 1;
        args.top_k = random_below((int)modes + 1);
    }
}

/* ---- Plain loops ----------------------------------------------------------------- */

struct mode_errors {
    double p = 0, ade = 0, fde = NAN, largest = 0;
    bool is_top = true;
};

double
distance_at(const tfast_trajectory_args &args, int64_t agent, int64_t mode,
            int64_t step)
{
    const int64_t *of = args.pred_stride, *to = args.target_stride;
    double sum = 0;

    for (int64_t d = 0; d < args.dim; d++) {
        const double gap =
            get(args.pred, args.pred_dtype,
                agent * of[0] + mode * of[1] + step * of[2] + d * of[3]) -
            get(args.target, args.target_dtype,
                agent * to[0] + step * to[1] + d * to[2]);
        sum += gap * gap;
    }
    return std::sqrt(sum);
}

std::vector<mode_errors>
measure_modes(const tfast_trajectory_args &args, int64_t agent,
              const std::vector<int64_t> &steps, bool has_final)
{
    std::vector<mode_errors> all((size_t)args.modes);

    for (int64_t mode = 0; mode < args.modes; mode++) {
        mode_errors &e = all[(size_t)mode];
        for (int64_t step : steps) {
            const double d = distance_at(args, agent, mode, step);
            e.ade += d / (double)steps.size();
            e.largest = std::max(e.largest, d);
            e.fde = has_final ? d : NAN;
        }
        if (args.probabilities != nullptr) {
            e.p = get(args.probabilities, args.probability_dtype,
                      agent * args.modes + mode);
        }
    }
    for (size_t m = 0; m < all.size() && args.top_k > 0; m++) {
        int64_t before = 0;
        for (size_t o = 0; o < all.size(); o++) {
            before += all[o].p > all[m].p || (all[o].p == all[m].p && o < m);
        }
        all[m].is_top = before < args.top_k;
    }
    return all;
}

/* The metrics of an agent, NaN for those that it lacks. */
std::vector<double>
plain_agent(const tfast_trajectory_args &args, int64_t agent)
{
    const bool by_fde = args.definition == TFAST_TRAJECTORY_AV2;
    std::vector<double> values(TFAST_TRAJECTORY_METRICS, NAN);
    std::vector<int64_t> steps;

    for (int64_t t = 0; t < args.steps; t++) {
        if (args.mask == nullptr || args.mask[agent * args.steps + t]) {
            steps.push_back(t);
        }
    }
    if (steps.empty()) {
        return values;
    }
    const bool has_final = !args.strict_final || steps.back() == args.steps - 1;
    const auto modes = measure_modes(args, agent, steps, has_final);
    const mode_errors *most = &modes[0], *of_ade = nullptr, *of_fde = nullptr;
    double largest = INFINITY;
    for (const mode_errors &e : modes) {
        most = e.p > most->p ? &e : most;
        if (e.is_top) {
            of_ade = of_ade == nullptr || e.ade < of_ade->ade ? &e : of_ade;
            of_fde = of_fde == nullptr || e.fde < of_fde->fde ? &e : of_fde;
            largest = std::min(largest, e.largest);
        }
    }
    of_ade = by_fde ? of_fde : of_ade;
    const bool brier = args.probabilities != nullptr;
    values[TFAST_ADE] = most->ade;
    values[TFAST_FDE] = most->fde;
    values[TFAST_MIN_FDE] = of_fde->fde;
    values[TFAST_MIN_ADE] = has_final || !by_fde ? of_ade->ade : NAN;
    values[TFAST_BRIER_MIN_ADE] =
        brier ? values[TFAST_MIN_ADE] + std::pow(1 - of_ade->p, 2) : NAN;
    values[TFAST_BRIER_MIN_FDE] =
        brier ? of_fde->fde + std::pow(1 - of_fde->p, 2) : NAN;
    values[TFAST_MISS] =
        args.definition == TFAST_TRAJECTORY_NUSCENES ? largest >= args.miss_threshold
        : !has_final                                 ? NAN
                     : (by_fde ? of_fde : most)->fde > args.miss_threshold;
    return values;
}

/* ---- The comparison -------------------------------------------------------------- */

bool
is_near(double got, double want, double bound)
{
    return std::isnan(want) ? std::isnan(got)
                            : std::fabs(got - want) <= bound * (1 + std::fabs(want));
}

bool
run_problem(int number)
{
    problem given;
    tfast_trajectory_args &args = given.args;
    std::vector<double> agents((size_t)args.n * TFAST_TRAJECTORY_METRICS);
    std::vector<double> totals(2 * TFAST_TRAJECTORY_METRICS), want(totals.size());
    bool right = true;

    tfast_simt_most_blocks(random_below(3)); /* 0: as many as there are */
    args.agents = agents.data();
    args.totals = totals.data();
    if (backend->trajectory_scratch(&args.scratch_bytes, &args) != TFAST_OK) {
        return false;
    }
    std::vector<char> scratch((size_t)args.scratch_bytes, (char)0xFF);
    args.scratch = scratch.data();
    if (backend->trajectory(&args) != TFAST_OK) {
        return false;
    }
    for (int64_t i = 0; i < args.n; i++) {
        const std::vector<double> own = plain_agent(args, i);
        for (size_t m = 0; m < own.size(); m++) {
            right &= is_near(agents[(size_t)i * own.size() + m], own[m], 1e-6);
            if (!std::isnan(own[m])) {
                want[m] += own[m];
                want[TFAST_TRAJECTORY_METRICS + m] += 1;
            }
        }
    }
    for (size_t m = 0; m < totals.size(); m++) {
        right &= is_near(totals[m], want[m], 1e-6);
    }
    if (!right) {
        fprintf(stderr, "problem %d differs: n %lld, modes %lld, steps %lld, %d\n",
                number, (long long)args.n, (long long)args.modes, (long long)args.steps,
                args.definition);
    }
    return right;
}

} // namespace

int
main(int argc, char **argv)
{
    return solve_problems(argc, argv, run_problem);
}
