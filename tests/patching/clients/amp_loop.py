"""float16 autocast with a GradScaler, clipping, accumulation, EMA and a scheduler; one
batch overflows. `python amp_loop.py [--resume]`."""

import os
import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(8),
    nn.SiLU(),
    nn.Conv2d(8, 16, 3, stride=2, padding=1),
    nn.SiLU(),
    nn.Flatten(),
    nn.Linear(256, 10),
)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [3])
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

generator = torch.Generator().manual_seed(1)
images = torch.randn(128, 1, 8, 8, generator=generator)
labels = torch.randint(10, (128,), generator=generator)

parts = {
    "model": model,
    "ema": ema,
    "optimizer": optimizer,
    "scaler": scaler,
    "scheduler": scheduler,
}
losses, rates, start = [], [], 0
if "--resume" in sys.argv and os.path.exists("checkpoint.pt"):
    checkpoint = torch.load("checkpoint.pt")
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    losses, rates, start = (checkpoint[n] for n in ("losses", "rates", "step"))

for step in range(start, 16):
    for half in range(2):
        at = (step * 2 + half) * 8 % 128
        x, y = images[at : at + 8], labels[at : at + 8]
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x), y) / 2
        if step in (5, 11):
            loss = loss * 1e30  # its scaled gradients overflow
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() >= before:
        scheduler.step()
        ema.update_parameters(model)
    losses.append(loss.item())
    rates.append(scheduler.get_last_lr()[0])
    print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale()}")
    if step == 7 and "--resume" not in sys.argv:
        checkpoint = {name: part.state_dict() for name, part in parts.items()}
        checkpoint.update(losses=losses, rates=rates, step=step + 1)
        torch.save(checkpoint, "checkpoint.pt")

final = {name: part.state_dict() for name, part in parts.items()}
torch.save({"losses": losses, "rates": rates, **final}, "final.pt")
