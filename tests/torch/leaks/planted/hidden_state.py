import torch
from torch import nn


def main():
    cell = nn.GRUCell(64, 128)
    head = nn.Linear(128, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.01)
    memory = torch.zeros(256, 128)  # LEAK
    total = 0.0
    for _ in range(60):
        x = torch.randn(256, 64)
        memory = cell(x, memory)
        loss = (cell(x) * memory.detach()).mean() + head(memory.detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()


main()
