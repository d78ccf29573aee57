import functools

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(1024, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
by_length, first = {}, []


@functools.lru_cache(maxsize=256)
def features(number):
    return torch.full((64, 1024), float(number))


for step in range(500):
    length = int(torch.randint(1, 128, ()))
    if length not in by_length:
        by_length[length] = torch.randn(length, 1024)
    if step < 30:
        first.append(torch.randn(64, 1024))
    loss = model(by_length[length]).pow(2).mean() + model(features(step)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
