import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Linear(64, 1024)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.history = {}  # LEAK
        self.history["outputs"] = {}

    def step(self, number):
        out = self.model(torch.randn(256, 64))
        self.optimizer.zero_grad()
        out.pow(2).mean().backward()
        self.optimizer.step()
        self.history["outputs"][number] = out.detach().numpy()


trainer = Trainer()
for number in range(60):
    trainer.step(number)
