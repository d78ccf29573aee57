"""trainfast.torch.GradScaler as a drop-in for torch's, on every backend."""

import copy
import gc
import math
import pickle
import warnings

import pytest
import torch

import trainfast
from trainfast.torch import AdamW, GradScaler, SkipAwareScheduler, clip_grad_norm_

MAKERS = {
    "ours": lambda params: AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "loop": lambda params: torch.optim.SGD(params, lr=0.1),
    "without": lambda params: AdamW(params, lr=0.1, amp_scaling=False),
}
BAD = [math.inf, -math.inf, math.nan]


@pytest.fixture(autouse=True)
def forget_stats(amp_kernels_at_any_size):
    torch.manual_seed(0)
    trainfast.reset_stats()


@pytest.fixture(params=MAKERS)
def maker(request):
    return MAKERS[request.param]


def make_params(device, dtype=torch.float32, shapes=((5,), (3, 4))):
    return [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]


def backward(scaler, params, factor=1.0):
    loss = sum((p * p).sum() for p in params) * factor
    scaler.scale(loss).backward()


def iterate(scaler, optimizer, params, factor=1.0):
    optimizer.zero_grad()
    backward(scaler, params, factor)
    scaler.step(optimizer)
    scaler.update()


def bits(params):
    return [p.detach().clone() for p in params]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- Steps ---------------------------------------------------------------------------


def test_training_agrees_with_torchs_scaler(backend, device, maker):
    runs = []
    for cls in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        params = make_params(device)
        scaler = cls(device, init_scale=128.0, growth_interval=2)
        optimizer = maker(params)
        for factor in (1, math.inf, 1, 1, 1, math.nan, 1):
            iterate(scaler, optimizer, params, factor)
        runs.append((params, scaler.state_dict()))
    (ours, state), (theirs, wanted) = runs
    assert state == wanted
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
    assert "amp" not in trainfast.stats().fallbacks


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 7, -1])
def test_one_bad_element_skips_the_step(backend, device, maker, bad, place):
    params = make_params(device, shapes=[(3,), (1021,)])
    scaler, optimizer = GradScaler(device, init_scale=4.0), maker(params)
    iterate(scaler, optimizer, params)
    before = bits(params)
    optimizer.zero_grad()
    backward(scaler, params)
    params[1].grad[place] = bad
    scaler.step(optimizer)
    scaler.update()
    assert same(params, before)
    assert scaler.get_scale() == 2.0
    assert scaler.step_was_skipped() and scaler.step_was_skipped(optimizer)
    iterate(scaler, optimizer, params)
    assert not same(params, before)
    assert not scaler.step_was_skipped(optimizer)


def test_ours_leaves_the_gradients_as_backward_left_them(backend, device):
    params = make_params(device)
    scaler, optimizer = GradScaler(device, init_scale=64.0), MAKERS["ours"](params)
    backward(scaler, params)
    before = bits([p.grad for p in params])
    scaler.step(optimizer)
    assert same([p.grad for p in params], before)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "_measure_inf")


def test_unscale_then_clip_then_step(backend, device, maker):
    params, exact = make_params(device), None
    optimizer = maker(params)
    scaler = GradScaler(device, init_scale=1024.0)
    backward(scaler, params)
    exact = [2 * p.detach() for p in params]
    scaler.unscale_(optimizer)
    for p, grad in zip(params, exact, strict=True):
        torch.testing.assert_close(p.grad, grad)
    clip_grad_norm_(params, 0.5)
    before = bits(params)
    scaler.step(optimizer)
    scaler.update()
    assert not same(params, before)
    norm = torch.cat([p.grad.flatten() for p in params]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-5)


def test_a_check_of_torchs_fused_optimizer_writes_nothing(backend, device):
    params = make_params(device)
    scaler, optimizer = GradScaler(device, init_scale=2.0), MAKERS["fused"](params)
    backward(scaler, params)
    versions = [p.grad._version for p in params]
    scaler._check_inf_per_device(optimizer)
    assert [p.grad._version for p in params] == versions


def test_optimizers_share_a_scaler(backend, device):
    scaler = GradScaler(device, init_scale=16.0)
    pairs = [(maker(p), p) for maker in MAKERS.values() for p in [make_params(device)]]
    before = [bits(params) for _, params in pairs]
    for _, params in pairs:
        backward(scaler, params)
    pairs[1][1][0].grad[0] = math.inf
    for optimizer, _ in pairs:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    skipped = [scaler.step_was_skipped(optimizer) for optimizer, _ in pairs]
    assert skipped == [False, True, False, False]
    unchanged = [same(old, p) for old, (_, p) in zip(before, pairs, strict=True)]
    assert unchanged == skipped


def test_more_flags_than_the_core_takes_are_combined(backend, device):
    scaler = GradScaler(device, init_scale=16.0)
    pairs = [(AdamW(p), p) for p in (make_params(device) for _ in range(20))]
    for _, params in pairs:
        backward(scaler, params)
    pairs[18][1][0].grad[0] = math.nan
    for optimizer, _ in pairs:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert [scaler.step_was_skipped(o) for o, _ in pairs].index(True) == 18


def test_no_flag_is_a_sum(backend, device):
    """torch's fused step does not skip at found_inf == 2."""
    params = make_params(device)
    scaler, optimizer = GradScaler(device, init_scale=2.0), MAKERS["fused"](params)
    backward(scaler, params)
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    one = torch.ones((), device=device)
    state["found_inf_per_device"] = {"a": one, "b": one.clone()}  # as of two devices
    before = bits(params)
    scaler.step(optimizer)
    assert same(params, before)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert one == 1


def test_accumulation_is_one_step(backend, device, maker):
    params = make_params(device)
    scaler, optimizer = GradScaler(device, init_scale=4.0), maker(params)
    whole = [p.detach().clone().requires_grad_() for p in params]
    backward(scaler, params, 0.5)
    backward(scaler, params, 0.5)
    scaler.unscale_(optimizer)
    for p in params:
        torch.testing.assert_close(p.grad, 2 * p.detach())
    scaler.step(optimizer)
    iterate(GradScaler(device, init_scale=4.0), maker(whole), whole)
    for p, q in zip(params, whole, strict=True):
        torch.testing.assert_close(p, q)


def test_an_optimizer_of_the_older_contract_gets_the_scaler():
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, grad_scaler=None):
            assert grad_scaler is scaler
            grad_scaler._check_inf_per_device(self)

    params = make_params("cpu")
    scaler, optimizer = GradScaler("cpu"), Older(params)
    backward(scaler, params)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(optimizer)
    scaler.update()


def test_gradients_that_come_after_unscale_are_refused(backend, maker):
    params = make_params("cpu")
    scaler, optimizer = GradScaler("cpu"), maker(params)
    loss = scaler.scale((params[0] * 2).sum())
    scaler.unscale_(optimizer)
    loss.backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this"):
        scaler.step(optimizer)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("cls", [AdamW, torch.optim.AdamW])
def test_a_step_without_gradients_is_refused_as_torchs(cls, unscaled):
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler, optimizer = kind("cpu"), cls(params := make_params("cpu"))
        scaler.scale(params[0].sum())
        scaler.unscale_(optimizer) if unscaled else None
        with pytest.raises(AssertionError, match="No inf checks were recorded for"):
            scaler.step(optimizer)


def test_a_failing_step_leaves_nothing_on_the_optimizer(monkeypatch):
    params = make_params("cpu")
    scaler, optimizer = GradScaler("cpu"), AdamW(params)
    backward(scaler, params)

    def fail(groups, key):
        raise RuntimeError("no")

    monkeypatch.setattr(optimizer, "_step_groups", fail)
    with pytest.raises(RuntimeError, match="no"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf", "_measure_inf"} & set(vars(optimizer))
    monkeypatch.undo()
    scaler.step(optimizer)


# ---- Dtypes and layouts --------------------------------------------------------------


def test_bfloat16_gradients_are_unscaled(backend, device, maker):
    params = make_params(device, torch.bfloat16)
    scaler, optimizer = GradScaler(device, init_scale=8.0), maker(params)
    backward(scaler, params)
    scaler.unscale_(optimizer)
    for p in params:
        assert torch.equal(p.grad, 2 * p.detach())
    scaler.step(optimizer)


def test_float16_gradients_are_refused_with_torchs_text(backend, maker):
    params = make_params("cpu", torch.float16)
    scaler, optimizer = GradScaler("cpu", init_scale=2.0), maker(params)
    backward(scaler, params)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("amp_scaling", [True, False])
def test_float16_gradients_of_master_weights_are_taken(backend, device, amp_scaling):
    params = make_params(device, torch.float16)
    optimizer = AdamW(params, lr=0.1, master_weights=True, amp_scaling=amp_scaling)
    scaler = GradScaler(device, init_scale=4.0)
    iterate(scaler, optimizer, params)
    backward(scaler, params)
    scaler.unscale_(optimizer)
    params[0].grad[0] = math.inf  # after the check: as with torch, not seen
    scaler.step(optimizer)
    assert not scaler.step_was_skipped()


def test_all_dtypes_of_a_device_are_unscaled_in_one_call(backend, device):
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    params = [p for dtype in dtypes for p in make_params(device, dtype)]
    scaler, optimizer = GradScaler(device, init_scale=8.0), MAKERS["loop"](params)
    for p in params:
        backward(scaler, [p])
    scaler.unscale_(optimizer)
    assert trainfast.stats().calls == {"amp": {backend: 1}}
    for p in params:
        torch.testing.assert_close(p.grad, 2 * p.detach())


@pytest.mark.parametrize("bad", [1.0, math.inf])
def test_sparse_gradients_are_unscaled_and_checked(backend, bad):
    weight = torch.randn(6, 2, requires_grad=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ids = torch.tensor([1, 4, 1])
    used = torch.nn.functional.embedding(ids, weight, sparse=True)
    scaler.scale((used * bad).sum()).backward()
    assert weight.grad.is_sparse
    scaler.unscale_(optimizer)
    if bad == 1.0:
        assert torch.equal(weight.grad.to_dense()[1], torch.full((2,), 2.0))
    scaler.step(optimizer)
    assert scaler.step_was_skipped() == (bad != 1.0)


def test_gradients_with_gaps_go_torchs_way(backend):
    param = torch.zeros(4, requires_grad=True)
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), MAKERS["loop"]([param])
    backward(scaler, [param])
    param.grad = torch.full((4, 2), 16.0)[:, 0]
    scaler.unscale_(optimizer)
    assert (param.grad == 2).all()
    assert sum(trainfast.stats().fallbacks["amp"].values()) == 1


# ---- The scale -----------------------------------------------------------------------


def scales(scaler, flags):
    """The scale after each iteration, with an overflow where the flag is true."""
    param = torch.zeros(3, requires_grad=True)
    optimizer, seen = AdamW([param]), []
    for flag in flags:
        iterate(scaler, optimizer, [param], math.inf if flag else 1.0)
        seen.append(scaler.get_scale())
    return seen


def without_the_core(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("no amp_update here")

    monkeypatch.setattr("trainfast._core.amp_update", refuse)


@pytest.mark.parametrize("core", [True, False])
def test_bounds_stop_the_scale(backend, monkeypatch, core):
    if not core:
        without_the_core(monkeypatch)
    options = {"init_scale": 8.0, "growth_interval": 1}
    scaler = GradScaler("cpu", min_scale=3.0, max_scale=20.0, **options)
    assert scales(scaler, [1, 1, 1, 0, 0, 0, 0]) == [4, 3, 3, 6, 12, 20, 20]
    scaler.update(1.0)  # below the bound: not moved by it
    assert scales(scaler, [1, 0, 0]) == [1, 2, 4]


@pytest.mark.parametrize("core", [True, False])
def test_hysteresis_counts_overflows_in_a_row(backend, monkeypatch, core):
    if not core:
        without_the_core(monkeypatch)
    scaler = GradScaler("cpu", init_scale=8.0, hysteresis=2, growth_interval=100)
    assert scales(scaler, [1, 0, 1, 1, 1, 0, 1, 1]) == [8, 8, 8, 4, 2, 2, 2, 1]


@pytest.mark.parametrize("start", [0.0, math.inf, math.nan, 2.0**127])
def test_scales_out_of_range_behave_as_torchs(backend, start):
    seen = []
    for cls in (GradScaler, torch.amp.GradScaler):
        param = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler = cls("cpu", growth_interval=1)
        scaler.scale(param.sum())
        scaler.update(start)
        scaled = []
        for factor in (1.0, math.inf, 1.0):
            iterate(scaler, optimizer, [param], factor)
            scaled.append(scaler.get_scale())
        seen.append(scaled)
    assert seen[0] == pytest.approx(seen[1], nan_ok=True)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"init_scale": 0.0}, "init_scale"),
        ({"init_scale": math.nan}, "init_scale"),
        ({"init_scale": math.inf}, "init_scale"),
        ({"min_scale": 0.0}, "min_scale"),
        ({"min_scale": math.nan}, "min_scale"),
        ({"max_scale": -1.0}, "max_scale"),
        ({"max_scale": math.inf}, "max_scale"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale must be <= max_scale"),
        ({"init_scale": 1.0, "min_scale": 2.0}, "init_scale must be in"),
        ({"init_scale": 8.0, "max_scale": 2.0}, "init_scale must be in"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"hysteresis": 1.5}, "hysteresis"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        GradScaler("cpu", **options)


@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_errors_of_the_constructor_are_torchs(options):
    with pytest.raises(AssertionError) as torchs:
        torch.amp.GradScaler("cpu", **options)
    with pytest.raises(AssertionError) as mine:
        GradScaler("cpu", **options)
    assert str(mine.value) == str(torchs.value)


def test_repeated_unscale_does_nothing_more(backend):
    params = make_params("cpu")
    scaler = GradScaler("cpu", init_scale=4.0, repeated_unscale=True)
    optimizer = AdamW(params)
    backward(scaler, params)
    scaler.unscale_(optimizer)
    once = bits([p.grad for p in params])
    scaler.unscale_(optimizer)
    assert same([p.grad for p in params], once)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
        scaler.unscale_(optimizer)


def test_a_disabled_scaler_does_nothing(maker):
    params = make_params("cpu")
    scaler, optimizer = GradScaler("cpu", enabled=False), maker(params)
    before = bits(params)
    iterate(scaler, optimizer, params)
    scaler.unscale_(optimizer)
    assert not same(params, before)
    assert scaler.state_dict() == {} and scaler.get_scale() == 1.0
    assert scaler.step_was_skipped() is False
    scaler.load_state_dict({})
    pickle.loads(pickle.dumps(scaler))


# ---- State ---------------------------------------------------------------------------


def test_state_is_torchs_and_loads_both_ways(backend):
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scales(scaler, [1, 0])
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict() == scaler.state_dict()
    again = GradScaler("cpu")
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == scaler.state_dict()
    assert scales(again, [0, 0]) == scales(scaler, [0, 0]) == [4, 8]


def test_options_travel_with_the_state(backend):
    options = {"min_scale": 2.0, "max_scale": 64.0, "hysteresis": 3}
    scaler = GradScaler("cpu", init_scale=8.0, **options)
    scales(scaler, [1])
    state = scaler.state_dict()
    assert {**state, **options, "_hysteresis_tracker": 2} == state
    for fresh in (GradScaler("cpu"), GradScaler("cpu", hysteresis=2)):
        scales(fresh, [0])
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert twin.state_dict() == state
        assert scales(twin, [1, 1]) == [8, 4]
    del state["hysteresis"]
    fresh = GradScaler("cpu", hysteresis=2)
    fresh.load_state_dict({**state, "_hysteresis_tracker": 3})
    assert fresh.state_dict()["_hysteresis_tracker"] == 2


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"_growth_tracker": None}, KeyError, "_growth_tracker"),
        ({"scale": None}, KeyError, "scale"),
        ({"scale": "much"}, ValueError, "scale"),
        ({"growth_interval": 2**40}, ValueError, "growth_interval"),
        ({"min_scale": -1.0}, ValueError, "min_scale"),
        ({"hysteresis": 0}, ValueError, "hysteresis"),
        ({"_hysteresis_tracker": "a"}, ValueError, "_hysteresis_tracker"),
    ],
)
@pytest.mark.parametrize("warm", [True, False])
def test_a_state_that_is_wrong_changes_nothing(change, error, text, warm):
    scaler = GradScaler("cpu", init_scale=8.0)
    if warm:
        scales(scaler, [0])
    before = scaler.state_dict()
    wrong = {**before, "scale": 2.0, "growth_factor": 3.0, **change}
    wrong = {name: value for name, value in wrong.items() if value is not None}
    with pytest.raises(error, match=text):
        scaler.load_state_dict(wrong)
    assert scaler.state_dict() == before


def test_skips_are_asked_for_after_a_step_only():
    scaler = GradScaler("cpu")
    optimizer = AdamW(make_params("cpu"))
    for arguments in ((), (optimizer,)):
        with pytest.raises(RuntimeError, match="must come after a step"):
            scaler.step_was_skipped(*arguments)


def test_a_scaler_keeps_no_optimizer_alive():
    scaler, params = GradScaler("cpu"), make_params("cpu")
    optimizer = AdamW(params)
    iterate(scaler, optimizer, params)
    assert len(scaler._steps) == 1
    del optimizer
    gc.collect()
    assert len(scaler._steps) == 0


# ---- Schedulers ----------------------------------------------------------------------


def rates(flags, maker, helper, calls=(1,)):
    """The learning rate that each iteration's step has used.

    `calls` says how often in turn the scheduler's step() comes after an iteration.
    """
    torch.manual_seed(0)
    param = torch.randn(3, requires_grad=True)
    optimizer = maker([param])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = GradScaler("cpu", init_scale=4.0)
    wrapped = SkipAwareScheduler(scheduler, scaler) if helper else scheduler
    used = []
    optimizer.register_step_post_hook(
        lambda o, *_: used.append(o.param_groups[0]["lr"])
    )
    for i, flag in enumerate(flags):
        iterate(scaler, optimizer, [param], math.inf if flag else 1.0)
        for _ in range(calls[i % len(calls)]):
            if helper or not scaler.step_was_skipped():
                wrapped.step()
    return used, wrapped.get_last_lr(), wrapped.state_dict(), param.detach()


@pytest.mark.parametrize("flags", [[0, 0, 0], [1, 0, 1, 1, 0, 0, 1], [0, 1, 0]])
@pytest.mark.parametrize("calls", [(1,), (2,), (0, 3, 1)])
def test_a_scheduler_advances_as_if_it_had_waited(backend, maker, flags, calls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = rates(flags, maker, True, calls)
        ideal = rates(flags, maker, False, calls)
    assert mine[:2] == ideal[:2]
    for state in (mine[2], ideal[2]):
        state.pop("_last_lr", None)
    assert mine[2] == ideal[2]
    assert torch.equal(mine[3], ideal[3])


def test_a_scheduler_decides_at_the_next_step_and_when_it_is_read(backend):
    param = torch.randn(3, requires_grad=True)
    optimizer = AdamW([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scheduler = SkipAwareScheduler(inner, scaler)
    with pytest.raises(RuntimeError, match="must come after a step"):
        scheduler.step()
    iterate(scaler, optimizer, [param])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert scheduler.get_last_lr() == [0.5]
    assert scheduler.gamma == 0.5 and scheduler.last_epoch == 1
    saved = scheduler.state_dict()
    iterate(scaler, optimizer, [param])
    scheduler.step()
    scheduler.load_state_dict(saved)
    assert scheduler.last_epoch == 1
    with pytest.raises(AttributeError):
        scheduler.nothing_like_it  # noqa: B018


# ---- Under the framework's names -----------------------------------------------------


def test_patched_names_are_ours_and_torchs_classes_still_work():
    params = make_params("cpu")
    theirs = pickle.dumps(torch.amp.GradScaler("cpu"))
    with trainfast.patch("amp", "clip"):
        assert torch.amp.GradScaler is GradScaler
        assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with pytest.warns(FutureWarning, match="is deprecated"):
            old = torch.cuda.amp.GradScaler(enabled=False)
        assert isinstance(old, GradScaler) and isinstance(
            old, torch.cuda.amp.GradScaler
        )
        assert type(pickle.loads(pickle.dumps(scaler))) is GradScaler
        assert type(pickle.loads(theirs)) is not GradScaler
        iterate(scaler, AdamW(params), params)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    assert torch.amp.GradScaler is not GradScaler
    assert isinstance(scaler, torch.amp.GradScaler)
    calls = trainfast.stats().calls
    assert calls["amp"] and calls["clip"]
