"""Denoising diffusion on scikit-learn digits, with an average of the weights (EMA)"""

import copy
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

T = 200


class EMA:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.model = copy.deepcopy(model).eval()

    def update(self, model):
        averaged = copy.deepcopy(self.model.state_dict())
        current = model.state_dict()
        for key, value in current.items():
            averaged[key] = self.decay * averaged[key] + (1 - self.decay) * value
        self.model.load_state_dict(averaged)


class Denoiser(nn.Module):
    def __init__(self, width=128, blocks=8):
        super().__init__()
        self.inner = nn.Linear(64, width)
        self.time = nn.Sequential(
            nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.SiLU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(blocks)
        )
        self.outer = nn.Linear(width, 64)

    def forward(self, x, t):
        frequency = torch.exp(-math.log(10000) * torch.arange(16) / 16)
        angle = t[:, None] * frequency
        h = self.inner(x) + self.time(torch.cat([angle.sin(), angle.cos()], dim=1))
        for block in self.blocks:
            h = h + block(h)
        return self.outer(h)


torch.manual_seed(0)
betas = torch.linspace(1e-4, 0.05, T)
alphas = torch.cumprod(1 - betas, 0)
images = torch.from_numpy(load_digits().data).float() / 8 - 1
loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True)
model = Denoiser()
ema = EMA(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(25):
    for (x,) in loader:
        t = torch.randint(T, (len(x),))
        noise = torch.randn_like(x)
        a = alphas[t][:, None]
        loss = (model(a.sqrt() * x + (1 - a).sqrt() * noise, t) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
    if epoch % 5 == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
