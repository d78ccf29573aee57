"""A small graph network learns from functions whether they return a value.

The graphs are the syntax trees of Python's standard library; what says that there is a
value has been taken out. The same network is trained on the same batches three ways:
each graph built from source whenever it is needed, loaded from a `.pt` file of its own,
and read from trainfast's cache. Where PyTorch Geometric is installed, the latter two
run once more with its batches. The runs take turns of a few iterations, so that
whatever else the machine does slows all of them alike. At the end stand a table of
speeds and of the time spent waiting for data, and the same as a plot in a PNG.

    python examples/graph_syntax_trees.py                  # about a minute
    python examples/graph_syntax_trees.py --preset tiny    # seconds

Stopped with Ctrl-C, it goes on building where it was.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import small_gnn
import syntax_graphs
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from syntax_batches import (
    KEYS,
    WAYS,
    Batch,
    Graphs,
    Way,
    build_cache,
    built,
    write_files,
)
from tqdm import tqdm

import trainfast

TURN = 20  # iterations before the next way has its turn
GUIDE = (0.13, 1.2)  # it/s of a performance guide, without and with a cache


@dataclass
class Preset:
    functions: int | None  # at most
    batch: int
    steps: int
    width: int
    rounds: int


PRESETS = {
    "tiny": Preset(300, 8, steps=40, width=16, rounds=2),
    "small": Preset(12_000, 32, steps=150, width=32, rounds=3),
}


class Run:
    """One way's training: its own network, and the same batches as all others."""

    def __init__(
        self, way: Way, graphs: Graphs, args: argparse.Namespace, place: int
    ) -> None:
        preset = PRESETS[args.preset]
        self.name, self.device = way.name, args.device
        torch.manual_seed(args.seed)
        model = small_gnn.GNN(
            len(syntax_graphs.KINDS),
            syntax_graphs.N_WORDS,
            syntax_graphs.STEPS,
            len(syntax_graphs.RELATIONS),
            preset.width,
            preset.rounds,
            small_gnn.pyg_sums() if way.pyg else small_gnn.sums,
        )
        self.model = model.to(args.device)
        self.optimizer = trainfast.torch.AdamW(self.model.parameters(), lr=3e-3)
        self.batches = iter(way.batches(graphs, graphs.order(args.steps, args.seed)))
        self.losses: list[float] = []
        self.seconds: list[tuple[float, float]] = []  # waiting, all of an iteration
        # disable=None: no bar where the output is no terminal
        self.bar = tqdm(desc=way.name, total=args.steps, position=place, disable=None)

    def moved(self, batch: Batch) -> Batch:
        return {key: batch[key].to(self.device) for key in KEYS}

    def iteration(self) -> None:
        began = time.perf_counter()
        batch = self.moved(next(self.batches))
        ready = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(self.model(batch), batch["y"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # a GPU has done its work then, too
        self.seconds.append((ready - began, time.perf_counter() - began))

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.iteration()
        self.bar.update(count)
        self.bar.set_postfix(loss=f"{self.losses[-1]:.3f}")

    def speed(self) -> tuple[float, float]:
        """Mean seconds of an iteration, and of waiting; without the first turn."""
        waiting, whole = np.mean(self.seconds[TURN:] or self.seconds, axis=0)
        return float(whole), float(waiting)

    def row(self, epoch: int) -> list[str]:
        whole, waiting = self.speed()
        minutes, seconds = divmod(round(epoch * whole), 60)
        cells = [f"{1 / whole:.1f}", f"{minutes}:{seconds:02}"]
        cells += [
            f"{whole * 1e3:.2f}",
            f"{waiting * 1e3:.2f}",
            f"{waiting / whole:.1%}",
        ]
        return [self.name, *cells, f"{statistics.fmean(self.losses[-50:]):.4f}"]


def train(runs: Sequence[Run], steps: int) -> None:
    try:
        while (done := len(runs[0].losses)) < steps:
            for run in runs:
                run.turn(min(TURN, steps - done))
    finally:
        for run in runs:
            run.bar.close()


def check_losses(runs: Sequence[Run]) -> str:
    """Says how alike the losses are; an error unless the batches were the same."""
    first, *others = (np.array(run.losses) for run in runs)
    apart = max((abs(other / first - 1).max() for other in others), default=0.0)
    if not apart < 1e-3:
        raise SystemExit(f"all runs must have the same losses, got {apart:.0e} between")
    if apart:
        return f"Losses are the same in all runs, to {apart:.0e}."
    return "Losses are the same in all runs, bit by bit."


@torch.no_grad()
def accuracy(run: Run, graphs: Graphs) -> str:
    """How much of unseen modules is right, and what guessing would give."""
    chosen = graphs.validation[:: max(1, len(graphs.validation) // 500)]
    batch = run.moved(next(built(graphs, [chosen])))
    truth = batch["y"] > 0.5
    right = ((run.model(batch) > 0) == truth).float().mean().item()
    share = truth.float().mean().item()
    return (
        f"Of {len(chosen)} functions of unseen modules {right:.0%} are told rightly, "
        f"with one answer for all {max(share, 1 - share):.0%}."
    )


# ---- What comes out ------------------------------------------------------------------


def print_table(runs: Sequence[Run], epoch: int) -> None:
    head = ["", "it/s", "epoch", "ms", "waiting", "share", "loss"]
    for name, *cells in [head, *(run.row(epoch) for run in runs)]:
        print(f"{name:22}", *(f"{cell:>8}" for cell in cells))
    print(
        f"Runs took turns of {TURN} iterations; means without the first turn. epoch: "
        f"minutes for\n{epoch:,} iterations. ms: of an iteration; waiting: of those, "
        "for data. loss: of the last 50."
    )


def note(runs: Mapping[str, Run]) -> str:
    """What share of a step is loading, and what a cache can and cannot do about it."""
    if not {"none", "cache"} <= set(runs):
        return ""
    (slow, building), (fast, waiting) = runs["none"].speed(), runs["cache"].speed()
    never_waiting, guide = fast - waiting, GUIDE[1] / GUIDE[0]
    return (
        f"Without a cache {building / slow:.0%} of an iteration is building graphs. "
        f"Never waiting would make it\n{slow / never_waiting:.1f} times faster; "
        f"trainfast's cache makes it {slow / fast:.1f} times faster, and leaves "
        f"{waiting / fast:.1%} of it for loading.\n"
        f"A guide's {GUIDE[0]} to {GUIDE[1]} it/s is {guide:.1f} times: at least "
        f"{1 - 1 / guide:.0%} of its iterations was building graphs."
    )


def plot(runs: Sequence[Run], path: Path) -> None:
    names = [run.name for run in runs]
    whole, waiting = np.array([run.speed() for run in runs]).T
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    speed, parts = figure.subplots(1, 2, sharey=True)
    bars = speed.barh(names, 1 / whole)
    speed.bar_label(bars, [f"{1 / each:.1f}" for each in whole], padding=3)
    speed.set(xlabel="iterations per second", title="training speed")
    speed.margins(x=0.15)
    speed.invert_yaxis()
    parts.barh(names, 1e3 * waiting, label="waiting for data", color="tab:red")
    parts.barh(
        names, 1e3 * (whole - waiting), left=1e3 * waiting, label="training",
        color="tab:green",
    )  # fmt: skip
    parts.set(xlabel="ms", title="what an iteration consists of")
    parts.legend()
    figure.savefig(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    has_pyg = importlib.util.find_spec("torch_geometric") is not None
    ways = [name for name, way in WAYS.items() if has_pyg or not way.pyg]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--steps", type=int, help="iterations of each run")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/graph_syntax_trees"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="that build the cache")
    parser.add_argument("--fresh", action="store_true", help="build everything anew")
    args = parser.parse_args(arguments)
    args.steps = args.steps or PRESETS[args.preset].steps
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    preset = PRESETS[args.preset]
    how = (preset.functions, preset.batch, args.workers, args.fresh)
    graphs = Graphs(args.out, *how)
    print(
        f"{len(graphs.functions):,} functions of Python's standard library", flush=True
    )
    ways = {name: WAYS[name] for name in args.ways}
    needs = {way.needs for way in ways.values()}
    try:
        if "cache" in needs:
            print(build_cache(graphs), flush=True)
        if "files" in needs:
            print(write_files(graphs, "cache" in needs), flush=True)
        runs = {
            name: Run(way, graphs, args, place)
            for place, (name, way) in enumerate(ways.items())
        }
        train(list(runs.values()), args.steps)
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; the same command goes on building") from None
    all_runs = list(runs.values())
    print_table(all_runs, graphs.epoch)
    print(check_losses(all_runs), accuracy(all_runs[-1], graphs), note(runs), sep="\n")
    plot(all_runs, args.out / "speed.png")
    print(f"The same as a plot: {args.out / 'speed.png'}")


if __name__ == "__main__":
    main()
