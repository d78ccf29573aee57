"""Whole iterations of the torch classes on the CUDA sources: what they ask of CUDA, and
that they may be captured. The SIMT runner counts and records."""

import gc
import math

import pytest
import torch

import trainfast
from tests.simt_library import WARM, Capture
from tests.torch_loops import make_params
from trainfast.torch import AdamW, GradScaler, clip_grad_norm_

SHAPES = [(5,), (40, 30), (), (3001,)]


@pytest.fixture
def runner(request, amp_kernels_at_any_size):
    (row,) = (b for b in trainfast.backends() if b["name"] == "simt")
    if not row["usable"]:
        pytest.skip(row["reason"])
    simt = request.getfixturevalue("simt")
    trainfast.use_backend("simt")
    trainfast.reset_stats()
    gc.collect()  # earlier tests' optimizers, whose ends would be counted here
    yield simt
    trainfast.use_backend(None)


def fill_grads(params, seed, factor=8.0, bad=False):
    """New values in the memory that the gradients have, or will keep."""
    gen = torch.Generator().manual_seed(seed)
    for p in params:
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(factor * torch.randn(p.shape, generator=gen))
    if bad:
        params[-1].grad[-1] = math.inf


OPTIONS = {
    "plain": ({}, 1),
    "clipped": ({"max_grad_norm": 1.0}, 2),
    "all": (dict(max_grad_norm=1.0, ema_decay=0.9, zero_grad=True, amsgrad=True), 2),
    "masters": (dict(master_weights=True, write_back_grads=True), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_warm_optimizer_step_is_its_launches_and_nothing_else(runner, name, dtype):
    options, launches = OPTIONS[name]
    params = make_params(dtype=dtype, shapes=SHAPES)
    optimizer = AdamW(params, **options)
    for step in range(3):
        fill_grads(params, step)
        optimizer.step()
    for step in range(3, 20):
        fill_grads(params, step)
        runner.counts()
        optimizer.step()
        assert runner.counts() == {**WARM, "launches": launches}
    assert trainfast.stats().fallbacks == {}


@pytest.mark.parametrize("clip", [None, 1.0])
def test_warm_scaled_iteration_is_three_launches_and_nothing_else(runner, clip):
    params = make_params(shapes=SHAPES)
    optimizer = AdamW(params, max_grad_norm=clip, zero_grad=True)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scaler.scale(torch.zeros(()))
    for step in range(8):
        fill_grads(params, step, bad=step == 5)
        runner.counts()
        scaler.step(optimizer)
        scaler.update()
        if step > 1:
            assert runner.counts() == {**WARM, "launches": 3}
    assert scaler.get_scale() == 8 * 2 / 2
    assert optimizer.state[params[0]]["step"] == 7


def test_unscale_and_clip_apart_are_a_launch_each_and_nothing_else(runner):
    params = make_params(shapes=SHAPES)
    optimizer = AdamW(params)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    seen = []
    for step in range(4):
        fill_grads(params, step)
        for call in (
            lambda: scaler.unscale_(optimizer),
            lambda: clip_grad_norm_(params, 0.5),  # its norm, and then its product
            lambda: scaler.step(optimizer),
            scaler.update,
        ):
            runner.counts()
            call()
            seen.append(runner.counts())
    launches = [counts["launches"] for counts in seen]
    assert launches == [1, 2, 1, 1] * 4
    assert not any(c["syncs"] for c in seen)


def iterate(scaler, optimizer):
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("name", OPTIONS)
def test_captured_iteration_replays_as_eager_ones_bit_for_bit(
    runner, monkeypatch, name
):
    options, _ = OPTIONS[name]
    runs = []
    for _ in range(2):
        params = make_params(shapes=SHAPES)
        optimizer = AdamW(params, lr=0.1, **options)
        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        scaler.scale(torch.zeros(()))
        fill_grads(params, 0)
        iterate(scaler, optimizer)
        runs.append((params, optimizer, scaler))
    (params, optimizer, scaler), (twins, eager, other) = runs
    kept, empty = [], torch.empty

    def keep(*args, **kwargs):  # as a graph's own memory pool does
        kept.append(empty(*args, **kwargs))
        return kept[-1]

    fill_grads(params, 1)
    before = [p.detach().clone() for p in params]
    with monkeypatch.context() as patch, Capture(runner) as graph:
        patch.setattr(torch, "empty", keep)
        iterate(scaler, optimizer)
    assert all(map(torch.equal, params, before))  # recorded, not run
    for seed, bad in ((1, False), (2, True), (3, False), (4, False)):
        fill_grads(params, seed, bad=bad)
        fill_grads(twins, seed, bad=bad)
        graph.replay()
        iterate(other, eager)
        for p, q in zip(params, twins, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p.grad, q.grad) or bad
            ours, wanted = optimizer.state[p], eager.state[q]
            assert all(torch.equal(ours[key], wanted[key]) for key in wanted)
        assert scaler.state_dict() == other.state_dict()
        if "max_grad_norm" in options and not bad:
            assert torch.equal(optimizer.grad_norm, eager.grad_norm)
    assert eager.state[twins[0]]["step"] == 4
    assert not torch.equal(params[0], before[0])
