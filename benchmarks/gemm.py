"""Products of matrices by cuBLAS: the roof that kernels on tensor cores are measured
against, and attention without fusion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.attention import Inputs, Problem, Unavailable
from benchmarks.harness import Contender

SIDE = 8192  # of the square product: 1.1 TFLOP, and 400 MB in 16 bits
# How far a product may be off, as a share of its norm; TF32 has ten bits.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def scratch(n: int, device: str) -> torch.Tensor:
    """Return n float32, aligned to 256 bytes."""
    whole = torch.empty(n + 64, dtype=torch.float32, device=device)
    start = -(whole.data_ptr() // 4) % 64
    return whole[start : start + n]


def gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
    """Enqueue out <- alpha * op(a) op(b) on the current stream."""
    from trainfast import _core

    stream = torch.cuda.current_stream(a.device).cuda_stream if a.is_cuda else 0
    memory = partial(scratch, device=str(a.device))
    _core.gemm(a, b, out, stream=stream, scratch=memory, **options)


# ---- The roof ------------------------------------------------------------------------


@functools.cache
def square(
    dtype: torch.dtype, device: str, side: int, allow_tf32: bool = False
) -> Callable[[], None]:
    """Return a call that multiplies two square matrices, once it has been checked.

    Raises Unavailable where there is no cuBLAS.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(side, side, generator=generator, device=device).to(dtype)
        for _ in range(2)
    )
    out = torch.empty_like(a)
    call = partial(gemm, a, b, out, allow_tf32=allow_tf32)
    try:
        call()
    except (ImportError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise Unavailable(f"no product by cuBLAS: {error}") from error
    right = a[:8].double() @ b.double()
    off = float((out[:8].double() - right).norm() / right.norm())
    if not off <= TOLERANCE[dtype]:
        raise RuntimeError(f"cuBLAS must multiply matrices, got {off:.2g} off")
    return call


def make_roof(
    flops: int,
    dtype: torch.dtype,
    prepare: Callable[[], object] | None,
    device: str = "cuda",
    side: int = SIDE,
) -> Contender:
    """Return the bound of a case of so many operations: cuBLAS's rate for them."""
    return Contender(
        "cuBLAS roof",
        square(dtype, device, side),
        "bound",
        prepare=prepare,
        note=f"a product of {side:,} x {side:,} matrices, scaled to as many operations",
        calls=2 * side**3 / flops,
    )


# ---- Attention without fusion --------------------------------------------------------


def unfused_bytes(problem: Problem, which: str) -> int:
    """Return what its matrices of N x N take: scores, weights, and their gradients."""
    matrices = 2 if which == "forward" else 4
    pairs = problem.batch * problem.heads * problem.queries * problem.n
    return matrices * pairs * problem.dtype.itemsize


class Unfused:
    """Products by cuBLAS, softmax by torch between them, as before FlashAttention."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.q, self.k, self.v = (tensor.detach() for tensor in inputs.leaves)
        self.scale = inputs.problem.dim**-0.5
        allowed = inputs.problem.allowed(self.q.device.type)
        self.forbidden = None if allowed is None else ~allowed

    def forward(self) -> torch.Tensor:
        q, k, v = self.q, self.k, self.v
        scores = q.new_empty(*q.shape[:3], k.shape[2])
        gemm(q, k, scores, alpha=self.scale, transpose_b=True)
        if self.forbidden is not None:
            scores.masked_fill_(self.forbidden, -torch.inf)
        self.scores = scores.requires_grad_()
        self.weights = scores.softmax(-1)
        out = torch.empty_like(q)
        gemm(self.weights.detach(), v, out)
        return out

    def backward(self) -> list[torch.Tensor]:
        """After forward(), of which it needs the weights; may be called again."""
        q, k, v, dout = self.q, self.k, self.v, self.inputs.dout
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        weights = self.weights.detach()
        gemm(weights, dout, dv, transpose_a=True)
        dweights = torch.empty_like(weights)
        gemm(dout, v, dweights, transpose_b=True)
        (dscores,) = torch.autograd.grad(
            self.weights, self.scores, dweights, retain_graph=True
        )
        gemm(dscores, k, dq, alpha=self.scale)
        gemm(dscores, q, dk, alpha=self.scale, transpose_a=True)
        return [dq, dk, dv]
