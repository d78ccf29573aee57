"""Random orders of calls: trainfast's GradScaler and clipping against torch's.

Each seed makes one sequence of calls, run in two worlds that differ only in whose
scaler, optimizers and clipping they use. After each call both have raised the same, and
are in the same state.
"""

import copy
import random
from collections import Counter

import pytest
import torch

import trainfast
from trainfast.torch import AdamW, GradScaler, clip_grad_norm_, clip_grad_value_

pytestmark = pytest.mark.usefixtures("amp_kernels_at_any_size")

SEQUENCES = 100  # on each backend, which has its own
LENGTH = 14
SHAPES = [(3,), (2, 9), ()]
NO_CHECKS = "No inf checks were recorded for this optimizer."
BAD = (float("inf"), float("-inf"), float("nan"))


class World:
    """A scaler and three optimizers; if it is ours, the first is trainfast's, too."""

    def __init__(self, ours, seed, device, **options):
        self.ours = ours
        self.scaler = (GradScaler if ours else torch.amp.GradScaler)(device, **options)
        gen = torch.Generator().manual_seed(seed)
        self.params = [
            [torch.randn(s, generator=gen).to(device).requires_grad_() for s in SHAPES]
            for _ in range(3)
        ]
        first, second, third = self.params
        self.optimizers = [
            AdamW(first, lr=0.1, write_back_grads=True)  # as torch's fused step does
            if ours
            else torch.optim.AdamW(first, lr=0.1, fused=True),
            torch.optim.AdamW(second, lr=0.1, fused=True),
            torch.optim.SGD(third, lr=0.1),
        ]

    # Each call takes the same random choices in both worlds.

    def backward(self, which, coefficients):
        pairs = zip(self.params[which], coefficients, strict=True)
        device = self.params[which][0].device
        loss = sum((p * c.to(device)).sum() for p, c in pairs if c is not None)
        if isinstance(loss, torch.Tensor):
            self.scaler.scale(loss).backward()

    def zero_grad(self, which):
        self.optimizers[which].zero_grad()

    def unscale(self, which):
        self.scaler.unscale_(self.optimizers[which])

    def clip(self, which, max_norm, strict):
        clip = clip_grad_norm_ if self.ours else torch.nn.utils.clip_grad_norm_
        return float(clip(self.params[which], max_norm, error_if_nonfinite=strict))

    def clip_value(self, which, value):
        clip = clip_grad_value_ if self.ours else torch.nn.utils.clip_grad_value_
        if any(p.grad is not None for p in self.params[which]):  # else torch's fails
            clip(self.params[which], value)

    def step(self, which):
        optimizer = self.optimizers[which]
        if not self.ours and which == 0 and self.finds_nothing(optimizer):
            raise AssertionError(NO_CHECKS)
        try:
            return self.scaler.step(optimizer)
        except AttributeError as error:
            # Gradients came after unscale_(): torch's fused step fails on its own
            # scaler's flag, an int. Ours says what both say for other optimizers.
            assert str(error) == "'int' object has no attribute 'device'"
            del optimizer.grad_scale, optimizer.found_inf
            raise AssertionError(NO_CHECKS) from error

    def finds_nothing(self, optimizer):
        """Whether torch's scaler would refuse this step, for want of gradients, if the
        optimizer left unscaling to it: ours does, torch's fused one does not."""
        if not self.scaler.is_enabled() or self.scaler._scale is None:
            return False
        state = self.scaler._per_optimizer_states[id(optimizer)]
        if state["stage"].name == "READY":
            groups = optimizer.param_groups
            return all(p.grad is None for g in groups for p in g["params"])
        return state["stage"].name == "UNSCALED" and not state["found_inf_per_device"]

    def step_with_closure(self, which):
        return self.scaler.step(self.optimizers[which], closure=lambda: 1.0)

    def update(self):
        self.scaler.update()

    def update_to(self, new_scale):
        self.scaler.update(new_scale)

    def set_factors(self, growth, backoff):
        self.scaler.set_growth_factor(growth)
        self.scaler.set_backoff_factor(backoff)

    def reload(self):
        self.scaler.load_state_dict(self.scaler.state_dict())

    def load(self, state):
        self.scaler.load_state_dict(state)

    def copy(self):
        self.scaler = copy.deepcopy(self.scaler)

    def stages(self):
        states = self.scaler._per_optimizer_states
        return [
            states[id(o)]["stage"] if id(o) in states else None for o in self.optimizers
        ]


def random_coefficients(rng):
    gen = torch.Generator().manual_seed(rng.randrange(2**30))
    made = []
    for shape in SHAPES:
        made.append(torch.randn(shape, generator=gen) if rng.random() < 0.85 else None)
    present = [c for c in made if c is not None]
    if present and rng.random() < 0.2:
        chosen = rng.choice(present).view(-1)
        chosen[rng.choice((0, -1))] = rng.choice(BAD)
    return made


def random_call(rng):
    """The name of a method of World, and its arguments; sensible ones more often."""
    which = rng.randrange(3)
    state = {
        "scale": 8.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 4,
        "_growth_tracker": 1,
    }
    calls = [
        (14, "backward", (which, random_coefficients(rng))),
        (4, "zero_grad", (which,)),
        (5, "unscale", (which,)),
        (4, "clip", (which, rng.choice((0.5, 2, 1e9, 0, -1)), rng.random() < 0.3)),
        (1, "clip_value", (which, rng.choice((0.5, 1e6)))),
        (9, "step", (which,)),
        (0.5, "step_with_closure", (which,)),
        (6, "update", ()),
        (1, "update_to", (rng.choice((4.0, 3.0, torch.tensor(16.0))),)),
        (0.3, "update_to", (torch.ones(2),)),
        (0.3, "set_factors", (rng.choice((0.5, 2.0)), rng.choice((0.5, 1.0)))),
        (1, "reload", ()),
        (0.5, "load", (rng.choice((state, {})),)),
        (1, "copy", ()),
    ]
    weights = [weight for weight, *_ in calls]
    return rng.choices(calls, weights)[0][1:]


def attempt(world, name, arguments):
    """What the call returns, and what it raises."""
    try:
        return getattr(world, name)(*copy.deepcopy(arguments)), None
    except Exception as error:
        return None, (type(error), str(error))


def assert_same(ours, theirs, history):
    assert ours.stages() == theirs.stages(), history
    assert ours.scaler.state_dict() == theirs.scaler.state_dict(), history
    for mine, torchs in zip(ours.params, theirs.params, strict=True):
        for p, q in zip(mine, torchs, strict=True):
            pairs = [(p, q)]
            assert (p.grad is None) == (q.grad is None), history
            if p.grad is not None:
                pairs.append((p.grad, q.grad))
            for a, b in pairs:
                assert torch.allclose(a, b, 1e-4, 1e-6, equal_nan=True), history


def run_sequence(seed, device="cpu", length=LENGTH):
    rng = random.Random(seed)
    options = {
        "init_scale": rng.choice((1.0, 4.0, 2.0**16)),
        "growth_factor": rng.choice((2.0, 1.5)),
        "backoff_factor": rng.choice((0.5, 0.3)),
        "growth_interval": rng.choice((1, 2, 3)),
    }
    ours, theirs = (World(kind, seed, device, **options) for kind in (True, False))
    history, seen = [], Counter()
    for _ in range(length):
        name, arguments = random_call(rng)
        history.append((name, *arguments))
        if any(isinstance(a, torch.Tensor) for a in arguments):
            arguments = tuple(a.to(device) for a in arguments)
        mine, torchs = (attempt(w, name, arguments) for w in (ours, theirs))
        assert mine[1] == torchs[1], history
        assert type(mine[0]) is type(torchs[0]), history
        if mine[0] is not None:
            assert mine[0] == pytest.approx(torchs[0], rel=1e-5, nan_ok=True), history
        seen[mine[1] or name] += 1
        assert_same(ours, theirs, history)
    return seen


def test_any_order_of_calls_agrees_with_torch(backend, device):
    seen = Counter()
    names = [b["name"] for b in trainfast.backends()]
    first = names.index(backend) * SEQUENCES
    for seed in range(first, first + SEQUENCES):
        seen += run_sequence(seed, device)
    assert seen["step"] > 0.8 * SEQUENCES
    texts = [key[1] for key in seen if isinstance(key, tuple)]
    for part in (
        "unscale_() has already been called on this optimizer since the last update().",
        "unscale_() is being called after step().",
        "step() has already been called since the last update().",
        "No inf checks were recorded prior to update.",
        NO_CHECKS,
        "Attempted step but _scale is None.",
        "Attempted update but _scale is None.",
        "Closure use is not currently supported if GradScaler is enabled.",
        "may only be pickled at the beginning",
        "The source state dict is empty",
        "new_scale should be a float",
        "The total norm of order 2.0 for gradients",
    ):
        assert any(part in text for text in texts), part


def test_most_of_it_ran_on_the_kernel(backend, device):
    trainfast.reset_stats()
    for seed in range(30):
        run_sequence(seed, device)
    stats = trainfast.stats()
    for name in ("adamw", "amp", "clip"):
        assert list(stats.calls[name]) == [backend]
    assert set(stats.fallbacks) <= {"amp"}  # factors that only torch's rule takes


def test_a_scaler_that_backs_off_differently_is_found(monkeypatch):
    right = GradScaler._update_on_core

    def wrong(self, scale, tracker, flags):
        right(self, scale, tracker, [torch.zeros_like(flag) for flag in flags])

    monkeypatch.setattr(GradScaler, "_update_on_core", wrong)
    with pytest.raises(AssertionError):
        for seed in range(50):
            run_sequence(seed)
