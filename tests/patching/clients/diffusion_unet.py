"""Denoising diffusion with a small UNet, attention at its middle and an EMA copy."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class ResBlock(nn.Module):
    def __init__(self, channels, out, time):
        super().__init__()
        self.norm1, self.conv1 = (
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels, out, 3, 1, 1),
        )
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, 1, 1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.to_qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.to_out, self.heads = nn.Linear(channels, channels), heads

    def forward(self, x):
        b, c, h, w = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (
            z.view(b, h * w, self.heads, -1).transpose(1, 2)
            for z in self.to_qkv(tokens).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.to_out(y).transpose(1, 2).reshape(b, c, h, w)


class UNet(nn.Module):
    def __init__(self, width=16, time=32):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(
            nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time)
        )
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down1, self.down2 = ResBlock(16, 16, time), ResBlock(16, 32, time)
        self.middle, self.attention = ResBlock(32, 32, time), Attention(32, 2)
        self.up2, self.up1 = ResBlock(64, 16, time), ResBlock(32, 16, time)
        self.leave = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x, t):
        rates = torch.exp(-math.log(1e4) * torch.arange(self.width // 2) / 8)
        angles = t[:, None] * rates
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        a = self.down1(self.enter(x), t)
        b = self.down2(F.avg_pool2d(a, 2), t)
        h = self.attention(self.middle(b, t))
        h = self.up2(torch.cat([h, b], dim=1), t)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.leave(self.up1(torch.cat([h, a], dim=1), t))


torch.manual_seed(12)
model = UNet()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
keep = torch.linspace(0.999, 0.02, 100).cumprod(0)
losses = []
for _step in range(8):
    x = torch.rand(4, 1, 1, 1) * torch.ones(4, 1, 16, 16)
    t, noise = torch.randint(100, (4,)), torch.randn(4, 1, 16, 16)
    scale = keep[t].view(-1, 1, 1, 1)
    loss = F.mse_loss(model(scale.sqrt() * x + (1 - scale).sqrt() * noise, t), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(p, 0.1)
    losses.append(loss.item())
average.eval()
with torch.no_grad():
    sample = average(torch.randn(2, 1, 16, 16), torch.tensor([90, 10]))
print(losses)
torch.save(
    {
        "losses": losses,
        "sample": sample,
        "model": model.state_dict(),
        "average": average.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
    "final.pt",
)
