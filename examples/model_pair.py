"""A small and a large segmentation model, with the tables of the EmberFormer guide.

From six pictures of a fire and the wind the model predicts where it burns next: a small
convolutional encoder makes patches, a transformer runs over the time steps of each, and
a convolutional decoder paints the answer. The tables: how much of a GPU with 24 GB each
configuration would take, by an estimate that computes nothing; what scaling batch and
model in three steps takes and how fast it is here; speed and quality of each
configuration after the same number of samples, with plain torch's AdamW and clipping
("before") and trainfast's ("after") in turns; and learning rates for the larger batch.

    python examples/model_pair.py                 # under two minutes on two cores
    python examples/model_pair.py --samples 128   # seconds
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainfast
from trainfast.report import Table

FRAMES = 6  # time steps of a sample, as in the guide
GUIDE_SIZE = 320  # pixels: 20 x 20 patches, the guide's 400
PATCH = 16
RATE, RATE_BATCH = 1e-3, 8  # the guide's learning rate, and the batch that it is for
MAX_GRAD_NORM = 1.0
GIB = 1 << 30


@dataclass(frozen=True)
class Config:
    batch: int
    d_model: int
    heads: int
    layers: int
    ffn: int
    width: int  # channels of the encoder and the decoder


CONFIGS = {
    "small": Config(8, 64, 4, 3, 256, width=16),
    "medium": Config(16, 96, 6, 4, 384, width=24),
    "large": Config(32, 128, 8, 6, 512, width=32),
}
# What the guide says: GB in use, times as fast as small, and F1.
GUIDE = {
    "small": (2.7, "1", "baseline"),
    "medium": (6.0, "2", "+10 %"),
    "large": (12.0, "3.5", "+15 %"),
}
# The guide's three steps from the small configuration to the large one, and its GB.
STEPS = {
    "1. batch 32": (replace(CONFIGS["small"], batch=32), 6.0),
    "2. d_model 128, 6 layers": (replace(CONFIGS["large"], width=16), 10.0),
    "3. larger encoder and decoder": (CONFIGS["large"], 14.0),
}


class EmberFormer(nn.Module):
    """(batch, FRAMES, 3, size, size) to logits (batch, size, size)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, d_model = config.width, config.d_model
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(4, width), nn.GELU()),
            *(nn.Conv2d(width, width, 3, 2, 1), nn.GroupNorm(4, width), nn.GELU()),
            nn.Conv2d(width, d_model, 4, 4),
        )
        self.time = nn.Parameter(torch.randn(FRAMES, d_model) * 0.02)
        layer = nn.TransformerEncoderLayer(
            *(d_model, config.heads, config.ffn, 0.0, "gelu"),
            **{"batch_first": True, "norm_first": True},
        )
        self.temporal = nn.TransformerEncoder(
            layer, config.layers, enable_nested_tensor=False
        )
        self.decoder = nn.Sequential(
            *(nn.ConvTranspose2d(d_model, width, 4, 4), nn.GELU()),
            *(nn.ConvTranspose2d(width, width, 4, 4), nn.GELU()),
        )
        self.paint = nn.Sequential(  # the change since the last picture
            *(nn.Conv2d(width + 3, width, 3, padding=1), nn.GELU()),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        batch, frames = pictures.shape[:2]
        patches = self.encoder(pictures.flatten(0, 1)).unflatten(0, (batch, frames))
        grid = patches.shape[-2:]
        sequences = patches.flatten(3).permute(0, 3, 1, 2).flatten(0, 1) + self.time
        last = self.temporal(sequences)[:, -1]
        last = last.unflatten(0, (batch, -1)).transpose(1, 2).unflatten(2, grid)
        features = torch.cat((self.decoder(last), pictures[:, -1]), 1)
        return self.paint(features).squeeze(1) + 8 * (pictures[:, -1, 0] - 0.5)


def fires(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Fires that grow and drift with the wind: pictures, and where it burns next.

    A picture has three channels: a noisy mask of the fire, and the wind's two parts.
    """
    random = torch.rand(count, 6, generator=generator)[..., None, None, None]
    x, y, wind_x, wind_y, radius, growth = random.unbind(1)
    wind_x, wind_y = wind_x - 0.5, wind_y - 0.5
    step = torch.arange(FRAMES + 1.0)[:, None, None]
    line = torch.linspace(0, 1, size)
    drift_x, drift_y = (0.15 * wind * (step - FRAMES / 2) for wind in (wind_x, wind_y))
    across = line[None, None, None, :] - (0.25 + x / 2) - drift_x
    down = line[None, None, :, None] - (0.25 + y / 2) - drift_y
    reach = 0.08 + 0.1 * radius + (0.01 + 0.02 * growth) * step
    burns = (across.square() + down.square() < reach.square()).float()
    seen = burns[:, :-1]
    noise = 0.1 * torch.randn(seen.shape, generator=generator)
    winds = (wind.expand_as(seen) for wind in (wind_x, wind_y))
    return torch.stack((seen + noise, *winds), 2), burns[:, -1]


class Run:
    """One configuration in training: with plain torch, or with trainfast."""

    def __init__(self, way: str, config: Config, lr: float, args) -> None:
        torch.manual_seed(args.seed)
        self.way, self.config, self.device = way, config, args.device
        self.model = EmberFormer(config).to(args.device)
        parameters = self.model.parameters()
        half = args.device.type == "cuda"
        self.dtype = torch.float16 if half else torch.bfloat16
        if way == "before":
            self.optimizer = torch.optim.AdamW(parameters, lr=lr)
            self.scaler = torch.amp.GradScaler(args.device.type, enabled=half)
        else:
            self.optimizer = trainfast.AdamW(
                parameters, lr=lr, max_grad_norm=MAX_GRAD_NORM
            )
            self.scaler = trainfast.GradScaler(args.device.type, enabled=half)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def logits(self, pictures: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.dtype):  # as the guide has it
            return self.model(pictures.to(self.device)).float()

    def step(self, pictures: Tensor, target: Tensor) -> None:
        began = time.perf_counter()
        logits = self.logits(pictures)
        loss = F.binary_cross_entropy_with_logits(logits, target.to(self.device))
        self.scaler.scale(loss).backward()
        if self.way == "before":
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for a GPU
        self.seconds.append(time.perf_counter() - began)

    def speed(self) -> float:
        """Samples a second: the median, without the first step, which warms up."""
        return self.config.batch / statistics.median(self.seconds[1:] or self.seconds)

    @torch.no_grad()
    def f1(self, size: int) -> float:
        """On fires that were not trained on."""
        pictures, target = unseen(size)
        return f1(self.logits(pictures).cpu() > 0, target)


def unseen(size: int) -> tuple[Tensor, Tensor]:
    return fires(32, size, torch.Generator().manual_seed(0))


def f1(found: Tensor, target: Tensor) -> float:
    both = (found & target.bool()).sum()
    return (2 * both / (found.sum() + target.sum())).item()


def train(config: Config, ways: tuple[str, ...], lr: float, samples: int, args):
    """Trains one run for each way on the same batches, in turns."""
    runs = [Run(way, config, lr, args) for way in ways]
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(max(2, samples // config.batch)):
        batch = fires(config.batch, args.size, generator)
        for run in runs:
            run.step(*batch)
    return runs


# ---- The tables ----------------------------------------------------------------------


def gigabytes(
    config: Config, gpu: str, batch: int | None = None
) -> tuple[float, float]:
    """What a step would take with the guide's images, and what the GPU has."""
    batch = batch or config.batch
    pictures = torch.zeros(batch, FRAMES, 3, GUIDE_SIZE, GUIDE_SIZE)
    estimate = trainfast.estimate_memory(
        lambda: EmberFormer(config),
        (pictures, torch.zeros(batch, GUIDE_SIZE, GUIDE_SIZE)),
        loss_fn=F.binary_cross_entropy_with_logits,
        **{"optimizer": "trainfast", "amp": "fp16", "gpu": gpu},
    )
    return estimate.total / GIB, estimate.capacity / GIB


def headroom_table(args: argparse.Namespace) -> Table:
    rows = []
    for name, config in CONFIGS.items():
        (used, capacity), (doubled, _) = (
            gigabytes(config, args.gpu, batch)
            for batch in (config.batch, 2 * config.batch)
        )
        # memory grows by as much with each sample; the guide's target ends at 60 %
        of_a_sample = (doubled - used) / config.batch
        room = config.batch + int((0.6 * capacity - used) / of_a_sample)
        parameters = sum(p.numel() for p in EmberFormer(config).parameters())
        share = f"{used:.1f} of {capacity:.0f} GB ({used / capacity:.0%})"
        rows.append(
            (name, config.batch, parameters, share, f"{GUIDE[name][0]} GB", room)
        )
        print(f"estimated {name}: {share}", flush=True)
    columns = "", "batch", "parameters", "estimate", "guide", "batch for 60 %"
    return Table(f"Headroom on {args.gpu}, float16 autocast", columns, rows)


def progressive_table(args: argparse.Namespace) -> Table:
    rows = []
    for name, (config, guide) in STEPS.items():
        used, _ = gigabytes(config, args.gpu)
        (run,) = train(config, ("after",), RATE, 3 * config.batch, args)
        rows.append((name, f"{used:.1f} GB", f"{guide} GB", round(run.speed(), 1)))
        print(f"{name}: {run.speed():.1f} samples/s", flush=True)
    columns = "step", "estimate", "guide", "samples/s here"
    return Table("Progressive scaling", columns, rows)


def trade_off_table(args: argparse.Namespace) -> Table:
    rows = []
    for name, config in CONFIGS.items():
        lr = trainfast.scale_lr(RATE, RATE_BATCH, config.batch)
        before, after = train(config, ("before", "after"), lr, args.samples, args)
        if name == "small":
            slow = after.speed()
        quality = after.f1(args.size)
        _, guide_speed, guide_f1 = GUIDE[name]
        rows.append(
            (
                *(name, len(after.losses), round(before.speed(), 1)),
                *(round(after.speed(), 1), f"{after.speed() / before.speed():.2f}"),
                *(f"{after.speed() / slow:.2f}", guide_speed),
                *(round(after.losses[0], 3), round(after.losses[-1], 3)),
                *(round(quality, 3), guide_f1),
            )
        )
        print(f"{name}: loss {after.losses[-1]:.3f}, F1 {quality:.3f}", flush=True)
    speeds = "before samples/s", "after samples/s", "times", "of small", "guide"
    losses = "first loss", "last loss", "F1", "guide's F1"
    pictures, target = unseen(args.size)
    copied = f1(pictures[:, -1, 0] > 0.5, target)
    title = (
        f"Trade-off after {args.samples} samples (F1 of the last picture: {copied:.3f})"
    )
    return Table(title, ("", "updates", *speeds, *losses), rows)


def rate_table(args: argparse.Namespace) -> Table:
    """The small model with four times the batch: which learning rate?"""
    config = STEPS["1. batch 32"][0]
    rows = []
    for rule in (None, "sqrt", "linear"):
        lr = trainfast.scale_lr(RATE, RATE_BATCH, config.batch, rule)
        (run,) = train(config, ("after",), lr, args.samples, args)
        quality = round(run.f1(args.size), 3)
        rows.append((rule or "keep", lr, round(run.losses[-1], 3), quality))
        print(f"learning rate {lr:g}: loss {run.losses[-1]:.3f}", flush=True)
    columns = "rule", "learning rate", "last loss", "F1"
    return Table(f"scale_lr({RATE:g}, {RATE_BATCH}, {config.batch})", columns, rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=768, help="trained on, each")
    parser.add_argument(
        "--size", type=int, help=f"of a picture, {PATCH} times a number"
    )
    parser.add_argument("--gpu", default="24GB", help="to estimate for: name or memory")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.size = args.size or (48 if args.device == "cpu" else GUIDE_SIZE // 2)
    if args.size < PATCH or args.size % PATCH:
        parser.error(f"--size must be {PATCH} times a number, got {args.size}")
    args.device = torch.device(args.device)
    return args


def main(arguments: list[str] | None = None) -> list[Table]:
    args = parse(arguments)
    make = headroom_table, progressive_table, trade_off_table, rate_table
    tables = [table(args) for table in make]
    print()
    print("\n\n".join(map(str, tables)))
    return tables


if __name__ == "__main__":
    main()
