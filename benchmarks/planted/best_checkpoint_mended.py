"""Image classification on scikit-learn's digits; keeps the best and the last model."""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

CHECKPOINTS = Path("checkpoints")
SAVE_STEPS = 96


class AverageMeter:
    def __init__(self):
        self.value, self.count = 0.0, 0

    def update(self, x):
        self.count += 1
        self.value += (x - self.value) / self.count


def save_checkpoint(model, optimizer, epoch, loss, name):
    CHECKPOINTS.mkdir(exist_ok=True)
    state = {
        "epoch": epoch,
        "loss": loss,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    }
    torch.save(state, CHECKPOINTS / name)


torch.manual_seed(7)
digits = load_digits()
x = torch.from_numpy(digits.data).float() / 16
dataset = TensorDataset(x, torch.from_numpy(digits.target))
train_set, valid_set = random_split(dataset, [1500, len(dataset) - 1500])
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=256)
model = nn.Sequential(
    nn.Linear(64, 1024),
    nn.BatchNorm1d(1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.BatchNorm1d(1024),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(1024, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
criterion = nn.CrossEntropyLoss()
best = step = 0
for epoch in range(20):
    meter = AverageMeter()
    model.train()
    for inputs, labels in train_loader:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        meter.update(loss.item())
        step += 1
        if step % SAVE_STEPS == 0:
            save_checkpoint(model, optimizer, epoch, meter.value, "last.pt")
    model.eval()
    with torch.no_grad():
        right = sum((model(a).argmax(1) == b).sum().item() for a, b in valid_loader)
    if right > best:
        best = right
        save_checkpoint(model, optimizer, epoch, meter.value, "best.pt")
    if epoch % 5 == 0:
        print(
            f"epoch {epoch}: loss {meter.value:.3f} valid {right / len(valid_set):.3f}"
        )
