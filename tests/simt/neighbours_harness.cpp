/* The search for neighbours of cuda/ on the runner, against plain loops: a program,
 * because the sanitizers do not get into a Python that runs already. Its arguments are
 * the seed and the number of problems. */
#include "harness.h"
#include "neighbour_search.h"

#include <algorithm>
#include <memory>

namespace {

/* ---- A problem ------------------------------------------------------------------- */

struct cloud {
    std::vector<int64_t> ptr = {0};
    std::unique_ptr<array> data;
    int64_t row, column;
};

/* Points on a lattice, of which many coincide, or of a cube; by rows or by columns. */
cloud
make_cloud(int graphs, int dim, int dtype, bool lattice)
{
    cloud c;

    for (int g = 0; g < graphs; g++) {
        const int n = random_below(4) == 0
                          ? 0
                          : random_below(g > 0                   ? 40
                                         : random_below(16) == 0 ? 1500
                                                                 : 300);
        c.ptr.push_back(c.ptr.back() + n);
    }
    const int64_t n = c.ptr.back();
    const bool by_rows = random_below(2) == 0;
    c.row = by_rows ? dim : 1;
    c.column = by_rows ? 1 : n;
    c.data = std::make_unique<array>(dtype, n * dim, random_below(3), -1);
    for (int64_t i = 0; lattice && i < n * dim; i++) {
        set(c.data->start(), dtype, i, random_below(5) - 2);
    }
    return c;
}

tfast_points
points_of(const cloud &c)
{
    return {c.data->start(), c.row, c.column, c.ptr.back(), c.ptr.data()};
}

tfast_neighbours_args
make_problem(cloud *points, cloud *centres)
{
    static const int dtypes[] = {TFAST_F32, TFAST_F64, TFAST_F16, TFAST_BF16};
    static const double radii[] = {0, 0.5, 1, 1.5, INFINITY};
    tfast_neighbours_args args = {};
    const int graphs = 1 + random_below(3), dim = 1 + random_below(8);
    const int dtype = dtypes[random_below(4)];
    const bool lattice = random_below(2) == 0;

    *points = make_cloud(graphs, dim, dtype, lattice);
    args.points = points_of(*points);
    if (random_below(2) == 0) {
        *centres = make_cloud(graphs, dim, dtype, lattice);
        args.centres = points_of(*centres);
    }
    args.n_graphs = graphs;
    args.dim = dim;
    args.dtype = (uint8_t)dtype;
    args.radius = radii[random_below(5)];
    args.most = random_below(3) == 0 ? -1 : random_below(12);
    args.first = random_below(3) == 0;
    args.below = random_below(2) == 0;
    args.loop = random_below(2) == 0;
    args.unit = random_below(4) == 0;
    args.short_indices = random_below(2) == 0;
    args.device = {TFAST_CPU, 0};
    return args;
}

/* ---- Plain loops ----------------------------------------------------------------- */

std::vector<double>
coordinates(const tfast_points &points, const tfast_neighbours_args &args, int64_t row)
{
    std::vector<double> at;
    double norm = 0;

    for (int64_t d = 0; d < args.dim; d++) {
        at.push_back(
            get(points.data, args.dtype, row * points.row + d * points.column));
        norm += at.back() * at.back();
    }
    for (double &x : at) {
        x = args.unit && norm > 0 ? x / std::sqrt(norm) : x;
    }
    return at;
}

struct edge {
    int64_t neighbour, centre;
    double square;
};

/* The edges of one centre, in the order of neighbours. */
std::vector<edge>
plain_edges(const tfast_neighbours_args &args, int64_t centre, int64_t first,
            int64_t end)
{
    const bool itself = args.centres.data == nullptr;
    const double limit = tfast_neighbours_limit(&args);
    const auto at = coordinates(itself ? args.points : args.centres, args, centre);
    std::vector<edge> found, own;

    for (int64_t i = first; i < end; i++) {
        const auto point = coordinates(args.points, args, i);
        double square = 0;
        for (size_t d = 0; d < at.size(); d++) {
            square += (point[d] - at[d]) * (point[d] - at[d]);
        }
        if (square <= limit && !(itself && i == centre && !args.loop)) {
            (itself && i == centre ? own : found).push_back({i, centre, square});
        }
    }
    if (!args.first) {
        std::stable_sort(found.begin(), found.end(), [](const edge &a, const edge &b) {
            return a.square < b.square;
        });
    }
    if (args.most >= 0 && (int64_t)found.size() > args.most) {
        found.resize((size_t)args.most);
    }
    found.insert(found.end(), own.begin(), own.end());
    std::sort(found.begin(), found.end(),
              [](const edge &a, const edge &b) { return a.neighbour < b.neighbour; });
    return found;
}

std::vector<edge>
plain_search(const tfast_neighbours_args &args)
{
    const tfast_points &centres =
        args.centres.data == nullptr ? args.points : args.centres;
    std::vector<edge> all;

    for (int64_t g = 0; g < args.n_graphs; g++) {
        for (int64_t c = centres.ptr[g]; c < centres.ptr[g + 1]; c++) {
            const auto found =
                plain_edges(args, c, args.points.ptr[g], args.points.ptr[g + 1]);
            all.insert(all.end(), found.begin(), found.end());
        }
    }
    return all;
}

/* ---- The comparison -------------------------------------------------------------- */

struct result {
    std::vector<int64_t> neighbour, centre; /* or int32, in half of the bytes */
    array distance, relative, unit;

    result(int dtype, int64_t n, int64_t dim)
        : neighbour((size_t)n), centre((size_t)n), distance(dtype, n, 0, -1),
          relative(dtype, n * dim, 0, -1), unit(dtype, n * dim, 0, -1)
    {
    }
};

int64_t
index_at(const std::vector<int64_t> &rows, bool is_short, size_t i)
{
    return is_short ? reinterpret_cast<const int32_t *>(rows.data())[i] : rows[i];
}

/* Whether array[i] is `value`, rounded to its dtype. */
bool
is_rounded(array &a, size_t i, double value)
{
    array one(a.dtype, 1, 0, -1);

    set(one.start(), a.dtype, 0, value);
    return get(a.start(), a.dtype, (int64_t)i) == get(one.start(), a.dtype, 0);
}

bool
has_features(result *r, const tfast_neighbours_args &args, const edge &e, size_t i)
{
    const bool itself = args.centres.data == nullptr;
    const auto point = coordinates(args.points, args, e.neighbour);
    const auto centre =
        coordinates(itself ? args.points : args.centres, args, e.centre);
    const double distance = std::sqrt(e.square);
    bool right = is_rounded(r->distance, i, distance);

    for (size_t d = 0; d < point.size(); d++) {
        const double gap = point[d] - centre[d];
        right &= is_rounded(r->relative, i * point.size() + d, gap);
        right &= is_rounded(r->unit, i * point.size() + d,
                            distance > 0 ? gap / distance : 0);
    }
    return right;
}

bool
is_right(result *r, const tfast_neighbours_args &args, const std::vector<edge> &want)
{
    bool right = true;

    for (size_t i = 0; i < want.size(); i++) {
        right &= index_at(r->neighbour, args.short_indices, i) == want[i].neighbour &&
                 index_at(r->centre, args.short_indices, i) == want[i].centre;
        right &= args.distance == nullptr || has_features(r, args, want[i], i);
    }
    return right;
}

bool
run_problem(int number)
{
    cloud points, centres;
    tfast_neighbours_args args = make_problem(&points, &centres);
    const std::vector<edge> want = plain_search(args);
    tfast_neighbours_plan *plan = nullptr;
    bool right;

    tfast_simt_most_blocks(random_below(3)); /* 0: as many as there are; else a warp
                                                has several centres */
    if (backend->neighbours_scratch(&args.scratch_bytes, &args) != TFAST_OK) {
        return false;
    }
    std::vector<char> scratch((size_t)args.scratch_bytes, (char)0xFF);
    args.scratch = scratch.data();
    if (backend->neighbours_count(&plan, &args) != TFAST_OK) {
        return false;
    }
    right = args.n_edges == (int64_t)want.size();
    if (right) {
        result r(args.dtype, args.n_edges, args.dim);
        args.neighbour = r.neighbour.data();
        args.centre = r.centre.data();
        if (random_below(2) == 0) {
            args.distance = r.distance.start();
            args.relative_position = r.relative.start();
            args.unit_vector = r.unit.start();
        }
        right = plan->fill(plan, &args) == TFAST_OK && is_right(&r, args, want);
    }
    plan->end(plan);
    if (!right) {
        fprintf(stderr,
                "problem %d differs: %lld edges of %zu, dim %lld, dtype %d, radius "
                "%g, most %lld, first %d\n",
                number, (long long)args.n_edges, want.size(), (long long)args.dim,
                args.dtype, args.radius, (long long)args.most, args.first);
    }
    return right;
}

} // namespace

int
main(int argc, char **argv)
{
    return solve_problems(argc, argv, run_problem);
}
