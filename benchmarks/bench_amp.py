"""AMP: loss scaling, clipping, step and update, as a user calls them.

    python -m benchmarks.bench_amp                        every case, on the CPU
    python -m benchmarks.bench_amp --case 300x40k --seconds 20
    python -m benchmarks.bench_amp --json auto            into benchmarks/results/

Every contender has parameters, gradients and state of its own with the same values.
Rivals unscale and clip in place, or zero the gradients, so before each call, outside
the clock, the gradients of the contender whose turn it is are written anew, the floor's
too: all find them as warm in the caches as backward() would have left them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isinf

import torch

from benchmarks import command, floor, harness
from benchmarks.harness import Contender
from benchmarks.optimizers import (
    LR,
    WEIGHT_DECAY,
    Problem,
    Setup,
    check_first_step,
    enough_memory,
    gpt2_shapes,
)

SCALE, MAX_NORM, EMA_DECAY = 1024.0, 0.1, 0.999
NORM_BYTES = 4  # a read for the norm
CLIP_BYTES = 12  # and a read and a write
STEP_BYTES = 32  # a read of g, then reads p, g, m, v and writes p, m, v


@dataclass(frozen=True)
class AmpProblem(Problem):
    """One case: the tensors, all float32, and what is done with them."""

    step: bool = True  # False: clip_grad_norm_ alone
    max_norm: float = MAX_NORM  # inf: there is nothing to clip
    zero_grad: bool = False
    ema_copy: bool = False  # an EMA in float32 and a copy in bfloat16

    def nbytes(self, state_dtype: torch.dtype | None = None) -> int:
        """Return what must be moved; see the constants above."""
        if not self.step:
            return self.params * (NORM_BYTES if isinf(self.max_norm) else CLIP_BYTES)
        each = STEP_BYTES + 4 * self.zero_grad + 10 * self.ema_copy
        return self.params * each

    def resident(self) -> int:
        """Return the bytes that one contender holds, with the gradients' values."""
        return self.params * (20 + 6 * self.ema_copy)


def problems() -> list[AmpProblem]:
    """Return the cases, in the order of the table."""
    many, gpt2 = 300 * ((40_000,),), tuple(gpt2_shapes())
    small = 10_000 * ((64,),)
    return [
        AmpProblem("300x40k", "300 x 40,000", many),
        AmpProblem("300x40k-zero", "300 x 40,000, zero-grad", many, zero_grad=True),
        AmpProblem(
            "300x40k-ema-copy",
            "300 x 40,000, zero-grad, EMA, bf16 copy",
            many,
            zero_grad=True,
            ema_copy=True,
        ),
        AmpProblem("10000x64", "10,000 x 64", small),
        AmpProblem("gpt2", "GPT-2 small", gpt2),
        AmpProblem(
            "gpt2-clip", "GPT-2 small, `clip_grad_norm_` alone", gpt2, step=False
        ),
        AmpProblem(
            "gpt2-norm",
            "GPT-2 small, the same, the norm below its limit",
            gpt2,
            step=False,
            max_norm=inf,
        ),
    ]


# ---- Contenders ----------------------------------------------------------------------


def make_contender(
    setup: Setup,
    name: str,
    params: Sequence[torch.nn.Parameter],
    run: Callable[[], object],
    optimizer: torch.optim.Optimizer | None = None,
    role: str = "rival",
) -> Contender:
    """Return a contender whose first iteration has been done and checked."""
    scale = SCALE if optimizer else 1.0
    grads = [param.grad for param in params]
    values = [grad * scale for grad in grads]
    total = torch.nn.utils.get_total_norm(grads)
    coef = min(float(setup.problem.max_norm / (total + 1e-6)), 1.0)
    expected = coef * grads[-1]
    before = params[-1].detach().clone()

    def prepare() -> None:
        torch._foreach_copy_(grads, values)

    prepare()
    run()
    got = grads[-1]
    if optimizer is not None:
        check_first_step(name, params[-1].detach(), before, expected)
        got = optimizer.state[params[-1]]["exp_avg"] / 0.1
    wanted = coef * values[-1] / scale
    if not torch.allclose(got, wanted, rtol=1e-3, atol=1e-12):
        raise RuntimeError(f"{name} must clip to norm {setup.problem.max_norm}")
    return Contender(name, run, role, prepare=prepare)


def make_two_passes(setup: Setup) -> Contender:
    """AdamW(max_grad_norm=...) with trainfast's scaler."""
    from trainfast.torch import AdamW, GradScaler

    problem, params = setup.problem, setup.parameters()
    options = {"max_grad_norm": MAX_NORM, "zero_grad": problem.zero_grad}
    if problem.ema_copy:
        options |= {"ema_decay": EMA_DECAY, "weight_copy_dtype": torch.bfloat16}
    optimizer = AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, **options)
    scaler = GradScaler(setup.device, SCALE, growth_interval=10**9)
    loss = torch.ones((), device=setup.device)

    def run() -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    return make_contender(setup, "trainfast", params, run, optimizer, "ours")


def make_loop(
    setup: Setup, name: str, kinds: tuple, role: str = "rival", **options: bool
) -> Contender:
    """The usual loop: unscale, clip, step, update, and the rest by hand."""
    adamw, scaler_class, clip = kinds
    problem, params = setup.problem, setup.parameters()
    optimizer = adamw(params, lr=LR, weight_decay=WEIGHT_DECAY, **options)
    scaler = scaler_class(setup.device, SCALE, growth_interval=10**9)
    loss = torch.ones((), device=setup.device)
    weights = [param.detach() for param in params]
    emas = copies = None
    if problem.ema_copy:
        emas = [weight.clone() for weight in weights]
        copies = [weight.bfloat16() for weight in weights]

    def run() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        clip(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        if emas is not None:
            torch._foreach_lerp_(emas, weights, 1 - EMA_DECAY)
            torch._foreach_copy_(copies, weights)
        if problem.zero_grad:
            optimizer.zero_grad(set_to_none=False)

    return make_contender(setup, name, params, run, optimizer, role)


def make_clip(setup: Setup, name: str, clip: Callable, role: str) -> Contender:
    params = setup.parameters()
    return make_contender(
        setup, name, params, lambda: clip(params, setup.problem.max_norm), role=role
    )


def make_ours(setup: Setup) -> Contender:
    from trainfast.torch import clip_grad_norm_

    if setup.problem.step:
        return make_two_passes(setup)
    return make_clip(setup, "trainfast", clip_grad_norm_, "ours")


def make_unchanged(setup: Setup) -> Contender:
    from trainfast.torch import AdamW, GradScaler, clip_grad_norm_

    kinds = (AdamW, GradScaler, clip_grad_norm_)
    return make_loop(setup, "trainfast, unchanged loop", kinds, "ours")


TORCH = (torch.optim.AdamW, torch.amp.GradScaler, torch.nn.utils.clip_grad_norm_)


def make_fused(setup: Setup) -> Contender:
    return make_loop(setup, "torch fused", TORCH, fused=True)


def make_foreach(setup: Setup) -> Contender:
    if setup.problem.step:
        return make_loop(setup, "torch foreach", TORCH, foreach=True)
    return make_clip(setup, "torch foreach", TORCH[2], "rival")


def make_bound(setup: Setup) -> Contender:
    """The same bytes in as many passes, moved as plainly as possible."""
    problem = setup.problem
    grads = setup.tensors(1, 0.01)
    values = [grad.clone() for grad in grads]
    written = problem.zero_grad or not problem.step
    columns = [(grads, floor.UPDATE if written else floor.READ)]
    for _ in range(3 * problem.step + problem.ema_copy):  # param, moments, EMA
        columns.append(([torch.zeros_like(grad) for grad in grads], floor.UPDATE))
    if problem.ema_copy:
        columns.append(([grad.bfloat16() for grad in grads], floor.WRITE))
    passes = [floor.make_floor([(grads, floor.READ)], setup.threads)]
    if not isinf(problem.max_norm):
        passes.append(floor.make_floor(columns, setup.threads))

    def run() -> None:
        for each in passes:
            each()

    return Contender(
        "floor",
        run,
        "bound",
        prepare=lambda: torch._foreach_copy_(grads, values),
        note="a read of g and one pass over the same bytes in C, same threads",
    )


CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "ours": make_ours,
    "unchanged": make_unchanged,
    "fused": make_fused,
    "foreach": make_foreach,
    "floor": make_bound,
}


def choose(args: argparse.Namespace, problem: AmpProblem) -> list[str]:
    """Return the contenders that a case has."""
    chosen = list(args.contender or CONTENDERS)
    if not problem.step:
        chosen = [name for name in chosen if name not in ("unchanged", "fused")]
    if args.device == "cuda":
        chosen = [name for name in chosen if name != "floor"]
    return chosen


def run_problem(args: argparse.Namespace, problem: AmpProblem) -> dict | None:
    """Build a case's contenders, measure them, and return the case's report."""
    names = choose(args, problem)
    lacking = enough_memory(problem, len(names), args.device)
    if lacking:
        print(f"{problem.title}: not run, {lacking}\n", flush=True)
        return None
    setup = Setup(problem, args.device, args.threads, fresh_grads=False)
    contenders, skipped = [], {}
    for name in names:
        try:
            contenders.append(CONTENDERS[name](setup))
        except RuntimeError as error:
            if name != "floor":  # a machine may lack a C compiler
                raise
            skipped[name] = str(error)[:200]
    budget = command.make_budget(args)
    clock = harness.cuda_clock if args.device == "cuda" else harness.cpu_clock
    return harness.run_case(problem.case(), contenders, budget, clock, skipped)


# ---- Command line --------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cases = [problem.name for problem in problems()]
    parser = command.make_parser("bench_amp", __doc__, cases, list(CONTENDERS))
    command.add_device(parser)
    return command.parse(parser, argv)


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases and return the report."""
    conditions = "gradients written anew before each call, untimed"
    backend = command.backend_in_use(args.device)
    cases = [
        partial(run_problem, args, problem.shrunk() if args.smoke else problem)
        for problem in problems()
        if not args.case or problem.name in args.case
    ]
    return command.run("amp", "AMP", args, conditions, backend, cases)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    command.write(args, run(args), "amp")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
