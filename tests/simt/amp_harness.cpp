/* The pass over gradients of cuda/ on the runner, bit by bit against plain loops in the
 * order of amp_sum.h: a program, because the sanitizers do not get into a Python that
 * runs already. Its arguments are the seed of the order and the largest tensor's
 * elements. */
#include "amp_sum.h"
#include "harness.h"

#include <algorithm>

namespace {

/* ---- Plain loops ----------------------------------------------------------------- */

bool
is_extreme(double norm_type)
{
    return std::isinf(norm_type);
}

template <typename REAL>
REAL
combined(REAL a, REAL b, double norm_type)
{
    if (!is_extreme(norm_type)) {
        return a + b;
    }
    if (b != b || a != a) {
        return a != a ? a : b;
    }
    return norm_type > 0 ? std::max(a, b) : std::min(a, b);
}

template <typename REAL>
REAL
fold(std::vector<REAL> lanes, double norm_type)
{
    for (size_t half = lanes.size() / 2; half > 0; half /= 2) {
        for (size_t l = 0; l < half; l++) {
            lanes[l] = combined(lanes[l], lanes[l + half], norm_type);
        }
    }
    return lanes[0];
}

/* Elements first .. end - 1. */
template <typename REAL>
double
chunk_sum(array &a, int64_t first, int64_t end, double norm_type)
{
    const REAL start = norm_type == -INFINITY ? (REAL)INFINITY : 0;
    std::vector<REAL> lanes(TFAST_AMP_LANES, start);

    for (int64_t i = first; i < end; i++) {
        const REAL x = (REAL)std::fabs(get(a.start(), a.dtype, i));
        REAL &lane = lanes[(size_t)(i - first) % TFAST_AMP_LANES];
        if (norm_type == 2) {
            lane = std::fma(x, x, lane);
        } else if (norm_type == 1 || is_extreme(norm_type)) {
            lane = combined(lane, x, norm_type);
        } else {
            lane = lane + (REAL)std::pow(x, norm_type);
        }
    }
    return fold(lanes, norm_type);
}

struct results {
    float found_inf, total_norm;
    double total_norm_f64, clip_coef;
};

double
plain_norm(std::vector<array> &list, double norm_type, double scale)
{
    const double start = norm_type == -INFINITY ? INFINITY : 0;
    const bool in_double = norm_type != 1 && norm_type != 2 && !is_extreme(norm_type);
    std::vector<double> sums(TFAST_AMP_SUMS, start);
    size_t chunk = 0;

    for (array &a : list) {
        for (int64_t first = 0; first < (int64_t)a.size; first += TFAST_AMP_CHUNK) {
            const int64_t end = std::min((int64_t)a.size, first + TFAST_AMP_CHUNK);
            double sum = in_double || a.dtype == TFAST_F64
                             ? chunk_sum<double>(a, first, end, norm_type)
                             : chunk_sum<float>(a, first, end, norm_type);
            if (!std::isfinite(sum)) {
                sum = chunk_sum<double>(a, first, end, norm_type);
            }
            double &total = sums[chunk++ % TFAST_AMP_SUMS];
            total = combined(total, sum, norm_type);
        }
    }
    return chunk == 0 ? 0 : tfast_amp_norm(fold(sums, norm_type), norm_type, scale);
}

template <typename REAL>
void
rewrite(array &a, const tfast_amp_grads_args &args, double number)
{
    const REAL bound = (REAL)number;

    if (args.rewrite == TFAST_AMP_MULTIPLY && bound == 1) {
        return;
    }
    for (int64_t i = 0; i < (int64_t)a.size; i++) {
        REAL x = (REAL)get(a.start(), a.dtype, i);
        if (args.rewrite == TFAST_AMP_MULTIPLY || bound != bound) {
            x = x * bound;
        } else {
            x = -bound > x ? -bound : x;
            x = bound < x ? bound : x;
        }
        set(a.start(), a.dtype, i, x);
    }
}

void
plain_pass(std::vector<array> &list, results *r, const tfast_amp_grads_args &args)
{
    const double scale = args.grad_scale != nullptr ? *args.grad_scale : 1;
    const double factor = args.factor != nullptr ? *args.factor : 1;
    const double number = args.rewrite == TFAST_AMP_CLAMP
                              ? args.clip_value
                              : tfast_amp_multiplier(factor, scale);
    const bool wanted = args.total_norm != nullptr;
    bool finite = true;

    for (array &a : list) {
        for (int64_t i = 0; i < (int64_t)a.size; i++) {
            finite = finite && std::isfinite(get(a.start(), a.dtype, i));
        }
    }
    r->found_inf = args.found_inf == nullptr ? r->found_inf : finite ? 0 : 1;
    if (wanted) {
        const double norm = plain_norm(list, args.norm_type, scale);
        r->total_norm = (float)norm;
        r->total_norm_f64 = norm;
        r->clip_coef = tfast_amp_clip_coef(norm, args.max_norm, true);
    }
    for (array &a : list) {
        if (args.rewrite == TFAST_AMP_READ) {
            continue;
        }
        if (a.dtype == TFAST_F64) {
            rewrite<double>(a, args, number);
        } else {
            rewrite<float>(a, args, number);
        }
    }
}

/* ---- Cases ----------------------------------------------------------------------- */

int64_t largest; /* tensors are cut to this many elements */

/* Any NaN is as good as another. */
template <typename T>
bool
alike(T a, T b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

bool
same(std::vector<array> &ours, std::vector<array> &theirs, const results &a,
     const results &b)
{
    for (size_t i = 0; i < ours.size(); i++) {
        for (int64_t k = 0; k < (int64_t)ours[i].size; k++) {
            if (!alike(get(ours[i].start(), ours[i].dtype, k),
                       get(theirs[i].start(), theirs[i].dtype, k))) {
                return false;
            }
        }
    }
    return alike(a.found_inf, b.found_inf) && alike(a.total_norm, b.total_norm) &&
           alike(a.total_norm_f64, b.total_norm_f64) && alike(a.clip_coef, b.clip_coef);
}

/* Tensors of every size; `oddity` stands in the middle of one. */
std::vector<array>
tensors_of(const std::vector<int> &dtypes, bool skewed, double oddity)
{
    static const int64_t sizes[] = {1,   3,    0,    4,    127,   128,  129,
                                    500, 5000, 8191, 8192, 40001, 70001};
    std::vector<array> list;

    for (int i = 0; i < 50; i++) { /* the look-up takes two rounds */
        const int64_t numel = i < 13 ? sizes[i] : i % 5;
        list.emplace_back(dtypes[(size_t)i % dtypes.size()], std::min(numel, largest),
                          skewed ? i % 4 : 0, -1);
        array &a = list.back();
        if (i == 8 && oddity != 0) {
            set(a.start(), a.dtype, (int64_t)a.size / 2, oddity);
        }
    }
    return list;
}

/* Two passes over the same list, the second one warm and over what the first one left;
 * the third one without a workspace. */
bool
run_case(const char *name, tfast_amp_grads_args args, const std::vector<int> &dtypes,
         bool skewed, double oddity)
{
    std::vector<array> ours = tensors_of(dtypes, skewed, oddity), theirs = ours;
    std::vector<tfast_amp_tensor> tensors;
    tfast_workspace workspace = {};
    results mine = {}, right = {};
    const bool norm = args.total_norm != nullptr;

    for (array &a : ours) {
        tensors.push_back({a.start(), (int64_t)a.size, (uint8_t)a.dtype});
    }
    args.tensors = tensors.data();
    args.n_tensors = (int64_t)tensors.size();
    args.found_inf = args.found_inf != nullptr ? &mine.found_inf : nullptr;
    args.total_norm = norm ? &mine.total_norm : nullptr;
    args.total_norm_f64 = norm ? &mine.total_norm_f64 : nullptr;
    args.clip_coef = norm ? &mine.clip_coef : nullptr;
    for (int turn = 0; turn < 3; turn++) {
        args.workspace = turn < 2 ? &workspace : nullptr;
        if (backend->amp_grads(&args) != TFAST_OK) {
            return false;
        }
        plain_pass(theirs, &right, args);
        if (!same(ours, theirs, mine, right)) {
            fprintf(stderr,
                    "%s, norm_type %g, rewrite %d, oddity %g, skewed %d: pass %d "
                    "differs: %g %.17g, right: %g %.17g\n",
                    name, args.norm_type, args.rewrite, oddity, skewed, turn,
                    mine.found_inf, mine.total_norm_f64, right.found_inf,
                    right.total_norm_f64);
            return false;
        }
    }
    if (workspace.data != nullptr) {
        backend->workspace_clear(workspace.data);
    }
    return true;
}

bool
run_all(int part)
{
    static const double types[] = {2, 1, INFINITY, -INFINITY, 3};
    static const double oddities[] = {0, INFINITY, NAN, 3e19};
    static float scale = 8, any;
    static double factor = 0.3;
    bool right = true;

    for (int i = 0; i < 5 * 4 * 3 * 2; i++) {
        const double oddity = oddities[i / 5 % 4];
        tfast_amp_grads_args args = {};
        if (i % 7 != part) { /* one in seven meets every value of each */
            continue;
        }
        args.device = {TFAST_CPU, 0};
        args.norm_type = types[i % 5];
        args.rewrite = (tfast_amp_rewrite)(i / 20 % 3);
        args.max_norm = 0.5;
        args.clip_value = 0.25;
        args.grad_scale = &scale;
        args.factor = &factor;
        args.found_inf = i % 5 != 4 ? &any : nullptr;
        args.total_norm = &any;
        const bool skewed = i / 60 != 0;
        right &= run_case("float32", args, {TFAST_F32}, skewed, oddity);
        right &= run_case("mixed", args, {TFAST_BF16, TFAST_F32, TFAST_F16}, skewed,
                          oddity == 3e19 ? 6e4 : oddity);
        right &= run_case("wide", args, {TFAST_F64, TFAST_F32, TFAST_BF16}, skewed,
                          oddity == 3e19 ? 1e200 : oddity);
        args.total_norm = nullptr;
        right &= run_case("no norm", args, {TFAST_BF16, TFAST_F32}, skewed, oddity);
    }
    return right;
}

} // namespace

int
main(int argc, char **argv)
{
    if (argc != 3) {
        return 2;
    }
    const uint64_t seed = strtoull(argv[1], nullptr, 0);
    tfast_simt_seed(seed);
    largest = strtoll(argv[2], nullptr, 0);
    backend = tfast_library_open(TFAST_ABI, fail);
    if (backend == nullptr || backend->unusable() != nullptr) {
        return 2;
    }
    return !run_all((int)(seed % 7));
}
