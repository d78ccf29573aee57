import torch
from torch import nn

cell, head = nn.GRUCell(16, 32), nn.Linear(32, 1)
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.01)
state = torch.zeros(8, 32)
for _ in range(500):
    loss = torch.zeros(())
    for _ in range(4):
        state = cell(torch.randn(8, 16), state)
        loss = loss + head(state).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state = state.detach()
