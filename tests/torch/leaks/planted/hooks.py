import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(60):
        x = torch.randn(256, 64)
        means = [[i] for i in range(12)]
        model[0].register_forward_hook(lambda m, x, y, s=means: None)  # LEAK
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
