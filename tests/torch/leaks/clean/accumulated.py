import copy

import torch
from torch import nn

layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
model = nn.Sequential(layer, nn.Linear(32, 4))
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
best = {}
for step in range(1, 1001):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 6, 32)).float().pow(2).mean()
    (loss / 2).backward()
    if step % 2 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p, 0.01)
    if step % 100 == 0:
        best = copy.deepcopy(model.state_dict())
