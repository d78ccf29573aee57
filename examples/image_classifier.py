"""An image classifier before and after the Kaggle guide's advice.

scikit-learn's 1,797 digits are enlarged to images, turned and moved at random. The same
small CNN learns them in two ways. "before" is plain torch: float32, no workers, the
guide's loop for accumulation. "after" follows the guide where it holds: autocast (with
a loss scale on a GPU), enlarged images kept in memory, worker processes, accumulation
by trainfast.Accumulator, clipping inside trainfast.AdamW's step. Their epochs take
turns, so that whatever else the machine does slows both alike.

    python examples/image_classifier.py               # about a minute on two cores
    python examples/image_classifier.py --epochs 3 --size 24
"""

import argparse
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

import trainfast
from trainfast.report import Table

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("the images need scikit-learn: pip install scikit-learn") from None

MAX_GRAD_NORM = 1.0
TEST = 360  # images that are not trained on


class Digits(Dataset):
    """Digits as images of `size` x `size` pixels and their labels."""

    def __init__(
        self, images: Tensor, labels: Tensor, size: int, distort=False, cache=False
    ) -> None:
        self.images, self.labels = images, labels
        self.size, self.distort = size, distort
        self.cached = [self.enlarge(image) for image in images] if cache else None

    def enlarge(self, image: Tensor) -> Tensor:
        return F.interpolate(image[None, None], (self.size, self.size), mode="bicubic")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = self.cached[i] if self.cached else self.enlarge(self.images[i])
        if self.distort:
            angle, right, down = (torch.rand(3) * 0.4 - 0.2).tolist()
            c, s = math.cos(angle), math.sin(angle)
            turn = torch.tensor([[[c, -s, right], [s, c, down]]])
            grid = F.affine_grid(turn, image.shape, align_corners=False)
            image = F.grid_sample(image, grid, align_corners=False)
        return image[0], self.labels[i]


def cnn(width: int = 32) -> nn.Module:
    layers, channels = [], 1
    for out in (width, 2 * width, 4 * width):
        conv = nn.Conv2d(channels, out, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
        channels = out
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)
    return nn.Sequential(*layers, *head)


class Before:
    """Plain torch, with the guide's loop for accumulation and clipping."""

    name, dtype, cache = "before", torch.float32, False

    def __init__(
        self, args: argparse.Namespace, images: Tensor, labels: Tensor
    ) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.model = cnn().to(args.device)
        options = {"size": args.size, "distort": True, "cache": self.cache}
        train = Digits(images[TEST:], labels[TEST:], **options)
        self.loader = self.make_loader(train)
        test = Digits(images[:TEST], labels[:TEST], args.size)
        self.test = DataLoader(test, batch_size=TEST)
        self.optimizer = self.make_optimizer()
        steps = args.epochs * math.ceil(len(self.loader) / args.accumulate)
        self.scheduler = CosineAnnealingLR(self.optimizer, steps)
        self.updates = 0
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def make_loader(self, data: Dataset) -> DataLoader:
        return DataLoader(data, batch_size=self.args.batch, shuffle=True)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.args.lr)

    def train(self) -> Tensor:
        """One epoch; returns the mean loss, on the device."""
        losses = []
        for i, (x, y) in enumerate(self.loader):
            loss = self.loss(x, y)
            (loss / self.args.accumulate).backward()
            # batches left over wait for the next epoch's first step, as in the guide
            if (i + 1) % self.args.accumulate == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.updates += 1
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x), y.to(self.args.device))

    def scores(self, x: Tensor) -> Tensor:
        return self.model(x.to(self.args.device))

    def epoch(self) -> None:
        self.model.train()
        began = time.perf_counter()
        loss = self.train().item()  # waits for a GPU
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss)
        print(
            f"epoch {len(self.losses)} of {self.args.epochs}  {self.name:6}  "
            f"{self.seconds[-1]:.2f} s  loss {loss:.3f}",
            flush=True,
        )

    @torch.no_grad()
    def accuracy(self) -> float:
        self.model.eval()
        ((x, y),) = self.test
        return (self.scores(x).argmax(1).cpu() == y).double().mean().item()

    def epoch_seconds(self) -> float:
        """The median, without the first epoch, which warms up."""
        return statistics.median(self.seconds[1:] or self.seconds)


class After(Before):
    """What the guide advises, with trainfast."""

    name, cache = "after", True

    def __init__(self, args: argparse.Namespace, *data: Tensor) -> None:
        super().__init__(args, *data)
        cuda = args.device.type == "cuda"
        self.dtype = torch.float16 if cuda else torch.bfloat16
        # bfloat16 has float32's range and needs no loss scale
        scaler = trainfast.GradScaler() if cuda else None
        self.accumulator = trainfast.Accumulator(
            self.optimizer, args.accumulate, scaler=scaler, scheduler=self.scheduler
        )

    def make_loader(self, data: Dataset) -> DataLoader:
        options = {"batch_size": self.args.batch, "shuffle": True}
        return DataLoader(data, **trainfast.loader_kwargs(self.args.workers, **options))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return trainfast.AdamW(
            self.model.parameters(), lr=self.args.lr, max_grad_norm=MAX_GRAD_NORM
        )

    def train(self) -> Tensor:
        losses = []
        for x, y in self.accumulator.batches(self.loader):  # leftovers take a step too
            loss = self.loss(x, y)
            self.accumulator.backward(loss)
            losses.append(loss.detach())
        self.updates = self.accumulator.steps_done
        return torch.stack(losses).mean()

    def scores(self, x: Tensor) -> Tensor:
        x = x.to(self.args.device, non_blocking=True)
        with torch.autocast(self.args.device.type, self.dtype):
            return self.model(x).float()


def table(runs: list[Before]) -> Table:
    rows = [
        (
            run.name,
            run.args.batch,
            run.args.accumulate,
            run.loader.num_workers,
            str(run.dtype).removeprefix("torch."),
            round(run.epoch_seconds(), 2),
            round(len(run.loader.dataset) / run.epoch_seconds()),
            run.updates / len(run.losses),
            f"{run.accuracy():.1%}",
        )
        for run in runs
    ]
    columns = ("", "batch", "accumulation", "workers", "dtype")
    measured = ("s an epoch", "samples/s", "updates an epoch", "accuracy")
    return Table("Measured here", (*columns, *measured), rows)


def verdict(before: Before, after: Before) -> str:
    ratio = before.epoch_seconds() / after.epoch_seconds()
    if ratio < 1.02:
        return f"After is not faster on this machine: {ratio:.2f} times."
    return f"After is {ratio:.2f} times as fast (the guide: 2 to 3 for AMP alone)."


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--size", type=int, default=48, help="of an image, in pixels")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4, help="batches to a step")
    parser.add_argument("--workers", type=int, help="after; default: from the cores")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    return args


def main(arguments: list[str] | None = None) -> list[Before]:
    args = parse(arguments)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    runs = [kind(args, images, labels) for kind in (Before, After)]
    trainfast.print_gpu_memory()
    for _ in range(args.epochs):
        for run in runs:
            run.epoch()
    trainfast.print_gpu_memory()
    print(f"\n{table(runs)}\n{verdict(*runs)}")
    return runs


if __name__ == "__main__":
    main()
