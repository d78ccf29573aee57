"""Classifies photographs of digits: a folder a class, as ImageFolder reads them."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 32


def shrink(folder, to):
    """Copies of the photographs at the size that the network sees."""
    for path in sorted(folder.glob("*/*.jpg")):
        target = to / path.parent.name
        target.mkdir(exist_ok=True)
        with Image.open(path) as image:
            small = image.convert("RGB").resize((SIZE, SIZE), Image.BILINEAR)
            small.save(target / path.name, quality=95)


def photograph(folder, count=320, side=768):
    """Large JPEG files, as a camera writes them."""
    digits = load_digits()
    for i in range(count):
        array = (digits.images[i] * 15.9).astype(np.uint8)
        image = (
            Image.fromarray(array).resize((side, side), Image.BICUBIC).convert("RGB")
        )
        target = folder / str(digits.target[i])
        target.mkdir(exist_ok=True)
        image.save(target / f"{i:05}.jpg", quality=95)


class ImageFolder(Dataset):
    def __init__(self, root, transform):
        self.classes = sorted(p.name for p in root.iterdir() if p.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).glob("*.jpg"))
        ]
        self.transform = transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        path, label = self.samples[i]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label


def to_tensor(image):
    image = image.resize((SIZE, SIZE), Image.BILINEAR)
    array = np.asarray(image, dtype=np.float32) / 255
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    return (tensor - 0.5) / 0.5


def vgg():
    layers, channels = [], 3
    for out in (32, 64, 64):
        layers += [
            nn.Conv2d(channels, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]
        layers += [nn.MaxPool2d(2)]
        channels = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


torch.manual_seed(0)
root = Path(tempfile.mkdtemp())
photograph(root)
small = Path(tempfile.mkdtemp())
shrink(root, small)
dataset = ImageFolder(small, to_tensor)
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model = vgg()
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
criterion = nn.CrossEntropyLoss()
for epoch in range(4):
    running, right = 0.0, 0
    for images, labels in loader:
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(images)
        right += (outputs.argmax(1) == labels).sum().item()
    scheduler.step()
    print(f"{epoch}: loss {running / len(dataset):.3f} acc {right / len(dataset):.3f}")
