"""accelerate's loop with bfloat16, accumulation, clipping and a schedule:
`python accelerate_loop.py [--resume]`."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(
    cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2
)
set_seed(3)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(96, 20, generator=generator)
targets = (inputs[:, :3].sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + 0.1 * i))
model, optimizer, loader, scheduler = accelerator.prepare(
    model, optimizer, loader, scheduler
)

losses, rates, skipped, first = [], [], [], 0
if "--resume" in sys.argv:
    accelerator.load_state("state")
    first = 1
for epoch in range(first, 2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        rates.append(scheduler.get_last_lr()[0])
        skipped.append(optimizer.step_was_skipped)
    accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    if epoch == 0 and first == 0:
        accelerator.save_state("state")
torch.save(
    {
        "losses": losses[-len(loader) :],
        "rates": rates[-len(loader) :],
        "skipped": skipped[-len(loader) :],
        "model": accelerator.get_state_dict(model),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    },
    "final.pt",
)
