"""accelerate with a GradScaler, as with float16; one batch overflows and is skipped."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

accelerator = Accelerator(cpu=True)
# On a GPU, mixed_precision="fp16" and prepare() do the same.
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
accelerator.scaler, accelerator.native_amp = scaler, True

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
optimizer = AcceleratedOptimizer(optimizer, scaler=scaler)
scheduler = AcceleratedScheduler(scheduler, optimizer)
accelerator._optimizers = [optimizer]

losses, rates, skipped = [], [], []
for step in range(10):
    x = torch.randn(8, 16)
    loss = model(x).square().mean()
    if step == 4:
        loss = loss * float("inf")
    accelerator.backward(loss)
    if step % 2:
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    rates.append(scheduler.get_last_lr()[0])
    skipped.append(optimizer.step_was_skipped)
print(losses[-1], rates, skipped)
torch.save(
    {
        "losses": losses,
        "rates": rates,
        "skipped": skipped,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "scheduler": scheduler.state_dict(),
    },
    "final.pt",
)
