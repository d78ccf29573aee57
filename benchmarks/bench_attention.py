"""Attention: forward and backward alone, as a user calls them, against torch's.

    python -m benchmarks.bench_attention                  every case, on the CPU
    python -m benchmarks.bench_attention --case f32-n2048-d64 --pass backward
    python -m benchmarks.bench_attention --json auto      into benchmarks/results/
    python -m benchmarks.bench_attention --memory         peak memory instead of time
    python -m benchmarks.bench_attention --device cuda    see attention_cuda.py

On a CPU with AVX-512, TRAINFAST_BACKEND=avx2 ATEN_CPU_CAPABILITY=avx2
ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 before it make ours and torch run
as on one without.

All contenders of a case read the same tensors, which are read once before each call,
outside the clock, when as much memory as a call writes is touched and freed, too: what
training's second iteration finds. A forward keeps what its backward needs (but a
decoding step has no gradient); a backward is torch.autograd.grad on a graph that is
kept.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import attention_cuda, attention_memory, command, harness, peak
from benchmarks.attention import (
    PASSES,
    Problem,
    Setup,
    Unavailable,
    forward_math,
    forward_torch,
    make_inputs,
    make_ours,
    ours,
    problems,
    without_fallback,
)
from benchmarks.harness import Contender

# ---- Contenders ----------------------------------------------------------------------


def make_functional(setup: Setup) -> Contender:
    """The functional entries, without torch's graph around them."""
    inputs, problem = setup.inputs, setup.problem
    q, k, v, *bias = [tensor.detach() for tensor in inputs.leaves]
    options: dict[str, Any] = {"is_causal": problem.is_causal}
    if problem.window:
        options["window_size"] = (problem.window - 1, 0)
    elif inputs.mask is not None:
        options["mask"] = inputs.mask
    if bias:
        options["bias"] = bias[0]
    if problem.dropout_p:
        options |= {"dropout_p": problem.dropout_p, "seed": 0}
    attention = ours("trainfast.numpy.attention")
    run: Callable[[], Any] = partial(attention, q, k, v, **options)

    def make() -> Contender:
        call = run
        if setup.which == "backward":
            both = attention(q, k, v, return_lse=True, **options)
            wanted = ("q", "k", "v", *(["bias"] if bias else []))
            backward = ours("trainfast.numpy.attention_backward")

            def call() -> list[torch.Tensor]:
                grads = backward(inputs.dout, q, k, v, *both, wanted=wanted, **options)
                return [grad for grad in grads if grad is not None]

        return setup.contender("trainfast, functional", call, role="ours")

    return without_fallback(make)


def make_torch(setup: Setup) -> Contender:
    """torch's own choice of a kernel."""
    note = "its math path" if setup.problem.only_math else ""
    return setup.differentiated("torch", forward_torch(setup.inputs), note=note)


def make_math(setup: Setup) -> Contender | None:
    """torch's unfused path, where it is not torch's own choice anyway."""
    if setup.problem.only_math:
        return None
    return setup.differentiated("torch math", forward_math(setup.inputs))


def make_flex(setup: Setup) -> Contender | None:
    """torch's FlexAttention, compiled, for a window; it has no backward on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    problem = setup.problem
    if not problem.window or setup.which != "forward":
        return None
    q, k, v = (tensor.detach() for tensor in setup.inputs.leaves)
    rows = (problem.queries, problem.n)

    def near(
        batch: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        return (j <= i) & (j > i - problem.window)

    blocks = create_block_mask(near, None, None, *rows, device="cpu")
    compiled = torch.compile(flex_attention)
    note = "keeps nothing for a backward"
    run = partial(compiled, q, k, v, block_mask=blocks)
    return setup.contender("torch FlexAttention", run, note=note)


def make_bound(setup: Setup) -> Contender:
    """The same multiply-adds in registers; for a decoding step, the bytes read."""
    problem, threads = setup.problem, setup.threads
    if problem.nbytes():
        run = peak.make_read(setup.inputs.leaves[1:], threads)
        note = "k and v read once in C, same threads"
        return Contender("read", run, "bound", prepare=setup.inputs.warm, note=note)
    lanes = peak.products(setup.backend, str(problem.dtype).removeprefix("torch."))
    run = peak.make_multiply_adds(problem.flops(setup.which), lanes, threads)
    of = "of pairs of bfloat16" if lanes == peak.PAIRS else f"float32, {lanes} lanes"
    note = f"as many multiply-adds in C, {of}, same threads"
    return Contender("multiply-adds", run, "bound", note=note)


# None: the case has no such contender.
CONTENDERS: dict[str, Callable[[Setup], Contender | None]] = {
    "ours": make_ours,
    "functional": make_functional,
    "torch": make_torch,
    "math": make_math,
    "flex": make_flex,
    "bound": make_bound,
}
# Run where --contender names them: it is what the other one of ours consists of.
ON_REQUEST = ("functional",)


def choose(args: argparse.Namespace) -> list[str]:
    """Return the contenders to try in each case."""
    chosen = args.contender or [name for name in CONTENDERS if name not in ON_REQUEST]
    left_out = {"ours", "functional"} if args.without_ours else set()
    if args.smoke and not args.contender:
        left_out.add("flex")  # compiling it takes a quarter of a minute
    return [name for name in chosen if name not in left_out]


def run_problem(
    args: argparse.Namespace, backend: str, problem: Problem, which: str
) -> dict | None:
    """Build a case's contenders, measure them, and return the case's report."""
    setup = Setup(make_inputs(problem), which, args.threads, backend)
    made, skipped = [], {}
    for name in choose(args):
        try:
            made.append(CONTENDERS[name](setup))
        except Unavailable as error:
            skipped[name] = str(error)
        except Exception as error:
            # What needs a compiler must not take the others with it.
            if name not in ("flex", "bound"):
                raise
            first = (str(error).splitlines() or [""])[0]
            skipped[name] = f"{type(error).__name__}: {first}"[:200]
    if args.json == "auto" and "ours" in skipped:
        raise SystemExit(f"{problem.name}: results need trainfast: {skipped['ours']}")
    contenders = [contender for contender in made if contender is not None]
    if not any(contender.role != "bound" for contender in contenders):
        print(
            f"{problem.title}, {which}: no contender can run: {skipped}\n", flush=True
        )
        return None
    budget = command.make_budget(args)
    return harness.run_case(
        problem.case(which), contenders, budget, harness.cpu_clock, skipped
    )


# ---- Command line --------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [problem.name for problem in (*problems(), *attention_cuda.problems())]
    contenders = list(CONTENDERS | attention_cuda.CONTENDERS)
    parser = command.make_parser("bench_attention", __doc__, names, contenders)
    command.add_device(parser)
    add = parser.add_argument
    add("--pass", nargs="+", choices=PASSES, default=PASSES, dest="passes",
        help="forward, backward (default both)")  # fmt: skip
    add("--memory", action="store_true",
        help="peak memory at N16384, both passes, instead of time")  # fmt: skip
    add("--heads", type=int, nargs="+", default=attention_memory.HEADS,
        help="of --memory (default 1 2 4)")  # fmt: skip
    add("--without-ours", action="store_true", help="rivals only")
    add("--within", type=float, default=math.inf,
        help="on a GPU: start no case after so many seconds")  # fmt: skip
    add("--as-gpu", action="store_true",
        help="the cases of --device cuda on the CPU, for --smoke")  # fmt: skip
    add("--ptx75", action="store_true",
        help="on a GPU: float16 only, with the library that TRAINFAST_CUDA_LIBRARY "
        "names, built with TRAINFAST_CUDA_ARCHS=75 and TRAINFAST_CUDA=1")  # fmt: skip

    def partial_run(args: argparse.Namespace) -> bool:
        fewer = len(set(args.passes)) < len(PASSES)
        return args.without_ours or fewer or args.heads != attention_memory.HEADS

    args = command.parse(parser, argv, partial_run)
    if args.as_gpu and not args.smoke:
        parser.error("--as-gpu must be with --smoke, got it alone")
    on_gpu = args.device == "cuda" or args.as_gpu
    own = attention_cuda if on_gpu else sys.modules[__name__]
    for option, given, known in (
        ("--case", args.case, [problem.name for problem in own.problems()]),
        ("--contender", args.contender, own.CONTENDERS),
    ):
        for name in given or ():
            if name not in known:
                parser.error(f"{option} must be one of {args.device}'s, got {name}")
    if min(args.heads) < 1:
        parser.error(f"--heads must be at least 1, got {min(args.heads)}")
    if on_gpu and args.memory:
        parser.error("--memory must be without --device cuda, got both")
    if args.ptx75 and not os.environ.get("TRAINFAST_CUDA_LIBRARY"):
        parser.error("--ptx75 must have a library in TRAINFAST_CUDA_LIBRARY, got none")
    return args


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases and return the report."""
    torch.set_num_threads(args.threads)
    backend = "none" if args.without_ours else command.backend_in_use(args.device)
    if args.memory:
        return attention_memory.run(args, backend)
    cases = []
    for problem in problems():
        if args.case and problem.name not in args.case:
            continue
        chosen = problem.shrunk() if args.smoke else problem
        for which in args.passes:
            if which in problem.passes:
                cases.append(partial(run_problem, args, backend, chosen, which))
    conditions = "inputs read and memory touched before each call, untimed"
    return command.run("attention", "Attention", args, conditions, backend, cases)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    kind = "attention-memory" if args.memory else "attention"
    if args.device == "cuda" or args.as_gpu:
        report = attention_cuda.run(args)
        kind = "attention-cuda-ptx75" if args.ptx75 else "attention-cuda"
        command.write(args, report, kind)
        return attention_cuda.status(args, report)
    command.write(args, run(args), kind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
