"""The roof of products of matrices: cuBLAS through trainfast, and torch's matmul.

    python -m benchmarks.bench_gemm                       every dtype, on a GPU
    python -m benchmarks.bench_gemm --case bf16 --seconds 5

Square products of random numbers. Calls are queued behind a fill of memory that empties
L2, so the GPU's time alone counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import command, device, gemm, harness
from benchmarks.attention import Unavailable
from benchmarks.harness import Case, Contender

SMOKE_SIDE = 32


@dataclass(frozen=True)
class Problem:
    """A product of two square matrices."""

    name: str
    dtype: torch.dtype
    side: int = gemm.SIDE
    allow_tf32: bool = False

    @property
    def case(self) -> Case:
        title = f"{self.name}, {self.side:,} x {self.side:,}"
        dtype = str(self.dtype).removeprefix("torch.")
        return Case(self.name, title, dtype, flops=2 * self.side**3)


def problems(side: int = gemm.SIDE) -> list[Problem]:
    """Return the cases, in the order of the table."""
    return [
        Problem("f16", torch.float16, side),
        Problem("bf16", torch.bfloat16, side),
        Problem("tf32", torch.float32, side, allow_tf32=True),
        Problem("f32", torch.float32, side),
    ]


def make_ours(problem: Problem, where: str, prepare: Callable[[], object]) -> Contender:
    call = gemm.square(problem.dtype, where, problem.side, problem.allow_tf32)
    return Contender("cuBLAS by trainfast", call, "ours", prepare=prepare)


def make_torch(
    problem: Problem, where: str, prepare: Callable[[], object]
) -> Contender:
    a, b = (
        torch.randn(problem.side, problem.side, device=where).to(problem.dtype)
        for _ in range(2)
    )
    out = torch.empty_like(a)

    def ready() -> None:
        torch.backends.cuda.matmul.allow_tf32 = problem.allow_tf32
        prepare()

    return Contender("torch", lambda: torch.mm(a, b, out=out), prepare=ready)


CONTENDERS = {"ours": make_ours, "torch": make_torch}


def run_problem(
    args: argparse.Namespace, prepare: Callable[[], object], problem: Problem
) -> dict | None:
    """Build a case's contenders, measure them, and return the case's report."""
    made, skipped = [], {}
    for name in args.contender or CONTENDERS:
        try:
            made.append(CONTENDERS[name](problem, args.device, prepare))
        except (Unavailable, RuntimeError) as error:  # RuntimeError: also out of memory
            skipped[name] = str(error)
    if not made:
        print(f"{problem.name}: no contender can run: {skipped}\n", flush=True)
        return None
    clock = device.clock(args.device)
    budget = command.make_budget(args)
    return harness.run_case(problem.case, made, budget, clock, skipped)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [problem.name for problem in problems()]
    parser = command.make_parser("bench_gemm", __doc__, names, list(CONTENDERS))
    command.add_device(parser)
    parser.set_defaults(device="cuda")
    return command.parse(parser, argv)


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases and return the report."""
    prepare = device.make_fill(args.device, args.smoke)
    chosen = [
        partial(run_problem, args, prepare, problem)
        for problem in problems(SMOKE_SIDE if args.smoke else gemm.SIDE)
        if not args.case or problem.name in args.case
    ]
    backend = command.backend_in_use(args.device)
    conditions = device.CONDITIONS
    return command.run(
        "gemm", "Products of matrices", args, conditions, backend, chosen
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    report = run(args)
    command.write(args, report, "gemm")
    wanted = "ours" in (args.contender or CONTENDERS)
    ours = sum(line["role"] == "ours" for c in report["cases"] for line in c["lines"])
    return 1 if wanted and not ours else 0


if __name__ == "__main__":
    raise SystemExit(main())
