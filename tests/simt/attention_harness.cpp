/* Attention of cuda/ on the runner, against plain loops in double: a program, because
 * the sanitizers do not get into a Python that runs already. Its arguments are the seed
 * and how many random problems to try. */
#include "attention_dropout.h"
#include "harness.h"

#include <algorithm>

namespace {

/* ---- A problem ------------------------------------------------------------------- */

int
any_of(int n)
{
    return (int)((random_value() + 1) * 0.5f * (float)n) % n;
}

/* True once in n times. */
bool
once_in(int n)
{
    return any_of(n) == 0;
}

typedef std::vector<double> numbers;

/* Every array that a call may have. Rows are [batch, heads, n, dim], dense. */
struct problem {
    tfast_attention_args a = {};
    std::vector<array> arrays; /* q k v out dout dq dk dv, then in lse's dtype */
    std::vector<int64_t> kv_lens;
    std::vector<uint8_t> mask;
};

enum {
    Q,
    K,
    V,
    OUT,
    DOUT,
    DQ,
    DK,
    DV,
    LSE,
    DLSE,
    BIAS,
    DBIAS,
    SLOPES,
    DSLOPES,
    SINKS,
    DSINKS
};

int64_t
any_rows()
{
    const int64_t sizes[] = {1, 7, 16, 33, 63, 64, 65, 90, 130};

    return sizes[any_of(9)];
}

int64_t
any_dim()
{
    const int64_t dims[] = {1, 7, 8, 16, 32, 40, 64, 72, 96, 128, 160, 192, 250, 256};

    return dims[any_of(14)];
}

void
choose_sizes(tfast_attention_args *a)
{
    a->batch = 1 + any_of(2);
    a->kv_heads = 1 + any_of(2);
    a->heads = a->kv_heads * (1 + any_of(2));
    a->n_q = any_rows();
    a->n_k = any_rows();
    a->dim = any_dim();
    a->dim_v = once_in(2) ? a->dim : any_dim();
    a->dtype = (uint8_t)any_of(TFAST_N_DTYPES);
    a->device = {TFAST_CPU, 0};
}

/* Few queries of many heads that share their keys, and many of these. */
void
choose_few(tfast_attention_args *a)
{
    a->heads = a->kv_heads * (1 + any_of(7));
    a->n_q = 1 + any_of(4);
    a->n_k = 256 + any_of(300);
    a->dtype = (uint8_t)(once_in(2) ? TFAST_F16 : TFAST_BF16);
}

/* A simple problem knows bounds alone. */
void
choose_options(tfast_attention_args *a, bool simple)
{
    a->is_causal = once_in(2);
    a->bottom_right = once_in(2);
    a->window_left = once_in(4) ? any_of(70) : -1;
    a->window_right = once_in(4) ? any_of(70) : -1;
    a->scale = 1 / std::sqrt((double)a->dim);
    if (!simple) {
        a->scale = once_in(5) ? -0.3 : a->scale;
        a->softcap = once_in(4) ? 1.5 : 0;
        a->dropout_p = once_in(3) ? 0.3 : 0;
        a->seed = -123456789012345;
    }
}

/* Appends an array of `rows` rows to the problem's. */
tfast_attention_rows
add_rows(problem *p, int64_t heads, int64_t n, int64_t dim)
{
    p->arrays.emplace_back(p->a.dtype, p->a.batch * heads * n * dim, 0, -1.0);
    return {p->arrays.back().start(), heads * n * dim, n * dim, dim};
}

void *
add_wide(problem *p, int64_t n)
{
    const int dtype = p->a.dtype == TFAST_F64 ? TFAST_F64 : TFAST_F32;

    p->arrays.emplace_back(dtype, n, 0, -1.0);
    return p->arrays.back().start();
}

/* Makes half of the bias's rows far from all others, or all where they are one. */
void
make_far(const tfast_attention_args &a, void *bias, int64_t n)
{
    for (int64_t at = 0; at < n; at++) {
        const int64_t row = a.bias.stride[2] == 0 ? 0 : at / a.bias.stride[2] % a.n_q;
        if (row % 8 < 4) {
            set(bias, a.bias.dtype, at, get(bias, a.bias.dtype, at) + 300);
        }
    }
}

void
add_terms(problem *p, bool simple)
{
    tfast_attention_args *a = &p->a;
    const int64_t full[4] = {a->batch, a->heads, a->n_q, a->n_k};
    int64_t step = 1;

    for (int d = 3; d >= 0; d--) {
        const bool whole = once_in(2);
        a->bias.stride[d] = a->dbias_stride[d] = whole ? step : 0;
        step *= whole ? full[d] : 1;
    }
    void *bias = add_wide(p, step);
    a->bias.data = bias;
    a->bias.dtype = a->dtype == TFAST_F64 ? TFAST_F64 : TFAST_F32;
    a->dbias = add_wide(p, step);
    if (a->n_q % 3 == 0) {
        make_far(*a, bias, step);
    }
    if (simple || once_in(2)) {
        a->bias.data = a->dbias = nullptr;
    }
    if (!simple && once_in(2)) {
        for (int64_t i = 0; i < a->n_q * a->n_k; i++) {
            p->mask.push_back(!once_in(3));
        }
        a->mask = {p->mask.data(), {0, 0, a->n_k, 1}, TFAST_BOOL};
    }
}

void
fill_problem(problem *p, bool few)
{
    tfast_attention_args *a = &p->a;
    const bool simple = once_in(2);

    choose_sizes(a);
    if (few) {
        choose_few(a);
    }
    choose_options(a, simple);
    p->arrays.reserve(16);
    a->q = add_rows(p, a->heads, a->n_q, a->dim);
    a->k = add_rows(p, a->kv_heads, a->n_k, a->dim);
    a->v = add_rows(p, a->kv_heads, a->n_k, a->dim_v);
    a->out = add_rows(p, a->heads, a->n_q, a->dim_v);
    a->dout = add_rows(p, a->heads, a->n_q, a->dim_v);
    a->dq = add_rows(p, a->heads, a->n_q, a->dim);
    a->dk = add_rows(p, a->kv_heads, a->n_k, a->dim);
    a->dv = add_rows(p, a->kv_heads, a->n_k, a->dim_v);
    a->lse = add_wide(p, a->batch * a->heads * a->n_q);
    a->lse_head = a->n_q;
    a->lse_batch = a->heads * a->n_q;
    a->dlse = add_wide(p, a->batch * a->heads * a->n_q);
    add_terms(p, simple);
    a->alibi_slopes = add_wide(p, a->heads);
    a->dalibi = add_wide(p, a->heads);
    a->sinks = add_wide(p, a->heads);
    a->dsinks = add_wide(p, a->heads);
    if (simple || once_in(2)) {
        a->alibi_slopes = a->dalibi = nullptr;
    }
    if (once_in(2)) {
        a->sinks = a->dsinks = nullptr;
    }
    if (once_in(3)) {
        for (int64_t b = 0; b < a->batch; b++) {
            p->kv_lens.push_back(any_of((int)a->n_k + 1));
        }
        a->kv_lens = p->kv_lens.data();
    }
}

/* ---- Plain loops ----------------------------------------------------------------- */

/* What the call must give, by the names above. */
struct expected {
    numbers at[16];
};

/* One head of one item: where it is, and its matrices, [n_q, n_k]. */
struct head {
    const tfast_attention_args &a;
    problem &p;
    int64_t b, h, n_k, shift;
    numbers s, weight, keep, slope;

    double read(int name, int64_t i) const
    {
        return get(p.arrays[(size_t)name].start(), p.arrays[(size_t)name].dtype, i);
    }
    int64_t query(int64_t i, int64_t dim) const
    {
        return ((b * a.heads + h) * a.n_q + i) * dim;
    }
    int64_t key(int64_t j, int64_t dim) const
    {
        const int64_t kv_head = h / (a.heads / a.kv_heads);
        return ((b * a.kv_heads + kv_head) * a.n_k + j) * dim;
    }
    int64_t bias(int64_t i, int64_t j) const
    {
        const int64_t *stride = a.bias.stride;
        return b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
    }
    double far(int64_t i, int64_t j) const { return (double)std::abs(i + shift - j); }
};

bool
is_allowed(const head &x, int64_t i, int64_t j)
{
    const int64_t off = j - i - x.shift;

    return j < x.n_k && !(x.a.is_causal && off > 0) &&
           !(x.a.window_left >= 0 && -off > x.a.window_left) &&
           !(x.a.window_right >= 0 && off > x.a.window_right) &&
           (x.p.mask.empty() || x.p.mask[(size_t)(i * x.a.n_k + j)] != 0);
}

double
kept(const head &x, int64_t i, int64_t j)
{
    const uint32_t threshold = tfast_dropout_threshold(x.a.dropout_p);
    const uint64_t seed = (uint64_t)x.a.seed;
    uint32_t word[4] = {(uint32_t)(i / 16 * 8 + i % 8),
                        (uint32_t)(j / 16 * 4 + j % 8 / 2),
                        (uint32_t)(x.b * x.a.heads + x.h), 0};

    if (x.a.dropout_p == 0) {
        return 1;
    }
    tfast_philox(word, (uint32_t)seed, (uint32_t)(seed >> 32));
    const uint32_t both = word[i / 8 % 2 * 2 + j / 8 % 2];
    const uint32_t number = j % 2 == 1 ? both >> 16 : both & 0xFFFF;
    return number < threshold ? 0 : tfast_dropout_scale(threshold);
}

void
fill_scores(head *x)
{
    const tfast_attention_args &a = x->a;

    for (int64_t i = 0; i < a.n_q; i++) {
        for (int64_t j = 0; j < a.n_k; j++) {
            double s = 0, slope = 1;
            for (int64_t d = 0; d < a.dim; d++) {
                s += x->read(Q, x->query(i, a.dim) + d) *
                     x->read(K, x->key(j, a.dim) + d);
            }
            s *= a.scale;
            if (a.softcap != 0) {
                const double bent = std::tanh(s / a.softcap);
                slope = 1 - bent * bent;
                s = a.softcap * bent;
            }
            s += a.bias.data != nullptr ? x->read(BIAS, x->bias(i, j)) : 0;
            s -= a.alibi_slopes != nullptr ? x->read(SLOPES, x->h) * x->far(i, j) : 0;
            x->s.push_back(is_allowed(*x, i, j) ? s : -INFINITY);
            x->slope.push_back(slope);
            x->keep.push_back(kept(*x, i, j));
        }
    }
}

/* Fills in the weights and this head's rows of lse and out. */
void
run_forward(head *x, expected *e)
{
    const tfast_attention_args &a = x->a;
    const double sink = a.sinks != nullptr ? x->read(SINKS, x->h) : -INFINITY;

    for (int64_t i = 0; i < a.n_q; i++) {
        const double *s = &x->s[(size_t)(i * a.n_k)];
        const double most = *std::max_element(s, s + a.n_k), top = std::max(most, sink);
        double sum = std::exp(sink - top);
        for (int64_t j = 0; j < a.n_k; j++) {
            sum += std::exp(s[j] - top);
        }
        const bool empty = most == -INFINITY;
        e->at[LSE][(size_t)x->query(i, 1)] = empty ? -INFINITY : top + std::log(sum);
        for (int64_t j = 0; j < a.n_k; j++) {
            x->weight.push_back(empty ? 0 : std::exp(s[j] - top) / sum);
        }
        for (int64_t d = 0; d < a.dim_v; d++) {
            double &out = e->at[OUT][(size_t)(x->query(i, a.dim_v) + d)];
            for (int64_t j = 0; j < a.n_k; j++) {
                const size_t at = (size_t)(i * a.n_k + j);
                out += x->weight[at] * x->keep[at] * x->read(V, x->key(j, a.dim_v) + d);
            }
        }
    }
}

/* Adds one score's gradient to those of all that it was made of. */
void
spread(head *x, expected *e, int64_t i, int64_t j, double ds)
{
    const tfast_attention_args &a = x->a;
    const double product = ds * x->slope[(size_t)(i * a.n_k + j)] * a.scale;

    for (int64_t d = 0; d < a.dim; d++) {
        const int64_t q = x->query(i, a.dim) + d, k = x->key(j, a.dim) + d;
        e->at[DQ][(size_t)q] += product * x->read(K, k);
        e->at[DK][(size_t)k] += product * x->read(Q, q);
    }
    if (a.dbias != nullptr) {
        e->at[DBIAS][(size_t)x->bias(i, j)] += ds;
    }
    if (a.dalibi != nullptr) {
        e->at[DSLOPES][(size_t)x->h] -= ds * x->far(i, j);
    }
}

void
run_backward(head *x, expected *e)
{
    const tfast_attention_args &a = x->a;

    for (int64_t i = 0; i < a.n_q; i++) {
        const int64_t row = x->query(i, a.dim_v);
        const double lse = e->at[LSE][(size_t)x->query(i, 1)];
        double delta = -x->read(DLSE, x->query(i, 1));
        for (int64_t d = 0; d < a.dim_v; d++) {
            delta += x->read(DOUT, row + d) * e->at[OUT][(size_t)(row + d)];
        }
        for (int64_t j = 0; j < a.n_k; j++) {
            const size_t at = (size_t)(i * a.n_k + j);
            double product = 0;
            for (int64_t d = 0; d < a.dim_v; d++) {
                const int64_t v = x->key(j, a.dim_v) + d;
                product += x->read(DOUT, row + d) * x->read(V, v);
                e->at[DV][(size_t)v] +=
                    x->weight[at] * x->keep[at] * x->read(DOUT, row + d);
            }
            spread(x, e, i, j, x->weight[at] * (x->keep[at] * product - delta));
        }
        if (a.dsinks != nullptr && lse != -INFINITY) {
            e->at[DSINKS][(size_t)x->h] -= std::exp(x->read(SINKS, x->h) - lse) * delta;
        }
    }
}

expected
expect(problem *p)
{
    expected e;

    for (size_t i = 0; i < p->arrays.size(); i++) {
        e.at[i].assign(p->arrays[i].size, 0);
    }
    for (int64_t b = 0; b < p->a.batch; b++) {
        const int64_t n_k = p->kv_lens.empty() ? p->a.n_k : p->kv_lens[(size_t)b];
        const int64_t shift = p->a.bottom_right ? n_k - p->a.n_q : 0;
        for (int64_t h = 0; h < p->a.heads; h++) {
            head x = {p->a, *p, b, h, n_k, shift, {}, {}, {}, {}};
            fill_scores(&x);
            run_forward(&x, &e);
            run_backward(&x, &e);
        }
    }
    return e;
}

/* ---- Comparison ------------------------------------------------------------------ */

/* What out, rounded, lets gradients be off by, by dtype; those of slopes are summed
 * with distances, at most `farthest`, as weights. */
bool
agrees(const char *what, array &found, const numbers &true_values, int dtype,
       double farthest)
{
    const double noise[TFAST_N_DTYPES] = {1e-4, 1e-11, 6e-3, 5e-2};
    const double weight = strcmp(what, "dalibi") == 0 ? 10 + farthest / 10 : 1;
    double largest = 1;

    for (double x : true_values) {
        largest = std::max(largest, std::isfinite(x) ? std::fabs(x) : 0);
    }
    for (size_t i = 0; i < true_values.size(); i++) {
        const double mine = get(found.start(), found.dtype, (int64_t)i);
        const double true_value = true_values[i];
        const bool same = mine == true_value; /* infinities too */
        if (!same &&
            !(std::fabs(mine - true_value) <= noise[dtype] * weight * largest)) {
            fprintf(stderr, "%s differs at %zu: %g, not %g\n", what, i, mine,
                    true_value);
            return false;
        }
    }
    return true;
}

bool
agree(problem *p, const expected &e)
{
    const struct {
        const char *name;
        int at;
        bool wanted;
    } results[] = {{"out", OUT, true},
                   {"lse", LSE, true},
                   {"dq", DQ, true},
                   {"dk", DK, true},
                   {"dv", DV, true},
                   {"dbias", DBIAS, p->a.dbias != nullptr},
                   {"dalibi", DSLOPES, p->a.dalibi != nullptr},
                   {"dsinks", DSINKS, p->a.dsinks != nullptr}};

    for (const auto &result : results) {
        const size_t at = (size_t)result.at;
        if (result.wanted && !agrees(result.name, p->arrays[at], e.at[at], p->a.dtype,
                                     (double)std::max(p->a.n_q, p->a.n_k))) {
            return false;
        }
    }
    return true;
}

/* With scratch of NaNs that ends where it says. */
bool
call(const tfast_backend *backend, problem *p, bool backward)
{
    int64_t bytes;

    if (backend->attention_scratch(&bytes, &p->a, backward) != TFAST_OK) {
        return false;
    }
    std::vector<char> scratch((size_t)bytes, (char)0xFF);
    p->a.scratch = bytes == 0 ? nullptr : scratch.data();
    return (backward ? backend->attention_backward : backend->attention)(&p->a) ==
           TFAST_OK;
}

/* Runs the problem on the instruction path for this version of PTX. */
bool
is_right(const tfast_backend *backend, problem *p, const expected &e, const char *ptx)
{
    setenv("TRAINFAST_SIMT_PTX", ptx, 1);
    return call(backend, p, false) && call(backend, p, true) && agree(p, e);
}

/* Tiles are laid out so that all rows of a matrix come from different banks. */
bool
are_tiles_read_at_once()
{
    uint64_t counts[2];

    tfast_simt_matrices(counts);
    if (counts[0] != counts[1]) {
        fprintf(stderr, "%llu matrices took %llu wavefronts\n",
                (unsigned long long)counts[0], (unsigned long long)counts[1]);
    }
    return counts[0] == counts[1];
}

} // namespace

int
main(int argc, char **argv)
{
    if (argc != 3) {
        return 2;
    }
    const tfast_backend *backend = tfast_library_open(TFAST_ABI, fail);
    const int problems = atoi(argv[2]);

    seed_with(argv[1]);
    for (int i = 0; i < problems; i++) {
        problem p;
        fill_problem(&p, i % 3 == 2);
        const expected e = expect(&p);
        const bool same = p.a.dtype == TFAST_F32 || p.a.dtype == TFAST_F64;
        tfast_simt_most_blocks(same && i % 2 == 0 ? 2 : 0);
        for (const char *ptx : {"75", "80"}) {
            if (!(same && ptx[0] == '8') &&
                !(is_right(backend, &p, e, ptx) && are_tiles_read_at_once())) {
                fprintf(stderr, "in problem %d with PTX %s\n", i, ptx);
                return 1;
            }
        }
    }
    return 0;
}
