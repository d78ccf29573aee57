"""A temporal convolution network on sunspot-like series; watches its gradients."""

import json
import time

import numpy as np
import torch
from torch import nn


class Watcher:
    """Writes statistics of weights and gradients to a file of JSON lines."""

    def __init__(self, model, path="gradients.jsonl"):
        self.model, self.file = model, open(path, "w")

    def log(self, step, **values):
        for name, p in self.model.named_parameters():
            grad = p.grad.detach().cpu()
            counts, edges = np.histogram(grad.numpy(), bins=64)
            values[f"gradients/{name}"] = {
                "bins": edges.tolist(),
                "counts": counts.tolist(),
                "norm": grad.norm().item(),
                "std": grad.std().item(),
            }
            values[f"weights/{name}"] = p.detach().norm().item()
        self.file.write(
            json.dumps({"step": step, "time": time.time(), **values}) + "\n"
        )
        self.file.flush()


def series(n=4000, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(n)
    wave = np.sin(2 * np.pi * t / 132) + 0.3 * np.sin(2 * np.pi * t / 27)
    return torch.from_numpy((wave + 0.1 * rng.standard_normal(n)).astype(np.float32))


class Residual(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.conv = nn.Conv1d(
            channels, channels, 3, padding=dilation, dilation=dilation
        )
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        return x + self.mix(torch.relu(self.conv(x)))


torch.manual_seed(0)
values = series()
windows = values.unfold(0, 129, 1)
model = nn.Sequential(
    nn.Conv1d(1, 32, 1),
    *[Residual(32, 2**i) for i in range(6)],
    nn.AdaptiveAvgPool1d(1),
    nn.Flatten(),
    nn.Linear(32, 1),
)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
watcher = Watcher(model)
for step in range(300):
    rows = windows[torch.randint(len(windows), (16,))]
    loss = (model(rows[:, None, :-1]).squeeze(1) - rows[:, -1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    watcher.log(step, loss=loss.item())
    optimizer.step()
    if step % 100 == 0:
        print(step, round(loss.item(), 4))
