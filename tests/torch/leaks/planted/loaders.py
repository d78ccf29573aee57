import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(4096, 64))
open_loaders = []  # LEAK


def next_batch():
    loader = iter(DataLoader(data, batch_size=64, shuffle=True))
    open_loaders.append(loader)
    return next(loader)[0]


for _ in range(60):
    loss = model(next_batch()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
