"""A graph network learns where players and a ball will be a second from now.

The tracks of 22 players and a ball are simulated. Five frames of a play become a graph,
and the network predicts several futures of ten frames, of which one should be right.
It is trained with Lightning on the same batches in several ways: each graph built from
positions whenever it is needed, read from trainfast's cache, with half precision too,
and with at most ten neighbours a node. The ways take turns; each turn goes on from the
checkpoint of the turn before. At the end stand a table of speeds, of the time spent
waiting for data and of memory, the metrics beside their targets, and a picture of
tracks and predicted futures.

    python examples/trajectories.py                  # about a minute
    python examples/trajectories.py --preset tiny    # seconds
    python examples/trajectories.py --resume         # goes on after a Ctrl-C
    tensorboard --logdir build/trajectories/lightning_logs

Needs lightning and tensorboard.
"""

import argparse
import logging
import shutil
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from play_batches import FUTURE, PAST, Batch, Order, Plays, built, cached
from play_model import PlayNet, loss_of, straight_on
from play_simulation import TEAM, TRACKS
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

import trainfast

try:
    import lightning
    import tensorboard  # noqa: F401 (Lightning's logger writes with it)
    from lightning.pytorch.loggers import TensorBoardLogger
except ModuleNotFoundError as error:
    raise SystemExit(
        f"the training needs {error.name}: pip install lightning tensorboard"
    ) from None

GUIDE = (0.13, 1.2, 2.1)  # it/s of a performance guide: no cache, cache, half precision
VALIDATION = 256  # plays, at most
TARGETS = ("competition", "world_class")


@dataclass
class Preset:
    plays: int
    turns: int
    updates: int  # in a turn
    batch: int = 16
    accumulate: int = 12
    width: int = 32
    rounds: int = 2
    modes: int = 6


PRESETS = {
    "tiny": Preset(300, turns=3, updates=4, batch=4, accumulate=3, width=16),
    "small": Preset(20_000, turns=4, updates=4),
}


@dataclass
class Way:
    """One row of the table: where graphs come from, and the precision."""

    name: str
    cached: bool = True
    cap: int | None = None  # neighbours of a node, at most
    half: bool = False


WAYS = {
    "none": Way("no cache", cached=False),
    "cache": Way("cache"),
    "half": Way("cache + half precision", half=True),
    "ten": Way("cache, 10 neighbours", cap=10),
}


class Forecaster(lightning.LightningModule):
    """The network, its loss, its metrics and its optimizer."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.preset = preset
        self.net = PlayNet(preset.width, preset.rounds, preset.modes)
        self.metrics = trainfast.TrajectoryMetrics()
        self.losses: list[float] = []
        self.result = None  # trainfast's TrajectoryResult of the last validation

    def training_step(self, batch: Batch, _: int) -> Tensor:
        loss = loss_of(*self.net(batch), batch["y"])
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        self.log("learning_rate", self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        futures, scores = self.net(batch)
        loss = loss_of(futures, scores, batch["y"])
        self.log("val_loss", loss, batch_size=len(batch["y"]))
        self.metrics.update(futures, batch["y"], probabilities=scores.softmax(1))

    def on_validation_epoch_end(self) -> None:
        values = self.metrics.compute()
        names = {"val_ade": "ade", "val_minADE": "min_ade", "val_fde": "fde"}
        self.log_dict({tag: values[name] for tag, name in names.items()})
        self.result = self.metrics.report()
        self.metrics.reset()

    def configure_optimizers(self):
        optimizer = trainfast.AdamW(
            self.parameters(), lr=1e-2, weight_decay=0.01, max_grad_norm=1.0
        )
        schedule = CosineAnnealingLR(optimizer, self.preset.turns * self.preset.updates)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.losses = checkpoint["losses"]


class Board(TensorBoardLogger):
    """TensorBoard without the tag `epoch`, which Lightning adds, in one file a run.

    Lightning closes its file after each turn. TensorBoard reads the files of one second
    in the order of their names, where 10 comes before 9, and so mixes up the turns.
    """

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None
    ) -> None:
        super().log_metrics({k: v for k, v in metrics.items() if k != "epoch"}, step)

    def finalize(self, status: str) -> None:
        self.save()


class Timed:
    """A loader that notes how long each iteration waited for its batch, and took."""

    def __init__(self, loader, cuda: bool) -> None:
        self.loader, self.cuda = loader, cuda
        self.sampler = loader.sampler  # which Lightning tells the epoch
        self.turns: list[list[tuple[float, float]]] = []  # waiting, all of an iteration

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        seconds: list[tuple[float, float]] = []
        self.turns.append(seconds)
        began = time.perf_counter()
        for batch in self.loader:
            ready = time.perf_counter()
            yield batch
            if self.cuda:
                torch.cuda.synchronize()
            ended = time.perf_counter()
            seconds.append((ready - began, ended - began))
            began = ended


class Run:
    """One way's training: its own network, and the same plays as all others."""

    def __init__(self, way: Way, plays: Plays, args: argparse.Namespace) -> None:
        self.way, self.name, self.args = way, way.name, args
        self.preset = PRESETS[args.preset]
        self.cuda = args.device.type == "cuda"
        torch.manual_seed(args.seed)
        self.model = Forecaster(self.preset)
        preset, unseen = self.preset, range(plays.n_train, len(plays))[:VALIDATION]
        count = preset.updates * preset.accumulate * preset.batch
        order = Order(plays.n_train, count, args.seed)
        self.train_loader = Timed(self.loader(plays, order), self.cuda)
        self.validation = self.loader(plays, unseen)
        slug = way.name.replace(" + ", "-").replace(", ", "-").replace(" ", "-")
        self.board = Board(args.out, version=slug, default_hp_metric=False)
        self.checkpoint = args.out / f"{slug}.ckpt"
        if not args.resume:
            self.checkpoint.unlink(missing_ok=True)
            shutil.rmtree(self.board.log_dir, ignore_errors=True)
        self.memory = 0 if self.cuda else self.estimated_memory()

    def loader(self, plays: Plays, sampler):
        if not self.way.cached:
            return built(plays, sampler, self.preset.batch, self.args.workers)
        device = self.args.device
        return cached(plays, sampler, self.preset.batch, self.way.cap, device)

    def estimated_memory(self) -> int:
        """Bytes of a step's tensors: on a CPU they cannot be told from all others."""
        estimate = trainfast.estimate_memory(
            self.model.net,
            dict(next(iter(self.validation))),
            step=lambda net, batch: loss_of(*net(batch), batch["y"]),
            optimizer="trainfast",
            amp="bf16" if self.way.half else None,
            device="cpu",
        )
        return estimate.allocated

    def trainer(self, epochs: int) -> lightning.Trainer:
        kind = "16-mixed" if self.cuda else "bf16-mixed"
        precision = trainfast.lightning.Precision(kind, self.args.device.type)
        return lightning.Trainer(
            accelerator="gpu" if self.cuda else "cpu",
            devices=1,
            max_epochs=epochs,
            accumulate_grad_batches=self.preset.accumulate,
            plugins=[precision] if self.way.half else [],
            logger=self.board,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def turns_done(self) -> int:
        if not self.checkpoint.exists():
            return 0
        return torch.load(self.checkpoint, weights_only=True)["epoch"]

    def train(self, turns: int) -> None:
        """Trains until so many turns are done, from the last checkpoint on."""
        trainer = self.trainer(turns)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        start = self.checkpoint if self.checkpoint.exists() else None
        trainer.fit(self.model, self.train_loader, self.validation, ckpt_path=start)
        if self.cuda:
            self.memory = max(self.memory, torch.cuda.max_memory_allocated())
        new = self.checkpoint.with_suffix(".new")
        trainer.save_checkpoint(new)
        new.replace(self.checkpoint)  # whatever happens, one checkpoint is whole

    def validate(self) -> None:
        """Measures the network of the checkpoint, if no turn has in this process."""
        if self.model.result is None:
            trainer = self.trainer(0)
            trainer.logger = None
            path = self.checkpoint
            trainer.validate(self.model, self.validation, ckpt_path=path, verbose=False)

    # ---- What it measured ------------------------------------------------------------

    def speed(self) -> tuple[float, float] | None:
        """Mean seconds of an iteration, and of waiting; without the first turn."""
        turns = self.train_loader.turns
        seconds = [pair for turn in turns[1:] or turns for pair in turn]
        if not seconds:
            return None  # resumed at its end
        waiting, whole = np.mean(seconds, axis=0)
        return float(whole), float(waiting)

    def row(self, epoch: int) -> list[str]:
        cells = ["-"] * 5
        if speed := self.speed():
            whole, waiting = speed
            minutes, seconds = divmod(round(epoch * whole), 60)
            cells = [f"{1 / whole:.1f}", f"{minutes}:{seconds:02}"]
            cells += [f"{whole * 1e3:.2f}", f"{waiting * 1e3:.2f}"]
            cells.append(f"{waiting / whole:.1%}")
        loss = statistics.fmean(self.model.losses[-50:])
        cells += [f"{self.memory / 2**20:.1f}", f"{loss:.3f}"]
        return [self.name, *cells, f"{self.model.result.min_ade:.3f}"]


def train(runs: Sequence[Run], turns: int) -> None:
    for turn in range(1, turns + 1):
        for run in runs:
            if run.turns_done() < turn:
                run.train(turn)
        now = {run.name: run.model.result for run in runs if run.model.result}
        if now:
            values = ", ".join(f"{name} {now[name].min_ade:.3f}" for name in now)
            print(f"turn {turn} of {turns}: val_minADE: {values}", flush=True)
    for run in runs:
        run.validate()


def check_losses(runs: Mapping[str, Run]) -> str:
    """Says how alike the losses are with and without a cache; an error if they are not:
    the batches were not the same."""
    if not {"none", "cache"} <= set(runs):
        return ""
    one, two = (np.array(runs[name].model.losses) for name in ("none", "cache"))
    apart = abs(one / two - 1).max()
    if not apart < 1e-2:
        raise SystemExit(
            f"losses must not depend on the cache, got {apart:.0e} between"
        )
    return f"Losses with and without the cache are the same, to {apart:.0e}."


# ---- What comes out ------------------------------------------------------------------


def print_table(runs: Sequence[Run], epoch: int) -> None:
    head = ["", "it/s", "epoch", "ms", "waiting", "share", "MiB", "loss", "minADE"]
    for name, *cells in [head, *(run.row(epoch) for run in runs)]:
        print(f"{name:22}", *(f"{cell:>7}" for cell in cells))
    preset, kind = runs[0].preset, "peak" if runs[0].cuda else "estimated"
    print(
        f"An iteration is a batch of {preset.batch} plays, an update "
        f"{preset.accumulate} iterations. The ways took turns of {preset.updates}\n"
        f"updates; means without the first turn. epoch: minutes for {epoch:,} "
        "iterations. ms: of an\niteration; waiting: of those, for data. MiB: tensors "
        f"of a step, {kind}. loss: of the last\n50 iterations. minADE: metres, on "
        "unseen plays."
    )


def note(runs: Mapping[str, Run]) -> str:
    """What a cache and half precision gain here, beside the guide's numbers."""
    speeds = {name: run.speed() for name, run in runs.items()}
    said = []
    if speeds.get("none") and speeds.get("cache"):
        (slow, building), (fast, _) = speeds["none"], speeds["cache"]
        said.append(
            f"Without a cache {building / slow:.0%} of an iteration is building "
            f"graphs; the cache makes it {slow / fast:.1f} times\nfaster. A guide's "
            f"{GUIDE[0]} to {GUIDE[1]} it/s is {GUIDE[1] / GUIDE[0]:.1f} times."
        )
    if speeds.get("cache") and speeds.get("half"):
        gain = speeds["cache"][0] / speeds["half"][0]
        said.append(
            f"With half precision it is {gain:.2f} times as fast, on the guide's GPU "
            f"{GUIDE[2] / GUIDE[1]:.2f} times. A CPU without\nbfloat16 instructions "
            "is slower with it than with float32."
        )
    return "\n".join(said)


def against_targets(run: Run, plays: Plays) -> str:
    """The metrics beside the guide's targets, and beside going straight on."""
    unseen = slice(plays.n_train, plays.n_train + VALIDATION)
    last = torch.from_numpy(plays.velocity[unseen, -TRACKS:]).flatten(0, 1)
    truth = torch.from_numpy(plays.y[unseen]).flatten(0, 1)
    straight = trainfast.trajectory_metrics(straight_on(last), truth)
    lines = [
        f"On unseen plays, {run.name}: {values_of(run.model.result)}",
        f"Velocity kept as it is:  {values_of(straight)}",
    ]
    for name in TARGETS:
        rows = trainfast.targets(name).check(run.model.result).rows
        missed = [f"{metric} {value:.3g}" for metric, value, _, met in rows if not met]
        which = f", not {', '.join(missed)}" if missed else ""
        met = len(rows) - len(missed)
        lines.append(f"targets({name!r}): {met} of {len(rows)} are met{which}")
    lines.append(
        "The targets are for tracks of a league; these plays are simulated, and the "
        "training is short."
    )
    return "\n".join(lines)


def values_of(result) -> str:
    return (
        f"ADE {result.ade:.3f}, minADE {result.min_ade:.3f}, FDE {result.fde:.3f}, "
        f"minFDE {result.min_fde:.3f}, miss rate {result.miss_rate:.1%}"
    )


@torch.no_grad()
def plot(run: Run, plays: Plays, path: Path, count: int = 3) -> None:
    """Tracks of unseen plays around the ball, and the futures that are predicted."""
    batch = next(iter(run.validation))
    net = run.model.net.to("cpu").eval()
    futures, scores = net({key: value.cpu() for key, value in batch.items()})
    futures = futures.unflatten(0, (-1, TRACKS)).numpy()
    likely = scores.softmax(1).unflatten(0, (-1, TRACKS)).numpy()
    figure = Figure(figsize=(5 * count, 5), layout="constrained")
    for play, axes in enumerate(figure.subplots(1, count)):
        at = plays.n_train + play
        past = plays.pos[at].reshape(PAST, TRACKS, 2)
        for track, team in enumerate(TEAM):
            color = ("tab:blue", "tab:red", "black")[team]
            now = past[-1, track]
            axes.plot(*past[:, track].T, color=color, linewidth=3)
            for mode, chance in zip(futures[play, track], likely[play, track]):
                line = np.vstack([now, now + mode]).T
                axes.plot(*line, color="tab:green", alpha=0.2 + 0.8 * float(chance))
            truth = np.vstack([now, now + plays.y[at, track]]).T
            axes.plot(*truth, color=color, linestyle=":", linewidth=1.5)
        x, y = past[-1, -1]
        axes.set(xlim=(x - 18, x + 18), ylim=(y - 18, y + 18), aspect="equal")
        axes.set(title=f"play {at}", xlabel="m")
    figure.suptitle(
        f"{PAST} frames (thick; attack blue, defence red, ball black), the {FUTURE} "
        f"frames after them (dotted), and {run.preset.modes} predicted futures (green)"
    )
    figure.savefig(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/trajectories"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="with the same arguments")
    parser.add_argument(
        "--workers", type=int, default=0, help="that build graphs without a cache"
    )
    parser.add_argument("--fresh", action="store_true", help="build the caches anew")
    args = parser.parse_args(arguments)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    return args


def quiet() -> None:
    """No advice of Lightning's about loaders and devices."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    quiet()
    args.out.mkdir(parents=True, exist_ok=True)
    preset, chosen = PRESETS[args.preset], {name: WAYS[name] for name in args.ways}
    try:
        began = time.perf_counter()
        plays = Plays(preset.plays, preset.batch, args.out, args.seed)
        took = time.perf_counter() - began
        print(f"{len(plays):,} plays simulated in {took:.1f} s", flush=True)
        for cap in dict.fromkeys(way.cap for way in chosen.values() if way.cached):
            print(plays.build_cache(cap, args.fresh), flush=True)
        runs = {name: Run(way, plays, args) for name, way in chosen.items()}
        train(list(runs.values()), preset.turns)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != 1:
            raise
        # Lightning makes an exit with the code 1 of Ctrl-C.
        text = "\nstopped; the same command with --resume goes on"
        raise SystemExit(text) from None
    all_runs = list(runs.values())
    best = runs.get("cache", all_runs[-1])
    print_table(all_runs, plays.epoch)
    said = [check_losses(runs), note(runs), against_targets(best, plays)]
    print("\n".join(text for text in said if text))
    plot(best, plays, args.out / "plays.png")
    print(f"Tracks and predicted futures: {args.out / 'plays.png'}")


if __name__ == "__main__":
    main()
