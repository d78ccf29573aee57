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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import floor, harness, machine
from benchmarks.harness import Budget, Case, Contender

RESULTS = Path(__file__).resolve().parent / "results"
LR, WEIGHT_DECAY = 1e-3, 0.01
# Compiling takes 0.2 s a tensor on 2 cores, 30 s for 148. On a GPU, whose times are
# steady, the whole table must fit into two minutes.
COMPILED_TENSORS = {"cpu": 150, "cuda": 1}
SECONDS = {"cpu": 10.0, "cuda": 3.0}
SMOKE_TENSORS, SMOKE_NUMEL = 5, 257


def gpt2_shapes() -> list[tuple[int, ...]]:
    """Return the 148 shapes of GPT-2 small (124,439,808 parameters)."""
    width = 768
    block = [
        *[(width,), (width,)],  # ln_1
        *[(width, 3 * width), (3 * width,)],  # attn.c_attn
        *[(width, width), (width,)],  # attn.c_proj
        *[(width,), (width,)],  # ln_2
        *[(width, 4 * width), (4 * width,)],  # mlp.c_fc
        *[(4 * width, width), (width,)],  # mlp.c_proj
    ]
    return [(50257, width), (1024, width), *(12 * block), (width,), (width,)]


@dataclass(frozen=True)
class Problem:
    """One case: the tensors, and the dtypes of parameters with gradients and state."""

    name: str
    title: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32

    @property
    def params(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def nbytes(self, state_dtype: torch.dtype | None = None) -> int:
        """Return what a step must move: reads p, g, m, v and writes p, m, v."""
        state = (state_dtype or self.state_dtype).itemsize
        return self.params * (3 * self.dtype.itemsize + 4 * state)

    def resident(self) -> int:
        """Return the bytes that one contender holds."""
        return self.params * 2 * (self.dtype.itemsize + self.state_dtype.itemsize)

    def case(self) -> Case:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.state_dtype != self.dtype:
            dtype += f", {self.state_dtype} state".replace("torch.", "")
        counts = (len(self.shapes), self.params, self.nbytes())
        return Case(self.name, self.title, dtype, *counts)

    def shrunk(self) -> Problem:
        """Return a case of the same kind that takes no time."""
        shapes = self.shapes[:SMOKE_TENSORS]
        small = [(min(torch.Size(s).numel(), SMOKE_NUMEL),) for s in shapes]
        return replace(self, shapes=tuple(small), title=f"{self.title} (shrunk)")


def problems() -> list[Problem]:
    """Return the cases, in the order of the table."""
    f32, bf16 = torch.float32, torch.bfloat16
    one, many = ((50_000_000,),), 300 * ((40_000,),)
    return [
        Problem("50m-f32", "1 x 50,000,000 f32", one),
        Problem("300x40k-f32", "300 x 40,000 f32", many),
        Problem("gpt2-f32", "GPT-2 small, f32", tuple(gpt2_shapes())),
        Problem("10000x64-f32", "10,000 x 64 f32", 10_000 * ((64,),)),
        Problem("300x64-f32", "300 x 64 f32", 300 * ((64,),)),
        Problem("50m-bf16", "1 x 50,000,000 bf16", one, bf16, bf16),
        Problem("300x40k-bf16", "300 x 40,000 bf16", many, bf16, bf16),
        Problem("50m-bf16-f32state", "1 x 50,000,000 bf16, f32 state", one, bf16, f32),
        Problem(
            "300x40k-bf16-f32state", "300 x 40,000 bf16, f32 state", many, bf16, f32
        ),
    ]


# ---- Contenders ----------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What a contender is built from."""

    problem: Problem
    device: str
    threads: int
    fresh_grads: bool

    def tensors(self, seed: int, scale: float) -> list[torch.Tensor]:
        """Return one tensor a shape; the same seed gives the same values."""
        generator = torch.Generator(self.device).manual_seed(seed)
        dtype = self.problem.dtype
        return [
            torch.empty(shape, device=self.device, dtype=dtype).normal_(
                0.0, scale, generator=generator
            )
            for shape in self.problem.shapes
        ]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return parameters with their gradients set."""
        params = [torch.nn.Parameter(p) for p in self.tensors(0, 0.02)]
        for param, grad in zip(params, self.tensors(1, 0.01), strict=True):
            param.grad = grad
        return params

    def renew(self, params: Sequence[torch.nn.Parameter]) -> Callable[[], None] | None:
        """Return what frees and re-creates the gradients, as a training loop does."""
        if not self.fresh_grads:
            return None
        values = [param.grad for param in params if param.grad is not None]

        def prepare() -> None:
            for param in params:
                param.grad = None
            for param, value in zip(params, values, strict=True):
                param.grad = value.clone()

        return prepare

    def contender(
        self,
        name: str,
        run: Callable[[], object],
        params: Sequence[torch.nn.Parameter],
        **fields: Any,
    ) -> Contender:
        """Return a contender whose first step has been done and checked."""
        ends = (params[0], params[-1])
        before = [_sample(param) for param in ends]
        run()
        for param, old in zip(ends, before, strict=True):
            assert param.grad is not None
            check_first_step(name, _sample(param), old, _sample(param.grad))
        return Contender(name, run, prepare=self.renew(params), **fields)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy of a tensor's first elements."""
    return tensor.detach().flatten()[:100_000].to(torch.float32, copy=True)


def check_first_step(
    name: str, new: torch.Tensor, old: torch.Tensor, grad: torch.Tensor
) -> None:
    """Raise RuntimeError unless AdamW's first step led from old to new.

    A contender that does not do the work must not be timed. With bias correction the
    first step is p (1 - lr wd) - lr g / (|g| + eps). A step is about lr an element, and
    a bfloat16 parameter is a tenth of that off by rounding, on average.
    """
    expected = old * (1 - LR * WEIGHT_DECAY) - LR * grad / (grad.abs() + 1e-8)
    error = float((new - expected).abs().mean())
    if not error <= 0.2 * LR:
        raise RuntimeError(
            f"{name} must do AdamW's first step, got parameters that are {error:.2g} "
            f"off on average with lr {LR}"
        )


def make_ours(setup: Setup) -> Contender:
    from trainfast.torch import AdamW

    params, problem = setup.parameters(), setup.problem
    other = problem.state_dtype != problem.dtype
    state_dtype = problem.state_dtype if other else None
    optimizer = AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, state_dtype=state_dtype)
    return setup.contender("trainfast", optimizer.step, params, role="ours")


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


def make_bound(setup: Setup) -> Contender:
    """The same bytes, moved as plainly as possible."""
    problem = setup.problem
    if setup.device == "cuda":
        half = problem.nbytes() // 2
        source = torch.zeros(half, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        note = "one device-to-device copy that moves the same bytes"
        return Contender("copy", lambda: target.copy_(source), role="bound", note=note)
    params = setup.tensors(0, 0.02)
    grads = setup.tensors(1, 0.01)
    exp_avgs, exp_avg_sqs = (
        [torch.zeros(s, dtype=problem.state_dtype) for s in problem.shapes]
        for _ in range(2)
    )
    run = floor.make_floor(params, grads, exp_avgs, exp_avg_sqs, setup.threads)
    note = "one pass of p, m, v += 0 * g in C over the same bytes, same threads"
    return Contender("floor", run, role="bound", note=note)


CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "ours": make_ours,
    "fused": make_fused,
    "foreach": make_foreach,
    "compiled": make_compiled,
    "deepspeed": make_deepspeed,
    "floor": make_bound,
}


def choose(args: argparse.Namespace, problem: Problem) -> tuple[list[str], dict]:
    """Return the contenders of a case, and why the others do not run."""
    chosen = list(args.contender or CONTENDERS)
    skipped: dict[str, str] = {}
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
    skipped = {name: why for name, why in skipped.items() if name in chosen}
    return [name for name in chosen if name not in skipped], skipped


def enough_memory(problem: Problem, contenders: int, device: str) -> str | None:
    """Return None, or why the case does not fit."""
    if device == "cuda":
        have: int | None = torch.cuda.mem_get_info()[0]
    else:
        have = machine.available_bytes()
    # foreach needs about one more array of state, its own buffers a little.
    need = problem.resident() * (contenders + 1)
    if have is None or need <= have:
        return None
    return (
        f"needs {need / 2**30:.1f} GiB and {have / 2**30:.1f} GiB are available; "
        "choose fewer with --contender"
    )


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
            if name not in ("compiled", "deepspeed", "floor"):
                raise
            first = (str(error).splitlines() or [""])[0]
            skipped[name] = f"{type(error).__name__}: {first}"[:200]
    if not any(contender.role != "bound" for contender in contenders):
        raise SystemExit(f"{problem.name}: no contender can run: {skipped}")
    budget = Budget(args.seconds)
    if args.smoke:
        budget = Budget(0.02, warmup=1, min_rounds=3, max_rounds=50)
    clock = harness.cuda_clock if args.device == "cuda" else harness.cpu_clock
    return harness.run_case(problem.case(), contenders, budget, clock, skipped)


# ---- Command line --------------------------------------------------------------------


def backend_in_use(device: str) -> str:
    """Return the name of trainfast's backend for the device."""
    import trainfast

    for backend in trainfast.backends():
        if backend["in_use"] and (backend["name"] == "cuda") == (device == "cuda"):
            return str(backend["name"])
    return "unknown"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cases = [problem.name for problem in problems()]
    summary = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser("python -m benchmarks.bench_adamw", None, summary)
    add = parser.add_argument
    add("--case", nargs="+", choices=cases, metavar="NAME", help=", ".join(cases))
    add("--contender", nargs="+", choices=list(CONTENDERS), metavar="NAME",
        help=", ".join(CONTENDERS))  # fmt: skip
    add("--threads", type=int, default=2, help="torch.set_num_threads (default 2)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--json", help="write the report to this file; auto: benchmarks/results/")
    add("--seconds", type=float, help="per case (default 10, on a GPU 3)")
    add("--smoke", action="store_true", help="tiny cases: does it run, not how fast")
    add("--compiled", action=argparse.BooleanOptionalAction,
        help="torch.compile (default: up to 150 tensors, on a GPU 1)")  # fmt: skip
    add("--fresh-grads", action="store_true",
        help="free and re-create the gradients between steps, untimed")  # fmt: skip
    add("--without-ours", action="store_true", help="rivals only")
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")
    if args.seconds is None:
        args.seconds = SECONDS[args.device]
    if not args.seconds >= 0:
        parser.error(f"--seconds must be at least 0, got {args.seconds}")
    partial = args.smoke or args.case or args.contender or args.without_ours
    if args.json == "auto" and partial:
        parser.error("--json must be a path unless everything runs, got auto")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be usable, got cuda without a GPU that torch sees")
    return args


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases, printing each as it is done; return the report."""
    torch.set_num_threads(args.threads)
    ours = not args.without_ours and "ours" in (args.contender or CONTENDERS)
    backend = backend_in_use(args.device) if ours else "none"
    about = machine.describe(args.device)
    how = machine.describe_run(args.threads, backend)
    grads = "fresh gradients each step" if args.fresh_grads else "static gradients"
    how["conditions"] = grads + (", SMOKE: sizes without meaning" * args.smoke)
    how["smoke"], how["fresh_grads"] = args.smoke, args.fresh_grads
    how["device"] = args.device
    print(harness.heading("AdamW", about, how) + "\n", flush=True)
    cases = []
    for problem in problems():
        if args.case and problem.name not in args.case:
            continue
        case = run_problem(args, problem.shrunk() if args.smoke else problem)
        if case is not None:
            cases.append(case)
            print(harness.case_text(case) + "\n", flush=True)
    how["openmp"] = [Path(path).name for path in floor.openmp_runtimes()]
    return harness.make_report("adamw", about, how, cases)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    report = run(args)
    if args.json:
        kind = "adamw-fresh-grads" if args.fresh_grads else "adamw"
        path = Path(args.json)
        if args.json == "auto":
            path = RESULTS / f"{machine.slug(report['machine'])}_{kind}.json"
        harness.write_json(report, path)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
