"""What the probe's hooks cost a training step: the same loop with and without them.

    python -m benchmarks.probe_hooks       # five minutes; --pairs 10 for a glance

A character-level transformer of two sizes, fed by a DataLoader, logs its loss. With
hooks its statements have stopwatches, too, as in a process of `diagnose --probe` that
changes nothing. Blocks with and without come in pairs of random order within one
process; the interval of the ratio is bootstrapped over pairs.
"""

import argparse
import ast
import builtins
import contextlib
import io
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from benchmarks.harness import median_interval
from benchmarks.machine import describe
from trainfast.report import Table
from trainfast.torch.private import LoaderIterator
from trainfast.torch.probe import hooks
from trainfast.torch.probe.loop import Loop
from trainfast.torch.probe.schedule import Schedule
from trainfast.torch.probe.statements import NAME, Statements

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from small_gpt import GPT, Corpus

OUTPUT = Path(__file__).with_suffix(".json")
CONTEXT, BATCH = 64, 8
SIZES = {"small": (1, 32, 240), "medium": (4, 128, 30)}  # layers, width, steps a block

SCRIPT = """
import torch.nn.functional as F

def train():
    running = 0.0
    for step, (x, y) in enumerate(loader):
        x = x.to(device)
        y = y.to(device)
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = 0.9 * running + 0.1 * loss.item()
        if step % 20 == 0:
            print(f"step {step} loss {running:.3f}")
"""


class Hooks:
    """The functions that the probe replaces, to be put there and taken back."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.loop = Loop("script.py")
        self.model = model
        self.places = [
            *((torch.autograd, "backward"), (torch, "save"), (builtins, "print")),
            *((DataLoader, "__init__"), (DataLoader, "__iter__")),
            *((LoaderIterator, "__next__"), (logging.Logger, "_log")),
            *((torch.optim.Optimizer, "profile_hook_step"), (type(optimizer), "step")),
        ]
        self.torchs = self._now()
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        plan = Schedule(self.loop, [], 1_000, 1e9, 0, nothing, nothing)
        hooks.install(self.loop, plan.step_ended)
        step = type(optimizer).step.__wrapped__  # not torch's own hook twice
        type(optimizer).step = torch.optim.Optimizer.profile_hook_step(step)
        self.probes = self._now()
        self.use(False)

    def _now(self) -> list[Any]:
        return [vars(owner)[name] for owner, name in self.places]

    def use(self, hooked: bool) -> None:
        for (owner, name), value in zip(
            self.places, self.probes if hooked else self.torchs
        ):
            setattr(owner, name, value)
        if not hooked:  # the hook of the model that find_model() leaves
            self.of_the_model = self.model._forward_pre_hooks.copy()
            self.model._forward_pre_hooks.clear()
        else:
            self.model._forward_pre_hooks.update(self.of_the_model)


def trainers(layers: int, width: int, steps: int) -> dict[bool, Callable[[], float]]:
    """Seconds a step of a block, by whether the hooks are in place."""
    torch.manual_seed(0)
    corpus = Corpus()
    starts = torch.randint(len(corpus.train) - CONTEXT, (steps * BATCH, 1))
    crops = corpus.train[starts + torch.arange(CONTEXT + 1)]
    data = TensorDataset(crops[:, :-1].contiguous(), crops[:, 1:].contiguous())
    model = GPT(len(corpus.alphabet), CONTEXT, layers, width, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    known = {"torch": torch, "model": model, "optimizer": optimizer, "device": "cpu"}
    known["loader"] = DataLoader(data, BATCH)
    probe = Hooks(model, optimizer)

    def compiled(statements: Statements | None) -> Callable[[], None]:
        tree = ast.parse(SCRIPT)
        if statements is not None:
            statements.instrument(tree)
        names = {**known, NAME: statements}
        exec(compile(tree, "script.py", "exec"), names)
        return names["train"]  # type: ignore[return-value]

    def timed(train: Callable[[], None], hooked: bool) -> float:
        probe.use(hooked)
        probe.loop.stepped = None
        with contextlib.redirect_stdout(io.StringIO()):
            began = time.perf_counter()
            train()
            took = time.perf_counter() - began
        probe.use(False)
        return took / steps

    plain = compiled(None)
    hooks.find_model(probe.loop)
    timed(plain, True)  # as the probe's first process, which finds the loop
    statements = Statements(probe.loop, probe.loop.stack, probe.loop.work)
    watched = compiled(statements)
    statements.leave_out_short_runs(timed(watched, True), steps)  # as after a warm-up
    return {
        False: lambda: timed(plain, False),
        True: lambda: timed(watched, True),
    }


def measure(size: str, pairs: int) -> dict[str, Any]:
    blocks = trainers(*SIZES[size])
    for block in blocks.values():
        block()  # warm up
    ratios, plain = [], []
    for _ in tqdm(range(pairs), desc=size, unit="pair", disable=None):
        seconds = {each: blocks[each]() for each in random.sample([False, True], 2)}
        ratios.append(seconds[True] / seconds[False])
        plain.append(seconds[False])
    low, high = median_interval(ratios)
    return {
        "pairs": pairs,
        "step_ms": 1e3 * float(np.median(plain)),
        "ratio": float(np.median(ratios)),
        "low": low,
        "high": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON")
    arguments = parser.parse_args()
    found = {size: measure(size, arguments.pairs) for size in SIZES}
    rows = [(size, *values.values()) for size, values in found.items()]
    names = ("size", "pairs", "ms a step", "ratio", "low", "high")
    print(Table("With the probe's hooks against without", names, rows))
    found["machine"] = describe()
    arguments.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
