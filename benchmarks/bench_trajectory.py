"""Trajectory metrics: all errors of a batch of predictions at once.

    python -m benchmarks.bench_trajectory                 every case
    python -m benchmarks.bench_trajectory --case 10k --seconds 5

The rivals compute the same numbers, vectorised, as people write them. The bound is a
read of the same bytes: torch's sum on the same threads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

import trainfast
from benchmarks import command, harness
from benchmarks.harness import Case, Contender

MISS = 2.0


@dataclass(frozen=True)
class Problem:
    """A batch of float32 predictions in the plane."""

    name: str
    agents: int
    modes: int = 6
    steps: int = 60

    @property
    def case(self) -> Case:
        sizes = f"{self.agents:,} agents, {self.modes} modes, {self.steps} steps"
        numbers = self.agents * self.steps * 2 * (self.modes + 1)
        return Case(self.name, sizes, "float32", nbytes=4 * numbers)


class Inputs:
    """The arrays of a case, for NumPy and torch; the memory is shared."""

    def __init__(self, problem: Problem) -> None:
        rng = np.random.default_rng(0)
        shape = problem.agents, problem.modes, problem.steps, 2
        self.pred = rng.standard_normal(shape, dtype=np.float32)
        self.target = rng.standard_normal((shape[0], *shape[2:]), dtype=np.float32)
        p = rng.random(shape[:2], dtype=np.float32)
        self.p = p / p.sum(1, keepdims=True) * np.float32(0.999)
        self.tensors = [torch.from_numpy(x) for x in (self.pred, self.target, self.p)]


def problems(smoke: bool = False) -> list[Problem]:
    """Return the cases, in the order of the table."""
    if smoke:
        return [Problem("10k", 20), Problem("1gb", 30)]
    return [Problem("10k", 10_000), Problem("1gb", 300_000)]


# ---- Contenders ----------------------------------------------------------------------


def by_numpy(inputs: Inputs) -> list[float]:
    """The seven metrics of definition "av2" with NumPy."""
    pred, target, p = inputs.pred, inputs.target, inputs.p
    distances = np.linalg.norm(pred - target[:, None], axis=-1)
    ade, fde = distances.mean(-1), distances[..., -1]
    rows = np.arange(len(pred))
    most, best = p.argmax(1), fde.argmin(1)
    min_ade, min_fde = ade[rows, best], fde[rows, best]
    term = (1 - p[rows, best]) ** 2
    numbers = ade[rows, most], fde[rows, most], min_ade, min_fde
    means = [float(x.mean()) for x in numbers]
    missed = float((min_fde > MISS).mean())
    return [*means, missed, *(float((x + term).mean()) for x in (min_ade, min_fde))]


def by_torch(inputs: Inputs) -> list[float]:
    """The same with torch."""
    pred, target, p = inputs.tensors
    distances = torch.linalg.vector_norm(pred - target[:, None], dim=-1)
    ade, fde = distances.mean(-1), distances[..., -1]
    most, best = p.argmax(1, keepdim=True), fde.argmin(1, keepdim=True)
    min_ade, min_fde = ade.gather(1, best), fde.gather(1, best)
    term = (1 - p.gather(1, best)) ** 2
    numbers = ade.gather(1, most), fde.gather(1, most), min_ade, min_fde
    means = [float(x.mean()) for x in numbers]
    missed = float((min_fde > MISS).float().mean())
    return [*means, missed, *(float((x + term).mean()) for x in (min_ade, min_fde))]


def by_ours(inputs: Inputs) -> list[float]:
    """The same with trainfast."""
    pred, target, p = inputs.tensors
    found = trainfast.trajectory_metrics(
        pred, target, probabilities=p, definition="av2", miss_threshold=MISS
    )
    names = ("ade", "fde", "min_ade", "min_fde", "miss_rate")
    names = (*names, "brier_min_ade", "brier_min_fde")
    return [getattr(found, name) for name in names]


def make(
    name: str, role: str, function: Callable[[Inputs], list[float]], inputs: Inputs
) -> Contender:
    """Return a contender whose numbers have been checked."""
    wanted = by_numpy(inputs)
    if not np.allclose(function(inputs), wanted, rtol=1e-3):
        raise RuntimeError(f"{name} must give {wanted}, got {function(inputs)}")
    return Contender(name, partial(function, inputs), role)


def make_bound(inputs: Inputs) -> Contender:
    flat = [x.flatten() for x in inputs.tensors[:2]]
    note = "torch's sum of pred and target, same threads"
    run = partial(lambda arrays: [x.sum() for x in arrays], flat)
    return Contender("read", run, "bound", note=note)


CONTENDERS: dict[str, Callable[[Inputs], Contender]] = {
    "ours": partial(make, "trainfast", "ours", by_ours),
    "torch": partial(make, "torch", "rival", by_torch),
    "numpy": partial(make, "NumPy", "rival", by_numpy),
    "read": make_bound,
}


def run_problem(args: argparse.Namespace, problem: Problem) -> dict:
    """Build a case's contenders, measure them, and return the case's report."""
    inputs = Inputs(problem)
    made = [CONTENDERS[name](inputs) for name in args.contender or CONTENDERS]
    budget = command.make_budget(args)
    return harness.run_case(problem.case, made, budget)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [problem.name for problem in problems()]
    parser = command.make_parser("bench_trajectory", __doc__, names, list(CONTENDERS))
    return command.parse(parser, argv)


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases and return the report."""
    chosen = [
        partial(run_problem, args, problem)
        for problem in problems(args.smoke)
        if not args.case or problem.name in args.case
    ]
    conditions = "all seven metrics, definition av2, with probabilities"
    backend = command.backend_in_use("cpu")
    return command.run(
        "trajectory", "Trajectory metrics", args, conditions, backend, chosen
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    command.write(args, run(args), "trajectory")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
