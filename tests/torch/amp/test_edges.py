"""trainfast.torch's scaler, clipping and scheduler at the edges: compiled loops,
checkpoints between two decisions, optimizers that write what a scaler gives them."""

import copy
import inspect
import math
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

import trainfast
from trainfast.torch import AdamW, GradScaler, SkipAwareScheduler, clip_grad_norm_

pytestmark = pytest.mark.usefixtures("amp_kernels_at_any_size")

MAKERS = {
    "ours": lambda params: AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_a_compiled_loop_takes_the_same_steps(maker, kind):
    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = MAKERS[maker](model.parameters())
        scaler = kind("cpu", 8.0)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        step = torch.compile(step, backend="eager") if compiled else step
        return [float(step(torch.ones(3, 4)).detach()) for _ in range(4)]

    assert run(True) == pytest.approx(run(False), rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        dict(max_grad_norm=0.5),
        dict(ema_decay=0.5, weight_copy_dtype=torch.float16),
        dict(master_weights=True, zero_grad=True),
        dict(state_dtype=torch.float32, write_back_grads=True),
    ],
    ids="+".join,
)
def test_options_hold_in_a_compiled_step(options):
    def run(compiled):
        torch._dynamo.reset()
        param = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.bfloat16))
        param.grad = torch.empty_like(param)
        optimizer = AdamW([param], lr=0.1, **options)

        def step():
            optimizer.step()

        step = torch.compile(step, backend="eager") if compiled else step
        for value in (1.0, 2.0, 3.0):
            param.grad.fill_(value)
            step()
        return [param.detach(), param.grad, *optimizer.state[param].values()]

    compiled, plain = run(True), run(False)
    assert len(compiled) == len(plain)
    assert all(map(torch.equal, compiled, plain))


class Loop:
    """Iterations under a helped scheduler; notes the rate of each optimizer step."""

    def __init__(self):
        self.param = torch.nn.Parameter(torch.ones(3))
        self.optimizer = AdamW([self.param], lr=1.0)
        self.scaler = GradScaler("cpu", init_scale=8.0)
        self.scaler.scale(torch.zeros(()))
        inner = ExponentialLR(self.optimizer, 0.5)
        self.scheduler = SkipAwareScheduler(inner, self.scaler)
        self.rates = []

    def run(self, steps, bad):
        for step in steps:
            value = math.inf if step in bad else 1.0
            self.param.grad = torch.full_like(self.param, value)
            self.scaler.step(self.optimizer)
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.scaler.update()
            self.scheduler.step()


def test_an_optimizers_checkpoint_has_the_rate_of_the_next_step():
    bad = (1, 5)
    whole, begun, resumed = Loop(), Loop(), Loop()
    whole.run(range(8), bad)
    begun.run(range(4), bad)
    saved = begun.optimizer.state_dict(), begun.scheduler.state_dict()
    assert saved[0]["param_groups"][0]["lr"] == 0.125
    resumed.run(range(1), ())  # what is due here must not reach what is loaded
    resumed.optimizer.load_state_dict(saved[0])
    resumed.scheduler.load_state_dict(saved[1])
    resumed.rates.clear()
    resumed.run(range(4, 8), bad)
    assert begun.rates + resumed.rates == whole.rates


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda loop: pickle.loads(pickle.dumps(loop))]
)
def test_a_copied_scheduler_decides_as_the_first_one(twin_of):
    """Before the optimizer's step, though a copied optimizer has lost its hooks."""
    loop = Loop()
    loop.run(range(3), (1,))
    twin = twin_of(loop)
    for each in (loop, twin):
        each.scaler.scale(torch.zeros(()))  # a copy's scale is made anew, as torch's is
        each.run(range(3, 7), (4,))
    assert twin.rates == loop.rates == [1.0, 0.5, 0.5, 0.25, 0.125, 0.125, 0.0625]


def test_an_optimizer_may_write_the_scale_that_it_is_given(backend, device):
    class Writes(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            self.grad_scale.mul_(4.0)

    param = torch.nn.Parameter(torch.ones(3, device=device))
    param.grad = torch.ones_like(param)
    scaler = GradScaler(device, init_scale=8.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(Writes([param]))
    assert scaler.get_scale() == 8


def test_gradients_that_need_no_clipping_keep_their_version(backend, device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    param.grad = torch.ones_like(param)
    version = param.grad._version
    clip_grad_norm_([param], 100.0)
    assert param.grad._version == version or device == "cuda"
    clip_grad_norm_([param], 0.1)
    assert param.grad._version > version


# ---- torch's own scenarios for its scaler, in our words ------------------------------


@pytest.mark.parametrize("name", ["GradScaler", "clip_grad_norm_", "clip_grad_value_"])
def test_signatures_begin_as_torchs(name):
    theirs = {"GradScaler": torch.amp.GradScaler}.get(name)
    pairs = [(getattr(trainfast.torch, name), theirs or getattr(torch.nn.utils, name))]
    if theirs is not None:
        methods = [n for n, _ in inspect.getmembers(theirs, inspect.isfunction)]
        methods = [n for n in methods if not n.startswith("_")]
        assert len(methods) > 10
        pairs += [(getattr(pairs[0][0], n), getattr(theirs, n)) for n in methods]
    for mine, torchs in pairs:
        ours = list(inspect.signature(mine).parameters.values())
        wanted = list(inspect.signature(torchs).parameters.values())
        for one, other in zip(ours, wanted, strict=False):
            assert (one.name, one.kind, one.default) == (
                other.name,
                other.kind,
                other.default,
            )
        assert all(one.kind is one.KEYWORD_ONLY for one in ours[len(wanted) :])


def two_worlds(device, maker, loop, **options):
    """Runs `loop(scaler, params, optimizer)` with our scaler and with torch's."""
    results = []
    for cls in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(4, 4, device=device)) for _ in range(2)
        ]
        scaler = cls(device, init_scale=128.0, growth_interval=2)
        loop(scaler, params, MAKERS[maker](params))
        results.append([*params, torch.tensor(scaler.get_scale(), device=device)])
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, equal_nan=True)
    return results[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maker", MAKERS)
def test_training_under_autocast_agrees_with_torchs(backend, device, maker, dtype):
    def loop(scaler, params, optimizer):
        x = torch.randn(8, 4, device=device)
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast(device, dtype):
                hidden = torch.nn.functional.linear(x, params[0]).relu()
                out = torch.nn.functional.linear(hidden, params[1])
                assert out.dtype == dtype
            loss = out.float().square().mean() * (math.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()

    *_, scale = two_worlds(device, maker, loop)
    assert scale == 256


@pytest.mark.parametrize("maker", MAKERS)
def test_a_gradient_penalty_is_scaled_and_unscaled_by_hand(backend, device, maker):
    def loop(scaler, params, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            loss = sum((p**3).sum() for p in params)
            scaled = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
            inverse = 1.0 / scaler.get_scale()
            penalty = sum((g * inverse).square().sum() for g in scaled).sqrt()
            scaler.scale(loss + penalty).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    two_worlds(device, maker, loop)


@pytest.mark.parametrize("maker", MAKERS)
def test_gradients_spoilt_after_unscale_are_stepped_with(backend, device, maker):
    def loop(scaler, params, optimizer):
        scaler.scale(sum(p.sum() for p in params)).backward()
        scaler.unscale_(optimizer)
        for param, value in zip(params, (math.inf, math.nan), strict=True):
            param.grad.fill_(value)
        scaler.step(optimizer)
        scaler.update()

    *params, scale = two_worlds(device, maker, loop)
    assert not any(p.isfinite().any() for p in params) and scale == 128


def test_several_losses_and_optimizers_step_once_each(backend, device):
    def loop(scaler, params, optimizer):
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        second = MAKERS["sgd"](others)
        for bad in (False, True, False, False):
            optimizer.zero_grad()
            second.zero_grad()
            one = sum((p * q).sum() for p, q in zip(params, others, strict=True))
            two = sum(
                (p - q).square().sum() for p, q in zip(params, others, strict=True)
            )
            scaler.scale(one).backward(retain_graph=True)
            scaler.scale(two * (math.inf if bad else 1.0)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.step(second)
            scaler.update()

    *_, scale = two_worlds(device, "ours", loop)
    assert scale == 128


# ---- At the edges of a list of gradients ---------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids="+".join)
def test_the_only_gradient_may_be_the_bad_one(backend, device, bad, options):
    param = torch.nn.Parameter(torch.ones((), device=device))
    param.grad = torch.full_like(param, bad)
    optimizer, scaler = AdamW([param], **options), GradScaler(device, init_scale=8.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    scaler.update()
    assert param == 1 and scaler.get_scale() == 4 and scaler.step_was_skipped()


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids="+".join)
def test_without_any_gradient_there_is_no_check(backend, device, options):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    scaler = GradScaler(device, init_scale=8.0)
    optimizer = AdamW(params[:1], amp_scaling=True, **options)  # like torch's fused one
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to"):
        scaler.update()
    other = AdamW(params[1:], **options)
    params[1].grad = torch.full_like(params[1], 8.0)
    scaler.step(other)
    scaler.update()  # one of two is enough
    assert not optimizer.state and optimizer.grad_norm is None
    assert (params[0] == 1).all() and not (params[1] == 1).any()


@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_a_sparse_gradient_is_refused_with_torchs_text(backend, device, kind):
    param = torch.nn.Parameter(torch.ones(5, 2, device=device))
    param.grad = torch.eye(5, 2, device=device).to_sparse()
    scaler, optimizer = kind(device, init_scale=8.0), AdamW([param])
    scaler.scale(torch.zeros((), device=device))
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        scaler.step(optimizer)
    assert (param == 1).all()


@pytest.mark.parametrize("start", [0.0, math.inf, math.nan, 2.0**127])
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_scales_out_of_range_do_to_ours_what_they_do_to_torchs(backend, start, kind):
    seen = []
    for scaler_kind, cls in ((kind, AdamW), (torch.amp.GradScaler, torch.optim.AdamW)):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer, scaler = cls([param], lr=0.1), scaler_kind("cpu", growth_interval=1)
        scaler.scale(param.sum())
        scaler.update(start)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((param * param).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append([*param.tolist(), scaler.get_scale()])
    assert seen[0] == pytest.approx(seen[1], nan_ok=True)


def test_tied_weights_in_two_groups_are_stepped_one_after_the_other(backend, device):
    results = []
    for cls in (AdamW, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.ones(6, device=device))
        tied = torch.nn.Parameter(weight.data)
        optimizer = cls([{"params": [weight], "lr": 0.1}, {"params": [tied]}])
        weight.grad, tied.grad = torch.ones_like(weight), -torch.ones_like(tied)
        optimizer.step()
        optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results)
