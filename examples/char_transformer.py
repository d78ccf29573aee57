"""A small GPT learns Python from the source of Python's own standard library.

The same model is trained with torch's default AdamW, with torch's fused one and with
trainfast's, and in bfloat16 autocast with a gradient scaler and clipping, by torch and
by trainfast; then both of trainfast's again, with its attention in place of torch's.
All start from the same seeds and see the same batches. The runs take turns of a few
iterations, so that whatever else the machine does slows all of them alike. At the end
stand a table of speeds and losses, how far apart the losses are, their curves in a PNG,
and a sample.

    python examples/char_transformer.py                  # about two minutes
    python examples/char_transformer.py --preset tiny    # seconds
    python examples/char_transformer.py --resume         # goes on after a Ctrl-C
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from small_gpt import GPT, Corpus
from torch import Tensor, nn
from torch.backends.cpu import get_cpu_capability
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from tqdm import tqdm

import trainfast

TURN = 25  # iterations before the next optimizer has its turn
NOTE = f"""\
The runs took turns of {TURN} iterations. Times are medians, without each one's first
turn; ms is a whole iteration. With AMP, step() is unscaling, clipping, step and update.
Losses are in nats per character, of the last 50 iterations and on unseen text.
"+ attention" is the trainfast row of its kind under trainfast.patch("attention")."""


@dataclass
class Preset:
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    eval_every: int  # iterations, a multiple of TURN


PRESETS = {
    "tiny": Preset(2, 32, 2, 32, 4, steps=75, eval_every=25),
    "small": Preset(4, 128, 4, 64, 8, steps=600, eval_every=100),
}


@dataclass
class Variant:
    """One row of the table: what this training run does in its own way."""

    name: str
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    make_scaler: Callable[[str], torch.amp.GradScaler] | None = None
    like: str | None = None  # of VARIANTS: computes the same but for roundings
    patches: tuple[str, ...] = ()

    def patched(self) -> AbstractContextManager:
        """In it, the model runs in this variant's way."""
        return trainfast.patch(*self.patches) if self.patches else nullcontext()


def groups(model: nn.Module) -> list[dict]:
    """Weight decay for matrices, none for biases and norms, as is usual."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others}]


DEFAULTS = {"lr": 2e-3, "weight_decay": 0.0}
VARIANTS = {
    "torch": Variant(
        "torch AdamW",
        lambda model: torch.optim.AdamW(groups(model), **DEFAULTS),
    ),
    "torch-fused": Variant(
        "torch fused AdamW",
        lambda model: torch.optim.AdamW(groups(model), fused=True, **DEFAULTS),
        like="torch",
    ),
    "trainfast": Variant(
        "trainfast AdamW",
        lambda model: trainfast.torch.AdamW(groups(model), **DEFAULTS),
        like="torch",
    ),
    "trainfast-int8": Variant(
        "8-bit state",
        lambda model: trainfast.torch.AdamW(
            groups(model), state_dtype="int8", **DEFAULTS
        ),
        like="trainfast",
    ),
    "amp-torch": Variant(
        "AMP, torch",
        lambda model: torch.optim.AdamW(groups(model), fused=True, **DEFAULTS),
        torch.amp.GradScaler,
    ),
    "amp-trainfast": Variant(
        "AMP, trainfast",
        lambda model: trainfast.torch.AdamW(
            groups(model), max_grad_norm=1.0, **DEFAULTS
        ),
        trainfast.torch.GradScaler,
        like="amp-torch",
    ),
}
for name, new in (("trainfast", "AdamW"), ("amp-trainfast", "AMP")):
    VARIANTS[f"{name}-attention"] = replace(
        VARIANTS[name],
        name=f"{new} + attention",
        like=name,
        patches=("attention",),
    )


class Stopwatch:
    """Notes times between start and stop; on a GPU by events, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: list = []

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self.began = self.now()

    def stop(self) -> None:
        self.spans.append((self.began, self.now()))

    def milliseconds(self) -> float:
        """The median, which other processes on the machine disturb least."""
        if not self.cuda:
            return statistics.median(end - began for began, end in self.spans) * 1e3
        torch.cuda.synchronize()
        return statistics.median(began.elapsed_time(end) for began, end in self.spans)


class Run:
    """One variant's training: its own model, optimizer, schedule and random crops."""

    def __init__(self, variant: Variant, corpus: Corpus, args, place: int) -> None:
        self.variant, self.name = variant, variant.name
        self.corpus, self.args = corpus, args
        self.preset = PRESETS[args.preset]
        torch.manual_seed(args.seed)
        shape = (self.preset.context, self.preset.layers, self.preset.width)
        model = GPT(len(corpus.alphabet), *shape, self.preset.heads)
        self.model = model.to(args.device)
        self.optimizer = variant.make_optimizer(self.model)
        self.scaler = variant.make_scaler and variant.make_scaler(args.device.type)
        warmup = max(1, args.steps // 10)
        rise = LinearLR(self.optimizer, 0.05, total_iters=warmup)
        fall = CosineAnnealingLR(self.optimizer, max(1, args.steps - warmup))
        self.schedule = SequentialLR(self.optimizer, [rise, fall], [warmup])
        self.generator = torch.Generator().manual_seed(args.seed)
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.turns = 0
        self.whole, self.step = Stopwatch(args.device), Stopwatch(args.device)
        self.checkpoint = args.out / f"{variant.name.replace(' ', '-')}.pt"
        if args.resume and self.checkpoint.exists():
            self.load()
        # disable=None: no bar where the output is no terminal, report() prints instead
        self.bar = tqdm(desc=self.name, total=args.steps, position=place, disable=None)
        self.bar.update(len(self.losses))

    def crops(self, text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs (batch, context), and targets, which are one character ahead."""
        last = len(text) - self.preset.context
        starts = torch.randint(last, (self.preset.batch, 1), generator=generator)
        crops = text[starts + torch.arange(self.preset.context + 1)]
        return crops[:, :-1].to(self.args.device), crops[:, 1:].to(self.args.device)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def iteration(self) -> Tensor:
        self.whole.start()
        with torch.autocast(
            self.args.device.type, torch.bfloat16, enabled=self.scaler is not None
        ):
            loss = self.loss(*self.crops(self.corpus.train, self.generator))
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.step.start()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.step.start()
            self.step_with_scaler()
        self.step.stop()
        self.schedule.step()
        self.whole.stop()
        return loss.detach()

    def step_with_scaler(self) -> None:
        if isinstance(self.optimizer, trainfast.torch.AdamW):
            self.scaler.step(self.optimizer)  # unscales and clips in its two passes
        else:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def turn(self) -> None:
        """Trains for one turn, then validates and saves where that is due."""
        every = self.preset.eval_every
        count = min(TURN, self.args.steps - len(self.losses))
        if self.turns == 1:  # the first one was for warming up
            self.whole.spans.clear()
            self.step.spans.clear()
        self.turns += 1
        with self.variant.patched():
            losses = [self.iteration() for _ in range(count)]
            self.losses += torch.stack(losses).tolist()
            self.bar.update(count)
            if len(self.losses) % every == 0 or len(self.losses) == self.args.steps:
                self.validation.append((len(self.losses), self.validate()))
                self.save()
                self.report()

    @torch.no_grad()
    def validate(self, batches: int = 16) -> float:
        generator = torch.Generator().manual_seed(0)  # the same crops every time
        crops = [self.crops(self.corpus.validation, generator) for _ in range(batches)]
        return statistics.fmean(self.loss(*crop).item() for crop in crops)

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "generator": self.generator.get_state(),
            "losses": self.losses,
            "validation": self.validation,
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)  # whatever happens, one checkpoint is whole

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.generator.set_state(state["generator"])
        self.losses, self.validation = state["losses"], state["validation"]

    def report(self) -> None:
        train, validation = f"{self.train_loss():.3f}", f"{self.validation[-1][1]:.3f}"
        self.bar.set_postfix(train=train, validation=validation)
        if self.bar.disable:
            step = f"step {len(self.losses):5} of {self.args.steps}"
            took = f"{self.whole.milliseconds():.1f} ms a step"
            line = f"{self.name:17}  {step}  {took}  train {train}  valid. {validation}"
            print(line, flush=True)

    def train_loss(self) -> float:
        return statistics.fmean(self.losses[-50:])

    def row(self) -> list[str]:
        speeds = ["-"] * 4
        if self.step.spans:  # none when resumed at the end
            whole, step = self.whole.milliseconds(), self.step.milliseconds()
            tokens = self.preset.batch * self.preset.context
            speeds = [f"{whole:.2f}", f"{1e3 / whole * tokens:,.0f}"]
            speeds += [f"{step:.3f}", f"{step / whole:.1%}"]
        losses = [f"{self.train_loss():.4f}", f"{self.validation[-1][1]:.4f}"]
        return [self.name, *speeds, *losses]


def print_table(runs: list[Run]) -> None:
    head = ["run", "ms", "tokens/s", "step() ms", "share", "train", "valid."]
    rows = [head, *(run.row() for run in runs)]
    for name, *cells in rows:
        print(f"{name:17}", *(f"{cell:>9}" for cell in cells))
    print(NOTE)


def print_differences(runs: list[Run]) -> None:
    """How far apart are the losses of runs that compute the same: by roundings in the
    beginning, which training then magnifies."""
    named = {run.name: run for run in runs}
    rows = [("at most, relative", "to", f"first {TURN}", "all")]
    for run in runs:
        like = run.variant.like and named.get(VARIANTS[run.variant.like].name)
        if like:
            apart = (torch.tensor(run.losses) / torch.tensor(like.losses) - 1).abs()
            ends = (f"{apart[:TURN].max():.0e}", f"{apart.max():.0e}")
            rows.append((run.name, like.name, *ends))
    if len(rows) > 1:
        print("Training losses differ by roundings, which training magnifies:")
        for name, other, *cells in rows:
            print(f"{name:17} {other:17}", *(f"{cell:>9}" for cell in cells))
    fallbacks = trainfast.stats().fallbacks.get("attention", {})
    for reason, count in fallbacks.items():
        print(f"torch's attention ran instead of trainfast's {count} times: {reason}")


def plot(runs: list[Run], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, run in enumerate(runs):  # they lie on each other: ever thinner lines
        window = max(1, len(run.losses) // 40)
        smooth = torch.tensor(run.losses).unfold(0, window, 1).mean(1).tolist()
        steps = range(window, len(run.losses) + 1)
        (line,) = axes.plot(steps, smooth, linewidth=7 / (i + 1), label=run.name)
        dots = {"color": line.get_color(), "markersize": 12 / (i + 1)}
        axes.plot(*zip(*run.validation, strict=True), "o", **dots)
    axes.set(xlabel="iteration", ylabel="nats per character")
    axes.set_title("training loss (lines, smoothed) and validation loss (dots)")
    axes.legend()
    figure.savefig(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--steps", type=int, help="iterations of each run")
    parser.add_argument("--optimizers", nargs="+", choices=VARIANTS)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/char_transformer"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="with the same arguments")
    args = parser.parse_args(arguments)
    args.steps = args.steps or PRESETS[args.preset].steps
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    args.optimizers = args.optimizers or worthwhile(args)
    return args


def worthwhile(args: argparse.Namespace) -> list[str]:
    """All variants but 8-bit state, which saves memory and no time; without AMP where
    bfloat16 makes an iteration 15 times as long."""
    names = [name for name in VARIANTS if name != "trainfast-int8"]
    emulated = args.device.type == "cpu" and get_cpu_capability() == "AVX2"
    if args.preset == "tiny" or not emulated:
        return names
    print(
        "Without AMP: this processor has no AVX-512, so that torch emulates bfloat16 "
        "and each run\nwith it takes minutes. --optimizers amp-torch amp-trainfast "
        "runs it."
    )
    return [name for name in names if not name.startswith("amp")]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus, chosen = Corpus(), [VARIANTS[name] for name in args.optimizers]
    runs = [Run(variant, corpus, args, i) for i, variant in enumerate(chosen)]
    parameters = sum(p.numel() for p in runs[0].model.parameters())
    print(f"{parameters:,} parameters, {len(corpus.train):,} characters, {args.device}")
    try:
        while (done := min(len(run.losses) for run in runs)) < args.steps:
            for run in runs:
                if len(run.losses) == done:
                    run.turn()
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; the same command with --resume goes on") from None
    finally:
        for run in runs:
            run.bar.close()
    print_table(runs)
    print_differences(runs)
    plot(runs, args.out / "losses.png")
    print(
        f"Loss curves: {args.out / 'losses.png'}. A sample of {runs[-1].name}'s model:"
    )
    prompt = corpus.encode(b"def ")
    with runs[-1].variant.patched():
        sample = runs[-1].model.generate(prompt, 400, args.seed)
    print(corpus.decode(sample))


if __name__ == "__main__":
    main()
