"""DTensors in a world of this process alone."""

import time
from contextlib import suppress

import pytest
import torch

import trainfast
from trainfast.torch import Adam, AdamW, private
from trainfast.torch.optim import shards


def fallbacks():
    return trainfast.stats().fallbacks.get("adamw", {})


@pytest.fixture
def distribute(tmp_path):
    """Makes a DTensor of a tensor, in a world of this process alone."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
    finally:
        # torch 2.6 joins its thread while it holds the GIL, which that thread may need
        # to drop the last tensor of a collective.
        time.sleep(0.05)
        distributed.destroy_process_group()


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_distributed_tensors_run_the_kernel(backend, distribute, max_grad_norm):
    p = torch.nn.Parameter(distribute(torch.ones(4)))
    q = torch.nn.Parameter(torch.ones(4))
    spread, plain = (AdamW([each], max_grad_norm=max_grad_norm) for each in (p, q))
    for _ in range(3):
        p.grad, q.grad = distribute(torch.full((4,), 3.0)), torch.full((4,), 3.0)
        version = p._version
        spread.step()
        plain.step()
        assert p._version == version + 1
        assert torch.equal(p.full_tensor(), q)
    assert spread.state[p]["exp_avg"].placements == p.placements
    assert fallbacks() == {}


def test_distributed_tensors_have_redistributed_gradients(distribute):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    p = torch.nn.Parameter(distribute(torch.ones(4)))
    optimizer = AdamW([p])
    for placement in (Replicate(), Partial()):
        grad = DTensor.from_local(torch.ones(4), p.device_mesh, [placement])
        p.grad = grad
        optimizer.step()
        assert p.grad is not grad and p.grad.placements == p.placements
    (reason,) = fallbacks()
    assert "redistributed" in reason and fallbacks()[reason] == 2


def test_distributed_tensors_of_other_kinds_run_torchs_step(distribute):
    p = torch.nn.Parameter(distribute(torch.ones(4, dtype=torch.complex64)))
    p.grad = distribute(torch.ones(4, dtype=torch.complex64))
    AdamW([p]).step()
    assert "complex" in str(fallbacks())


def test_distributed_tensors_are_read_without_private_names(distribute, monkeypatch):
    from torch.distributed.tensor import DTensor

    without = type("Without", (DTensor,), {})  # has no slots of its own
    readers = private.dtensor_readers(without)
    assert not set(readers) & set(private.dtensor_readers(DTensor))
    monkeypatch.setitem(shards._readers, DTensor, (DTensor, *readers, shards.agree))
    p = torch.nn.Parameter(distribute(torch.ones(4)))
    q = torch.nn.Parameter(torch.ones(4))
    spread, plain = AdamW([p]), AdamW([q])
    for _ in range(2):
        p.grad, q.grad = distribute(torch.full((4,), 3.0)), torch.full((4,), 3.0)
        spread.step()
        plain.step()
        assert torch.equal(p.full_tensor(), q)
    assert fallbacks() == {}


def test_step_of_a_checkpoint_makes_state_alone():
    from torch.distributed.checkpoint import state_dict

    model = torch.nn.Linear(3, 2)
    optimizer = Adam(model.parameters(), 0.1, weight_decay=0.5)
    state = state_dict.get_optimizer_state_dict(model, optimizer)
    for value in state["state"]["weight"].values():
        assert value.count_nonzero() == 0  # torch counts a step, and decays
    model.weight.grad = torch.zeros(2, 3)
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 1


def test_partial_parameters_run_torchs_step(distribute):
    from torch.distributed.tensor import DTensor, Partial

    mesh = distribute(torch.ones(4)).device_mesh
    p = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    p.grad = p.detach()  # of the same spec
    with suppress(RuntimeError):
        AdamW([p]).step()
    assert "Partial" in str(fallbacks())


@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("by", ["step", "torchs step", "unscale_", "max_grad_norm"])
def test_distributed_tensors_beside_others_are_scaled_and_clipped(distribute, by, bad):
    """As they are without being distributed; torch's scaler does it, too."""

    def run(place):
        grads = [torch.tensor([8.0, -16.0, 4.0]), torch.tensor([2.0, 6.0])]
        if bad is not None:
            grads[bad][-1] = float("nan")
        params = [torch.nn.Parameter(place(torch.ones(3))), torch.ones(2)]
        params[0].grad, params[1].grad = place(grads[0]), grads[1]
        cls = torch.optim.AdamW if by == "torchs step" else AdamW
        limit = {"max_grad_norm": 0.5} if by == "max_grad_norm" else {}
        optimizer = cls(params, lr=0.1, eps=1.0, **limit)  # or scales are lost
        scaler, norm = trainfast.torch.GradScaler("cpu", 4.0), None
        scaler.scale(torch.ones(()))
        if by == "unscale_":
            scaler.unscale_(optimizer)
            norm = trainfast.torch.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update()
        norm = optimizer.grad_norm if limit else norm
        values = [params[0].detach(), params[1], norm]
        return [getattr(v, "full_tensor", lambda v=v: v)() for v in values], (
            scaler.get_scale(),
            scaler.step_was_skipped(),
        )

    (mine, end), (want, other) = run(distribute), run(lambda tensor: tensor)
    for value, right in zip(mine, want, strict=True):
        assert type(value) is type(right)
        if value is not None:
            torch.testing.assert_close(value, right, equal_nan=True)
    assert end == other == ((4.0, False) if bad is None else (2.0, True))
