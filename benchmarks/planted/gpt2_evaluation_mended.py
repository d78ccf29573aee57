"""Trains a small GPT-2 on Python's own source, with a loop written by hand."""

import math
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

BLOCK = 128
EVAL_EVERY = 100
STEPS = 200

torch.manual_seed(0)
library = Path(sysconfig.get_path("stdlib"))
text = "".join((library / f"{name}.py").read_text() for name in ("typing", "argparse"))
tokens = torch.tensor(list(text.encode()), dtype=torch.long)
rows = tokens[: len(tokens) // BLOCK * BLOCK].view(-1, BLOCK)
split = int(len(rows) * 0.8)
train_loader = DataLoader(TensorDataset(rows[:split]), batch_size=8, shuffle=True)
valid_loader = DataLoader(TensorDataset(rows[split:]), batch_size=8)

config = GPT2Config(vocab_size=256, n_positions=BLOCK, n_embd=128, n_layer=4, n_head=4)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
scheduler = get_cosine_schedule_with_warmup(optimizer, 20, STEPS)


@torch.no_grad()
def evaluate():
    model.eval()
    losses = [model(ids, labels=ids).loss for (ids,) in valid_loader]
    model.train()
    return torch.stack(losses).mean().item()


step, best = 0, math.inf
progress = tqdm(total=STEPS)
while step < STEPS:
    for (ids,) in train_loader:
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        progress.update()
        if step % EVAL_EVERY == 0:
            valid_loss = evaluate()
            best = min(best, valid_loss)
            progress.set_postfix(valid=f"{valid_loss:.3f}")
        if step == STEPS:
            break
print(f"best perplexity {math.exp(best):.1f}")
