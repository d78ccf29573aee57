"""SimCLR on scikit-learn's digits: two augmented views of each image."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter, ImageOps
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEMPERATURE = 0.5
EPOCHS = 2


class TwoViews(Dataset):
    def __init__(self, size=64):
        images = load_digits().images
        self.images = [
            Image.fromarray((image * 15.9).astype(np.uint8)).resize((size, size))
            for image in images
        ]
        self.size = size

    def __len__(self):
        return len(self.images)

    def augment(self, image):
        rng = np.random.default_rng()
        image = image.rotate(rng.uniform(-25, 25), resample=Image.BICUBIC)
        left, top = rng.integers(0, self.size // 4, 2)
        side = self.size * 3 // 4
        image = image.crop((left, top, left + side, top + side))
        image = image.resize((self.size, self.size), Image.BICUBIC)
        image = ImageOps.autocontrast(image)
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0)))
        array = np.asarray(image, dtype=np.float32) / 255
        return torch.from_numpy(array)[None]

    def __getitem__(self, i):
        return self.augment(self.images[i]), self.augment(self.images[i])


class Encoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        layers, channels = [], 1
        for i in range(4):
            out = width * 2**i
            layers += [
                nn.Conv2d(channels, out, 3, 2, 1),
                nn.BatchNorm2d(out),
                nn.ReLU(),
            ]
            channels = out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(channels, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return F.normalize(self.head(self.body(x)), dim=1)


def nt_xent(a, b):
    z = torch.cat([a, b])
    similarity = z @ z.t() / TEMPERATURE
    similarity.fill_diagonal_(-1e9)
    n = len(a)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similarity, target)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the machine is shared
    loader = DataLoader(
        TwoViews(),
        batch_size=64,
        shuffle=True,
        drop_last=True,
    )
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for a, b in loader:
            loss = nt_xent(model(a), model(b))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
