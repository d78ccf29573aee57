"""What the examples train: a small GPT, and Python's standard library as its text."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_BYTES = 4_000_000  # of text


class Corpus:
    """The standard library's top-level files, as tensors of character numbers."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        text = text[:MAX_BYTES]
        if len(text) < 100_000:
            raise SystemExit(f"{folder} must hold Python's source, got {len(text)} B")
        self.alphabet = sorted(set(text))
        # as encode() does, of all bytes at once
        table = bytes.maketrans(bytes(self.alphabet), bytes(range(len(self.alphabet))))
        numbers = torch.frombuffer(bytearray(text.translate(table)), dtype=torch.uint8)
        numbers = numbers.long()
        split = len(numbers) * 9 // 10  # contiguous: other modules for validation
        self.train, self.validation = numbers[:split], numbers[split:]

    def encode(self, text: bytes) -> list[int]:
        number = {byte: i for i, byte in enumerate(self.alphabet)}
        return [number[byte] for byte in text]

    def decode(self, numbers: list[int]) -> str:
        return bytes(self.alphabet[i] for i in numbers).decode(errors="replace")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self, characters: int, context: int, layers: int, width: int, heads: int
    ) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        blocks = [Block(width, heads) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.characters(numbers) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, numbers: list[int], count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            seen = torch.tensor([numbers[-self.context :]])
            scores = self(seen.to(self.head.weight.device))[0, -1].cpu()
            odds = F.softmax(scores / 0.7, dim=0)
            numbers = [*numbers, int(torch.multinomial(odds, 1, generator=generator))]
        return numbers
