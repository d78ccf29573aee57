"""Training loops for the torch tests: the same seeds for any optimizer class."""

import torch

from trainfast.torch import Adam, AdamW

OURS = {"Adam": Adam, "AdamW": AdamW}
SHAPES = [(), (1,), (7,), (10, 10), (3, 5, 2), (257,), (0, 4), (300, 17)]


def make_params(device="cpu", dtype=torch.float32, shapes=SHAPES, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(
            torch.randn(s, generator=gen, dtype=torch.float64).to(device, dtype)
        )
        for s in shapes
    ]


def set_grads(params, seed):
    gen = torch.Generator().manual_seed(seed)
    for p in params:
        g = torch.randn(p.shape, generator=gen, dtype=torch.float64)
        p.grad = g.to(p.device, p.dtype)


def train(cls, params, steps=5, **options):
    optimizer = cls(params, **options)
    for step in range(steps):
        set_grads(params, step + 100)
        optimizer.step()
    return optimizer


def assert_same_state(ours, theirs, **tolerance):
    for p, q in zip(
        (p for g in ours.param_groups for p in g["params"]),
        (p for g in theirs.param_groups for p in g["params"]),
        strict=True,
    ):
        torch.testing.assert_close(p, q, **tolerance)
        a, b = ours.state[p], theirs.state[q]
        assert list(a) == list(b)
        for name in a:
            torch.testing.assert_close(
                a[name], b[name], check_device=False, **tolerance
            )
