"""What attention's benchmarks share: the cases, their inputs, and what is right."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Case, Contender

Made = TypeVar("Made")
PASSES = ("forward", "backward")
# Five products of matrices to two; what is computed again counts for nobody.
BACKWARD_WORK = 2.5
# How far a contender may be off, as a share of the reference's norm. torch's own bf16
# backward is off by about 0.01.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
REFERENCE_BYTES = 2**29
# Dropout's noise averages out over the elements: about seven of its deviations.
DROPOUT_TOLERANCE = 10


@dataclass(frozen=True)
class Problem:
    """One case: q [B, H, n_q, D] on k and v [B, H, N, D], and what is asked of them."""

    name: str
    title: str
    batch: int
    heads: int
    n: int
    dim: int
    dtype: torch.dtype = torch.float32
    n_q: int = 0  # 0: n
    is_causal: bool = False
    window: int = 0  # keys that a query sees up to itself; 0: any
    padded: bool = False  # a bool mask [B, 1, 1, N] forbids the keys past each length
    dropout_p: float = 0.0
    learned_bias: bool = False  # [1, H, N, N], with a gradient
    passes: tuple[str, ...] = PASSES

    @property
    def queries(self) -> int:
        return self.n_q or self.n

    @property
    def only_math(self) -> bool:
        """Whether torch's fused kernel refuses the case."""
        return self.dropout_p > 0 or self.learned_bias

    def lengths(self) -> list[int]:
        """Return the keys of each item of the batch: from all down to a quarter."""
        if not self.padded:
            return [self.n] * self.batch
        step = 0.75 / max(self.batch - 1, 1)
        return [round(self.n * (1 - step * i)) for i in range(self.batch)]

    def pairs(self) -> float:
        """Return the pairs of query and key to compute, of one head of all items.

        Causal counts half of all, as is usual; what a window or padding forbids counts
        nothing.
        """
        if self.window:
            return self.batch * self.window * (self.n - (self.window - 1) / 2)
        return self.queries * sum(self.lengths()) * (0.5 if self.is_causal else 1.0)

    def flops(self, which: str) -> int:
        """Return the operations of a pass: two products of matrices forward."""
        forward = 4 * self.heads * self.pairs() * self.dim
        return round(forward * (BACKWARD_WORK if which == "backward" else 1))

    def nbytes(self) -> int:
        """Return what a decoding step must move, and 0 where computing is the bound."""
        if self.queries > 1:
            return 0
        rows = 2 * self.n + 2 * self.queries
        return self.batch * self.heads * rows * self.dim * self.dtype.itemsize

    def allowed(self, device: str = "cpu") -> torch.Tensor | None:
        """Return a bool mask that broadcasts to [B, H, n_q, N]; None: all."""
        key = torch.arange(self.n, device=device)
        query = torch.arange(self.queries, device=device)[:, None]
        if self.padded:
            lengths = torch.tensor(self.lengths(), device=device)
            return (key < lengths[:, None])[:, None, None]
        if self.window:
            return (key <= query) & (key > query - self.window)
        return key <= query if self.is_causal else None

    def case(self, which: str) -> Case:
        return Case(
            name=f"{self.name}-{which}",
            title=f"{self.title}, {which}",
            dtype=str(self.dtype).removeprefix("torch."),
            nbytes=self.nbytes(),
            flops=self.flops(which),
        )

    def shrunk(self) -> Problem:
        """Return a case of the same kind that takes no time."""
        return replace(
            self,
            title=f"{self.title} (shrunk)",
            batch=min(self.batch, 2),
            heads=min(self.heads, 2),
            n=min(self.n, 40),
            dim=min(self.dim, 16),
            window=min(self.window, 8),
        )


def problems() -> list[Problem]:
    """Return the cases, in the order of the table."""
    bf16 = torch.bfloat16
    square, causal = (1, 8, 2048, 64), (64, 6, 128, 64)
    return [
        Problem("f32-n2048-d64", "f32, B1 H8 N2048 D64", *square),
        Problem("f32-n2048-d128", "f32, B1 H8 N2048 D128", 1, 8, 2048, 128),
        Problem("f32-causal-n1024", "f32 causal, B1 H8 N1024 D64", 1, 8, 1024, 64,
                is_causal=True),
        Problem("f32-causal-n4096", "f32 causal, B1 H1 N4096 D64", 1, 1, 4096, 64,
                is_causal=True),
        Problem("f32-causal-n128", "f32 causal, B64 H6 N128 D64", *causal,
                is_causal=True),
        Problem("bf16-n2048-d64", "bf16, B1 H8 N2048 D64", *square, dtype=bf16),
        Problem("bf16-causal-n128", "bf16 causal, B64 H6 N128 D64", *causal,
                dtype=bf16, is_causal=True),
        Problem("f32-dropout", "f32 dropout 0.1, B2 H8 N1024 D64", 2, 8, 1024, 64,
                dropout_p=0.1),
        Problem("f32-bias", "f32 learned bias [1,H,N,N], B2 H8 N1024 D64",
                2, 8, 1024, 64, learned_bias=True),
        Problem("f32-window", "f32 causal window 256, B1 H4 N4096 D64", 1, 4, 4096, 64,
                is_causal=True, window=256),
        Problem("f32-decode", "f32 one query on 8,192 keys, B1 H32 D128",
                1, 32, 8192, 128, n_q=1, passes=("forward",)),
        Problem("f32-small", "f32 causal, B1 H1 N8 D8: what a call costs", 1, 1, 8, 8,
                is_causal=True),
        Problem("f32-swin", "f32 as Swin, B256 H3 N49 D32", 256, 3, 49, 32),
        Problem("f32-swin-bias", "f32 learned bias [1,H,N,N] as Swin, B256 H3 N49 D32",
                256, 3, 49, 32, learned_bias=True),
        Problem("f32-padded", "f32 as BERT, padded, B8 H12 N512 D64", 8, 12, 512, 64,
                padded=True),
        Problem("f32-batch32", "f32 as BERT, B32 H12 N512 D64", 32, 12, 512, 64),
    ]  # fmt: skip


# ---- Inputs --------------------------------------------------------------------------


@dataclass
class Inputs:
    """A case's tensors, which its contenders share. They only read them."""

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None = field(default=None)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What has a gradient; also what the reference takes."""
        bias = [] if self.bias is None else [self.bias]
        return [self.q, self.k, self.v, *bias]

    def warm(self) -> None:
        """Read all of them, and touch as much memory as a call writes: a contender must
        neither profit nor suffer from its predecessor's turn, which may have given the
        allocator's pages back to the system."""
        with torch.no_grad():
            for tensor in (*self.leaves, self.dout):
                tensor.sum()
            held = [torch.zeros_like(tensor) for tensor in (*self.leaves, self.dout)]
            del held

    @cached_property
    def reference(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output and the gradients of head 0 in float64, without dropout.

        By as many queries at a time as have REFERENCE_BYTES of scores.
        """
        leaves = [tensor[:, :1].detach().double() for tensor in self.leaves]
        leaves = [tensor.requires_grad_() for tensor in leaves]
        q, k, v = leaves[:3]
        dout = self.dout[:, :1].double()
        allowed = self.problem.allowed(q.device.type)
        row = 8 * self.problem.batch * self.problem.n
        step = max(1, REFERENCE_BYTES // row)
        outs, grads = [], [torch.zeros_like(tensor) for tensor in leaves]
        for first in range(0, self.problem.queries, step):
            rows = slice(first, first + step)
            scores = q[:, :, rows] @ k.mT * self.problem.dim**-0.5
            if self.bias is not None:
                scores = scores + leaves[3][:, :, rows]
            if allowed is not None:
                part = allowed if allowed.shape[-2] == 1 else allowed[..., rows, :]
                scores = scores.masked_fill(~part, -torch.inf)
            out = scores.softmax(-1) @ v
            parts = torch.autograd.grad(out, leaves, dout[:, :, rows])
            for total, grad in zip(grads, parts, strict=True):
                total += grad
            outs.append(out.detach())
        return torch.cat(outs, 2), grads


def make_inputs(problem: Problem, device: str = "cpu") -> Inputs:
    """Return a case's inputs; the same case always gives the same ones."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(problem.dtype)

    ahead = (problem.batch, problem.heads)
    queries, keys = (problem.queries, problem.dim), (problem.n, problem.dim)
    bias = None
    if problem.learned_bias:
        bias = normal(1, problem.heads, problem.queries, problem.n)
    inputs = Inputs(
        problem,
        *(normal(*ahead, *rows) for rows in (queries, keys, keys, queries)),
        bias=bias,
        mask=problem.allowed(device) if problem.padded or problem.window else None,
    )
    for tensor in inputs.leaves:
        tensor.requires_grad_("backward" in problem.passes)
    return inputs


def check(
    name: str, inputs: Inputs, which: str, results: Sequence[torch.Tensor]
) -> None:
    """Raise RuntimeError unless `results` are the case's output or its gradients.

    A contender that does not do the work must not be timed. The first head is compared.
    Dropout's average is the output without it: the error must be noise, some, and as
    good as unrelated to what is right.
    """
    out, grads = inputs.reference
    expected = [out] if which == "forward" else grads
    for i, (result, right) in enumerate(zip(results, expected, strict=True)):
        got = result[:, :1].detach().double()
        if got.shape != right.shape:
            raise RuntimeError(
                f"{name} must return shape {tuple(right.shape)} for one head, got "
                f"{tuple(got.shape)} in result {i} of the {which}"
            )
        error = (got - right) / right.norm()
        off = float(error.norm())
        limit = TOLERANCE[inputs.problem.dtype]
        if inputs.problem.dropout_p:
            if not 0.03 < off < 1.0:
                raise RuntimeError(f"{name} must drop elements, got an error of {off}")
            off = abs(float((error * right).sum() / right.norm()))
            limit = DROPOUT_TOLERANCE * right.numel() ** -0.5
        if not off <= limit:
            raise RuntimeError(
                f"{name} must compute attention, got result {i} of the {which} "
                f"{off:.2g} off, with {limit} allowed"
            )


# ---- Calls ---------------------------------------------------------------------------


class Unavailable(Exception):
    """A contender cannot run here; the message says why."""


def ours(name: str) -> Callable[..., Any]:
    """Return a function of trainfast or trainfast.torch."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{name} is not in this build") from error


def with_torch_signature(
    inputs: Inputs, attention: Callable[..., torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Return a call in the terms of torch's scaled_dot_product_attention."""
    problem = inputs.problem
    terms = inputs.bias if problem.learned_bias else inputs.mask
    causal = problem.is_causal and not problem.window  # a window's mask says it all
    options = {"dropout_p": problem.dropout_p, "is_causal": causal}
    q, k, v = inputs.leaves[:3]
    return lambda: attention(q, k, v, attn_mask=terms, **options)


def forward_ours(inputs: Inputs) -> Callable[[], torch.Tensor]:
    problem = inputs.problem
    if not problem.window:
        attention = ours("trainfast.torch.scaled_dot_product_attention")
        return with_torch_signature(inputs, attention)
    options = {"window_size": (problem.window - 1, 0), "is_causal": True}
    return partial(ours("trainfast.torch.attention"), *inputs.leaves, **options)


def forward_torch(inputs: Inputs) -> Callable[[], torch.Tensor]:
    return with_torch_signature(inputs, F.scaled_dot_product_attention)


def forward_math(inputs: Inputs) -> Callable[[], torch.Tensor]:
    call = forward_torch(inputs)

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return call()

    return forward


def without_fallback(make: Callable[[], Made]) -> Made:
    """Return what `make` returns; torch's own path taken by ours is an error."""
    stats = ours("trainfast.stats")
    before = stats().fallbacks.get("attention", {})
    try:
        made = make()
    except NotImplementedError as error:
        raise Unavailable(str(error)) from error
    after = stats().fallbacks.get("attention", {})
    reasons = [reason for reason in after if after[reason] != before.get(reason)]
    if reasons:
        raise Unavailable(f"it took torch's path: {'; '.join(reasons)}")
    return made


# ---- Contenders ----------------------------------------------------------------------

Results = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """What a contender is built from."""

    inputs: Inputs
    which: str  # of PASSES
    threads: int
    backend: str  # whose vectors the bound has
    prepare: Callable[[], object] | None = None  # None: inputs.warm

    @property
    def problem(self) -> Problem:
        return self.inputs.problem

    def contender(
        self, name: str, run: Callable[[], Results], **fields: Any
    ) -> Contender:
        """Return a contender whose first call has been done and checked."""
        first = run()
        results = [first] if isinstance(first, torch.Tensor) else first
        check(name, self.inputs, self.which, results)
        prepare = self.prepare or self.inputs.warm
        return Contender(name, run, prepare=prepare, **fields)

    def differentiated(
        self, name: str, forward: Callable[[], torch.Tensor], **fields: Any
    ) -> Contender:
        """Return a contender that does this pass of a differentiable forward."""
        if self.which == "forward":
            return self.contender(name, forward, **fields)
        out, leaves, dout = forward(), self.inputs.leaves, self.inputs.dout
        run = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        return self.contender(name, run, **fields)


def make_ours(setup: Setup) -> Contender:
    forward = forward_ours(setup.inputs)
    return without_fallback(
        lambda: setup.differentiated("trainfast", forward, role="ours")
    )
