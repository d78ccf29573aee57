"""A model whose checkpoint goes from two processes to four, and on to one."""

import torch
from torch import distributed
from torch.distributed.checkpoint import load as load_checkpoint
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint import state_dict as checkpoints

from tests.torch.distributed import two_ranks as cases
from trainfast.torch import AdamW

OPTIONS = {"lr": 0.01, "amsgrad": True, "ema_decay": 0.9}


def fresh():
    model = cases.model_of(cases.shard_fully)
    return model, AdamW(model.parameters(), **OPTIONS)


def load(path):
    model, optimizer = fresh()
    weights, state = checkpoints.get_state_dict(model, optimizer)
    load_checkpoint({"model": weights, "optimizer": state}, checkpoint_id=path)
    checkpoints.set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state
    )
    return model, optimizer


def train_on(model, optimizer):
    """Two steps on gradients that do not depend on the number of processes."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator)
            p.grad = cases.distribute_tensor(grad, p.device_mesh, p.placements)
        optimizer.step()
        optimizer.zero_grad()


def wholes(tensors):
    return [cases.full(tensor.detach()).clone() for tensor in tensors]


def save_first(folder):
    """Saves halfway; and what the weights are to become, in two more legs."""
    model, optimizer = fresh()
    train_on(model, optimizer)
    weights, state = checkpoints.get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder / "from-2")
    for name in ("want", "want-last"):
        train_on(model, optimizer)
        want = wholes(model.parameters())
        if distributed.get_rank() == 0:
            torch.save(want, folder / f"{name}.pt")
