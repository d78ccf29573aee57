"""A two-tower recommender: sparse embeddings with SparseAdam, the towers with Adam."""

import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self, entries, features):
        super().__init__()
        self.embed = nn.EmbeddingBag(entries, 16, mode="mean", sparse=True)
        self.mlp = nn.Sequential(nn.Linear(16 + features, 32), nn.ReLU())
        self.out = nn.Linear(32, 16)

    def forward(self, ids, features):
        return self.out(self.mlp(torch.cat([self.embed(ids), features], dim=1)))


torch.manual_seed(31)
users, items = Tower(500, 4), Tower(300, 6)
model = nn.ModuleDict({"user": users, "item": items})
temperature = nn.Parameter(torch.tensor(1.0))
sparse = [tower.embed.weight for tower in (users, items)]
dense = [p for n, p in model.named_parameters() if "embed" not in n]
optimizers = [
    torch.optim.SparseAdam(sparse, lr=1e-2),
    torch.optim.Adam(
        [
            {"params": dense, "weight_decay": 1e-4},
            {"params": [temperature], "lr": 1e-2},
        ],
        lr=1e-3,
    ),
]
scheduler = torch.optim.lr_scheduler.CyclicLR(
    optimizers[1], 1e-4, 1e-3, step_size_up=4, cycle_momentum=False
)
losses = []
for _ in range(20):
    user = users(torch.randint(500, (32, 5)), torch.randn(32, 4))
    item = items(torch.randint(300, (32, 3)), torch.randn(32, 6))
    loss = nn.functional.cross_entropy(temperature * user @ item.T, torch.arange(32))
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    scheduler.step()
    losses.append(loss.item())
print(losses[-1])
torch.save(
    {
        "losses": losses,
        "model": model.state_dict(),
        "temperature": temperature.detach(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    },
    "final.pt",
)
