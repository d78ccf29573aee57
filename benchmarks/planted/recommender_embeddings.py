"""A two-tower recommender: which identifiers does a source file use?"""

import re
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BUCKETS = 100_000  # identifiers are hashed


def interactions():
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    pairs = []
    for user, path in enumerate(files):
        words = set(re.findall(r"[A-Za-z_]{3,}", path.read_text(errors="ignore")))
        pairs += [
            (user, sum(map(ord, word)) * 7919 % BUCKETS) for word in sorted(words)
        ]
    return len(files), torch.tensor(pairs)


class TwoTower(nn.Module):
    def __init__(self, users, items, dim=32):
        super().__init__()
        self.users = nn.Embedding(users, dim)
        self.items = nn.Embedding(items, dim)
        self.item_bias = nn.Embedding(items, 1)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        x = torch.cat([u, i, u * i], dim=-1)
        return (self.mlp(x) + self.item_bias(item)).squeeze(-1)


torch.manual_seed(0)
n_users, pairs = interactions()
dataset = TensorDataset(pairs[:, 0], pairs[:, 1])
loader = DataLoader(dataset, batch_size=512, shuffle=True, drop_last=True)
model = TwoTower(n_users, BUCKETS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
criterion = nn.BCEWithLogitsLoss()

for epoch in range(2):
    running = 0.0
    for step, (user, item) in enumerate(loader):
        negative = torch.randint(BUCKETS, item.shape)
        logits = model(user.repeat(2), torch.cat([item, negative]))
        target = torch.cat([torch.ones(len(item)), torch.zeros(len(item))])
        loss = criterion(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
        if step % 50 == 49:
            print(f"epoch {epoch} step {step + 1}: loss {running / 50:.4f}")
            running = 0.0
