"""timm's loop: create_model, create_optimizer_v2, mixup, EMA and a schedule."""

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, accuracy, random_seed

random_seed(42)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images[:256], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
images = torch.nn.functional.interpolate(images, 32).expand(-1, 3, -1, -1)
labels = torch.tensor(labels[:256])

model = timm.create_model(
    "vit_tiny_patch16_224",
    img_size=32,
    patch_size=4,
    embed_dim=48,
    depth=2,
    num_heads=3,
    num_classes=10,
    drop_path_rate=0.1,
)
optimizer = create_optimizer_v2(
    model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75
)
scheduler = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=1e-5)
ema = ModelEmaV3(model, decay=0.9)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
criterion = SoftTargetCrossEntropy()

losses = []
for epoch in range(3):
    model.train()
    scheduler.step(epoch)
    for at in range(0, 192, 32):
        x, y = mixup(images[at : at + 32].clone(), labels[at : at + 32])
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        timm.utils.dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
        optimizer.step()
        ema.update(model)
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(images[192:])
    top1 = accuracy(logits, labels[192:])[0].item()
    print(f"epoch {epoch}: loss {losses[-1]:.4f}, top1 {top1:.1f}")
torch.save(
    {
        "losses": losses,
        "logits": logits,
        "model": model.state_dict(),
        "ema": ema.module.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
    "final.pt",
)
