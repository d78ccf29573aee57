"""AdamW on half parameters with `rounding`, `compensation` and `master_weights`."""

import copy
import io
import warnings

import pytest
import torch

import trainfast
from trainfast.torch import Adam, AdamW, GradScaler
from trainfast.torch.optim import half

SHAPES = [(700,), (30, 40), (5,), ()]
BF16, F16 = torch.bfloat16, torch.float16
WAYS = {
    "stochastic": ({"rounding": "stochastic"}, BF16),
    "stochastic-f16": ({"rounding": "stochastic"}, F16),
    "kahan": ({"compensation": "kahan"}, BF16),
    "kahan-f16": ({"compensation": "kahan"}, F16),
    "split": ({"master_weights": "split"}, BF16),
}
each_way = pytest.mark.parametrize("way", WAYS)


def made(way, cls=AdamW, seed=0, **options):
    chosen, dtype = WAYS[way]
    torch.manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    return params, cls(params, lr=0.01, **{**chosen, **options})


def train(optimizer, params, steps=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)
        optimizer.step()


def tails(optimizer):
    names = set(half.TAILS.values())
    states = optimizer.state.values()
    return [v.view(torch.int16) for s in states for k, v in s.items() if k in names]


def assert_same(params, others):
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


def fallbacks():
    return trainfast.stats().fallbacks.get("adamw", {})


# ---- What is kept --------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_follows_float32(backend, way, cls):
    """300 steps that are each below an ulp: only plain rounding loses them."""
    options, dtype = WAYS[way]
    errors = {}
    for name, chosen in (("ours", options), ("plain", {}), ("right", None)):
        torch.manual_seed(0)
        kind = torch.float32 if chosen is None else dtype
        param = torch.nn.Parameter(torch.ones(4096, dtype=kind))
        optimizer = cls([param], lr=2e-5, state_dtype=torch.float32, **(chosen or {}))
        rng = torch.Generator().manual_seed(1)
        for _ in range(300):
            grad = 1 + 0.1 * torch.randn(param.shape, generator=rng)
            param.grad = grad.to(param.dtype)
            optimizer.step()
        errors[name] = (param.detach().double() - 1).mean().item()
    assert errors["plain"] == 0  # it has stalled
    ulp = torch.finfo(dtype).eps / 2
    assert errors["ours"] == pytest.approx(errors["right"], abs=ulp)
    assert not fallbacks()


def test_split_is_a_master_bit_for_bit(backend):
    params, optimizer = made("split")
    others, masters = made("split", master_weights=True)
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        for p, q in zip(params, others, strict=True):
            p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)
            q.grad = p.grad.clone()
        optimizer.step()
        masters.step()
    for p, q in zip(params, others, strict=True):
        tail = optimizer.state[p]["master_remainder"].view(torch.int16)
        bits = (p.detach().view(torch.int16).int() << 16) + tail
        assert torch.equal(bits.view(torch.float32), masters.state[q]["master_param"])


@pytest.mark.parametrize(
    "way, bytes_each", [("stochastic", 0), ("kahan", 2), ("split", 2)]
)
def test_bytes_of_a_parameter(way, bytes_each):
    params, optimizer = made(way)
    train(optimizer, params, 1)
    assert sum(t.nbytes for t in tails(optimizer)) == bytes_each * sum(
        p.numel() for p in params
    )


@each_way
@pytest.mark.parametrize("kind", ["state_dict", "deepcopy", "pickle"])
def test_a_copy_goes_on_with_the_same_bits(way, kind):
    params, optimizer = made(way, amsgrad=True, ema_decay=0.9)
    train(optimizer, params)
    if kind == "state_dict":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        others, twin = made(way, seed=9, amsgrad=True, ema_decay=0.9)
        train(twin, others, 1)  # a seed and tails of its own
        twin.load_state_dict(torch.load(file, weights_only=True))
        with torch.no_grad():
            for p, q in zip(params, others, strict=True):
                q.copy_(p)
    elif kind == "deepcopy":
        others, twin = copy.deepcopy((params, optimizer))
    else:
        file = io.BytesIO()
        torch.save((params, optimizer), file)
        file.seek(0)
        others, twin = torch.load(file, weights_only=False)
    for mine, its in ((optimizer, params), (twin, others)):
        train(mine, its, seed=1)
    assert_same(params, others)
    assert_same(tails(optimizer), tails(twin))
    assert not fallbacks()


@each_way
def test_state_goes_to_torch_and_comes_back(way):
    params, optimizer = made(way)
    train(optimizer, params)
    others, _ = made(way)
    theirs = torch.optim.AdamW(others, lr=0.01)
    theirs.load_state_dict(optimizer.state_dict())
    back, twin = made(way)
    twin.load_state_dict(theirs.state_dict())
    assert_same(
        [s["exp_avg"] for s in optimizer.state.values()],
        [s["exp_avg"] for s in twin.state.values()],
    )
    train(twin, back, 1)


@pytest.mark.parametrize("before, after", [(True, "split"), ("split", True)])
def test_master_weights_load_in_either_form(before, after):
    params, optimizer = made("split", master_weights=before)
    train(optimizer, params)
    others, twin = made("split", seed=4, master_weights=after)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():  # after the optimizer, as many scripts do
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    for mine, its in ((optimizer, params), (twin, others)):
        train(mine, its, seed=1)
    assert_same(params, others)
    assert ("master_param" in twin.state[others[0]]) == (after is True)
    assert ("master_remainder" in twin.state[others[0]]) == (after == "split")


def test_a_master_of_other_weights_is_not_kept():
    params, optimizer = made("split", master_weights=True)
    train(optimizer, params)
    others, twin = made("split", seed=4)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in others:
        p.grad = torch.zeros_like(p)
    twin.step()
    for p, q in zip(others, made("split", seed=4)[0], strict=True):
        torch.testing.assert_close(p, q, rtol=0.01, atol=0.02)


def test_tails_that_no_option_asks_for_are_dropped_with_a_warning():
    params, optimizer = made("split")
    train(optimizer, params)
    others, plain = made("stochastic")
    with pytest.warns(UserWarning, match='no master_weights="split"'):
        plain.load_state_dict(optimizer.state_dict())
    assert not tails(plain)
    train(plain, others, 1)


@pytest.mark.parametrize("way", ["kahan", "split"])
def test_a_write_to_a_parameter_drops_what_it_had_lost(way):
    params, optimizer = made(way)
    train(optimizer, params)
    names = list(half.TAILS.values())
    first = next(
        optimizer.state[params[0]][n] for n in names if n in optimizer.state[params[0]]
    )
    assert first.any()
    with torch.no_grad():
        params[0].fill_(2.0)
    twins, plain = copy.deepcopy((params, optimizer))
    for name in names:
        if name in plain.state[twins[0]]:
            plain.state[twins[0]][name].zero_()
    for mine, its in ((optimizer, params), (plain, twins)):
        train(mine, its, 1, seed=2)
    assert_same(params, twins)
    assert fallbacks() == {half.WRITTEN: 1}


def test_a_write_to_a_parameter_is_taken_by_its_master():
    params, optimizer = made("split", master_weights=True)
    train(optimizer, params)
    masters = [optimizer.state[p]["master_param"].clone() for p in params]
    with torch.no_grad():
        params[0].fill_(2.0)
        params[1].mul_(1)  # writes what was there
    for p in params:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    found = [optimizer.state[p]["master_param"] for p in params]
    assert (params[0] == 2).all() and (found[0] == 2).all()
    for before, after in zip(masters[1:], found[1:], strict=True):
        assert torch.equal(before, after)
    assert fallbacks() == {half.WRITTEN: 2}


@pytest.mark.parametrize("way", ["kahan", "split"])
def test_looking_at_the_ema_drops_nothing(way):
    params, optimizer = made(way, ema_decay=0.9)
    twins, twin = made(way, ema_decay=0.9)
    train(optimizer, params)
    train(twin, twins)
    with optimizer.ema_weights():
        pass
    train(optimizer, params, seed=1)
    train(twin, twins, seed=1)
    assert_same(params, twins)
    assert not fallbacks()


# ---- The seed ------------------------------------------------------------------------


def test_the_seed_is_from_torchs_generator_and_in_the_group():
    results = []
    for seed in (1, 1, 2):
        params, optimizer = made("stochastic")
        assert half.SEED not in optimizer.param_groups[0]
        torch.manual_seed(seed)
        train(optimizer, params)
        results.append([p.detach().clone() for p in params])
        assert isinstance(optimizer.state_dict()["param_groups"][0][half.SEED], int)
    assert_same(results[0], results[1])
    assert not torch.equal(results[0][0], results[2][0])


def test_groups_share_a_seed_but_no_numbers():
    params = [torch.nn.Parameter(torch.full((2000,), 1.5, dtype=BF16)) for _ in "ab"]
    groups = [{"params": [p]} for p in params]
    optimizer = AdamW(groups, lr=2**-8, weight_decay=0, rounding="stochastic")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    seeds = {group[half.SEED] for group in optimizer.param_groups}
    assert len(seeds) == 1
    for p in params:  # a step is half an ulp
        assert 0.45 < (p != 1.5).float().mean() < 0.55
    assert 0.45 < (params[0] != params[1]).float().mean() < 0.55


def test_a_skipped_step_consumes_nothing():
    params, optimizer = made("stochastic")
    others, twin = made("stochastic")
    for group in (*optimizer.param_groups, *twin.param_groups):
        group[half.SEED] = 5
    train(optimizer, params, 1)
    train(twin, others, 1)
    scaler = GradScaler("cpu", init_scale=2.0)
    for p in others:
        p.grad = torch.full_like(p, torch.inf)
    scaler.scale(torch.ones(()))
    scaler.step(twin)
    scaler.update()
    train(optimizer, params, seed=1)
    train(twin, others, seed=1)
    assert_same(params, others)


@each_way
def test_results_are_those_of_release_gradients(way):
    torch.manual_seed(0)
    options, dtype = WAYS[way]
    results = []
    for released in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Linear(20, 3))
        model.to(dtype)
        optimizer = AdamW(model.parameters(), lr=0.01, **options)
        if released:
            optimizer.release_gradients()
        for _ in range(3):
            model(torch.ones(4, 9, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
        seed = optimizer.param_groups[0].get(half.SEED)
        assert (seed is not None) == ("rounding" in options)
    assert_same(*results)
    assert not fallbacks()


# ---- Together with the rest ----------------------------------------------------------


@each_way
def test_with_a_scaler_clipping_codes_and_an_ema(way):
    options = {"state_dtype": "int8", "max_grad_norm": 1.0, "ema_decay": 0.9}
    params, optimizer = made(way, **options, zero_grad=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        loss = sum((p.float() ** 2).sum() for p in params)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not any(p.grad.any() for p in params), step
    assert optimizer.grad_norm > 0 and not fallbacks()


def test_float32_parameters_are_stepped_as_always():
    torch.manual_seed(0)
    start = torch.randn(100)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    mixed = AdamW(
        [params[0], torch.nn.Parameter(start.to(BF16))], rounding="stochastic"
    )
    plain = AdamW([params[1]])
    train(mixed, mixed.param_groups[0]["params"])
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        params[1].grad = torch.randn(100, generator=rng)
        torch.randn(100, generator=rng)
        plain.step()
    assert torch.equal(*params)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rounding": "up"}, "rounding must be 'nearest' or 'stochastic', got 'up'"),
        ({"compensation": True}, "compensation must be None or 'kahan', got True"),
        (
            {"master_weights": "half"},
            "master_weights must be False, True or 'split', got 'half'",
        ),
        (
            {"rounding": "stochastic", "compensation": "kahan"},
            "rounding and compensation must not be given together",
        ),
        (
            {"rounding": "stochastic", "master_weights": True},
            "rounding and master_weights must not be given together",
        ),
        (
            {"rounding": "stochastic", "state_dtype": torch.float64},
            "state_dtype must not be float64 with rounding='stochastic'",
        ),
    ],
)
@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_wrong_options_are_refused(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls([torch.zeros(3, requires_grad=True)], **options)


def test_split_is_for_bfloat16():
    param = torch.nn.Parameter(torch.ones(3, dtype=F16))
    optimizer = AdamW([param], master_weights="split")
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="float16 with master_weights"):
        optimizer.step()
    assert (param == 1).all()


@each_way
def test_torchs_step_never_takes_over(way):
    """It would round to nearest, without a word."""
    params, optimizer = made(way)
    params[0].grad = torch.ones_like(params[0])
    optimizer.param_groups[0]["weight_decay"] = -0.1
    before = params[0].detach().clone()
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="is negative"):
        optimizer.step()
    assert torch.equal(params[0], before)


@each_way
def test_memory_is_estimated_with_the_tails(way):
    options, dtype = WAYS[way]
    model = torch.nn.Linear(500, 500).to(dtype)
    sizes = []
    for chosen in (options, {}):
        estimate = trainfast.estimate_memory(
            model,
            torch.zeros(2, 500, dtype=dtype),
            step=lambda net, batch: net(batch).float().sum(),
            optimizer=("trainfast", {"lr": 0.1, **chosen}),
            device="cpu",
        )
        sizes.append(estimate.kinds["optimizer state"])
    extra = 0 if "rounding" in options else 2 * 500 * 501
    assert sizes[0] - sizes[1] == pytest.approx(extra, abs=4096)


def test_memory_is_estimated_with_8_bit_state():
    model = torch.nn.Linear(512, 512)
    estimate = trainfast.estimate_memory(
        model,
        torch.zeros(2, 512),
        step=lambda net, batch: net(batch).sum(),
        optimizer=("trainfast", {"state_dtype": "int8"}),
        device="cpu",
    )
    weights = 512 * 512
    right = weights * 2 + weights // 128 * 12 + 512 * 8  # the bias keeps floats
    assert estimate.kinds["optimizer state"] == pytest.approx(right, abs=1024)
