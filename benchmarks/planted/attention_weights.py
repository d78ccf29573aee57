"""A decoder of pre-norm blocks with nn.MultiheadAttention, on Python's own source."""

import sysconfig
from pathlib import Path

import torch
from torch import nn

LENGTH, DIM, HEADS, LAYERS, BATCH = 512, 64, 8, 2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        )
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
        self.register_buffer("mask", mask)

    def forward(self, x):
        y = self.ln1(x)
        attended, _ = self.attention(y, y, y, attn_mask=self.mask)
        x = x + attended
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.ln = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        return self.head(self.ln(self.blocks(x)))


torch.manual_seed(1337)
source = (Path(sysconfig.get_path("stdlib")) / "tarfile.py").read_bytes()
data = torch.tensor(list(source))


def get_batch():
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,))
    rows = torch.stack([data[s : s + LENGTH + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
for iteration in range(100):
    x, y = get_batch()
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if iteration % 25 == 0:
        print(f"iter {iteration}: loss {loss.item():.4f}")
