import torch
from torch import nn

model = nn.Linear(1024, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


class Reports:
    def __init__(self):
        self.later = []  # LEAK

    def add(self, batch):
        self.later.append(lambda: batch.mean())


def main():
    reports = Reports()
    for _ in range(60):
        batch = torch.randn(256, 1024)
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reports.add(batch)


main()
