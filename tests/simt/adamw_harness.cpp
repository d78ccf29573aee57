/* AdamW of cuda/ on the runner, bit by bit against one plain loop: a program, because
 * the sanitizers do not get into a Python that runs already. Its arguments are the seed
 * and the largest slot's elements. Every array is an allocation of its own that ends
 * where the array does. */
#include "adamw_codes.h"
#include "adamw_coef.h"
#include "adamw_half.h"
#include "harness.h"

#include <algorithm>
#include <memory>

namespace {

/* ---- Arrays ---------------------------------------------------------------------- */

struct tensors {
    array param, grad, exp_avg, exp_avg_sq, top, ema, copy;
    float step;
    bool amsgrad, counted;

    tensors(const int dtypes[5], int64_t numel, const int offsets[7], float step,
            bool amsgrad, bool counted)
        : param(dtypes[0], numel, offsets[0], -1),
          grad(dtypes[1], numel, offsets[1], -1),
          exp_avg(dtypes[2], numel, offsets[2], -1),
          exp_avg_sq(dtypes[2], numel, offsets[3], 0),
          top(dtypes[2], numel, offsets[4], 0), ema(dtypes[3], numel, offsets[5], -1),
          copy(dtypes[4], numel, offsets[6], -1), step(step), amsgrad(amsgrad),
          counted(counted)
    {
    }

    tfast_adamw_slot slot()
    {
        tfast_adamw_slot s = {};
        s.param = param.start();
        s.grad = grad.start();
        s.exp_avg = exp_avg.start();
        s.exp_avg_sq = exp_avg_sq.start();
        s.max_exp_avg_sq = amsgrad ? top.start() : nullptr;
        s.step = counted ? &step : nullptr;
        s.numel = (int64_t)param.size;
        s.param_dtype = (uint8_t)param.dtype;
        s.grad_dtype = (uint8_t)grad.dtype;
        s.state_dtype = (uint8_t)exp_avg.dtype;
        return s;
    }

    /* The i-th of a list: both, either or none. */
    tfast_adamw_extra extra(int64_t i)
    {
        tfast_adamw_extra e = {};
        e.ema = i % 4 != 1 && i % 4 != 3 ? ema.start() : nullptr;
        e.copy = i % 4 != 2 && i % 4 != 3 ? copy.start() : nullptr;
        e.ema_dtype = (uint8_t)ema.dtype;
        e.copy_dtype = (uint8_t)copy.dtype;
        return e;
    }
};

bool
same(const tensors &a, const tensors &b)
{
    return a.param.bytes == b.param.bytes && a.grad.bytes == b.grad.bytes &&
           a.exp_avg.bytes == b.exp_avg.bytes &&
           a.exp_avg_sq.bytes == b.exp_avg_sq.bytes && a.top.bytes == b.top.bytes &&
           a.ema.bytes == b.ema.bytes && a.copy.bytes == b.copy.bytes &&
           a.step == b.step;
}

/* ---- The plain loop -------------------------------------------------------------- */

template <typename REAL>
void
update(const tfast_adamw_slot &s, const tfast_adamw_extra &extra,
       const tfast_adamw_coef &c, const tfast_adamw_args &args)
{
    const REAL unscale = (REAL)c.unscale, sign = (REAL)c.sign, l2 = (REAL)c.l2;
    const REAL decay = (REAL)c.decay, beta1 = (REAL)c.beta1, rest1 = (REAL)c.rest1;
    const REAL beta2 = (REAL)c.beta2, rest2 = (REAL)c.rest2, eps = (REAL)c.eps;
    const REAL step_size = (REAL)c.step_size, inv_root_bias = (REAL)c.inv_root_bias;
    const REAL ema_rest = (REAL)c.ema_rest;

    for (int64_t i = 0; i < s.numel; i++) {
        REAL p = (REAL)get(s.param, s.param_dtype, i);
        REAL g = (REAL)get(s.grad, s.grad_dtype, i) * unscale;
        REAL m = (REAL)get(s.exp_avg, s.state_dtype, i);
        REAL v = (REAL)get(s.exp_avg_sq, s.state_dtype, i);
        if (args.write_back_grads || args.zero_grad) {
            set(s.grad, s.grad_dtype, i, args.zero_grad ? 0 : g);
        }
        g = g * sign;
        g = l2 != 0 ? std::fma(l2, p, g) : g;
        p = p * decay;
        m = c.beta1 > 0.5 ? std::fma(rest1, g - m, m) : std::fma(-beta1, g - m, g);
        v = std::fma(beta2, v, rest2 * g * g);
        set(s.exp_avg, s.state_dtype, i, m);
        set(s.exp_avg_sq, s.state_dtype, i, v);
        if (s.max_exp_avg_sq != nullptr) {
            const REAL top = (REAL)get(s.max_exp_avg_sq, s.state_dtype, i);
            v = top > v ? top : v;
            set(s.max_exp_avg_sq, s.state_dtype, i, v);
        }
        p = p - step_size * m / std::fma(std::sqrt(v), inv_root_bias, eps);
        set(s.param, s.param_dtype, i, p);
        if (extra.ema != nullptr) {
            const REAL e = (REAL)get(extra.ema, extra.ema_dtype, i);
            set(extra.ema, extra.ema_dtype, i,
                args.ema_decay == 0 ? p : std::fma(ema_rest, p - e, e));
        }
        if (extra.copy != nullptr) {
            set(extra.copy, extra.copy_dtype, i, p);
        }
    }
}

void
plain_step(const tfast_adamw_args &args)
{
    const double lr = args.lr_device != nullptr ? *args.lr_device : args.lr;
    const double scale = args.grad_scale != nullptr ? *args.grad_scale : 1;
    const double clip = args.clip_coef != nullptr ? *args.clip_coef : 1;
    const bool skip = args.found_inf != nullptr && *args.found_inf != 0;

    for (int64_t i = 0; i < args.n_slots; i++) {
        const tfast_adamw_slot &s = args.slots[i];
        for (int64_t k = 0; skip && args.zero_grad && k < s.numel; k++) {
            set(s.grad, s.grad_dtype, k, 0);
        }
        if (skip) {
            continue;
        }
        const int64_t step = s.step != nullptr ? (int64_t)(*s.step += 1) : args.step;
        const tfast_adamw_coef coef = tfast_adamw_coef_at(&args, step, lr, scale, clip);
        const tfast_adamw_extra extra =
            args.extras != nullptr ? args.extras[i] : tfast_adamw_extra{};
        if (s.param_dtype == TFAST_F64 || s.state_dtype == TFAST_F64) {
            update<double>(s, extra, coef, args);
        } else {
            update<float>(s, extra, coef, args);
        }
    }
}

/* ---- Cases ----------------------------------------------------------------------- */

int64_t largest; /* slots are cut to this many elements */

std::vector<tfast_adamw_slot>
slots_of(std::vector<tensors> &list)
{
    std::vector<tfast_adamw_slot> slots;

    for (tensors &t : list) {
        slots.push_back(t.slot());
    }
    return slots;
}

std::vector<tfast_adamw_extra>
extras_of(std::vector<tensors> &list)
{
    std::vector<tfast_adamw_extra> extras;

    for (size_t i = 0; i < list.size(); i++) {
        extras.push_back(list[i].extra((int64_t)i));
    }
    return extras;
}

/* Three steps of a list of every size, each array offset as `skew` says: 0 not at all,
 * 1 all alike, 2 each in its own way, 3 only those of the extras. */
bool
run_case(const char *name, tfast_adamw_args args, const int (*dtypes)[5], int n_dtypes,
         int skew, bool extras = false)
{
    static const int64_t sizes[] = {1,  7,   8,   9,   0,    15,   16,
                                    17, 255, 256, 257, 2049, 5000, 70001};
    static const int many = 600; /* of 3 elements: the look-up takes several rounds */
    std::vector<tensors> ours;
    tfast_workspace workspace = {};

    for (int i = 0; i < 14 + many; i++) {
        int offsets[7] = {};
        for (int k = 0; k < 7; k++) {
            offsets[k] = skew == 1   ? i % 8
                         : skew == 2 ? (i * 3 + k * k) % 8
                         : skew == 3 ? std::max(k - 4, 0)
                                     : 0;
        }
        ours.emplace_back(dtypes[i % n_dtypes],
                          i < 14 ? std::min(sizes[i], largest) : 3, offsets,
                          i % 3 == 1 ? 7.0f : 0.0f, i % 2 == 1, i % 5 != 4);
    }
    std::vector<tensors> theirs = ours;
    const std::vector<tfast_adamw_slot> our_slots = slots_of(ours);
    const std::vector<tfast_adamw_slot> their_slots = slots_of(theirs);
    const std::vector<tfast_adamw_extra> our_extras = extras_of(ours);
    const std::vector<tfast_adamw_extra> their_extras = extras_of(theirs);
    for (args.step = 1; args.step <= 3; args.step++) {
        args.n_slots = (int64_t)ours.size();
        args.workspace = args.step < 3 ? &workspace : nullptr;
        args.slots = our_slots.data();
        args.extras = extras ? our_extras.data() : nullptr;
        if (backend->adamw(&args) != TFAST_OK) {
            return false;
        }
        args.slots = their_slots.data();
        args.extras = extras ? their_extras.data() : nullptr;
        plain_step(args);
        for (size_t i = 0; i < ours.size(); i++) {
            if (!same(ours[i], theirs[i])) {
                fprintf(stderr,
                        "%s, skew %d: slot %zu of %zu elements differs in step %d\n",
                        name, skew, i, ours[i].param.size, (int)args.step);
                return false;
            }
        }
    }
    backend->workspace_clear(workspace.data);
    return true;
}

/* Three steps by blocks, with 8-bit state or a rounding or both, for what the
 * sanitizers see; tests/core/test_adamw_codes.py and test_adamw_half.py have the bits.
 * The tail begins `skew` elements behind where it is aligned. */
bool
run_blocks(tfast_adamw_args args, int64_t numel, bool coded, int rounding, int skew)
{
    const int param = rounding == TFAST_NEAREST ? TFAST_F32 : TFAST_BF16;
    const int dtypes[5] = {param, param, TFAST_F32, TFAST_F32, TFAST_F32};
    static const int offsets[7] = {};
    const int64_t blocks = (numel + TFAST_CODE_BLOCK - 1) / TFAST_CODE_BLOCK;
    const bool kept = rounding == TFAST_KAHAN || rounding == TFAST_SPLIT;
    const std::unique_ptr<uint16_t[]> tail(new uint16_t[(size_t)(numel + skew)]());
    tfast_adamw_extra extra = {};
    tensors floats(dtypes, numel, offsets, 0, true, true);
    std::vector<uint8_t> codes[3];
    std::vector<float> scales((size_t)(blocks * TFAST_CODE_SCALES_AMSGRAD));
    tfast_adamw_slot slot = floats.slot();
    tfast_workspace workspace = {};
    bool right = true;

    for (std::vector<uint8_t> &each : codes) {
        each.resize((size_t)numel);
    }
    if (coded) {
        slot.exp_avg = codes[0].data();
        slot.exp_avg_sq = codes[1].data();
        slot.max_exp_avg_sq = codes[2].data();
        slot.scales = scales.data();
    }
    extra.rounding = (uint8_t)rounding;
    extra.tail = kept ? tail.get() + skew : nullptr;
    args.extras = &extra;
    args.slots = &slot;
    args.n_slots = 1;
    args.workspace = &workspace;
    for (args.step = 1; args.step <= 3; args.step++) {
        right &= backend->adamw(&args) == TFAST_OK;
    }
    backend->workspace_clear(workspace.data);
    return right;
}

bool
run_all()
{
    static const int f32[][5] = {
        {TFAST_F32, TFAST_F32, TFAST_F32, TFAST_F32, TFAST_BF16}};
    static const int bf16[][5] = {
        {TFAST_BF16, TFAST_BF16, TFAST_BF16, TFAST_F32, TFAST_F32}};
    static const int narrow[][5] = {
        {TFAST_BF16, TFAST_BF16, TFAST_F32, TFAST_BF16, TFAST_F16},
        {TFAST_F32, TFAST_F32, TFAST_BF16, TFAST_F32, TFAST_F32},
        {TFAST_F16, TFAST_F16, TFAST_F16, TFAST_F64, TFAST_F32},
        {TFAST_F32, TFAST_F16, TFAST_F32, TFAST_F16, TFAST_F16},
        {TFAST_F16, TFAST_F64, TFAST_F32, TFAST_F32, TFAST_BF16},
        {TFAST_BF16, TFAST_F32, TFAST_F16, TFAST_BF16, TFAST_F64}};
    static const int wide[][5] = {
        {TFAST_F64, TFAST_F64, TFAST_F64, TFAST_F64, TFAST_F32},
        {TFAST_F32, TFAST_F32, TFAST_F32, TFAST_F32, TFAST_BF16},
        {TFAST_F32, TFAST_BF16, TFAST_F64, TFAST_F16, TFAST_F64},
        {TFAST_F64, TFAST_F16, TFAST_BF16, TFAST_BF16, TFAST_BF16}};
    const float lr = 0.02f, scale = 8.0f, inf = 2.0f, none = 0.0f, nan = NAN;
    const double clip = 0.3;
    tfast_adamw_args usual = {};
    bool right = true;

    usual.device = {TFAST_CPU, 0};
    usual.lr = 1e-2;
    usual.beta1 = 0.9;
    usual.beta2 = 0.999;
    usual.eps = 1e-8;
    usual.weight_decay = 0.1;
    usual.decoupled_weight_decay = true;
    usual.ema_decay = 0.99;
    tfast_adamw_args scaled = usual, other = usual, skipped = usual;
    scaled.grad_scale = &scale;
    scaled.write_back_grads = true;
    scaled.lr_device = &lr;
    scaled.found_inf = &none;
    scaled.clip_coef = &clip;
    other.maximize = true;
    other.decoupled_weight_decay = false;
    other.beta1 = 0.3;
    skipped.found_inf = &inf;
    for (int skew = 0; skew < 3; skew++) {
        right &= run_case("float32", usual, f32, 1, skew);
        right &= run_case("bfloat16", usual, bf16, 1, skew);
        right &= run_case("mixed", scaled, narrow, 6, skew);
        right &= run_case("wide", usual, wide, 4, skew);
    }
    right &= run_case("float32 scaled", scaled, f32, 1, 1);
    right &= run_case("float32 other", other, f32, 1, 1);
    right &= run_case("bfloat16 scaled", scaled, bf16, 1, 2);
    right &= run_case("mixed other", other, narrow, 6, 1);
    right &= run_case("wide scaled", scaled, wide, 4, 1);
    right &= run_case("skipped", skipped, narrow, 6, 0);
    for (int skew = 0; skew < 4; skew++) {
        right &= run_case("float32 with extras", scaled, f32, 1, skew, true);
        right &= run_case("mixed with extras", usual, narrow, 6, skew, true);
        right &= run_case("wide with extras", usual, wide, 4, skew, true);
    }
    right &= run_case("skipped with extras", skipped, narrow, 6, 1, true);
    other.ema_decay = 0;
    other.zero_grad = skipped.zero_grad = true;
    right &= run_case("bfloat16 zeroed", other, bf16, 1, 2);
    right &= run_case("float32 zeroed", other, f32, 1, 0);
    right &= run_case("bfloat16 with extras", other, bf16, 1, 1, true);
    right &= run_case("wide zeroed", other, wide, 4, 2, true);
    right &= run_case("skipped and zeroed", skipped, wide, 4, 2);
    skipped.found_inf = &nan;
    for (int rounding = TFAST_NEAREST; rounding < TFAST_N_ROUNDINGS; rounding++) {
        for (int64_t numel : {1, 130, 5000}) {
            numel = std::min(numel, largest);
            right &= run_blocks(usual, numel, true, rounding, 0);
            right &= run_blocks(usual, numel, false, rounding, (int)(numel % 3));
        }
    }
    return right & run_case("skipped by NaN", skipped, f32, 1, 0);
}

} // namespace

int
main(int argc, char **argv)
{
    if (argc != 3) {
        return 2;
    }
    seed_with(argv[1]);
    largest = strtoll(argv[2], nullptr, 0);
    backend = tfast_library_open(TFAST_ABI, fail);
    if (backend == nullptr || backend->unusable() != nullptr) {
        return 2;
    }
    return !run_all();
}
