"""Gradient scalers beside code around step(): frameworks, subclasses, hooks."""

import copy
import functools
import math

import pytest
import torch

import trainfast
from trainfast.torch import Adam, AdamW, GradScaler, SkipAwareScheduler


def make_params():
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in [(5,), (3, 4)]]


def iterate(scaler, optimizer, params, factor=1.0):
    optimizer.zero_grad()
    scaler.scale(sum((p * p).sum() for p in params) * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def watch(optimizer, how, seen):
    """Puts code of others around the optimizer's step; it notes the first gradient."""
    grad = optimizer.param_groups[0]["params"][0]

    def note(*_):
        seen.append(grad.grad.clone())

    step = optimizer.step
    if how == "replaced":
        optimizer.step = lambda *args: (note(), step(*args))[1]
    elif how == "wrapped":
        optimizer.step = functools.wraps(step)(lambda *args: (note(), step(*args))[1])
    elif how == "overridden":

        class Watched(type(optimizer)):
            def step(self, closure=None):
                note()
                return super().step(closure)

        optimizer.__class__ = Watched
    elif how == "pre_hook":
        optimizer.register_step_pre_hook(note)
    else:
        optimizer.register_step_post_hook(note)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(
    "how", ["replaced", "wrapped", "overridden", "pre_hook", "post_hook"]
)
def test_code_around_a_step_sees_what_it_sees_with_torch(backend, how, scheduled):
    runs = []
    for scaler_cls, cls in (
        (torch.amp.GradScaler, torch.optim.AdamW),
        (GradScaler, AdamW),
        (torch.amp.GradScaler, AdamW),
    ):
        params, seen = make_params(), []
        scaler, optimizer = scaler_cls("cpu", init_scale=64.0), cls(params, lr=0.1)
        if how == "overridden":  # before there is a scheduler, as classes are made
            watch(optimizer, how, seen)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if how != "overridden":
            watch(optimizer, how, seen)
        for factor in (1.0, math.inf, 1.0):
            iterate(scaler, optimizer, params, factor)
        runs.append([*params, *seen])
    assert len(runs[0]) == len(params) + 2
    for run in runs[1:]:
        for mine, theirs in zip(run, runs[0], strict=True):
            torch.testing.assert_close(mine, theirs)


def test_schedulers_do_not_end_the_single_call(backend):
    params = make_params()
    scaler, optimizer = GradScaler("cpu", init_scale=64.0), AdamW(params, lr=0.1)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler = SkipAwareScheduler(inner, scaler)
    for _ in range(2):
        iterate(scaler, optimizer, params)
        scheduler.step()
        for p in params:  # only read: the step unscales in registers
            assert p.grad.abs().max() > 64


@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_scaling_is_offered_where_torch_or_an_option_offers_it(cls):
    def offered(optimizer):
        return getattr(optimizer, "_step_supports_amp_scaling", None)

    theirs = getattr(torch.optim, cls.__name__)
    for fused in (None, False, True):
        params = make_params()
        one, other = cls(params, fused=fused), theirs(params, fused=fused)
        assert offered(one) is offered(other)
        assert offered(copy.deepcopy(one)) is offered(one)
    for options in ({"zero_grad": True}, {"master_weights": True}):
        assert offered(cls(make_params(), **options)) is True
        later = cls(make_params())
        later.add_param_group({"params": make_params(), **options})
        assert offered(later) is True
    assert offered(cls(params, max_grad_norm=1.0)) is None
    for asked in (True, False):
        assert offered(cls(params, fused=not asked, amp_scaling=asked)) is asked


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("init_scale", [64.0, 3.7])
def test_small_gradients_are_torchs_with_the_same_bits(bad, init_scale, backend):
    runs = []
    for cls in (torch.amp.GradScaler, GradScaler):
        trainfast.reset_stats()
        params = make_params()
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        scaler = cls("cpu", init_scale, growth_factor=1.7, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(sum((p * p).sum() for p in params)).backward()
            if bad is not None and step == 2:
                params[1].grad[2, 1] = bad
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        runs.append((params, [p.grad for p in params], scaler.get_scale()))
    assert runs[0][2] == runs[1][2]
    for theirs, ours in zip(
        runs[0][0] + runs[0][1], runs[1][0] + runs[1][1], strict=True
    ):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0, equal_nan=True)
    stats = trainfast.stats()
    assert stats.calls == {}
    assert list(stats.fallbacks["amp"].values()) == [5, 5]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.ones(64) for _ in range(3)],
        lambda: [torch.ones(1025)],
        lambda: [torch.ones(64, dtype=torch.float64)],
        lambda: [torch.ones(64, dtype=torch.bfloat16)],
    ],
)
def test_other_gradients_are_unscaled_by_the_kernel(make, backend, device):
    params = [torch.nn.Parameter(value.to(device)) for value in make()]
    optimizer, scaler = torch.optim.SGD(params), GradScaler(device, 4.0)
    for param in params:
        param.grad = torch.full_like(param, 8.0)
    scaler.scale(torch.ones(()))
    trainfast.reset_stats()
    scaler.unscale_(optimizer)
    assert trainfast.stats().calls == {"amp": {backend: 1}}
    assert all((param.grad == 2).all() for param in params)
