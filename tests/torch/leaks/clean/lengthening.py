import torch
from torch import nn


def main():
    model, head = nn.RNNCell(16, 32), nn.Linear(32, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    for step in range(500):
        words = [str(i) for i in range(20 * step)]
        batch = {"x": torch.randn(64, 1 + step // 10, 16), "words": words}
        rows = [torch.randn(16) for _ in range(1 + step)]
        h = torch.zeros(64, 32)
        for x in batch["x"].unbind(1):
            h = model(x, h)
        loss = head(h).pow(2).mean() + torch.stack(rows).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
