"""The Newton-Schulz iteration of Muon on batches of matrices of one shape."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainfast.torch import private

NS_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

# Elements of one batch for each thread of the CPU. Measured on an AVX2 server, float32,
# one thread, milliseconds of processor time: matrices one by one, then in batches of 2,
# 4, 8, 16 and 32, then all in one batch.
#   200 x 64x64    34.4   28.5   25.6   24.2   23.9   24.4   30.5
#    64 x 64x256   25.6   23.6   23.1   22.8   23.6   25.5   26.7
#    32 x 128x128  28.1   27.3   27.2   28.0   30.1   32.3   31.4
#    32 x 128x512  80.3   81.8   80.4   85.4   89.9   89.6   95.0
#    16 x 256x256  99.6  102.0  106.6  109.3  121.0  122.1  109.6
# A batch pays while the iteration's four arrays stay in the second-level cache.
_CPU_ELEMENTS = 65_536
# On a GPU a batch saves launches; the bound keeps its temporary arrays small.
_GPU_ELEMENTS = 1 << 24
_BATCHED: tuple[Any, Any] = torch.bmm, torch.baddbmm
_SINGLE: tuple[Any, Any] = torch.mm, torch.addmm


def resolve_dtype(ns_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype to which the iteration's matrices are rounded on this device.

    "auto" is float16 on GPUs that emulate bfloat16 (compute capability below 8), and
    float32 on a CPU without instructions for bfloat16, where it is 1.2 times as fast as
    float32 that is rounded to bfloat16.
    """
    if ns_dtype != "auto":
        return NS_DTYPES[ns_dtype]
    if device.type == "cuda" and torch.version.hip is None:
        major, _ = torch.cuda.get_device_capability(device)
        return torch.float16 if major < 8 else torch.bfloat16
    if device.type == "cpu" and not private.has_bf16():
        return torch.float32
    return torch.bfloat16


def batch_size(shape: torch.Size, device: torch.device) -> int:
    """How many matrices of this shape one batch holds; 1: one by one is faster."""
    elements = max(shape.numel(), 1)
    if device.type != "cpu":
        return max(_GPU_ELEMENTS // elements, 1)
    each = _CPU_ELEMENTS // elements
    return each * torch.get_num_threads() if each > 1 else 1


def orthogonalize(
    batch: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Newton-Schulz iteration of each matrix: X <- a X + (b G + c G G) X, G = X X^T.

    G, b G + c G G and X are rounded to `dtype` in each step, as torch.optim.Muon rounds
    to bfloat16. Where the CPU has no instructions for `dtype`, the products are those
    of float32, rounded afterwards: the same sums, 17 times as fast for 64 x 64 as
    torch's emulated bfloat16 on the server above.

    Args:
        batch: (k, rows, columns) with rows <= columns, any floating dtype; unchanged.
        coefficients: a, b and c.
        steps: number of iterations.
        eps: lower bound of the Frobenius norm by which each matrix is divided.
        dtype: float32, bfloat16 or float16.

    Returns:
        A batch of the same shape in `dtype` or float32, contiguous.
    """
    a, b, c = coefficients
    # The norm comes first, in float32: float16 could overflow before the division.
    batch = batch.float()
    norm = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True)
    x = (batch / norm.clamp_(min=eps)).to(dtype)
    is_rounded = batch.is_cpu and not _multiplies(dtype)
    if is_rounded:
        x = x.float()
    mm, addmm = _BATCHED
    if len(batch) == 1:
        x, (mm, addmm) = x[0], _SINGLE
    rows = x.shape[-2]
    gram = x.new_empty((*x.shape[:-2], rows, rows))
    polynomial, following = torch.empty_like(gram), torch.empty_like(x)

    def rounded(result: Tensor) -> None:
        if is_rounded:
            result.copy_(result.to(dtype))

    for _ in range(steps):
        rounded(mm(x, x.mT, out=gram))
        rounded(addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial))
        rounded(addmm(x, polynomial, x, beta=a, out=following))
        x, following = following, x
    return x.view(batch.shape)


def _multiplies(dtype: torch.dtype) -> bool:
    """True where the CPU multiplies matrices of this dtype without emulation."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and private.has_bf16())


def batches(tensors: list[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors that are alike in shape, dtype and device, batch by batch."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = tensor.shape, tensor.dtype, tensor.device
        alike.setdefault(key, []).append(index)
    for (shape, _, device), indices in alike.items():
        size = batch_size(shape, device)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]
