"""Muon: the whole optimizer.step(), as a user calls it, against torch.optim.Muon.

    python -m benchmarks.bench_muon                       every case, on the CPU
    python -m benchmarks.bench_muon --case 200x64x64 --seconds 20
    python -m benchmarks.bench_muon --json auto           into benchmarks/results/
    python -m benchmarks.bench_muon --device cuda

Every contender has parameters, gradients and state of its own with the same values. The
report also has each contender's relative error against a float64 iteration.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import command, harness
from benchmarks.harness import Case, Contender
from benchmarks.optimizers import Problem, Setup, gpt2_shapes

COEFFICIENTS, NS_STEPS = (3.4445, -4.7750, 2.0315), 5
LAYERS = 12
ERROR_MATRICES = 50  # of a case, to bound the time that float64 takes


def problems() -> list[Problem]:
    """Return the cases. torch's step of all of GPT-2 small takes minutes on a CPU."""
    matrices = [shape for shape in gpt2_shapes()[2:] if len(shape) == 2]
    layer = tuple(matrices[: len(matrices) // LAYERS])
    small, half = 200 * ((64, 64),), torch.bfloat16
    return [
        Problem("200x64x64", "200 of 64 x 64 f32", small),
        Problem("200x64x64-bf16", "200 of 64 x 64 bf16", small, half, half),
        Problem("gpt2-layer", "GPT-2 small, one of its 12 layers, f32", layer),
    ]


def flops(problem: Problem) -> int:
    """Return the operations of the iteration's products, 2 for a multiply-add."""
    total = 0
    for shape in problem.shapes:
        rows, columns = sorted(shape)
        total += 2 * rows * rows * (2 * columns + rows) * NS_STEPS
    return total


# ---- Contenders ----------------------------------------------------------------------


def exact(grad: torch.Tensor) -> torch.Tensor:
    """Return the update that the iteration gives in float64."""
    a, b, c = COEFFICIENTS
    is_tall = grad.shape[0] > grad.shape[1]
    x = grad.double().T if is_tall else grad.double()
    x = x / x.norm()
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def error_of(make: Callable[..., torch.optim.Optimizer], setup: Setup) -> float:
    """Return the relative error of a first step with lr 1, over all its matrices."""
    chosen = slice(None, ERROR_MATRICES)
    params = [
        torch.nn.Parameter(torch.zeros_like(p, dtype=torch.float32))
        for p in setup.tensors(0, 0.02)[chosen]
    ]
    wrong = right = 0.0
    for param, grad in zip(params, setup.tensors(1, 0.01)[chosen], strict=True):
        param.grad = grad.float()
    make(params, lr=1.0, weight_decay=0.0).step()
    for param in params:
        assert param.grad is not None
        ratio = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
        truth = exact(param.grad)
        wrong += float((-param.detach().double() / ratio - truth).square().sum())
        right += float(truth.square().sum())
    return (wrong / right) ** 0.5


def contender(setup: Setup, name: str, make: Any, role: str = "rival") -> Contender:
    """Return a contender whose error is in its note."""
    error = error_of(make, setup)
    if not error < 0.1:  # one that does not do the work must not be timed
        raise RuntimeError(f"{name} must orthogonalise, got an error of {error:.2g}")
    optimizer = make(setup.parameters())
    note = f"relative error {error:.2e} against a float64 iteration"
    return Contender(name, optimizer.step, role=role, note=note)


def make_ours(setup: Setup, ns_dtype: str = "bfloat16") -> Contender:
    from trainfast.torch import Muon

    name = "trainfast" if ns_dtype == "bfloat16" else f"trainfast {ns_dtype}"
    return contender(setup, name, partial(Muon, ns_dtype=ns_dtype), "ours")


def make_torch(setup: Setup) -> Contender:
    return contender(setup, "torch", torch.optim.Muon)


CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "ours": make_ours,
    "float16": partial(make_ours, ns_dtype="float16"),
    "float32": partial(make_ours, ns_dtype="float32"),
    "torch": make_torch,
}


def run_problem(args: argparse.Namespace, problem: Problem) -> dict:
    """Build a case's contenders, measure them, and return the case's report."""
    setup = Setup(problem, args.device, args.threads, fresh_grads=False)
    names = list(args.contender or CONTENDERS)
    skipped = {}
    if not hasattr(torch.optim, "Muon") and "torch" in names:
        names.remove("torch")
        skipped["torch"] = "torch has Muon from 2.9 on"
    contenders = [CONTENDERS[name](setup) for name in names]
    budget = command.make_budget(args)
    clock = harness.cuda_clock if args.device == "cuda" else harness.cpu_clock
    dtype = str(problem.dtype).removeprefix("torch.")
    counts = len(problem.shapes), problem.params, 0, flops(problem)
    case = Case(problem.name, problem.title, dtype, *counts)
    return harness.run_case(case, contenders, budget, clock, skipped)


def shrunk(problem: Problem) -> Problem:
    """Return a case of the same kind that takes no time."""
    title = f"{problem.title} (shrunk)"
    shapes = 3 * ((8, 8),)
    return Problem(problem.name, title, shapes, problem.dtype, problem.state_dtype)


# ---- Command line --------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cases = [problem.name for problem in problems()]
    parser = command.make_parser("bench_muon", __doc__, cases, list(CONTENDERS))
    command.add_device(parser)
    return command.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    cases = [
        partial(run_problem, args, shrunk(problem) if args.smoke else problem)
        for problem in problems()
        if not args.case or problem.name in args.case
    ]
    backend = "torch's products"
    report = command.run("muon", "Muon", args, "static gradients", backend, cases)
    command.write(args, report, "muon")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
