"""AdaBelief, copied from a repository, on a deep and narrow network."""

import math

import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.optim import Optimizer


class AdaBelief(Optimizer):
    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-12, weight_decay=0.01
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                beta1, beta2 = group["betas"]
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_var"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                exp_avg, exp_avg_var = state["exp_avg"], state["exp_avg_var"]
                state["step"] += 1
                bias1 = 1 - beta1 ** state["step"]
                bias2 = 1 - beta2 ** state["step"]
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                residual = grad - exp_avg
                exp_avg_var.mul_(beta2).addcmul_(residual, residual, value=1 - beta2)
                denominator = (
                    exp_avg_var.add(group["eps"]).sqrt() / math.sqrt(bias2)
                ).add_(group["eps"])
                p.addcdiv_(exp_avg, denominator, value=-group["lr"] / bias1)
        return loss


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x + self.scale * torch.nn.functional.silu(self.linear(self.norm(x)))


torch.manual_seed(0)
features, labels = load_wine(return_X_y=True)
x = torch.from_numpy(StandardScaler().fit_transform(features)).float()
y = torch.from_numpy(labels)
model = nn.Sequential(
    nn.Linear(13, 24), *[Layer(24) for _ in range(24)], nn.Linear(24, 3)
)
optimizer = AdaBelief(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(250):
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = criterion(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    if epoch % 50 == 0:
        right = (model(x).argmax(1) == y).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.4f} accuracy {right:.3f}")
