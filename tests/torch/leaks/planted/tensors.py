import torch
from torch import nn

seen = []  # LEAK


def main():
    model = nn.Linear(64, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        out = model(torch.randn(256, 64))
        optimizer.zero_grad()
        out.pow(2).mean().backward()
        optimizer.step()
        seen.append({"out": out.detach().clone(), "step": len(seen)})


main()
