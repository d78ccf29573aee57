"""DistributedDataParallel on two processes: `torchrun --nproc-per-node 2 ddp.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(4)
data = TensorDataset(torch.randn(128, 24), torch.randint(6, (128,)))
sampler = DistributedSampler(data, seed=9)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.LayerNorm(48), nn.Linear(48, 6))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
losses = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if i % 2 == 0:  # accumulate without communication
            with ddp.no_sync():
                nn.functional.cross_entropy(ddp(x), y).backward()
            continue
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    print(losses)
    torch.save(
        {
            "losses": losses,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        "final.pt",
    )
dist.barrier()
dist.destroy_process_group()
