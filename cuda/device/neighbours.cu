/* The search for neighbours: a warp a centre, a lane a point. Each centre is compared
 * with every point of its graph, 32 at a time in the order of their numbers, so that
 * votes give each edge its place and the edges come out sorted. */
#include "element.cuh"
#include "neighbour_graph.h"

enum { MAX_DIM = TFAST_MAX_POINT_DIM };

/* ---- Points ---------------------------------------------------------------------- */

/* Reads a point; returns whether its coordinates are finite. */
template <typename REAL>
DEVICE bool
read_point(REAL *point, const tfast_neighbours_args &args, const tfast_points &points,
           int64_t row)
{
    double norm = 0;
    bool finite = true;

#pragma unroll
    for (int d = 0; d < MAX_DIM; d++) {
        if (d < args.dim) {
            point[d] = read_element<REAL>(points.data, args.dtype,
                                          row * points.row + d * points.column);
            finite = finite && point[d] - point[d] == 0;
        }
    }
    if (args.unit) {
#pragma unroll
        for (int d = 0; d < MAX_DIM; d++) {
            norm += d < args.dim ? (double)point[d] * (double)point[d] : 0;
        }
#pragma unroll
        for (int d = 0; d < MAX_DIM; d++) {
            if (d < args.dim && norm > 0) {
                point[d] = (REAL)((double)point[d] / sqrt(norm));
            }
        }
    }
    return finite;
}

/* Four coordinates, zeros past the last one: they add nothing to a distance. */
template <typename REAL>
struct alignas(16) quad {
    REAL x[4];
};

/* Copies points to [n, quads]; `bad`: see neighbours_found. */
template <typename REAL>
DEVICE void
copy_points(quad<REAL> *to, unsigned long long *bad, const tfast_neighbours_args &args,
            const tfast_points &points)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    const int quads = args.dim > 4 ? 2 : 1;
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    for (; row < points.n; row += step) {
        REAL point[MAX_DIM] = {};

        if (!read_point(point, args, points, row)) {
            atomicMax(bad, (unsigned long long)(points.n - row));
        }
        to[row * quads] = {{point[0], point[1], point[2], point[3]}};
        if (quads == 2) {
            to[row * 2 + 1] = {{point[4], point[5], point[6], point[7]}};
        }
    }
}

template <typename REAL>
TFAST_KERNEL(NEIGHBOUR_THREADS, 4)
neighbours_prepare(const __grid_constant__ neighbours_call call)
{
    const tfast_neighbours_args &args = call.args;

    copy_points((quad<REAL> *)call.points, &call.found->bad_point, args, args.points);
    if (args.centres.data != nullptr) {
        copy_points((quad<REAL> *)call.centres, &call.found->bad_centre, args,
                    args.centres);
    }
}

/* ---- One centre ------------------------------------------------------------------ */

template <typename REAL>
struct query {
    quad<REAL> centre[2];
    const quad<REAL> *points; /* of the graph */
    int quads;                /* of a point */
    uint32_t n;               /* points of the graph */
    int64_t first;            /* row of the first one */
    uint32_t own;             /* the centre's number among them, or NOT_THERE */
    bool keeps_own;           /* and it is its own neighbour */
};

/* No point has that number: a graph has fewer than 2^31 - 1. */
static const uint32_t NOT_THERE = ~0u;

template <typename REAL>
DEVICE query<REAL>
query_of(const neighbours_call &call, int64_t row)
{
    const tfast_neighbours_args &args = call.args;
    const bool itself = args.centres.data == nullptr;
    const int64_t g = tfast_graph_of(call.centres_ptr, args.n_graphs, row);
    const int quads = args.dim > 4 ? 2 : 1;
    const quad<REAL> *centre = (const quad<REAL> *)call.centres + row * quads;
    query<REAL> q;

    q.centre[0] = centre[0];
    q.centre[1] = centre[quads - 1];
    q.first = call.ptr[g];
    q.points = (const quad<REAL> *)call.points + q.first * quads;
    q.quads = quads;
    q.n = (uint32_t)(call.ptr[g + 1] - q.first);
    q.own = itself ? (uint32_t)(row - q.first) : NOT_THERE;
    q.keeps_own = itself && args.loop && call.limit >= 0;
    return q;
}

template <typename SUM, typename REAL>
DEVICE void
add_squares(SUM *sum, quad<REAL> a, const quad<REAL> &b) /* by value: one load */
{
#pragma unroll
    for (int d = 0; d < 4; d++) {
        const SUM gap = (SUM)a.x[d] - (SUM)b.x[d];

        *sum += gap * gap;
    }
}

/* The square of the distance to point i, in the order of csrc/kernels/neighbours.h. */
template <typename SUM, typename REAL>
DEVICE SUM
square_of(const query<REAL> &q, uint32_t i)
{
    const quad<REAL> *point = q.points + (int64_t)i * q.quads;
    SUM sum = 0;

    add_squares(&sum, point[0], q.centre[0]);
    if (q.quads == 2) {
        add_squares(&sum, point[1], q.centre[1]);
    }
    return sum;
}

/* What a square in float says about the exact one. In float each of up to 8 terms is
 * off by at most 3 roundings, its own product's underflow (2^-150) and those of up to 7
 * additions: together less than 2^-20 of the sum and 2^-146. */
struct float_bounds {
    float within; /* less than that: the exact square is at most the limit */
    float beyond; /* more than that: it is above it */
};

DEVICE float_bounds
bounds_of(double limit)
{
    return {(float)(limit * (1 - 0x1p-19) - 0x1p-140),
            (float)(limit * (1 + 0x1p-19) + 0x1p-140)};
}

/* Whether the square is within the limit; by a whole warp, so that it branches as one
 * where float cannot tell. */
DEVICE bool
is_within(const query<float> &q, uint32_t i, double limit, float_bounds bounds)
{
    const float rough = square_of<float>(q, i);
    bool within = rough < bounds.within;

    if (__any_sync(~0u, !(within || rough > bounds.beyond))) {
        within = square_of<double>(q, i) <= limit;
    }
    return within;
}

DEVICE bool
is_within(const query<double> &q, uint32_t i, double limit, float_bounds)
{
    return square_of<double>(q, i) <= limit;
}

/* Whether a lane's point is a neighbour; by a whole warp, some of whose lanes may be
 * past the last point. The centre itself is none. */
template <typename REAL>
DEVICE bool
is_neighbour(const query<REAL> &q, uint32_t i, double limit, float_bounds bounds)
{
    const bool within = is_within(q, i < q.n ? i : q.n - 1, limit, bounds);

    return within && i < q.n && i != q.own;
}

DEVICE bool
may_be_within(const query<float> &q, uint32_t i, float_bounds bounds)
{
    return !(square_of<float>(q, i) > bounds.beyond);
}

DEVICE bool
may_be_within(const query<double> &, uint32_t, float_bounds)
{
    return true;
}

/* ---- Counts and offsets ---------------------------------------------------------- */

DEVICE int64_t
first_warp()
{
    return (int64_t)blockIdx.x * NEIGHBOUR_WARPS + threadIdx.x / 32;
}

DEVICE int64_t
all_warps()
{
    return (int64_t)gridDim.x * NEIGHBOUR_WARPS;
}

DEVICE uint32_t
lanes_before()
{
    return (1u << threadIdx.x % 32) - 1;
}

/* offsets[row + 1]: the number of a centre's edges. */
template <typename REAL>
TFAST_KERNEL(NEIGHBOUR_THREADS, 4)
neighbours_count(const __grid_constant__ neighbours_call call)
{
    const float_bounds bounds = bounds_of(call.limit);
    const int64_t most = call.args.most;
    const uint32_t lane = threadIdx.x % 32;

    for (int64_t row = first_warp(); row < call.n_centres; row += all_warps()) {
        const query<REAL> q = query_of<REAL>(call, row);
        const bool all = call.limit == INFINITY;
        uint32_t n = all ? q.n - (q.own != NOT_THERE) : 0;

        for (uint32_t i = lane; !all && i - lane < q.n; i += 32) {
            n += __popc(__ballot_sync(~0u, is_neighbour(q, i, call.limit, bounds)));
        }
        if (lane == 0) {
            call.offsets[row + 1] = (most >= 0 && n > most ? most : n) + q.keeps_own;
        }
    }
}

/* From counts to each centre's first edge, by one block. */
TFAST_KERNEL(SCAN_THREADS, 1)
neighbours_scan(const __grid_constant__ neighbours_call call)
{
    SHARED(int64_t, sums, SCAN_THREADS / 32); /* of warps */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t before = 0; /* edges of all earlier centres */

    for (int64_t tile = 0; tile < call.n_centres; tile += SCAN_THREADS) {
        const int64_t row = tile + threadIdx.x;
        int64_t n = row < call.n_centres ? call.offsets[row + 1] : 0;
        int64_t add = before;

#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int64_t other = __shfl_up_sync(~0u, n, by);

            n += lane >= by ? other : 0;
        }
        if (lane == 31) {
            sums[warp] = n;
        }
        __syncthreads();
        for (int w = 0; w < SCAN_THREADS / 32; w++) {
            add += w < warp ? sums[w] : 0;
            before += sums[w];
        }
        if (row < call.n_centres) {
            call.offsets[row + 1] = add + n;
        }
        __syncthreads(); /* `sums` was read */
    }
    if (threadIdx.x == 0) {
        call.offsets[0] = 0;
        call.found->n_edges = before;
    }
}

/* ---- Edges ----------------------------------------------------------------------- */

template <typename REAL>
DEVICE void
write_features(const tfast_neighbours_args &args, const query<REAL> &q, int64_t edge,
               uint32_t i)
{
    const quad<REAL> *point = q.points + (int64_t)i * q.quads;
    const double distance = sqrt(square_of<double>(q, i));

    if (args.distance != nullptr) {
        write_element(args.distance, args.dtype, edge, distance);
    }
#pragma unroll
    for (int d = 0; d < MAX_DIM; d++) {
        if (d < args.dim) {
            const double gap =
                (double)point[d / 4].x[d % 4] - (double)q.centre[d / 4].x[d % 4];
            const int64_t at = edge * args.dim + d;

            if (args.relative_position != nullptr) {
                write_element(args.relative_position, args.dtype, at, gap);
            }
            if (args.unit_vector != nullptr) {
                write_element(args.unit_vector, args.dtype, at,
                              distance > 0 ? gap / distance : 0.0);
            }
        }
    }
}

/* The edge from point i of the graph to the centre in row `row`. */
template <typename REAL>
DEVICE void
write_edge(const tfast_neighbours_args &args, const query<REAL> &q, int64_t row,
           int64_t edge, uint32_t i)
{
    if (args.short_indices) {
        ((int32_t *)args.neighbour)[edge] = (int32_t)(q.first + i);
        ((int32_t *)args.centre)[edge] = (int32_t)row;
    } else {
        ((int64_t *)args.neighbour)[edge] = q.first + i;
        ((int64_t *)args.centre)[edge] = row;
    }
    if (args.distance != nullptr || args.relative_position != nullptr ||
        args.unit_vector != nullptr) {
        write_features(args, q, edge, i);
    }
}

/* All neighbours of each centre, or the first `most`. */
template <typename REAL>
TFAST_KERNEL(NEIGHBOUR_THREADS, 4)
neighbours_fill(const __grid_constant__ neighbours_call call)
{
    const tfast_neighbours_args &args = call.args;
    const float_bounds bounds = bounds_of(call.limit);
    const uint32_t lane = threadIdx.x % 32;

    for (int64_t row = first_warp(); row < call.n_centres; row += all_warps()) {
        const query<REAL> q = query_of<REAL>(call, row);
        const int64_t end = call.offsets[row + 1];
        int64_t edge = call.offsets[row], taken = 0; /* without the centre itself */

        for (uint32_t i = lane; i - lane < q.n && edge < end; i += 32) {
            const bool near = is_neighbour(q, i, call.limit, bounds);
            const uint32_t all = __ballot_sync(~0u, near);
            const int64_t number = taken + __popc(all & lanes_before());
            const bool kept = near && (args.most < 0 || number < args.most);
            const bool is_edge = kept || (q.keeps_own && i == q.own);
            const uint32_t edges = __ballot_sync(~0u, is_edge);

            if (is_edge) {
                write_edge(args, q, row, edge + __popc(edges & lanes_before()), i);
            }
            taken += __popc(all);
            edge += __popc(edges);
        }
    }
}

/* ---- The nearest neighbours ------------------------------------------------------ */

/* What a warp has found, in the order of numbers. Keys order as the squares that they
 * stand for; the centre itself, if it is kept, has key 0 and so always stays. */
struct nearest {
    uint64_t *keys;
    uint32_t *numbers;
    uint32_t n;
};

DEVICE uint64_t
key_of(double square)
{
    return (uint64_t)__double_as_longlong(square) + 1;
}

/* The largest square whose key is below `key`, at most infinity. */
DEVICE double
square_below(uint64_t key)
{
    return key > key_of(INFINITY) ? INFINITY
           : key < 2              ? 0
                                  : __longlong_as_double((int64_t)(key - 2));
}

DEVICE uint32_t
count_below(const nearest &list, uint64_t key)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t n = 0;

    for (uint32_t i = lane; i - lane < list.n; i += 32) {
        n += __popc(__ballot_sync(~0u, i < list.n && list.keys[i] < key));
    }
    return n;
}

/* Keeps the `most` < list->n smallest keys, of equal ones those in front. Returns the
 * key that whatever is found later must be below. */
DEVICE uint64_t
select_nearest(nearest *list, uint32_t most)
{
    const uint32_t lane = threadIdx.x % 32;
    uint64_t key = 0;        /* bit by bit: `below` keys are smaller, */
    uint32_t below = 0;      /* and below <= most */
    uint32_t ties, kept = 0; /* of the entries with this key, so many are kept */

    __syncwarp(); /* the other lanes' entries are there */
    for (int bit = 63; bit >= 0 && below < most; bit--) {
        const uint64_t larger = key | (uint64_t)1 << bit;
        const uint32_t n = count_below(*list, larger);

        if (n <= most) {
            key = larger;
            below = n;
        }
    }
    ties = most - below;
    for (uint32_t i = lane; i - lane < list->n; i += 32) {
        const uint64_t own = i < list->n ? list->keys[i] : ~(uint64_t)0;
        const uint32_t number = i < list->n ? list->numbers[i] : 0;
        const uint32_t equal = __ballot_sync(~0u, i < list->n && own == key);
        const uint32_t before = __popc(equal & lanes_before());
        const bool tie = own == key && before < ties;
        const bool keep = i < list->n && (own < key || tie);
        const uint32_t all = __ballot_sync(~0u, keep);
        const uint32_t at = kept + __popc(all & lanes_before());
        const uint32_t equals = __popc(equal);

        ties -= equals < ties ? equals : ties;
        kept += __popc(all);
        __syncwarp(); /* all have read theirs */
        if (keep) {
            list->keys[at] = own;
            list->numbers[at] = number;
        }
    }
    list->n = kept;
    return key;
}

/* Finds the k nearest of a centre. */
template <typename REAL>
DEVICE void
find_nearest(nearest *list, const neighbours_call &call, const query<REAL> &q,
             uint32_t k)
{
    const uint32_t lane = threadIdx.x % 32;
    uint64_t open = call.limit < 0 ? 0 : key_of(call.limit) + 1; /* keys below it may
                                                                     be among them */
    float_bounds bounds = bounds_of(call.limit);

    list->n = 0;
    for (uint32_t i = lane; i - lane < q.n; i += 32) {
        uint64_t key = ~(uint64_t)0;

        if (i < q.n && i == q.own) {
            key = q.keeps_own ? 0 : key;
        } else if (i < q.n && may_be_within(q, i, bounds)) {
            key = key_of(square_of<double>(q, i));
        }
        const uint32_t all = __ballot_sync(~0u, key < open);
        if (key < open) {
            const uint32_t at = list->n + __popc(all & lanes_before());

            list->keys[at] = key;
            list->numbers[at] = i;
        }
        list->n += __popc(all);
        if (list->n > call.room - 32) {
            open = select_nearest(list, k);
            bounds = bounds_of(square_below(open));
        }
    }
    if (list->n > k) {
        select_nearest(list, k);
    }
    __syncwarp();
}

/* The nearest `most` neighbours of each centre. */
template <typename REAL>
TFAST_KERNEL(NEIGHBOUR_THREADS, 4)
neighbours_nearest(const __grid_constant__ neighbours_call call)
{
    const tfast_neighbours_args &args = call.args;
    const int64_t warp = first_warp();
    nearest list = {call.keys + warp * call.room, call.numbers + warp * call.room, 0};

    for (int64_t row = warp; row < call.n_centres; row += all_warps()) {
        const query<REAL> q = query_of<REAL>(call, row);
        const int64_t edge = call.offsets[row];
        const int64_t most = args.most < q.n ? args.most : q.n;

        if (call.offsets[row + 1] > edge) {
            find_nearest(&list, call, q, (uint32_t)most + q.keeps_own);
            for (uint32_t i = threadIdx.x % 32; i < list.n; i += 32) {
                write_edge(args, q, row, edge + i, list.numbers[i]);
            }
            __syncwarp(); /* the list is free for the next centre */
        }
    }
}

TFAST_EXPORT(neighbours)
