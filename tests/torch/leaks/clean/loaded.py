import collections

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self):
        self.samples = {}

    def __len__(self):
        return 4096

    def __getitem__(self, place):
        if place not in self.samples:
            self.samples[place] = torch.full((512,), float(place))
        return self.samples[place]


model = nn.Linear(512, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = Cached()
recent = collections.deque(maxlen=100)
for _ in range(4):
    for batch in DataLoader(data, batch_size=32, shuffle=True):
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent.append(loss.detach())
