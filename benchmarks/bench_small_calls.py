"""Small calls: torch's own time over the patched time, on a CPU.

    python -m benchmarks.bench_small_calls                          every row
    python -m benchmarks.bench_small_calls --case attention-b1-h4-n16-d16-forward
    python -m benchmarks.bench_small_calls --seconds 0.5            shorter

Both contenders of a row call the same objects on the same tensors in turn, one with
torch's names and one after trainfast.patch(). A row that is slower than torch, below
0.95, is a defect: for small calls the patch must leave the work to torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import trainfast
from benchmarks import command, harness
from benchmarks.harness import Budget, Case, Contender

GOAL = 0.95
SECONDS = 1.0  # a row
# A block of calls between two readings of the clock; patch() takes 35 ms, and what it
# leaves of the processor's caches shows in the calls of the first milliseconds.
BLOCK_NS, PATCHED_BLOCK_NS = 500_000, 10_000_000


@dataclass(frozen=True)
class Row:
    """One row of the table.

    make: returns torch's call and trainfast's. patched: both are the same script, and
    trainfast's runs between patch() and unpatch().
    """

    name: str
    make: Callable[[], tuple[Callable[[], object], Callable[[], object]]]
    patched: bool = False


# ---- Attention -----------------------------------------------------------------------


def attend(
    shape: tuple[int, int, int, int], n_k: int, dtype: torch.dtype, grad: bool
) -> Any:
    """scaled_dot_product_attention as torch has it, and as patch() has it."""
    batch, heads, n_q, dim = shape
    q = torch.randn(batch, heads, n_q, dim, dtype=dtype, requires_grad=grad)
    k = torch.randn(batch, heads, n_k, dim, dtype=dtype, requires_grad=grad)
    v = torch.randn(batch, heads, n_k, dim, dtype=dtype, requires_grad=grad)
    dout = torch.randn(shape, dtype=dtype)
    theirs = functional.scaled_dot_product_attention
    with trainfast.patch("attention"):
        ours = functional.scaled_dot_product_attention

    def forward(attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        return attention(q, k, v)

    def both(attention: Callable[..., torch.Tensor]) -> object:
        return torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    call = both if grad else forward
    return partial(call, theirs), partial(call, ours)


ATTENTION = [
    # batch, heads, n_q, dim, n_k
    (1, 4, 8, 16, 8),
    (1, 4, 16, 16, 16),
    (1, 4, 32, 16, 32),
    (1, 4, 64, 16, 64),
    (1, 8, 1, 64, 16),
    (1, 8, 1, 64, 128),
    (1, 8, 1, 64, 512),
    (1, 8, 8, 64, 8),
    (1, 8, 32, 64, 32),
    (1, 8, 64, 64, 64),
    (8, 4, 8, 16, 8),
    (8, 4, 16, 16, 16),
    (8, 4, 64, 64, 64),
    (8, 4, 8, 64, 8),
    (32, 8, 8, 16, 8),
    (32, 8, 16, 64, 16),
    (32, 8, 64, 64, 64),
]


def attention_rows() -> list[Row]:
    rows = []
    for dtype, of_type in ((torch.float32, ""), (torch.bfloat16, "-bf16")):
        for batch, heads, n_q, dim, n_k in ATTENTION:
            shape = batch, heads, n_q, dim
            keys = "" if n_k == n_q else f"-k{n_k}"
            name = f"attention-b{batch}-h{heads}-n{n_q}{keys}-d{dim}{of_type}"
            for grad, which in ((False, "forward"), (True, "both")):
                make = partial(attend, shape, n_k, dtype, grad)
                rows.append(Row(f"{name}-{which}", make))
    return rows


# ---- Modules -------------------------------------------------------------------------


def apply_module(kind: str, batch: int, n: int, dim: int, training: bool) -> Any:
    """A module's call: inference without gradients, or forward and backward."""
    module: torch.nn.Module
    if kind == "mha":
        module = torch.nn.MultiheadAttention(dim, dim // 32, batch_first=True)
    else:
        module = torch.nn.TransformerEncoderLayer(
            dim, dim // 32, 2 * dim, dropout=0.0, batch_first=True
        )
        if kind == "encoder":
            module = torch.nn.TransformerEncoder(module, 2, enable_nested_tensor=False)
    module.train(training)
    x = torch.randn(batch, n, dim)

    def forward() -> torch.Tensor:
        if kind == "mha":
            return module(x, x, x, need_weights=False)[0]
        return module(x)

    def infer() -> None:
        with torch.no_grad():
            forward()

    def train() -> None:
        forward().sum().backward()
        module.zero_grad()

    call = train if training else infer
    return call, call


MODULE_LENGTHS = (8, 16, 32, 64, 128, 256)
MODULE_BATCHES = (1, 8, 32)


def module_rows() -> list[Row]:
    rows = []
    for kind in ("mha", "layer", "encoder"):
        for n in MODULE_LENGTHS:
            for batch in MODULE_BATCHES:
                for training in (False, True):
                    if training and (kind == "encoder" or n > 64):
                        continue
                    mode = "train" if training else "eval"
                    make = partial(apply_module, kind, batch, n, 128, training)
                    rows.append(Row(f"{kind}-{mode}-b{batch}-n{n}", make, patched=True))
    return rows


# ---- Optimizers ----------------------------------------------------------------------


def make_params(count: int, size: int = 64) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    params = [torch.nn.Parameter(torch.randn(size)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(size)
    return params


def scale_sgd(count: int, unscale: bool) -> Any:
    """A scaler's part of an iteration, with SGD, whose step it unscales for."""

    def make(scaler_class: type[torch.amp.GradScaler]) -> Callable[[], object]:
        scaler = scaler_class("cpu", init_scale=1.0, growth_interval=2**30)
        optimizer = torch.optim.SGD(make_params(count), lr=1e-3)
        loss = torch.ones(())

        def iterate() -> None:
            scaler.scale(loss)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

        return iterate

    return make(torch.amp.GradScaler), make(trainfast.torch.GradScaler)


def load_state(count: int) -> Any:
    """load_state_dict() of an AdamW with `count` parameters."""

    def make(cls: Callable[..., torch.optim.Optimizer]) -> Callable[[], object]:
        optimizer = cls(make_params(count))
        optimizer.step()
        state = optimizer.state_dict()
        return lambda: optimizer.load_state_dict(state)

    return make(torch.optim.AdamW), make(trainfast.torch.AdamW)


def step_adamw(count: int, fused: bool | None) -> Any:
    """A step of an AdamW with `count` parameters of 64 elements."""
    theirs = torch.optim.AdamW(make_params(count), fused=fused)
    ours = trainfast.torch.AdamW(make_params(count), fused=fused)
    return theirs.step, ours.step


def optimizer_rows() -> list[Row]:
    rows = []
    for count in (1, 2, 16):
        rows.append(Row(f"scaler-sgd-{count}", partial(scale_sgd, count, False)))
        rows.append(Row(f"scaler-sgd-{count}-unscale", partial(scale_sgd, count, True)))
    for count in (1, 16, 300):
        rows.append(Row(f"load-state-{count}", partial(load_state, count)))
    for count in (1, 2, 4, 16):
        rows.append(Row(f"adamw-{count}", partial(step_adamw, count, None)))
        rows.append(Row(f"adamw-{count}-fused", partial(step_adamw, count, True)))
    return rows


ROWS: list[Row] = [*attention_rows(), *module_rows(), *optimizer_rows()]


# ---- Measuring -----------------------------------------------------------------------


def calls_of(call: Callable[[], object], block_ns: int) -> int:
    """Return how many calls fill a block."""
    call()
    took = min(harness.cpu_clock(call)[0] for _ in range(3))
    return max(1, int(block_ns / max(took, 1)))


def run_row(args: argparse.Namespace, row: Row) -> dict:
    """Measure one row and return its part of the report."""
    torch.manual_seed(0)
    theirs, ours = row.make()
    block_ns = PATCHED_BLOCK_NS if row.patched else BLOCK_NS
    count = 1 if args.smoke else calls_of(theirs, block_ns)

    def block(call: Callable[[], object]) -> None:
        for _ in range(count):
            call()

    def after(change: Callable[[], object], call: Callable[[], object]) -> None:
        change()
        block(call)  # refills the interpreter's caches, which a change empties

    before: list[Callable[[], object] | None] = [None, None]
    if row.patched:
        before = [
            partial(after, trainfast.unpatch, theirs),
            partial(after, trainfast.patch, ours),
        ]
    contenders = [
        Contender("torch", partial(block, theirs), "rival", before[0], calls=count),
        Contender("patched", partial(block, ours), "ours", before[1], calls=count),
    ]
    budget = command.make_budget(args)
    if not args.smoke:
        budget = Budget(args.seconds, warmup=2, min_rounds=9)
    try:
        case = Case(row.name, row.name, "float32")
        report = harness.run_case(case, contenders, budget)
    finally:
        trainfast.unpatch()
    ahead = report["lines"][1]["ahead_of_best_rival"]["median"]
    mark = "" if ahead >= GOAL or args.smoke else f"  BELOW {GOAL}"
    print(f"{row.name}: torch / patched {ahead:.2f}{mark}", flush=True)
    return report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = command.make_parser("bench_small_calls", __doc__, names, ["torch", "ours"])
    parser.set_defaults(seconds=SECONDS)
    return command.parse(parser, argv)


def run(args: argparse.Namespace) -> dict:
    """Run the chosen rows and return the report."""
    rows = [row for row in ROWS if not args.case or row.name in args.case]
    backend = command.backend_in_use(args.device)
    cases = [partial(run_row, args, row) for row in rows]
    conditions = "calls back to back"
    return command.run("small-calls", "Small calls", args, conditions, backend, cases)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    command.write(args, run(args), "small-calls")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
