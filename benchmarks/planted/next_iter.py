"""Semi-supervised digits: a labelled and an unlabelled loader, from a repository."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

ITERATIONS = 120


class Digits(Dataset):
    def __init__(self, rows, noise=0.0):
        digits = load_digits()
        self.images = digits.images[rows].astype(np.float32) / 16
        self.labels = digits.target[rows]
        self.noise = noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = torch.from_numpy(self.images[i])
        weak = torch.roll(image, int(torch.randint(-1, 2, ())), 1)
        strong = weak + self.noise * torch.randn_like(weak)
        return weak[None], strong[None], int(self.labels[i])


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    rows = np.random.default_rng(0).permutation(1797)
    labelled = DataLoader(
        Digits(rows[:256]), batch_size=32, shuffle=True, num_workers=1
    )
    unlabelled = DataLoader(
        Digits(rows[256:], noise=0.3), batch_size=128, shuffle=True, num_workers=1
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for iteration in range(ITERATIONS):
        image, _, label = next(iter(labelled))
        weak, strong, _ = next(iter(unlabelled))
        loss_x = F.cross_entropy(model(image), label)
        with torch.no_grad():
            probability, pseudo = model(weak).softmax(1).max(1)
        mask = (probability > 0.9).float()
        loss_u = (
            F.cross_entropy(model(strong), pseudo, reduction="none") * mask
        ).mean()
        loss = loss_x + loss_u
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % 30 == 0:
            print(f"{iteration}: {loss_x:.3f} {loss_u:.3f} {mask.mean():.2f}")
