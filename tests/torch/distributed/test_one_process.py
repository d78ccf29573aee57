"""DTensors in a world of this process alone."""

import pytest
import torch

import trainfast
from trainfast.torch import AdamW


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
