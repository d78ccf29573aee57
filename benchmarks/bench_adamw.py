"""AdamW: the whole optimizer.step(), as a user calls it, against its rivals.

    python -m benchmarks.bench_adamw                      every case, on the CPU
    python -m benchmarks.bench_adamw --case 300x64-f32 --seconds 20
    python -m benchmarks.bench_adamw --json auto          into benchmarks/results/
    python -m benchmarks.bench_adamw --device cuda

Every contender has parameters, gradients and state of its own with the same values.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import command, floor, harness
from benchmarks.harness import Contender
from benchmarks.optimizers import (
    LR,
    ROUNDINGS,
    WEIGHT_DECAY,
    Problem,
    Setup,
    enough_memory,
    gpt2_shapes,
)

# Compiling takes 0.2 s a tensor on 2 cores, 30 s for 148. On a GPU, whose times are
# steady, the whole table must fit into two minutes.
COMPILED_TENSORS = {"cpu": 150, "cuda": 1}


CODES = torch.uint8  # the state_dtype of cases with 8-bit state


def problems() -> list[Problem]:
    """Return the cases, in the order of the table."""
    f32, bf16 = torch.float32, torch.bfloat16
    one, many = ((50_000_000,),), 300 * ((40_000,),)
    return [
        Problem("50m-f32", "1 x 50,000,000 f32", one),
        Problem("300x40k-f32", "300 x 40,000 f32", many),
        Problem(
            "50m-f32-int8state", "1 x 50,000,000 f32, 8-bit state", one, f32, CODES
        ),
        Problem(
            "300x40k-f32-int8state", "300 x 40,000 f32, 8-bit state", many, f32, CODES
        ),
        Problem("gpt2-f32", "GPT-2 small, f32", tuple(gpt2_shapes())),
        Problem("10000x64-f32", "10,000 x 64 f32", 10_000 * ((64,),)),
        Problem("300x64-f32", "300 x 64 f32", 300 * ((64,),)),
        Problem("50m-bf16", "1 x 50,000,000 bf16", one, bf16, bf16),
        Problem("300x40k-bf16", "300 x 40,000 bf16", many, bf16, bf16),
        Problem("50m-bf16-f32state", "1 x 50,000,000 bf16, f32 state", one, bf16, f32),
        Problem(
            "300x40k-bf16-f32state", "300 x 40,000 bf16, f32 state", many, bf16, f32
        ),
        *(
            Problem(
                f"50m-bf16-f32state-{name}",
                f"1 x 50,000,000 bf16, f32 state, {name}",
                *(one, bf16, f32, name),
            )
            for name in ROUNDINGS
            if name != "nearest"
        ),
    ]


# ---- Contenders ----------------------------------------------------------------------


def make_ours(setup: Setup) -> Contender:
    from trainfast.torch import AdamW

    params, problem = setup.parameters(), setup.problem
    other = problem.state_dtype != problem.dtype
    state_dtype: Any = problem.state_dtype if other else None
    if problem.state_dtype == CODES:
        state_dtype = "int8"
    optimizer = AdamW(
        params,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        state_dtype=state_dtype,
        **ROUNDINGS[problem.rounding],
    )
    return setup.contender("trainfast", optimizer.step, params, role="ours")


def make_float_state(setup: Setup) -> Contender:
    """Ours without 8-bit state."""
    from trainfast.torch import AdamW

    params, problem = setup.parameters(), setup.problem
    optimizer = AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)
    nbytes, name = problem.nbytes(problem.dtype), "trainfast, float32 state"
    return setup.contender(name, optimizer.step, params, nbytes=nbytes)


def make_masters(setup: Setup) -> Contender:
    """Ours with whole float32 master weights: reads and writes 4 bytes a parameter more
    than the parameter's own, and does not read that."""
    from trainfast.torch import AdamW

    params, problem = setup.parameters(), setup.problem
    optimizer = AdamW(
        params,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        state_dtype=problem.state_dtype,
        master_weights=True,
    )
    plain = replace(problem, rounding="nearest")
    nbytes, name = plain.nbytes() + 6 * problem.params, "trainfast, float32 masters"
    return setup.contender(name, optimizer.step, params, nbytes=nbytes)


def make_torch(setup: Setup, name: str, **options: Any) -> Contender:
    """torch.optim.AdamW; its state always has the parameter's dtype."""
    params, problem = setup.parameters(), setup.problem
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, **options)
    fields: dict[str, Any] = {}
    if problem.state_dtype != problem.dtype:
        fields["nbytes"] = problem.nbytes(problem.dtype)
        fields["note"] = "keeps its state in the parameter's dtype: less precise work"
    run = optimizer.step
    if name == "torch compiled":
        run = torch.compile(lambda: optimizer.step())
    return setup.contender(name, run, params, **fields)


def make_fused(setup: Setup) -> Contender:
    return make_torch(setup, "torch fused", fused=True)


def make_foreach(setup: Setup) -> Contender:
    return make_torch(setup, "torch foreach", foreach=True)


def make_compiled(setup: Setup) -> Contender:
    return make_torch(setup, "torch compiled", foreach=True)


def make_deepspeed(setup: Setup) -> Contender:
    """DeepSpeedCPUAdam; builds itself at the first use (ninja, a C++ compiler)."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folder = os.path.dirname(sys.executable)
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    params, problem = setup.parameters(), setup.problem
    optimizer = DeepSpeedCPUAdam(
        params,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        adamw_mode=True,
        fp32_optimizer_states=problem.state_dtype == torch.float32,
    )
    return setup.contender("DeepSpeedCPUAdam", optimizer.step, params)


def make_bitsandbytes(setup: Setup) -> Contender:
    from bitsandbytes.optim import AdamW8bit

    params = setup.parameters()
    optimizer = AdamW8bit(params, lr=LR, weight_decay=WEIGHT_DECAY)
    return setup.contender("bitsandbytes AdamW8bit", optimizer.step, params)


def make_torchao(setup: Setup) -> Contender:
    """Compiles its step, for each shape once."""
    from torchao.optim import AdamW8bit

    params = setup.parameters()
    optimizer = AdamW8bit(params, lr=LR, weight_decay=WEIGHT_DECAY)
    return setup.contender("torchao AdamW8bit", optimizer.step, params)


def make_bound(setup: Setup) -> Contender:
    """The same bytes, moved as plainly as possible."""
    problem = setup.problem
    if setup.device == "cuda":
        half = problem.nbytes() // 2
        source = torch.zeros(half, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        note = "one device-to-device copy that moves the same bytes"
        return Contender("copy", lambda: target.copy_(source), role="bound", note=note)
    state = [problem.state_dtype, problem.state_dtype]
    if problem.rounding in ("kahan", "split"):
        state.append(problem.dtype)
    columns = [(setup.tensors(0, 0.02), floor.UPDATE)]
    columns.append((setup.tensors(1, 0.01), floor.READ))
    for dtype in state:
        zeros = [torch.zeros(shape, dtype=dtype) for shape in problem.shapes]
        columns.append((zeros, floor.UPDATE))
    if problem.state_dtype == CODES:
        columns.append(([scales_of(p) for p in columns[0][0]], floor.UPDATE))
    run = floor.make_floor(columns, setup.threads)
    note = "one pass in C that reads and writes the same bytes, same threads"
    return Contender("floor", run, role="bound", note=note)


def scales_of(param: torch.Tensor) -> torch.Tensor:
    """The scales of 8-bit state: 3 for each block of 128 elements."""
    return torch.zeros(3 * -(-param.numel() // 128))


CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "ours": make_ours,
    "float-state": make_float_state,
    "masters": make_masters,
    "fused": make_fused,
    "foreach": make_foreach,
    "compiled": make_compiled,
    "deepspeed": make_deepspeed,
    "bitsandbytes": make_bitsandbytes,
    "torchao": make_torchao,
    "floor": make_bound,
}
OPTIONAL = ("compiled", "deepspeed", "bitsandbytes", "torchao", "floor")
OF_8_BITS = ("float-state", "bitsandbytes", "torchao")


def choose(args: argparse.Namespace, problem: Problem) -> tuple[list[str], dict]:
    """Return the contenders of a case, and why the others do not run."""
    chosen = list(args.contender or CONTENDERS)
    skipped: dict[str, str] = {}
    if problem.state_dtype != CODES:
        chosen = [name for name in chosen if name not in OF_8_BITS]
    if problem.rounding == "nearest":
        chosen = [name for name in chosen if name != "masters"]
    else:
        skipped["deepspeed"] = "it rounds to nearest, as torch does"
    if args.without_ours:
        skipped["ours"] = "--without-ours"
    if not (args.contender and "compiled" in args.contender):
        wanted = args.compiled
        if wanted is None:
            wanted = (
                len(problem.shapes) <= COMPILED_TENSORS[args.device] and not args.smoke
            )
        if not wanted:
            skipped["compiled"] = "compiling takes too long here (see --compiled)"
    if args.device == "cuda":
        skipped["deepspeed"] = "it is an optimizer for the CPU"
    elif importlib.util.find_spec("deepspeed") is None:
        skipped["deepspeed"] = "deepspeed is not installed"
    elif args.smoke and not args.contender:
        skipped["deepspeed"] = "building it takes too long for --smoke"
    for name in ("bitsandbytes", "torchao"):
        if importlib.util.find_spec(name) is None:
            skipped[name] = f"{name} is not installed"
        elif args.smoke and not args.contender:
            skipped[name] = "importing it takes too long for --smoke"
    skipped = {name: why for name, why in skipped.items() if name in chosen}
    return [name for name in chosen if name not in skipped], skipped


def run_problem(args: argparse.Namespace, problem: Problem) -> dict | None:
    """Build a case's contenders, measure them, and return the case's report."""
    names, skipped = choose(args, problem)
    lacking = enough_memory(problem, len(names), args.device)
    if lacking:
        print(f"{problem.title}: not run, {lacking}\n", flush=True)
        return None
    setup = Setup(problem, args.device, args.threads, args.fresh_grads)
    contenders = []
    for name in names:
        try:
            contenders.append(CONTENDERS[name](setup))
        except Exception as error:
            # A rival that does not work here must not take the others with it.
            if name not in OPTIONAL:
                raise
            first = (str(error).splitlines() or [""])[0]
            skipped[name] = f"{type(error).__name__}: {first}"[:200]
    if not any(contender.role != "bound" for contender in contenders):
        raise SystemExit(f"{problem.name}: no contender can run: {skipped}")
    budget = command.make_budget(args)
    clock = harness.cuda_clock if args.device == "cuda" else harness.cpu_clock
    return harness.run_case(problem.case(), contenders, budget, clock, skipped)


# ---- Command line --------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cases = [problem.name for problem in problems()]
    parser = command.make_parser("bench_adamw", __doc__, cases, list(CONTENDERS))
    command.add_device(parser)
    add = parser.add_argument
    add("--compiled", action=argparse.BooleanOptionalAction,
        help="torch.compile (default: up to 150 tensors, on a GPU 1)")  # fmt: skip
    add("--fresh-grads", action="store_true",
        help="free and re-create the gradients between steps, untimed")  # fmt: skip
    add("--without-ours", action="store_true", help="rivals only")
    return command.parse(parser, argv, lambda args: args.without_ours)


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases and return the report."""
    ours = not args.without_ours and "ours" in (args.contender or CONTENDERS)
    backend = command.backend_in_use(args.device) if ours else "none"
    grads = "fresh gradients each step" if args.fresh_grads else "static gradients"
    cases = [
        partial(run_problem, args, problem.shrunk() if args.smoke else problem)
        for problem in problems()
        if not args.case or problem.name in args.case
    ]
    fields = ("adamw", "AdamW", args, grads, backend, cases)
    return command.run(*fields, fresh_grads=args.fresh_grads)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    kind = "adamw-fresh-grads" if args.fresh_grads else "adamw"
    command.write(args, run(args), kind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
