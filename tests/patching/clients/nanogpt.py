"""A character-level GPT in one file: `python nanogpt.py [--resume]`."""

import inspect
import math
import sys

import torch
import torch.nn as nn
from torch.nn import functional as F

block_size, batch_size, n_layer, n_head, n_embd = 64, 8, 2, 2, 64
max_iters, warmup_iters, save_at = 12, 3, 6
learning_rate, min_lr, grad_clip = 1e-3, 1e-4, 1.0
gradient_accumulation_steps = 2

text = inspect.getsource(inspect)[:40_000]
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (z.view(B, T, n_head, C // n_head).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(chars), n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
        extra = {"fused": True} if fused else {}
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), **extra)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -block_size:])
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx


def get_batch(split, generator):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - block_size, (batch_size,), generator=generator)
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    generator = torch.Generator().manual_seed(7)
    loss = [model(*get_batch("val", generator))[1].item() for _ in range(2)]
    model.train()
    return sum(loss) / len(loss)


torch.manual_seed(1337)
model = GPT()
optimizer = model.configure_optimizers()
scaler = torch.amp.GradScaler("cpu", enabled=False)
generator = torch.Generator().manual_seed(0)
start, losses = 0, []
if "--resume" in sys.argv:
    checkpoint = torch.load("checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    generator.set_state(checkpoint["generator"])
    start, losses = checkpoint["iter_num"], checkpoint["losses"]

for it in range(start, max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for _ in range(gradient_accumulation_steps):
        _, loss = model(*get_batch("train", generator))
        scaler.scale(loss / gradient_accumulation_steps).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    print(f"iter {it}: loss {loss.item():.4f}, norm {norm:.4f}")
    if it + 1 == save_at and "--resume" not in sys.argv:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "generator": generator.get_state(),
            "iter_num": it + 1,
            "losses": losses,
        }
        torch.save(checkpoint, "checkpoint.pt")

val = estimate_loss(model)
model.eval()
sample = model.generate(torch.zeros(1, 1, dtype=torch.long), 40)[0].tolist()
print(f"val loss {val:.4f}\n" + "".join(chars[i] for i in sample))
torch.save(
    {
        "losses": [*losses, val],
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
    "final.pt",
)
