"""Keyword spotting in the manner of Speech Commands, on synthetic words of tones."""

import tempfile
import wave
from pathlib import Path

import numpy as np
import torch
from scipy import signal
from torch import nn
from torch.utils.data import DataLoader, Dataset

RATE, TARGET_RATE, WORDS = 44100, 16000, 10


def record(folder, count=400):
    rng = np.random.default_rng(0)
    t = np.arange(RATE) / RATE
    for i in range(count):
        word = i % WORDS
        tones = 200 + 120 * word + rng.normal(0, 10, 3)
        sound = sum(np.sin(2 * np.pi * f * t * (k + 1)) for k, f in enumerate(tones))
        sound = 0.2 * sound + 0.05 * rng.standard_normal(RATE)
        with wave.open(str(folder / f"{word}_{i:04}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())


def mel_filters(bins, mels=40):
    top = 2595 * np.log10(1 + TARGET_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, mels + 2) / 2595) - 1)
    f = np.linspace(0, TARGET_RATE / 2, bins)
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (f - low) / (mid - low), (high - f) / (high - mid)
    return np.maximum(0, np.minimum(rising, falling))


class Keywords(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.wav"))
        self.filters = mel_filters(257)

    def __len__(self):
        return len(self.files)

    def features(self, path):
        with wave.open(str(path)) as file:
            sound = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
        sound = signal.resample(sound, TARGET_RATE)
        _, _, spectrum = signal.stft(sound, TARGET_RATE, nperseg=512, noverlap=352)
        mel = self.filters @ np.abs(spectrum) ** 2
        return torch.from_numpy(np.log(mel + 1e-6)).float()

    def __getitem__(self, i):
        path = self.files[i]
        return self.features(path), int(path.name.split("_")[0])


class KeywordNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(40, 64, 5, padding=2),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Conv1d(64, 64, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(64, WORDS),
        )

    def forward(self, x):
        return self.body(x)


torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
record(folder)
loader = DataLoader(Keywords(folder), batch_size=32, shuffle=True, drop_last=True)
model = KeywordNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6 * len(loader))
for epoch in range(6):
    right = 0
    for x, y in loader:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        right += (out.argmax(1) == y).sum().item()
    print(f"epoch {epoch + 1}: accuracy {right / len(loader.dataset):.3f}")
