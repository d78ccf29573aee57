"""Attention on a GPU: the cases of FlashAttention's papers, against torch's back ends
and against cuBLAS without fusion, with cuBLAS's rate as the roof.

    python -m benchmarks.bench_attention --device cuda

16,384 tokens and a model's width of 2,048 in every case, so that there are blocks
enough for any GPU. All contenders of a case read the same tensors and take turns. A
call is queued behind a fill of memory, which empties L2 and lets the host run ahead: it
is the GPU's time alone that counts, unless enqueueing takes longer than the fill.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import command, device, gemm, harness, table
from benchmarks.attention import (
    Problem,
    Setup,
    Unavailable,
    forward_torch,
    make_inputs,
    ours,
    without_fallback,
)
from benchmarks.harness import Budget, Contender

TOKENS, WIDTH = 16384, 2048
CPU_SIDE = 16  # of the roof's matrices, where only the program is tested
# In this order, so that a run that is stopped has seen short and long ones. Of the two
# dtypes, which take the same instructions, one has them all.
LENGTHS = (4096, 16384, 512, 1024, 2048, 8192)
FEW = (4096, 16384, 512)


def problems() -> list[Problem]:
    """Return the cases, in the order in which they are run."""
    return [
        Problem(
            f"{name}-{'causal-' if causal else ''}n{n}-d{dim}",
            f"{name}{' causal' if causal else ''}, B{TOKENS // n} H{WIDTH // dim} "
            f"N{n} D{dim}",
            TOKENS // n,
            WIDTH // dim,
            n,
            dim,
            dtype=dtype,
            is_causal=causal,
        )
        for n in LENGTHS
        for dim in (64, 128)
        for causal in (False, True)
        for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16))
        if name == "bf16" or n in FEW
    ]


def by_size(problem: Problem) -> tuple:
    """Return the key that brings cases into the order of the table."""
    return str(problem.dtype), problem.is_causal, problem.dim, problem.n


# ---- Contenders ----------------------------------------------------------------------


def make_ours(setup: Setup) -> Contender:
    """trainfast's kernel on every GPU: scaled_dot_product_attention leaves GPUs from
    sm_80 on to torch."""
    attention = ours("trainfast.torch.attention")
    is_causal = setup.problem.is_causal
    forward = partial(attention, *setup.inputs.leaves, is_causal=is_causal)
    return without_fallback(
        lambda: setup.differentiated("trainfast", forward, role="ours")
    )


def make_backend(setup: Setup, name: str, backend: SDPBackend) -> Contender:
    """One of torch's; raises Unavailable with torch's own reasons."""
    call = forward_torch(setup.inputs)

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return call()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return setup.differentiated(name, forward)
        except RuntimeError as error:
            reasons = [str(error), *(str(warning.message) for warning in said)]
            lines = [(reason.splitlines() or [""])[0] for reason in reasons]
            raise Unavailable("; ".join(dict.fromkeys(lines))) from error


def make_unfused(setup: Setup) -> Contender:
    where = setup.inputs.q.device.type
    wanted = gemm.unfused_bytes(setup.problem, setup.which)
    free = device.free_bytes(where)
    if wanted > free:
        raise Unavailable(
            f"its matrices of N x N take {wanted / 2**30:.1f} GiB, with "
            f"{free / 2**30:.1f} free"
        )
    unfused = gemm.Unfused(setup.inputs)
    unfused.forward()
    run = unfused.forward if setup.which == "forward" else unfused.backward
    return setup.contender("torch unfused", run)


def make_roof(setup: Setup) -> Contender:
    flops, dtype = setup.problem.flops(setup.which), setup.problem.dtype
    where = setup.inputs.q.device.type
    side = gemm.SIDE if where == "cuda" else CPU_SIDE
    return gemm.make_roof(flops, dtype, setup.prepare, where, side)


# The one that takes most memory is made when the others hold theirs.
CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "roof": make_roof,
    "ours": make_ours,
    "flash": partial(
        make_backend, name="torch flash", backend=SDPBackend.FLASH_ATTENTION
    ),
    "cudnn": partial(
        make_backend, name="torch cuDNN", backend=SDPBackend.CUDNN_ATTENTION
    ),
    "efficient": partial(
        make_backend, name="torch efficient", backend=SDPBackend.EFFICIENT_ATTENTION
    ),
    "unfused": make_unfused,
}
PTX75 = ("roof", "ours", "flash")


def make_contenders(
    names: Sequence[str], setup: Setup
) -> tuple[list[Contender], dict[str, str]]:
    """Return those that can run, and why the others cannot.

    Nothing that one of them raises may cost the others their turn: time on a GPU is
    rare.
    """
    made, skipped = [], {}
    for name in names:
        try:
            made.append(CONTENDERS[name](setup))
        except Unavailable as error:
            skipped[name] = str(error)
        except torch.cuda.OutOfMemoryError:
            skipped[name] = "out of memory"
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            skipped[name] = f"{type(error).__name__}: {first}"[:300]
    return made, skipped


def run_problem(
    problem: Problem,
    which: str,
    *,
    names: Sequence[str],
    budget: Budget,
    where: str,
    prepare: Callable[[], object],
) -> dict | None:
    """Build a case's contenders, measure them, and return the case's report."""
    if where == "cuda":
        gc.collect()  # of the case before
        torch.cuda.empty_cache()
    setup = Setup(make_inputs(problem, where), which, 1, where, prepare)
    made, skipped = make_contenders(names, setup)
    case = problem.case(which)
    if not any(contender.role != "bound" for contender in made):
        print(f"{case.title}: no contender can run: {skipped}\n", flush=True)
        return None
    try:
        return harness.run_case(case, made, budget, device.clock(where), skipped)
    except torch.cuda.OutOfMemoryError:
        print(f"{case.title}: not run, out of memory\n", flush=True)
        return None


# ---- The whole -----------------------------------------------------------------------


def choose(args: argparse.Namespace) -> list[tuple[Problem, str]]:
    """Return the cases of a command line with their passes."""
    chosen = [p for p in problems() if not args.case or p.name in args.case]
    if args.ptx75:  # which has no kernels on tensor cores for bf16
        chosen = [p for p in chosen if p.dtype == torch.float16]
    if args.smoke:
        chosen = [problem.shrunk() for problem in chosen]
    return [(problem, which) for problem in chosen for which in args.passes]


def until(
    end: float, cases: Sequence[tuple[str, Callable[[], dict | None]]], late: list[str]
) -> list[Callable[[], dict | None]]:
    """Return the calls, which after `end` only add their name to `late`."""

    def call(name: str, run: Callable[[], dict | None]) -> dict | None:
        if time.monotonic() < end:
            return run()
        late.append(name)
        return None

    return [partial(call, name, run) for name, run in cases]


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases, as many as may start in time; return the report."""
    names = list(args.contender or (PTX75 if args.ptx75 else CONTENDERS))
    if args.without_ours:
        names = [name for name in names if name != "ours"]
    options = {
        "names": names,
        "budget": command.make_budget(args),
        "where": args.device,
        "prepare": device.make_fill(args.device, args.smoke),
    }
    cases = [
        (problem.case(which).name, partial(run_problem, problem, which, **options))
        for problem, which in choose(args)
    ]
    late: list[str] = []
    end = time.monotonic() + args.within
    calls = until(end, cases, late)
    backend = "none" if args.without_ours else command.backend_in_use(args.device)
    conditions = (
        device.CONDITIONS + ", kernels translated from compute_75's PTX" * args.ptx75
    )
    fields = ("Attention on a GPU", args, conditions, backend, calls)
    report = command.run("attention-cuda", *fields)
    report["run"]["late"] = late
    if late:
        print(f"not run, as {args.within:g} s were over: {', '.join(late)}\n")
    order = [problem.name for problem in sorted(problems(), key=by_size)]
    report["cases"].sort(key=lambda case: order.index(case["name"].rpartition("-")[0]))
    print(harness.align(table.throughput(report)))
    print("\n".join(table.reasons(report)), flush=True)
    return report


def status(args: argparse.Namespace, report: dict) -> int:
    """Return 1 where ours was wanted and has a case without a time."""
    if args.without_ours or (args.contender and "ours" not in args.contender):
        return 0
    timed = [
        any(line["role"] == "ours" for line in case["lines"])
        for case in report["cases"]
    ]
    return 0 if timed and all(timed) else 1
