"""FSDP2 on two processes: `torchrun --nproc-per-node 2 fsdp2.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(4)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(dist.get_rank())
losses = []
for _ in range(6):
    x = torch.randn(16, 32, generator=gen)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
weights, state = get_state_dict(model, optimizer, options=options)
if dist.get_rank() == 0:
    print(losses)
    torch.save({"losses": losses, "model": weights, "optimizer": state}, "final.pt")
dist.barrier()
dist.destroy_process_group()
