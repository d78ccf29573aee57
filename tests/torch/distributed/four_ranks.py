"""Cases for four processes, which worlds.py runs: meshes of two dimensions."""

import torch
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.torch.distributed import two_ranks as cases
from tests.torch.distributed.resume import load, train_on
from trainfast.torch import AdamW
from trainfast.torch.optim import clip

PLACES = ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(1)))


def case_replicas_count_once(folder):
    mesh = cases.mesh_of(2, 2)
    whole = cases.whole_params(shapes=((3, 4), (5, 2), (2, 6)))
    shards = [
        nn.Parameter(distribute_tensor(p.detach().clone(), mesh, place))
        for p, place in zip(whole, PLACES, strict=True)
    ]
    row = cases.mesh_of()
    whole.append(nn.Parameter(torch.ones(9, 2)))  # on another mesh
    shards.append(nn.Parameter(distribute_tensor(torch.ones(9, 2), row, [Shard(0)])))
    cases.set_grads(whole, shards, 4)
    plain, spread = (AdamW(p, max_grad_norm=0.5) for p in (whole, shards))
    total = clip.get_total_norm([p.grad for p in shards])
    plain.step()
    spread.step()
    assert not isinstance(total, DTensor)  # no mesh is that of all
    assert cases.ulps(total, plain.grad_norm) <= 1
    assert cases.ulps(spread.grad_norm, plain.grad_norm) <= 1
    cases.assert_same(shards, whole, cases.is_close)


def case_rounding_does_not_depend_on_sharding(folder):
    places = [
        (7, 3, Shard(0), Replicate()),
        (9, 5, Replicate(), Shard(1)),
        (8, 6, Shard(0), Shard(1)),
        (16, 40, Shard(1), Shard(0)),
        (16, 3, Shard(0), Shard(0)),
    ]
    cases.check_halves(cases.mesh_of(2, 2), places)


def shard_hybrid(model):
    names = ("replicate", "shard")
    mesh = cases.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    cases.shard_fully(model, mesh)


def case_hsdp_trains_as_with_torch(folder):
    cases.check_model(shard_hybrid)


def shard_and_split(model):
    """FSDP2 over tensor parallelism, whose placements are _StridedShard."""
    mesh = cases.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cases.parallel(model, mesh["tp"])
    for block in model:
        for part in (block.up, block.down):  # the norm stays a plain layer
            fully_shard(part, mesh=mesh["dp"])


def case_fsdp2_and_tensor_parallel_train_as_with_torch(folder):
    model = cases.model_of(shard_and_split)
    places = {type(p).__name__ for q in model.parameters() for p in places_of(q)}
    assert "_StridedShard" in places, places
    cases.check_model(shard_and_split)


def places_of(param):
    return param.placements if isinstance(param, DTensor) else ()


def case_a_checkpoint_of_two_goes_on(folder):
    model, optimizer = load(folder / "from-2")
    train_on(model, optimizer)
    cases.assert_same(model.parameters(), torch.load(folder / "want.pt"))
    weights, state = checkpoints.get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder / "from-4")
