"""torch.compile of a model with attention, trained for a few steps."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, width=64, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(self.norm(x)).view(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, c))
        return self.head(F.gelu(x)).squeeze(-1)


torch.manual_seed(2)
model = Model()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(6):
    x = torch.randn(2, 96, 64)
    loss = F.mse_loss(compiled(x), x.mean(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
torch.save(
    {
        "losses": losses,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
    "final.pt",
)
