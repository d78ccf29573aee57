"""What watching a run costs: a character-level transformer with everything on, against
the same steps with nothing on.

    python -m benchmarks.watching          # five minutes; --pairs 10 for a glance

On are SystemMonitor at 1 Hz, LeakTracker, Profiler, Logger (CSV and JSON lines),
EpochReport and the progress bar. Blocks of 20 steps with and without come in pairs of
random order within one process; the interval of the ratio is bootstrapped over pairs.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import trainfast
from benchmarks.harness import median_interval
from benchmarks.machine import describe
from trainfast.report import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from small_gpt import GPT, Corpus

STEPS = 20  # of a block
CONTEXT, BATCH = 64, 8


class Watchers:
    """All that watches, switched on for a block."""

    def __init__(self, folder: Path) -> None:
        self.system = trainfast.SystemMonitor(sampling_interval_sec=1.0)
        self.leaks = trainfast.LeakTracker()
        self.profiler = trainfast.Profiler(1000, folder / "profiles")
        self.logger = trainfast.Logger(csv=folder / "log.csv", jsonl=folder / "l.jsonl")
        self.report = trainfast.EpochReport()
        self.step_number = 0

    def step(self, loss: torch.Tensor, bar: object) -> None:
        self.step_number += 1
        self.leaks.step()
        self.profiler.step()
        self.logger.log({"train_loss": loss, "learning_rate": 1e-3}, self.step_number)
        self.report.step(loss, BATCH)
        bar.postfix(loss=loss)


def block(train: Callable[[], torch.Tensor], watchers: Watchers | None) -> float:
    """Seconds a step."""
    if watchers is None:
        began = time.perf_counter()
        for _ in range(STEPS):
            train()
        return (time.perf_counter() - began) / STEPS
    with watchers.system:
        began = time.perf_counter()
        bar = trainfast.progress(range(STEPS))
        for _ in bar:
            watchers.step(train(), bar)
        return (time.perf_counter() - began) / STEPS


def trainer() -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    corpus = Corpus()
    model = GPT(len(corpus.alphabet), CONTEXT, 4, 128, 4)
    optimizer = trainfast.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

    def train() -> torch.Tensor:
        starts = torch.randint(len(corpus.train) - CONTEXT, (BATCH, 1))
        crops = corpus.train[starts + torch.arange(CONTEXT + 1)]
        logits = model(crops[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, crops[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--output", type=Path, help="JSON")
    arguments = parser.parse_args()
    train = trainer()
    ratios, plain = [], []
    with tempfile.TemporaryDirectory() as folder:
        watchers = Watchers(Path(folder))
        block(train, None), block(train, watchers)  # warm up
        for pair in range(arguments.pairs):
            order = random.sample([None, watchers], 2)
            seconds = {each is None: block(train, each) for each in order}
            ratios.append(seconds[False] / seconds[True])
            plain.append(seconds[True])
            print(f"\rpair {pair + 1} of {arguments.pairs}", end="", file=sys.stderr)
        share = watchers.system.thread_seconds / (sum(plain) * STEPS)
        leaks = len(watchers.leaks.leaks)
        watchers.logger.close()
    print(file=sys.stderr)
    low, high = median_interval(ratios)
    found = {
        "machine": describe(),
        "pairs": len(ratios),
        "step_ms": 1e3 * float(np.median(plain)),
        "ratio": float(np.median(ratios)),
        "low": low,
        "high": high,
        "monitor_thread_share": share,
        "leaks": leaks,
    }
    rows = [(name, value) for name, value in found.items() if name != "machine"]
    print(Table("Everything on against nothing on", ("", ""), rows))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
