"""A Transformer encoder that names the author of a line, with gradient accumulation."""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NAMES = ("argparse", "decimal", "inspect", "pydoc", "tarfile", "typing")
LENGTH = 64
MICRO_BATCH = 2
ACCUMULATION_STEPS = 16
UPDATES = 40


def load():
    library = Path(sysconfig.get_path("stdlib"))
    rows, labels = [], []
    for label, name in enumerate(NAMES):
        data = (library / f"{name}.py").read_bytes()
        for at in range(0, len(data) - LENGTH, LENGTH):
            rows.append(list(data[at : at + LENGTH]))
            labels.append(label)
    return TensorDataset(torch.tensor(rows), torch.tensor(labels))


class Classifier(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Parameter(torch.zeros(LENGTH, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, len(NAMES))

    def forward(self, x):
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


torch.manual_seed(0)
loader = DataLoader(load(), batch_size=MICRO_BATCH, shuffle=True, drop_last=True)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
updates, total = 0, 0.0
optimizer.zero_grad()
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / ACCUMULATION_STEPS
    loss.backward()
    total += loss.item()
    if (step + 1) % ACCUMULATION_STEPS == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        if updates % 10 == 0:
            print(f"update {updates}: loss {total / 10:.3f}")
            total = 0.0
        if updates == UPDATES:
            break
