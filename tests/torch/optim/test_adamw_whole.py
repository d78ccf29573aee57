"""A step of trainfast.torch.AdamW is made whole or not at all: where memory is lacking
for any part of it, nothing has changed, and the same step can be made later."""

import copy

import pytest
import torch

import trainfast
from trainfast.torch import AdamW, GradScaler

ENOUGH = 40  # allocations


@pytest.fixture
def fail_allocations(simt):
    """Lets so many more of the device's allocations succeed; all with -1."""
    trainfast.use_backend("simt")
    simt.failures.clear()
    yield simt.library.tfast_simt_fail_allocations
    assert all("out of memory" in text for _, text in simt.failures)
    simt.library.tfast_simt_fail_allocations(-1)
    trainfast.use_backend(None)


def make(kinds, **options):
    """An optimizer of one group for each kind of parameter, with gradients."""
    gen = torch.Generator().manual_seed(0)
    groups = []
    for kind in kinds:
        params = [torch.randn(n, generator=gen) for n in (5, 300)]
        if kind == "complex":  # for torch's step
            params = [param.to(torch.complex64) for param in params]
        groups.append({"params": [torch.nn.Parameter(p) for p in params]})
        for param in groups[-1]["params"]:
            param.grad = torch.full_like(param, 2.0)
    return AdamW(groups, lr=0.1, **options)


def kept(optimizer):
    """Copies of all that a step may change."""
    tensors = [p for g in optimizer.param_groups for p in g["params"]]
    tensors += [p.grad for p in tensors]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [t.detach().clone() for t in tensors], state


def assert_same(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b)
    for key, entries in one[1].items():
        for name, value in entries.items():
            assert torch.equal(value, other[1][key][name]), name


OPTIONS = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "zeroed": {"zero_grad": True, "ema_decay": 0.9},
}
KINDS = {
    "one call": ["float", "float", "float"],
    "one call a group": ["complex", "float", "complex", "float"],
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kinds", KINDS)
def test_step_without_memory_changes_nothing(fail_allocations, kinds, options, scaled):
    def step(optimizer):
        if scaled:
            scaler = GradScaler("cpu", init_scale=2.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
        else:
            optimizer.step()

    failed = 0
    for after in range(ENOUGH):
        optimizer = make(KINDS[kinds], **OPTIONS[options])
        truth = make(KINDS[kinds], **OPTIONS[options])
        step(truth)
        before = kept(optimizer)
        fail_allocations(after)
        try:
            step(optimizer)
        except RuntimeError:
            failed += 1
            assert_same((before[0], {}), kept(optimizer))
            for state in optimizer.state.values():
                assert all(not value.any() for n, value in state.items() if n != "ema")
            fail_allocations(-1)
            step(optimizer)
        fail_allocations(-1)
        assert_same(kept(truth), kept(optimizer))
    groups = KINDS[kinds].count("float")
    assert 2 * groups <= failed < ENOUGH  # each group's table, and a copy of it


def test_warm_step_without_memory_changes_nothing(fail_allocations):
    optimizer, truth = make(["float"] * 3), make(["float"] * 3)
    for each in (optimizer, truth):
        each.step()
        last = each.param_groups[2]["params"]  # the only table that must grow
        last += [torch.nn.Parameter(torch.ones(7)) for _ in range(300)]
        for param in last[2:]:
            param.grad = torch.ones(7)
    before = kept(optimizer)
    fail_allocations(0)
    with pytest.raises(RuntimeError):
        optimizer.step()
    fail_allocations(-1)
    assert_same(before, kept(optimizer))
    for each in (optimizer, truth):
        each.step()
    assert_same(kept(truth), kept(optimizer))


def test_group_that_torch_refuses_leaves_the_others_as_they_were(backend):
    optimizer = make(["float"])
    sparse = torch.nn.Parameter(torch.ones(3))
    sparse.grad = torch.sparse_coo_tensor([[1]], [2.0], (3,))
    optimizer.add_param_group({"params": [sparse]})
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    for param, old in zip(optimizer.param_groups[0]["params"], before, strict=True):
        assert torch.equal(param, old)
        assert optimizer.state[param]["step"] == 0
