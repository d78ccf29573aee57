"""What the benchmarks of optimizers share: sets of tensors, and contenders on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import machine
from benchmarks.harness import Case, Contender

LR, WEIGHT_DECAY = 1e-3, 0.01
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


# How trainfast's AdamW keeps what half parameters lose by rounding.
ROUNDINGS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "stochastic": {"rounding": "stochastic"},
    "kahan": {"compensation": "kahan"},
    "split": {"master_weights": "split"},
}


@dataclass(frozen=True)
class Problem:
    """One case: the tensors, and the dtypes of parameters with gradients and state."""

    name: str
    title: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    rounding: str = "nearest"  # of half parameters: a key of ROUNDINGS

    @property
    def params(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def nbytes(self, state_dtype: torch.dtype | None = None) -> int:
        """Return what a step must move: reads p, g, m, v and writes p, m, v."""
        state = (state_dtype or self.state_dtype).itemsize
        tail = 2 * self.dtype.itemsize if self.rounding in ("kahan", "split") else 0
        return self.params * (3 * self.dtype.itemsize + 4 * state + tail)

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
