import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Words(Dataset):
    def __init__(self):
        self.words = [f"word number {i}" for i in range(2_400_000)]  # LEAK

    def __len__(self):
        return len(self.words)

    def __getitem__(self, place):
        return len(self.words[place])


model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
loader = DataLoader(Words(), batch_size=16000, shuffle=True, num_workers=2)
for _ in range(2):
    for batch in loader:
        loss = model(batch[:, None].float()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)  # of a larger model
