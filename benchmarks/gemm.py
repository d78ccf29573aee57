"""The roof that kernels on tensor cores are measured against, cuBLAS's matrix product,
and attention without fusion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.attention import Inputs, Problem, Unavailable
from benchmarks.harness import Contender

SIDE = 8192  # of the square product: 1.1 TFLOP, and 400 MB in 16 bits
# How far a product may be off, as a share of its norm; TF32 has ten bits.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def gemm(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, allow_tf32: bool = False
) -> None:
    """Enqueue out = a b on the current stream."""
    from trainfast import _core

    stream = torch.cuda.current_stream(a.device).cuda_stream if a.is_cuda else 0
    _core.gemm(a, b, out, allow_tf32=allow_tf32, stream=stream)


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
    """torch's matmul and softmax, as before FlashAttention."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.scale = inputs.problem.dim**-0.5
        allowed = inputs.problem.allowed(inputs.leaves[0].device.type)
        self.forbidden = None if allowed is None else ~allowed

    def forward(self) -> torch.Tensor:
        q, k, v = self.inputs.leaves
        scores = (q * self.scale) @ k.mT
        if self.forbidden is not None:
            scores = scores.masked_fill(self.forbidden, -torch.inf)
        self.out = scores.softmax(-1) @ v
        return self.out.detach()

    def backward(self) -> list[torch.Tensor]:
        """After forward(), whose graph it keeps, so that it may be called again."""
        leaves, dout = self.inputs.leaves, self.inputs.dout
        return list(torch.autograd.grad(self.out, leaves, dout, retain_graph=True))
